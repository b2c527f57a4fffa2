"""Fixtures of the audit: `audit` and `verdict` for the models, `device`, `judge` and `hostile` for single operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import gates, generic, selection
from parity.attribution import SETUP
from parity.audit import Floor
from parity.evaluate import judge_values
from parity.foreign import LEFT_OUT
from parity.gates import OPERATIONS
from parity.outside import NotExposedError, OutsideAudit
from parity.selection import Case
from parity.session import ROOT, RUN, NotLoadedError, Run, again_options, asked_for, not_due, run_of, verdict_of
from parity.traced import TraceAudit
from probes.core.inputs import Hostile
from probes.core.records import State, Verdict
from probes.core.wording import at_step, first_step, when
from reference.points import VALUES, PointSpec


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per point, phase, mode and step group of what the command line asks for."""
    run = metafunc.config.stash.get(RUN, None)
    if run is None:
        return
    if "phase" in metafunc.fixturenames and run.generic:
        metafunc.parametrize("phase", run.phases)
    if "generic_case" in metafunc.fixturenames and run.generic:
        of_model = generic.cases(run.audit) if run.audit is not None else []
        metafunc.parametrize("generic_case", of_model, ids=[case.id for case in of_model])
    if run.generic:
        return
    from reference.config import ModelConfig

    config = ModelConfig.from_dir(run.checkpoint_dir)
    cases: list[Case] | None = None
    if "layer_case" in metafunc.fixturenames:
        cases = selection.layer_cases(config, run.layers, run.phases, run.steps)
        cases = _as_held(run, cases)
        metafunc.parametrize("layer_case", cases, ids=[case.id for case in cases])
    if "model_case" in metafunc.fixturenames:
        cases = selection.model_cases(run.phases, run.steps, alone=bool(run.door) and run.door != "logits")
        if run.door == "logits":
            cases = [case for case in cases if case.point == "logits"]  # nothing else was ever asked of a server
        cases = _as_held(run, cases)
        metafunc.parametrize("model_case", cases, ids=[case.id for case in cases])
    if "state_case" in metafunc.fixturenames:
        states = selection.state_cases(config, run.layers, run.phases, run.steps)
        metafunc.parametrize("state_case", states, ids=[case.id for case in states])
    if "phase" in metafunc.fixturenames:
        metafunc.parametrize("phase", run.phases)
    if "layer" in metafunc.fixturenames:
        metafunc.parametrize("layer", run.layers, ids=[f"L{layer}" for layer in run.layers])
    if "compressed_layer" in metafunc.fixturenames:
        compressed = [layer for layer in run.layers if config.ratio(layer)]
        metafunc.parametrize("compressed_layer", compressed, ids=[f"L{layer}" for layer in compressed])


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """A test of compressed layers is not asked for where only window layers are."""
    return [] if name.startswith("test_") and inspect.isfunction(obj) and not asked_for(collector.config, obj) else None


def _as_held(run: Run, cases: list[Case]) -> list[Case]:
    """Of a trace, decode steps that are there apart from those that are not."""
    return run.audit.as_held(cases) if isinstance(run.audit, TraceAudit) else cases


@pytest.fixture(scope="session", autouse=True)
def asked_device(pytestconfig: pytest.Config) -> None:
    """Without the asked device every test is skipped for one reason, which pytest tells in one line."""
    run = pytestconfig.stash.get(RUN, None)
    if run is not None and run.device_reason is not None:
        pytest.skip(run.device_reason)


@pytest.fixture(scope="session")
def audit(pytestconfig: pytest.Config) -> Any:
    """Both models, and everything recorded of them."""
    run = run_of(pytestconfig)
    assert run.audit is not None
    return run.audit


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[Verdict], None]:
    """Write a verdict and turn it into the test's outcome."""
    run = run_of(request.config)

    def write(verdict: Verdict) -> None:
        verdict = run.record(replace(verdict, test_id=request.node.nodeid))
        if verdict.waiver is not None:
            pytest.xfail(waived(verdict))
        if verdict.state is State.FAIL:
            pytest.fail(describe(verdict, again_options(request.config)), pytrace=False)
        if verdict.state is State.NOT_RUN and run.audit is not None and run.audit.stopped:
            pytest.skip(verdict.reason)
        if verdict.state is State.NOT_RUN:
            pytest.fail(f"not run: {verdict.point}: {verdict.reason}", pytrace=False)

    return write


def waived(v: Verdict) -> str:
    """Why a failed gate fails no test."""
    assert v.waiver is not None
    return f"waived until {v.waiver['until']} ({v.waiver['by']}: {v.waiver['reason']}): {v.point}: {v.reason}"


def describe(v: Verdict, options: str = "") -> str:
    """What failed, where, by how much, and how to run it again. options  what the ids depend on, from `again_options`."""
    first = first_step(v) if v.phase == "decode" else None
    step = v.worst_step if first is None else first
    at = when(v.phase, step, v) or "single operation"
    lines = [f"{v.point}   {at}   {v.mode}   {v.component}", f"  {at_step(v.reason, v, step)}"]
    if v.element and v.got is not None and v.want is not None:
        lines.append(f"  worst row {v.where}, worst element {v.element}: got {v.got:.6g}, want {v.want:.6g}")
    if v.limit is not None and v.floor is not None and v.k is not None and v.eps is not None:
        lines.append(f"  limit {v.limit:.3g} = {v.k:g} x floor {v.floor:.3g} + {v.eps:.3g}   ({v.why})")
    elif v.limit is not None:  # an exact gate: its limit is no multiple of a floor
        lines.append(f"  limit {v.limit:.3g}" + (f"   ({v.why})" if v.why else ""))
    lines.append(f"  again: pytest '{v.test_id}'{options}")
    return "\n".join(filter(None, lines))


def pytest_runtest_setup(item: pytest.Item) -> None:
    why = not_due(item)
    if why:
        pytest.skip(why)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A gate over the whole of decode, of which a trace holds the first steps only, judges those; that it does not hold the others is told."""
    run = pyfuncitem.config.stash.get(RUN, None)
    if run is None or run.outsider is None or not isinstance(run.audit, OutsideAudit) or run.audit.plan.steps < 2 or "phase" not in pyfuncitem.fixturenames:
        return None
    test = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames})
    try:
        test()
    except NotExposedError as error:
        steps = error.leading
        while steps:
            try:
                with run.audit.narrowed(steps):
                    test()
            except NotExposedError as further:
                steps = further.leading if further.leading < steps else 0
            else:
                run.outsider.not_covered.add(error, pyfuncitem.nodeid)
                return True
        raise
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """A test that needs what somebody else's production does not show is not covered: no verdict, told in its own list."""
    try:
        return (yield)
    except NotExposedError as error:
        run = item.config.stash.get(RUN, None)
        if run is None or run.outsider is None:
            raise
        run.outsider.not_covered.add(error, item.nodeid)
        run.judged.add(item.nodeid)
        pytest.skip(str(error))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that ended without a verdict still counts: an exception is a failure, a skip is not run."""
    report = yield
    run = item.config.stash.get(RUN, None)
    if run is not None and run.device_reason is not None and report.skipped:
        report.longrepr = (str(item.config.rootpath / "parity"), None, run.device_reason)  # type: ignore[assignment]  # one place, so one line
    if run is None or item.nodeid in run.judged:
        return report
    base = verdict_of(item)
    if report.passed and report.when == "call":
        run.record(replace(base, rows=1))
    elif not report.passed:
        theirs = run.redactor is not None and call.excinfo is not None and not call.excinfo.errisinstance((pytest.fail.Exception, pytest.skip.Exception))
        said = LEFT_OUT if theirs else str(call.excinfo.value).strip() if call.excinfo else ""
        reason = said.splitlines()[0][:300] if said else report.outcome
        if report.skipped or (call.excinfo and call.excinfo.errisinstance(NotLoadedError)):
            run.record(replace(base, state=State.NOT_RUN, reason=reason))
        elif report.when != "call" and call.excinfo and not _within_the_audit(call.excinfo):
            reason = f"{report.when} of {item.name} stopped in pytest or a plugin, outside of the audit: {call.excinfo.typename}: {reason}"
            run.record(replace(base, gate="run", point=SETUP, mode="model", layer=None, phase=None, step_first=None, step_last=None, component="", metric="tests can be run", state=State.FAIL, reason=reason))
        else:
            run.record(replace(base, state=State.FAIL, reason=f"{call.excinfo.typename}: {reason}" if call.excinfo else reason))
    return report


def _within_the_audit(error: pytest.ExceptionInfo[BaseException]) -> bool:
    """Whether code of the audit or of what it audits was at work: a fixture of it failed, and no other plugin's or pytest itself."""
    rooms = [ROOT / room for room in ("parity", "probes", "production", "reference")]
    return not isinstance(error.value, pytest.FixtureLookupError) and any(room in Path(entry.path).parents for entry in error.traceback for room in rooms)


# ---- single operations ----


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> Any:
    """The opened device that `--device` names. Without one the operation is not run. The CPU emulates Hopper's instructions."""
    from production.launch import open_device

    run = pytestconfig.stash.get(RUN, None)
    name = run.device if run is not None else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no device: --device cuda, and torch sees no CUDA device here")
    opened = open_device(name, emulate="sm_90a" if name == "cpu" else None)
    if run is not None:
        run.devices.append(opened)
    return opened


@pytest.fixture
def hostile(device: Any) -> Hostile:
    """Inputs inside memory full of NaN, strided views, poisoned outputs; on the device under test."""
    return Hostile(device=device.torch_device)


Twins = Sequence[Callable[[], Tensor]]


@pytest.fixture
def judge(request: pytest.FixtureRequest) -> Callable[..., None]:
    """judge(operation, case, actual, reference=..., twins=[...], row_dims=1, exact=False, on_device=False)

    operation   row of gates.OPERATIONS; case  what is special about the input, for people
    actual      what production's kernel wrote: call it before the reference, so that no recycled answer can agree
    reference   () -> the same in FP32 or FP64; twins  [() -> own precision, sums reordered]: their worst row is the floor
    exact       bit equality instead: roundings, copies, choices
    on_device   compare where the values are: large ones
    """
    run = request.config.stash.get(RUN, None)

    def judged(
        operation: str, case: str, actual: Tensor, *, reference: Callable[[], Tensor], twins: Twins = (), row_dims: int = 1, exact: bool = False, on_device: bool = False,
    ) -> None:  # fmt: skip
        def there(value: Tensor) -> Tensor:
            return value.detach() if on_device else value.detach().cpu()

        row = OPERATIONS[operation]
        got, want = there(actual), there(reference())
        point = f"{operation}[{case}]"
        base = Verdict(f"operation.{operation}", point, "operation", State.NOT_RUN, "worst row rel-L2", component=row.component, local=True, test_id=request.node.nodeid)
        if exact:
            verdict = _exact(base, got, want)
        else:
            # One row axis is enough here: everything before the row is [1, rows].
            got2, want2 = (t.double().reshape(1, -1, *t.shape[t.dim() - row_dims :]) for t in (got, want))
            floor = Floor()
            valid = torch.ones(got2.shape[:2], dtype=torch.bool, device=got2.device)
            for twin in twins:
                floor.add(there(twin()).double().reshape(want2.shape), want2, VALUES, row_dims, valid)
            spec = PointSpec(operation, "", VALUES, row_dims, row.component, "")
            verdict = judge_values(base, spec, row.gate, "isolated", got2, want2, valid, floor)
        if run is not None:
            verdict = run.record(verdict)
        if verdict.waiver is not None:
            pytest.xfail(waived(verdict))
        if verdict.state is not State.PASS:
            pytest.fail(describe(verdict, again_options(request.config)), pytrace=False)

    return judged


def _exact(base: Verdict, got: Tensor, want: Tensor) -> Verdict:
    """Every element equal, NaN equal to NaN, shapes and numbers of elements too."""
    base = replace(base, metric="different elements", why="a rounding, a copy or a choice is exact")
    if got.shape != want.shape:
        return replace(base, state=State.FAIL, reason=f"shape {list(got.shape)}, expected {list(want.shape)}")
    g, w = got.double(), want.double()
    differ = (g != w) & ~(g.isnan() & w.isnan())
    judgement = gates.judge_exact(int(differ.sum()), differ.numel(), "elements differ")
    where: list[int] = differ.nonzero()[0].tolist() if differ.any() else []
    at = tuple(where)
    return replace(
        base, state=judgement.state, value=float(differ.sum()), limit=0.0, spent=judgement.spent, rows=differ.numel(),
        where=where, element=where, got=float(g[at]) if where else None, want=float(w[at]) if where else None,
        reason=judgement.reason + (f", first at {where}" if where else ""),
    )  # fmt: skip


