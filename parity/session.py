"""The life of one audit under pytest: options, input checks, models, ledger, summary, report.

Bad input is a usage error (exit 4, one line) before anything is written. Exit 0: every asked gate passed, or its failure is
waived; 1: a gate failed, or something asked was not run; 2: told to stop, with a report of what had been judged. Tests: parity/unit/test_session.py, which runs the real command line.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import inspect
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import (
    device_witness,
    evaluate,
    foreign,
    generic,
    outsider,
    pace,
    planted,
    policy,
    score,
    selection,
    stored,
    terminal,
)
from parity.attribution import first_divergence, operations_behind
from parity.audit import TWIN_ORDERS, Audit, Crash, Plan
from parity.cache import ReferenceCache, cache_folder, checkpoint_facts, code_hash, machine_facts
from parity.gates import OPERATIONS, with_numbers
from parity.isolation import REPRO, strength, strengthened, with_repro
from parity.logits import LogitsAudit
from parity.measure import measurements
from parity.mechanisms import mechanisms, unexercised
from parity.outside import OutsideAudit
from parity.redact import NO_REPRO, Redactor, decoder_of
from parity.traced import Traced, read_traced
from parity.waivers import Waivers, read_waivers, unwaived, waived_before
from probes.core import inputs
from probes.core.records import (
    Coverage,
    Divergence,
    Header,
    Kernel,
    Ledger,
    Measurement,
    Record,
    RecordError,
    State,
    Summary,
    Verdict,
    contradictions,
    read_run,
    summarise,
    unjudged,
    verdicts,
)
from probes.core.wording import gate_of, named, over, plural, when
from probes.outside.logits import Given, read_logits, steps_of
from reference.checkpoint import Checkpoint
from reference.config import InputError, ModelConfig
from reference.points import layer_of, places_of_model, spec_of

ROOT = Path(__file__).resolve().parents[1]
DEFAULT_CHECKPOINT = ROOT / "checkpoints" / "tiny-dsv4"
DEFAULT_PROMPT = "medium.txt:0:250"
DEFAULT_STEPS = 130
FAULT_STEPS = 24  # the fault profile: from 250 tokens on, groups of 4 end and 256 is crossed
PROFILES = ("full", "faults")
DEFAULT_MAX_CONTEXT = 8192
PARITY = ROOT / "parity"
RUNS = Path("reports") / "runs"  # below the source tree
RUNS_ELSEWHERE = Path("parity-reports")  # below another repository: no name that `import` could find instead of a package
DEVICES = ("cpu", "cuda")
DECODING = ("eager", "replay")  # as production.graph
PLANS = ("portable", "fast")  # as production.variants
UNIT = PARITY / "unit"
FILES = ("run.jsonl", "report.html", "junit.xml", REPRO)
GPU_FILES = ("test_device.py", "test_operations_published.py")  # asked for with --device cuda only


def add_options(parser: pytest.Parser) -> None:
    """The command line of `pytest parity/`."""
    group = parser.getgroup("parity", "DeepSeek-V4 parity audit (exit codes: 0 pass, 1 a gate failed or coverage is missing, 2 told to stop, 4 bad input)")
    group.addoption("--phase", default="both", metavar="prefill|decode|both", help="what is judged (default: both)")
    group.addoption("--layers", default=None, metavar="0-3,7", help="layers that are judged; all up to the highest are run (default: all)")
    group.addoption("--checkpoint", default=str(DEFAULT_CHECKPOINT), metavar="DIR", help="checkpoint directory (default: the bundled one)")
    group.addoption("--prompt", action="append", default=None, metavar="FILE[:START:END]", help="text or .json token ids, tokens START to END; may repeat, one batch row each (default: medium.txt:0:250)")
    group.addoption("--steps", default=None, metavar="N", help="decode steps after the prompt (default: 130; fault profile: 24)")
    group.addoption("--profile", default=None, metavar="full|faults", help="faults: 24 decode steps, and once a gate is red only what can explain it (default: faults with --inject, else full)")
    group.addoption("--device", default="cpu", metavar="cpu|cuda", help="where production runs (default: cpu)")
    group.addoption("--decode", default=None, metavar="eager|replay", help="how production decodes: launch by launch, or from a captured graph that is replayed at other lengths (default: eager)")
    group.addoption("--variants", default=None, metavar="portable|fast", help="kernel variants that production runs (default: fast on sm_90a, else portable)")
    outsider.add_options(group)
    group.addoption("--max-context", default=str(DEFAULT_MAX_CONTEXT), metavar="N", help="tokens the KV cache holds (default: 8192)")
    group.addoption("--report", default=None, metavar="DIR", help="where run.jsonl, report.html and junit.xml go (default: reports/runs/<date>-<commit>; with --parity in another repository parity-reports/<date>-<commit>)")
    group.addoption("--no-cache", action="store_true", help="compute the reference and its twins even if an earlier run left them in ~/.cache/dsv4-parity/reference (DSV4_PARITY_CACHE moves it)")
    group.addoption("--baseline", default=None, metavar="RUN.jsonl", help="an earlier run, or its folder: the report and the last lines say what differs from it; the verdict stays as it is")
    group.addoption("--waivers", default=None, metavar="FILE.toml", help="known deviations that are accepted, each with a reason, a name and an end date (parity/waivers.py)")
    group.addoption("--redact", action="store_true", help="keep the prompts out of records and report: names, text and token ids are left out or hashed, and no repro is written (parity/redact.py)")
    group.addoption("--inject", default=None, metavar="ID", help="plant a fault in a copy of production and kernels")
    group.addoption("--faults", default=None, metavar="FILE|DIR", help="list, or folder of lists, that --inject takes the fault from, instead of parity/faults/")


def _within_unit(path: Path) -> bool:
    return path == UNIT or UNIT in path.parents


def _asked_paths(config: pytest.Config) -> list[Path]:
    return [(config.invocation_params.dir / arg.split("::")[0]).resolve() for arg in config.args]


def is_elsewhere(config: pytest.Config) -> bool:
    """True for `pytest --parity` in another repository, whose own report and commit the run is."""
    return bool(config.getoption("parity", False)) and config.rootpath != ROOT


def home(config: pytest.Config) -> Path:
    """The repository that a run belongs to: where its reports go, and whose commit its header names."""
    return config.rootpath if is_elsewhere(config) else ROOT


def is_audit(config: pytest.Config) -> bool:
    """True unless only the project's own tests were asked for."""
    return not all(_within_unit(path) for path in _asked_paths(config))


def asked_for(config: pytest.Config, test: Callable[..., Any]) -> bool:
    """False for a test of compressed layers where only window layers are asked for."""
    run = config.stash.get(RUN, None)
    if run is None or run.generic or "compressed_layer" not in inspect.signature(test).parameters:
        return True
    model_config = ModelConfig.from_dir(run.checkpoint_dir)
    return any(model_config.ratio(layer) for layer in run.layers)


def ignore_collect(path: Path, config: pytest.Config) -> bool | None:
    """parity/unit is collected only when it is named."""
    if _within_unit(path) and not any(_within_unit(asked) for asked in _asked_paths(config)):
        return True
    if path.name in GPU_FILES and config.getoption("--device") != "cuda":
        return True  # not asked for, unless it is named
    run = config.stash.get(RUN, None)
    if path.name == "test_graph.py" and run is not None and "decode" not in run.phases:
        return True
    if path.name == "test_policy.py" and run is not None and not run.door:
        return True  # this project's own roundings are judged bit for bit, one by one
    if path.name == outsider.RANKS and path.parent == PARITY:
        return True if run is None or run.traced is None or run.traced.opened.size == 1 else None
    if path.parent == PARITY and path.name in outsider.GENERIC_FILES:
        return None if run is not None and run.generic else True
    if run is not None and run.generic and path.name.startswith("test_") and path.parent == PARITY:
        return True
    if path.parent == PARITY and path.name in outsider.LOGITS_FILES:
        return None if run is not None and run.door == "logits" else True
    if run is not None and run.door and path.name.startswith("test_") and path.parent == PARITY and (run.door == "logits" or path.name not in outsider.FILES):
        return True  # it judges this project's own production
    return None


def _whole(text: str, option: str, least: int) -> int:
    if re.fullmatch(r"-?[0-9]{1,18}", text) is None:
        raise InputError(f"{option} {text}: expected a whole number")
    value = int(text)
    if value < least:
        raise InputError(f"{option} {text}: expected at least {least}")
    return value


@dataclass
class Run:
    """One audit: what was asked, the models, and the ledger."""

    config: pytest.Config
    phases: tuple[str, ...]
    layers: tuple[int, ...]
    steps: int
    max_context: int
    device: str
    checkpoint_dir: Path
    prompts: list[Any]
    fault: planted.Fault | None
    report_dir: Path
    profile: str = "full"
    decode: str = "eager"
    variants: str | None = None
    fault_copy: Path | None = None
    ledger: Ledger | None = None
    audit: Any = None  # Audit, or generic.GenericAudit
    generic: bool = False
    load_crash: str | None = None
    device_reason: str | None = None
    started: float = field(default_factory=time.perf_counter)
    judged: set[str] = field(default_factory=set)
    uncollected: list[Verdict] = field(default_factory=list)
    offered: dict[Path, list[str]] = field(default_factory=dict)  # file -> ids of its tests, before anything is deselected
    on_terminate: Any = None
    devices: list[Any] = field(default_factory=list)
    red: bool = False
    waivers: Waivers = field(default_factory=Waivers)
    baseline: list[Record] | None = None
    reds: dict[str, list[str]] = field(default_factory=dict)
    trend: str = ""
    redactor: Redactor | None = None
    progress: terminal.Progress | None = None
    stopped_by: str = ""
    on_interrupt: Any = None
    door: str = ""
    outsider: outsider.Outsider | None = None
    answers: list[Given] = field(default_factory=list)
    policy_given: frozenset[str] | None = None
    traced: Traced | None = None
    absent: tuple[str, ...] = ()  # phases that were asked for, and of which the trace or file holds nothing
    least_coverage: int = 0
    _behind: frozenset[str] | None = None

    def operations_behind(self) -> frozenset[str] | None:
        """The operations that can explain the first point that is red; None where only other gates are."""
        if self._behind is None and self.ledger is not None and self.audit is not None:
            first = first_divergence(unwaived(self.ledger.records), places_of_model(self.audit.config, self.audit.layers_run))
            if first is not None and first.phase is not None:
                self._behind = operations_behind(first.point)
        return self._behind

    def told_to_stop(self, number: int, frame: Any) -> None:
        """The first signal ends the tests, and what was judged is reported; a second one ends the process where it stands."""
        self.stopped_by = signal.Signals(number).name
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        raise KeyboardInterrupt

    def record(self, record: Record) -> Any:
        """Write a record and return it as it is written: with the waiver that accepts a failure, without the prompt where it is redacted."""
        if isinstance(record, Verdict):
            if self.device_reason is not None and record.state is State.FAIL and record.rows == 0:
                record = replace(record, state=State.NOT_RUN, value=None, spent=None, reason=self.device_reason)  # it only found that there is no device
            record = self.waivers.judge(with_numbers(record))
            self.judged.add(record.test_id)
            failed, waived = record.state is State.FAIL, record.waiver is not None
            self.red = self.red or (failed and not waived and (record.rows > 0 or record.gate == "run"))  # a test that only broke names nothing
        if self.redactor is not None:
            record = self.redactor(record)
        if self.ledger is not None:
            self.ledger.write(record)
        if isinstance(record, Verdict) and record.state is State.FAIL and self.progress is not None:
            self.progress.turned_red(record, record.waiver is not None)
        return record


RUN = pytest.StashKey[Run]()
DESELECTED = pytest.StashKey[int]()


def run_of(config: pytest.Config) -> Run:
    """The audit of this pytest session."""
    return config.stash[RUN]


# ---- start ----


def configure(config: pytest.Config) -> None:
    """Check everything the user gave; nothing is written. Raises pytest.UsageError."""
    if not is_audit(config):
        return
    try:
        run = _checked(config)
    except InputError as error:
        raise pytest.UsageError(str(error)) from None
    except OSError as error:  # a name that no file can have
        raise pytest.UsageError(str(InputError(f"{error.filename}: {error.strerror}"))) from None
    config.stash[RUN] = run
    config.option.continue_on_collection_errors = True  # a production that cannot be imported is judged, not a reason to stop
    run.progress = terminal.Progress(config, terminal.quiet(config))
    run.progress.size = (sum(len(prompt.ids) for prompt in run.prompts), run.steps, max(run.layers, default=-1) + 1 or pace.LAYERS)
    if threading.current_thread() is threading.main_thread():  # a run that is told to stop still closes its ledger and lets go
        run.on_terminate, run.on_interrupt = (signal.signal(number, run.told_to_stop) for number in (signal.SIGTERM, signal.SIGINT))


def _checked(config: pytest.Config) -> Run:
    option = config.getoption
    for arg, path in zip(config.args, _asked_paths(config), strict=True):
        if not path.exists():
            raise InputError(f"{arg}: no such file or directory")
    door = outsider.asked(config)
    if option("--redact"):
        if option("capture") in ("no", "tee-sys"):
            raise InputError("--redact with -s or --capture=tee-sys: what production prints may hold the prompt; next: leave it out")
        config.option.showcapture, config.option.disable_warnings = "no", True
    profile = option("--profile") or ("full" if option("--inject") is None else "faults")
    for name, allowed in (("--phase", (*selection.PHASES, "both")), ("--device", DEVICES), ("--profile", PROFILES)):
        if (profile if name == "--profile" else option(name)) not in allowed:
            raise InputError(f"{name} {option(name)}: expected {', '.join(allowed[:-1])} or {allowed[-1]}")
    for name, allowed in (("--decode", DECODING), ("--variants", PLANS)):
        if option(name) not in (None, *allowed):
            raise InputError(f"{name} {option(name)}: expected {' or '.join(allowed)}")
    steps = _whole(option("--steps") or str(DEFAULT_STEPS if profile == "full" else FAULT_STEPS), "--steps", 0)
    traced = None
    max_context = _whole(option("--max-context"), "--max-context", 1)
    directory = Path(option("--checkpoint"))
    if not directory.is_absolute():
        directory = Path(os.path.normpath(config.invocation_params.dir / directory))
    phases = selection.parse_phases(option("--phase"))
    if "decode" in phases and steps == 0:
        if option("--phase") == "decode":
            raise InputError("--phase decode --steps 0: no decode step to judge")
        phases = ("prefill",)
    absent: tuple[str, ...] = ()
    least = 0 if option("least_coverage") is None else _whole(option("least_coverage"), "--least-coverage", 0)
    if least > 100:
        raise InputError(f"--least-coverage {least}: expected a whole number of percent, at most 100")
    if option("reference") is not None:
        return _checked_generic(config, door, phases, steps, max_context, directory, least)
    model_config = Checkpoint(directory, range(1)).config
    layers = selection.parse_layers(option("--layers"), model_config.num_hidden_layers)
    Checkpoint(directory, range(max(layers) + 1))
    if max_context > model_config.max_position_embeddings:
        raise InputError(f"--max-context {max_context}: the checkpoint's max_position_embeddings is {model_config.max_position_embeddings}")
    fault = None
    if option("--inject") is not None:
        fault = planted.find_fault(option("--inject"), None if option("--faults") is None else config.invocation_params.dir / option("--faults"))
    elif option("--faults") is not None:
        raise InputError("--faults needs --inject ID")
    baseline = None if option("--baseline") is None else _baseline(config.invocation_params.dir / option("--baseline"))
    waivers = Waivers()
    if option("--waivers") is not None:
        if profile == "faults":
            raise InputError("--waivers: the fault profile ends where a gate is red, accepted or not; next: --profile full")
        waivers = read_waivers(config.invocation_params.dir / option("--waivers"), model_config)
    if door == "trace_dir":
        given = [inputs.read_prompt(spec, directory, model_config.vocab_size) for spec in option("--prompt") or ()]
        traced = read_traced(config.invocation_params.dir / option("trace_dir"), model_config, given, None if option("--steps") is None else steps)
        steps = traced.steps
        if "decode" in phases and not steps:
            if option("--phase") == "decode":
                raise InputError(f"--phase decode --trace {option('trace_dir')}: the trace holds no decode step")
            phases, absent = ("prefill",), ("decode",)
    answers: list[Given] = []
    if door == "logits":
        answers = read_logits(config.invocation_params.dir / option("logits"), directory, model_config.vocab_size)
        held = steps_of(answers)
        if "decode" in phases and option("--phase") == "decode" and not held:
            raise InputError(f"--phase decode --logits {option('logits')}: no row after the prompt")
        steps = held if option("--steps") is None else min(steps, held)
        phases, absent = (phases, absent) if held or "decode" not in phases else (("prefill",), ("decode",))
    policy_given = outsider.policy_of(option("policy"))
    held_prompts = [inputs.Prompt(one.label, one.prompt, one.completion) for one in answers] or (traced.prompts if traced else [])
    prompts = held_prompts or [inputs.read_prompt(spec, directory, model_config.vocab_size) for spec in option("--prompt") or list(fault.prompts if fault else ()) or [DEFAULT_PROMPT]]
    longest = max(len(prompt.ids) for prompt in prompts)
    needed = longest + (steps if "decode" in phases else 0)
    if needed > max_context:
        raise InputError(f"prompt of {plural(longest, 'token')} and {plural(needed - longest, 'step')} need {plural(needed, 'token')}, --max-context is {max_context}")
    return Run(
        config, phases, layers, steps if "decode" in phases else 0, max_context, option("--device"), directory, prompts, fault, _report_dir(option("--report"), config), profile=profile,
        waivers=waivers, baseline=baseline, door=door, traced=traced, absent=absent, least_coverage=least, answers=answers, policy_given=policy_given, reds=score.known_reds(), decode=option("--decode") or (fault.decode if fault else "") or "eager", variants=option("--variants") or (fault.variants if fault else "") or None,
    )  # fmt: skip


def _checked_generic(config: pytest.Config, door: str, phases: tuple[str, ...], steps: int, max_context: int, directory: Path, least: int) -> Run:
    """What `--reference` needs: no checkpoint, token ids from a file; which layers there are the models say."""
    option = config.getoption
    for name in ("waivers", "redact"):
        if option(name):
            raise InputError(f"--{name} with --reference: not for a model that is no DeepSeek-V4")
    prompts = [inputs.read_prompt(spec, directory, 1 << 31) for spec in option("prompt")]
    needed = max(len(prompt.ids) for prompt in prompts) + (steps if "decode" in phases else 0)
    if needed > max_context:
        raise InputError(f"prompt and steps need {plural(needed, 'token')}, --max-context is {max_context}")
    layers = () if option("--layers") is None else selection.parse_layers(option("--layers"), generic.MOST_LAYERS)
    baseline = None if option("--baseline") is None else _baseline(config.invocation_params.dir / option("--baseline"))
    return Run(
        config, phases, layers, steps if "decode" in phases else 0, max_context, option("--device"), directory, prompts, None, _report_dir(option("--report"), config), baseline=baseline, door=door,
        generic=True, least_coverage=least,
    )  # fmt: skip


def _baseline(path: Path) -> list[Record]:
    """The records to compare with, read before anything is written: the run may go into the same folder. Raises InputError."""
    path = path / "run.jsonl" if path.is_dir() else path
    try:
        return read_run(path)
    except RecordError as error:
        raise InputError(f"--baseline: no readable run: {error}") from None
    except OSError as error:
        raise InputError(f"--baseline {path}: {error.strerror}; expected a run.jsonl that pytest parity/ wrote, or its folder") from None


def _report_dir(given: str | None, config: pytest.Config) -> Path:
    if given is None:
        stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
        first = path = home(config) / (RUNS_ELSEWHERE if is_elsewhere(config) else RUNS) / f"{stamp}-{git_commit(home(config))[0] or 'nogit'}"
        number = 1
        while path.exists():
            number += 1
            path = first.with_name(f"{first.name}-{number}")
    else:
        if not given:
            raise InputError("--report: expected a directory")
        path = Path(os.path.normpath(config.invocation_params.dir / given))
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        raise InputError(f"--report {path}: {parent} is no directory")
    if not os.access(parent, os.W_OK | os.X_OK) or _read_only(parent):
        raise InputError(f"--report {path}: {parent} cannot be written")
    for name in FILES:
        if (path / name).is_dir():
            raise InputError(f"--report {path}: {name} is a directory")
    return path


def _read_only(directory: Path) -> bool:
    """True where a probe file cannot be made: the access bits mean little to a superuser."""
    probe = directory / f".write-{os.getpid()}"
    try:
        probe.touch()
    except OSError:
        return True
    probe.unlink()
    return False


def start(session: pytest.Session) -> None:
    """Load both models. Raises pytest.UsageError on bad input; nothing is written yet."""
    config = session.config
    if RUN not in config.stash or config.getoption("collectonly"):
        return
    run = config.stash[RUN]
    assert run.progress is not None
    config.pluginmanager.register(run.progress, "parity.terminal")
    run.progress.begin()
    try:
        if run.fault is not None:
            run.fault_copy = planted.plant(run.fault)
            planted.import_from(run.fault_copy)
        _load(run)
        run.progress.clear()
    except InputError as error:
        raise pytest.UsageError(str(error)) from None


# The fault profile: where a fault shows and what it is come first, the rest only where nothing is red yet.
NAMING = ("test_layers", "test_state", "test_device", "test_graph", "test_visible", "test_sink", "test_load", "test_operations")


def collected(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Open the ledger, once pytest has found every test that was named. Raises pytest.UsageError."""
    run = config.stash.get(RUN, None)
    if run is None or run.audit is None:
        return
    if run.profile == "faults":
        items.sort(key=_turn)
    try:
        run.report_dir.mkdir(parents=True, exist_ok=True)
        if is_elsewhere(config) and run.report_dir.parent == home(config) / RUNS_ELSEWHERE:
            _kept_out_of_git(run.report_dir.parent)
        for name in FILES:
            (run.report_dir / name).unlink(missing_ok=True)
        run.ledger = Ledger(run.report_dir / "run.jsonl")
    except OSError as error:
        raise pytest.UsageError(str(InputError(f"--report {run.report_dir}: {error.strerror}: {error.filename}"))) from None
    run.record(header(run))
    for verdict in run.uncollected:
        run.record(verdict)


def _kept_out_of_git(folder: Path) -> None:
    """As pytest's own cache does: a folder of reports makes nobody's working tree dirty."""
    with contextlib.suppress(FileExistsError), (folder / ".gitignore").open("x", encoding="utf-8") as file:
        file.write("# made by dsv4-parity\n*\n")


def _turn(item: pytest.Item) -> int:
    """The place of a test's file in NAMING, or behind it; the model's own points stand with those of the layers.

    Whole small models, but for a state that comes back, and small checkpoints tell no more than operations and parameters do.
    """
    name = item.path.name
    if "model_case" in getattr(item, "fixturenames", ()):
        return 0
    if "no_kernel_leaves" in item.name:
        return len(NAMING)  # before anything else that runs a model: what writes outside of its memory may end the process
    if (name == "test_operations_whole.py" and "comes_back" not in item.name) or "awkward" in item.name:
        return len(NAMING) + 1
    return next((i for i, start in enumerate(NAMING) if name.startswith(start)), len(NAMING) + 2)


def not_due(item: pytest.Item) -> str:
    """Why the fault profile leaves a test out; empty where it is due."""
    run = item.config.stash.get(RUN, None)
    if run is None or run.profile != "faults" or not run.red:
        return ""
    turn = _turn(item)
    if turn >= len(NAMING):
        alone = "row_alone" in item.name and run.operations_behind() is None  # tells whether an operation is wrong for later rows only
        return "" if alone else "the fault profile: a gate is red already"
    if NAMING[turn] == "test_graph" and run.decode != "replay":
        return "the fault profile: a gate is red already, and no graph was replayed"
    if NAMING[turn] == "test_operations" and "comes_back" not in item.name:
        behind = run.operations_behind()
        words = {"positions" if op == "token_positions" else op.split("_")[0] for op in behind or ()}
        if behind is not None and item.name.removeprefix("test_").split("_")[0] not in words:
            return "the fault profile: this operation does not make the first point that is red"
    return ""


def offered(collector: pytest.Collector, report: pytest.CollectReport) -> None:
    """The tests of a file as they stand in it, before anybody leaves some out; one that pytest took for no test is named too."""
    run = collector.config.stash.get(RUN, None)
    if run is None or not isinstance(collector, pytest.Module) or report.skipped:
        return
    tests = run.offered.setdefault(collector.path, [])
    if report.passed:
        found = [item for item in report.result if isinstance(item, pytest.Item)]
        names = {getattr(item, "originalname", item.name) for item in found}
        own = {name: test for name, test in vars(collector.obj).items() if name.startswith("test_") and inspect.isfunction(test) and test.__module__ == collector.obj.__name__}
        tests += [item.nodeid for item in found]
        tests += [f"{collector.nodeid}::{name}" for name, test in own.items() if name not in names and asked_for(collector.config, test)]


def uncollected(collector: pytest.Collector, report: pytest.CollectReport) -> None:
    """Tests that could not be imported are a failure of the run."""
    run = collector.config.stash.get(RUN, None)
    if run is not None:
        lines = str(report.longrepr).strip().splitlines() or ["no reason given"]
        run.uncollected.append(Verdict("collection", collector.nodeid, "operation", State.FAIL, "tests can be imported", reason=lines[-1].removeprefix("E ").strip()[:300], test_id=collector.nodeid))


def _load_generic(run: Run) -> None:
    """Both models behind `--production` and `--reference`. Raises InputError, also where a factory fails: there is nothing to judge."""
    assert run.progress is not None
    option = run.config.getoption
    layers = run.layers or None
    given = {"checkpoint_dir": run.checkpoint_dir, "layers": layers, "max_context": run.max_context, "device": run.device} | ({} if option("dtype") is None else {"dtype": option("dtype")})
    plan = generic.GenericPlan([p.ids for p in run.prompts], [p.continuation for p in run.prompts], run.phases, run.steps, run.max_context)
    run.audit = generic.open_audit(option("production"), option("reference"), given, plan, layers, run.progress.say)
    run.layers = run.audit.layers
    run.outsider = outsider.Outsider(run.audit.production.name, run.audit.production, coverage=run.audit.coverage())


def _load(run: Run) -> None:
    import reference

    if run.generic:
        return _load_generic(run)
    layers = range(max(run.layers) + 1)
    assert run.progress is not None
    tell = run.progress.say
    policy: Any = "published"
    production, crash, redact = None, None, bool(run.config.getoption("--redact"))
    try:
        if run.door:
            run.outsider = open_door(run, layers)
            production = run.outsider.production
            if run.policy_given is not None:
                production.policy = run.policy_given
            policy = production.policy
        else:
            from production.model import POLICY

            policy = POLICY
    except (InputError, KeyboardInterrupt):
        raise
    except BaseException as error:
        crash = Crash("load", None, outsider.DOORS[run.door] if run.door else "import production", foreign.told(error, redact), raised=foreign.raised_at(error))
        run.load_crash = f"{crash.where}: {crash.message}"
    torch.set_num_threads(1 if Checkpoint(run.checkpoint_dir, range(1)).config.hidden_size < 2048 else max(1, os.cpu_count() or 1))
    with contextlib.redirect_stderr(_Lines(tell)):
        model = reference.load(run.checkpoint_dir, policy=policy, layers=layers, max_context=run.max_context)
    twins = [model.twin(order) for order in TWIN_ORDERS]
    if run.load_crash is None and production is None:
        try:
            production = load_production(run)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            crash = Crash("load", None, "production.load", foreign.told(error, redact), raised=foreign.raised_at(error))
            run.load_crash = run.device_reason or f"{crash.where}: {crash.message}"
    plan = Plan(
        rows=[p.ids for p in run.prompts], continuation=[p.continuation for p in run.prompts],
        phases=run.phases, layers=run.layers, steps=run.steps, max_context=run.max_context, checkpoint_dir=str(run.checkpoint_dir),
    )  # fmt: skip
    cache = None
    if not run.config.getoption("--no-cache") and not run.door:
        facts = {"checkpoint": checkpoint_facts(run.checkpoint_dir, layers), "code": code_hash(), **machine_facts()}
        cache = ReferenceCache(cache_folder(), facts)
    kind = run.outsider.kind if run.outsider is not None else OutsideAudit if run.door else Audit
    run.audit = kind(model, production if production is not None else _Missing(model, str(run.load_crash)), twins, plan, say=tell, cache=cache)
    run.audit.faulty, run.audit.redact = run.fault is not None, redact
    if production is not None and not run.door and asks_for_witness(run):
        run.audit.beside = device_witness.Beside.load(run.checkpoint_dir, production, run.max_context, layers)
    if run.profile == "faults":
        run.audit.red = lambda audit, phase, step, alone: evaluate.any_red(audit, phase, step, alone) or stored.any_red(audit, phase, step)
    if run.load_crash is not None:
        run.audit.crash = Crash("load", None, "load", run.load_crash, raised=crash.raised if crash is not None else "")
    if run.device_reason is not None:
        run.config.option.no_summary = True  # one reason for everything: the verdict's line says it
    if redact:
        files = [*(run.config.getoption("--prompt") or ()), *filter(None, (run.config.getoption(name) for name in ("trace_dir", "logits")))]
        run.redactor = Redactor(run.prompts, Checkpoint(run.checkpoint_dir, layers).hash(), decoder_of(run.checkpoint_dir), files, run.steps, {"trace_dir": "trace", "logits": "logits of"}.get(run.door, ""))


def open_door(run: Run, layers: range) -> outsider.Outsider:
    """Somebody else's production, as the command line names it. Raises InputError."""
    option = run.config.getoption
    if run.answers:
        return outsider.open_logits(option("logits"), run.answers)
    if run.traced is not None:
        return outsider.open_trace(run.traced, Checkpoint(run.checkpoint_dir, range(1)).config, layers)
    opened = outsider.open_production(option("--production"), option("--dtype"), run.checkpoint_dir, layers, run.max_context, run.device)
    opened.production.check_rows([len(prompt.ids) for prompt in run.prompts])
    return opened


def load_production(run: Run) -> Any:
    """Production on the asked device. Without a device everything that needs it is not run."""
    import production

    if run.device == "cuda" and not torch.cuda.is_available():
        run.device_reason = "no device: --device cuda, and torch sees no CUDA device here"
        raise RuntimeError(run.device_reason)
    return production.load(run.checkpoint_dir, device=run.device, max_context=run.max_context, layers=range(max(run.layers) + 1), variants=run.variants, decoding=run.decode)


def asks_for_witness(run: Run) -> bool:
    """On a GPU the isolated layers are run on the CPU device too."""
    return run.device == "cuda"


class NotLoadedError(AttributeError):
    """A test asked for a production that could not be loaded: it is not run."""


class _Missing:
    """Stands for a production that could not be loaded: it has taps that never fire, and nothing else."""

    def __init__(self, model: Any, reason: str) -> None:
        self.taps = type(model.taps)(model.taps.points)
        self.policy = model.policy
        self._reason = reason

    def __getattr__(self, name: str) -> Any:
        raise NotLoadedError(f"production was not loaded: {self._reason}")


class _Lines:
    """A text stream that hands whole lines on."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.tell, self.rest = tell, ""

    def write(self, text: str) -> int:
        self.rest += text
        *lines, self.rest = self.rest.split("\n")
        for line in filter(str.strip, lines):
            self.tell(line)
        return len(text)

    def flush(self) -> None:
        pass


def without_messages(item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
    """With --redact: what pytest tells of a test, without the messages of exceptions and without what was printed."""
    run = item.config.stash.get(RUN, None)
    if run is None or run.redactor is None:
        return
    report.sections = []
    if report.failed and call.excinfo is not None and not isinstance(call.excinfo.value, pytest.fail.Exception):
        at = foreign.raised_at(call.excinfo.value)
        report.longrepr = foreign.told(call.excinfo.value, redact=True) + (f" (raised at {at})" if at else "")
    elif isinstance(report.longrepr, tuple):
        report.longrepr = (*report.longrepr[:2], run.redactor.text(report.longrepr[2]))


# ---- header ----


def git_commit(root: Path = ROOT) -> tuple[str, bool]:
    """Short commit and whether the tree is dirty; empty outside of a repository."""
    try:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, timeout=20)
        status = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return "", False
    return (commit.stdout.strip(), bool(status.stdout.strip())) if commit.returncode == 0 else ("", False)


def environment(run: Run) -> dict[str, Any]:
    """Facts of this machine, read here and now."""
    facts: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__, "platform": platform.platform(), "cpu": platform.machine(),
        "cores": os.cpu_count(), "compiler": _first_line(["g++", "--version"]), "gpu": None, "cuda": torch.version.cuda,
    }  # fmt: skip
    if is_elsewhere(run.config):
        facts["dsv4-parity"] = _version()
    if run.device == "cuda" and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name(0)
        facts["capability"] = "sm_{}{}".format(*torch.cuda.get_device_capability(0))
        facts["driver"] = _first_line(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    return facts


def _version() -> str:
    """This project's own version and the hash of its code, where the commit is another repository's."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return f"{importlib.metadata.version('dsv4-parity')}, code {score.code_hash()[:12]}"
    return f"not installed, code {score.code_hash()[:12]}"


def _first_line(command: list[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.splitlines()
        return lines[0].strip() if lines else None
    return None


def header(run: Run) -> Header:
    """The first record."""
    assert run.audit is not None
    if run.generic:
        return _header_generic(run)
    config = run.audit.reference.config
    commit, dirty = git_commit(home(run.config))
    kinds = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    notes = [f"unknown config keys: {', '.join(config.unknown_keys)}"] if config.unknown_keys else []
    notes += filter(None, [_addopts(run)])
    if run.fault is not None:
        notes.append(f"fault {run.fault.id} is planted in a copy of production: {run.fault.title}")
    if run.profile == "faults":
        notes.append("fault profile: the models' runs end where a gate is red, and what was not run then is no part of the verdict")
    checkpoint = Checkpoint(run.checkpoint_dir, range(max(run.layers) + 1))
    if run.outsider is not None:
        notes += [f"{run.outsider.name}: {note}" for note in getattr(run.outsider.production, "notes", ())]
    if checkpoint.ignored:
        notes.append(f"{len(checkpoint.ignored)} mtp tensors ignored")
    return Header(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command=command_line(run.config), commit=commit, dirty=dirty,
        environment=environment(run), checkpoint=_shown(run.checkpoint_dir), checkpoint_hash=checkpoint.hash(),
        model={
            "layers": config.num_hidden_layers, "window": kinds.count("window"), "csa": kinds.count("csa"), "hca": kinds.count("hca"), "kinds": kinds,
            "hidden_size": config.hidden_size, "heads": config.num_attention_heads, "head_dim": config.head_dim, "hc_mult": config.hc_mult,
            "sliding_window": config.sliding_window, "index_topk": config.index_topk, "n_routed_experts": config.n_routed_experts, "vocab_size": config.vocab_size,
        },
        device=run.device, policy=sorted(run.audit.production.policy), phases=list(run.phases), layers=list(run.layers), layers_run=list(run.audit.layers_run),
        prompts=[p.label for p in run.prompts], tokens=[len(p.ids) for p in run.prompts], steps=run.steps, max_context=run.max_context,
        decode=run.decode, variants=_plan(run), inject=run.fault.id if run.fault else None, notes=notes, fault_score="" if run.outsider is not None else score.standing(),
        production=run.outsider.name if run.outsider is not None else "", waivers=[waiver.terms() for waiver in run.waivers.all], baseline=run.config.getoption("--baseline") or "", reds=run.reds,
    )  # fmt: skip


def _header_generic(run: Run) -> Header:
    """Of two models behind the protocol: no checkpoint is known."""
    commit, dirty = git_commit(home(run.config))
    audit = run.audit
    floor = audit.no_floor and f"no noise floor: {audit.no_floor}; limits are the table's absolute part"
    notes = [*filter(None, [_addopts(run), f"reference: {audit.reference.name} ({run.config.getoption('reference')})", f"not applicable: {', '.join(generic.NOT_APPLICABLE)}", floor]), *audit.production.notes, *(f"reference: {note}" for note in audit.reference.notes)]
    return Header(
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), command=command_line(run.config), commit=commit, dirty=dirty, environment=environment(run),
        checkpoint="", checkpoint_hash="", model={"layers": len(run.layers), "points": len(audit.points)}, device=run.device, policy=[], phases=list(run.phases), layers=list(run.layers),
        layers_run=list(run.layers), prompts=[p.label for p in run.prompts], tokens=[len(p.ids) for p in run.prompts], steps=run.steps, max_context=run.max_context, notes=notes,
        production=audit.production.name, baseline=run.config.getoption("--baseline") or "",
    )  # fmt: skip


def _plan(run: Run) -> str:
    """The kernel variants that production runs; where it was not loaded, those that were asked for."""
    plan = getattr(run.audit.production, "plan", None) if run.audit is not None else None
    return str(plan.name) if plan is not None else run.variants or ""


def _shown(path: Path) -> str:
    return str(path.relative_to(ROOT)) if ROOT in path.parents else str(path)


def command_line(config: pytest.Config) -> str:
    """What was typed, as a line that can be typed again."""
    return shlex.join(["pytest", *map(str, config.invocation_params.args)])


AGAIN = ("production", "reference", "logits", "policy", "trace", "trace_dir", "dtype", "phase", "layers", "checkpoint", "prompt", "steps", "device", "decode", "variants", "max_context", "profile", "inject", "faults")


def again_options(config: pytest.Config) -> str:
    """The options of this run that a test's id depends on, as typed behind `pytest ID`; empty for the defaults."""
    words: list[str] = ["--parity"] if is_elsewhere(config) else []
    for name in AGAIN:
        given, option = config.getoption("trace_dir" if name == "trace" else name, None), "--" + name.replace("_", "-")
        if given is not None and any(str(arg).split("=")[0] == option for arg in config.invocation_params.args):
            for value in given if isinstance(given, list) else [given]:
                words += [option, str(value)]
    run = config.stash.get(RUN, None)
    line = shlex.join(words)
    if run is not None and run.redactor is not None:
        line = run.redactor.command(line)
    return f" {line}" if line else ""


# ---- finish ----


def finish(session: pytest.Session, exitstatus: int, render: Callable[[list[Record], Path, list[Record] | None], Path], trend: Callable[[list[Record], list[Record]], str]) -> None:
    """Close the ledger with its summary, write the report, set the exit code. trend  what differs from the baseline, in one line."""
    config = session.config
    run = config.stash.get(RUN, None)
    if run is None or run.ledger is None or run.audit is None:
        return
    ledger = run.ledger
    _record_unreached(session, run)
    narrowed = _narrowed(session)
    cells = [] if narrowed else coverage(run)
    facts: list[Record] = [*cells, *_unjudged(run, cells)]
    if run.generic:
        found: list[Record] = [*facts, *run.audit.measurements(), *(Measurement("not covered", layer=layer_of(p), point=p, values={"tests": 0, "first": ""}) for p in run.audit.hidden)]
    elif isinstance(run.audit, LogitsAudit):
        found = [*facts, *run.audit.measurements()]
        for point in run.audit.uncovered():
            assert run.outsider is not None
            run.outsider.not_covered.tests.setdefault(point, [])
    else:
        found = [*facts]
        sources: list[Callable[[], Sequence[Record]]] = [
            lambda: measurements(run.audit), lambda: device_witness.measurements(run.audit), lambda: run.audit.cache_facts(), lambda: graphs(run.audit), lambda: mechanisms(run.audit, ledger.records), lambda: kernels(run),
        ]  # fmt: skip
        with run.audit.lenient() if isinstance(run.audit, OutsideAudit) else contextlib.nullcontext():
            for source in sources:
                found += measured_or_told(run, source)
            if run.outsider is not None:
                found += said_by_production(run)
    if run.outsider is not None:
        found += run.outsider.not_covered.measurements()
    for record in [*found, *run.waivers.facts()]:
        run.record(record)
    if run.audit.stopped:
        run.record(Measurement("early end", values={"reason": run.audit.stopped}))
    divergence = _divergence(run)
    summary = summarise(ledger.records, time.perf_counter() - run.started, divergence)
    if run.generic:
        summary = replace(summary, coverage=run.audit.coverage())
    if run.outsider is not None and isinstance(run.audit, OutsideAudit):
        summary = replace(summary, coverage=run.outsider.words(run.audit, run.absent))
    too_little = _too_little(run)
    beside = [*filter(None, [outsider.unusable(run.audit) if isinstance(run.audit, OutsideAudit) else ""]), *outsider.over_and_not_judged(ledger.records)]
    if beside:
        summary = _no_pass(summary, [*beside, *summary.reasons])
    if narrowed:
        summary = _no_pass(summary, [*summary.reasons, narrowed])
    else:
        summary = replace(summary, reasons=[*summary.reasons, *unexercised(ledger.records)])
    if too_little:
        summary = _no_pass(summary, [too_little, *summary.reasons])
    against = contradictions([*ledger.records, summary])
    if against:
        summary = _no_pass(summary, [*against[:10], *summary.reasons])
    run.record(summary)
    ledger.close()
    drawn = False
    try:
        run.trend = "" if run.baseline is None else trend(run.baseline, ledger.records)
        report = str(_near(render(ledger.records, run.report_dir, run.baseline)))
        drawn = True
    except Exception as error:  # the records are whole: the verdict stands, and is told
        report = f"not drawn: {type(error).__name__}: {' '.join(str(error).split())[:200]}; next: python -m reports {_near(ledger.path)}"
    config.add_cleanup(lambda: print("\n".join(_closing(run, divergence, summary, report)), flush=True))  # below pytest's own last line
    if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        clean = summary.verdict == "pass" or (bool(narrowed) and _typed(config) and not too_little and not beside and not against and exitstatus == 0 and summary.verdict != "fail" and not summary.not_run)
        session.exitstatus = pytest.ExitCode.OK if clean and drawn else pytest.ExitCode.TESTS_FAILED


def _no_pass(summary: Summary, reasons: list[str]) -> Summary:
    """The same with these reasons; where nothing failed it is incomplete."""
    return replace(summary, reasons=reasons, verdict="incomplete" if summary.verdict == "pass" else summary.verdict)


def _too_little(run: Run) -> str:
    """Why what production shows is less than was asked for; empty where it is enough."""
    if run.generic:
        shown = 100 * len(run.audit.points) / max(len(run.audit.points) + len(run.audit.hidden), 1)
    elif run.outsider is not None and isinstance(run.audit, OutsideAudit):
        shown = run.outsider.percent(run.audit, run.absent)
    else:
        return ""
    return f"{math.floor(10 * shown) / 10:g} % of the asked points are shown, --least-coverage asks for {run.least_coverage} %" if shown < run.least_coverage else ""


def measured_or_told(run: Run, source: Callable[[], Sequence[Record]]) -> Sequence[Record]:
    """Records of one kind; where making them stops, that, as a gate that was not run: a value that nobody expected costs no report."""
    try:
        return source()
    except Exception as error:
        told, at = foreign.told(error, run.redactor is not None), foreign.raised_at(error)
        return [Verdict("run", "run", "model", State.NOT_RUN, "measurements finished", reason=f"a measurement stopped: {told}" + (f" (raised at {at})" if at else ""))]


def said_by_production(run: Run) -> list[Record]:
    """What it declares beside what it does, and what it says of itself; that it stopped while it was asked."""
    try:
        return list(policy.measurements(run.audit))
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        crash = Crash(run.phases[-1], None, "measured", foreign.told(error, run.redactor is not None), raised=foreign.raised_at(error))
        return [Verdict("run", "run", "model", State.FAIL, "production finished", phase=crash.phase, reason=crash.words(), details={"because": crash.words()})]


def _divergence(run: Run) -> Divergence | None:
    """The first failure that no waiver accepts, how sure that is, and its repro."""
    assert run.ledger is not None
    assert run.audit is not None
    if run.generic:
        return generic.divergence_of(run.audit, run.ledger.records)
    places, counted = places_of_model(run.audit.config, run.audit.layers_run), unwaived(run.ledger.records)
    divergence = first_divergence(counted, places, loaded=run.load_crash is None)
    divergence = strengthened(divergence, counted, run.audit)
    if divergence is None:
        return None
    before = waived_before(run.ledger.records, places)
    if before:
        divergence = replace(divergence, because="; ".join(filter(None, [divergence.because, f"{plural(before, 'failed gate')} before it {'is' if before == 1 else 'are'} waived"])))
    if run.redactor is not None:
        return replace(divergence, no_repro=NO_REPRO)
    if run.stopped_by:
        return replace(divergence, no_repro=f"the run was stopped: {run.stopped_by}")
    if run.outsider is not None:
        return replace(divergence, no_repro=f"{run.outsider.name}: its layers cannot be run alone from here")
    return with_repro(divergence, counted, run.audit, run.report_dir, str(_near(run.report_dir / REPRO)), command_line(run.config))


def _closing(run: Run, divergence: Divergence | None, summary: Summary, report: str) -> list[str]:
    """What stands below pytest's own last line."""
    assert run.ledger is not None
    assert run.progress is not None
    cause = [f"production does not run: {' '.join(run.load_crash.split())[:300]}"] if run.load_crash is not None and run.device_reason is None else []
    lines = terminal.closing(
        run.ledger.records if summary.passed + summary.failed else (), cause, divergence_lines(divergence, run.ledger.records), [*run.waivers.lines(), *([f"trend: {run.trend}"] if run.trend else [])], terminal.verdict_line(summary, len(run.waivers.used)),
        report, run.progress.verbosity, run.progress.width(),
    )  # fmt: skip
    return terminal.coloured(lines, summary.verdict, run.config.get_terminal_writer())


def _near(path: Path) -> Path:
    """The path relative to the current directory, where that is no longer."""
    return Path(os.path.relpath(path)) if not os.path.relpath(path).startswith("../..") else path


def divergence_lines(divergence: Divergence | None, records: Sequence[Record] = ()) -> list[str]:
    """Where it starts, how sure that is, and how to run that one operation again."""
    if divergence is None:
        return []
    red = list(verdicts(records))
    index = gate_of(divergence, red)
    gate = None if index is None else red[index]
    where = when(divergence.phase, divergence.step, gate) or "single operation"
    how_far = "" if gate is None else over(gate, divergence.step)
    local = {True: "local", False: "inherited", None: "local or inherited: cannot be told"}[divergence.local]
    lines = ["first divergence: " + ", ".join(filter(None, [divergence.point, where, how_far, divergence.component, local, strength(divergence)]))]
    if divergence.because:
        lines.append(f"because: {divergence.because}")
    if divergence.replay is not None:
        lines.append(f"replay it alone: {divergence.replay}")
    elif divergence.no_repro:
        lines.append(f"no repro: {divergence.no_repro}")
    return lines


# Files whose tests are of one kind and no operation: what the gates are called that they write.
KINDS = {"test_self.py": "self", "test_load.py": "load", "test_memory.py": "memory", "test_recall.py": "recall"}


def verdict_of(item: pytest.Item) -> Verdict:
    """What a test without a verdict of its own is recorded as: the point, layer and phase it was asked for, else an operation."""
    operation = getattr(item, "originalname", item.name)
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    case = next((case for case in asked.values() if isinstance(case, selection.Case)), None)
    if case is not None:
        first, last = case.steps or (None, None)
        spec = spec_of(case.point)
        return Verdict(
            spec.name, case.point, case.mode, State.PASS, "assertions of the test", layer=case.layer, phase=case.phase, step_first=first, step_last=last,
            component=spec.component, test_id=item.nodeid,
        )  # fmt: skip
    component = next((row.component for name, row in OPERATIONS.items() if operation.startswith(f"test_{name}")), "")
    return Verdict(
        f"operation.{operation.removeprefix('test_')}", item.name, "operation", State.PASS, "assertions of the test", layer=asked.get("layer", asked.get("compressed_layer")), phase=asked.get("phase"),
        component=component, test_id=item.nodeid,
    )  # fmt: skip


def _kind(item: pytest.Item, verdict: Verdict) -> Verdict:
    """A test that was not reached, among the gates of its kind."""
    asked = item.callspec.params if hasattr(item, "callspec") else {}
    state = next((case for case in asked.values() if isinstance(case, selection.StateCase)), None)
    if state is not None:
        first, last = state.steps or (None, None)
        return replace(
            verdict, gate=f"state.{state.part}", point=f"layers.{state.layer}.state.{state.part}", mode="isolated", layer=state.layer, phase=state.phase, step_first=first, step_last=last,
            component=stored.component_of_part(state.part),
        )  # fmt: skip
    return replace(verdict, gate=verdict.gate.replace("operation", KINDS.get(item.path.name, "operation"), 1))


def _record_unreached(session: pytest.Session, run: Run) -> None:
    for item in session.items:
        if item.nodeid not in run.judged:
            reason = "the run ended before this test" + (f": {run.stopped_by}" if run.stopped_by else "")
            run.record(replace(_kind(item, verdict_of(item)), state=State.NOT_RUN, metric="none", reason=reason))


def _unjudged(run: Run, cells: list[Coverage]) -> list[Verdict]:
    """Asked cells whose tap fired and that no gate judged are not run; where the run ended early, its tests say so themselves."""
    assert run.ledger is not None
    assert run.audit is not None
    told = run.outsider is not None and any(run.outsider.not_covered.tests.values())  # gates that have no values of it are a list of their own
    if run.audit.stopped or run.load_crash is not None or told:
        return []
    return [
        Verdict(cell.point.removeprefix(f"layers.{cell.layer}."), cell.point, cell.mode, State.NOT_RUN, "none", layer=cell.layer, phase=cell.phase, reason=f"no gate judged {cell.phase} {cell.point} ({cell.mode}) at all of its steps")
        for cell in unjudged(cells, verdicts(run.ledger.records), every_step=run.outsider is None)
    ]  # fmt: skip


LEAVES_OUT = re.compile(r"-[km]|--(deselect|ignore|lf|last-failed|ff|failed-first|nf|sw|stepwise|override-ini|confcutdir|rootdir|config-file)|-[oc]")


def _picked(config: pytest.Config) -> bool:
    return any("::" in arg or arg.endswith(".py") for arg in config.args)


def _typed(config: pytest.Config) -> bool:
    """What leaves tests out was typed, and so asked for; PYTEST_ADDOPTS, ini files and plugins are not."""
    return _picked(config) or any(LEAVES_OUT.match(str(arg)) for arg in config.invocation_params.args)


def _narrowed(session: pytest.Session) -> str:
    """Not empty when tests of the audit were left out, however that was done: coverage is then not asked for, and the verdict says so.

    What was collected stands beside what the audit's own folder holds for this run: files that were never opened (--ignore, ini values,
    another conftest.py), tests of a file that pytest did not take for tests, and tests that somebody removed.
    """
    config = session.config
    run, kept = run_of(config), {item.nodeid for item in session.items}
    files = sorted(path.name for path in PARITY.glob("test_*.py") if path not in run.offered and not ignore_collect(path, config))
    single = any("::" in arg for arg in config.args)
    removed = sum(test not in kept for tests in run.offered.values() for test in tests)
    removed = config.stash.get(DESELECTED, 0) if single else max(removed, config.stash.get(DESELECTED, 0))
    if not removed and not _picked(config) and not files:
        return ""
    words = f"only {plural(len(session.items), 'test was', 'tests were')} selected" + (f", {removed} deselected" if removed else "")
    if files and not _picked(config):
        words += f", {plural(len(files), 'file')} of gates left out: {named(files)}"
    return words + (f"; {_addopts(run)}" if _addopts(run) else "")


def _addopts(run: Run) -> str:
    """Options that nobody typed on this command line."""
    given = os.environ.get("PYTEST_ADDOPTS", "").strip()
    if not given:
        return ""
    try:
        given = shlex.join(shlex.split(given)) if run.redactor is None else run.redactor.command(given)
    except ValueError:
        given = "of broken quotes"
    return f"PYTEST_ADDOPTS: {given}"


def deselected(items: Sequence[pytest.Item]) -> None:
    """Count what `-k` and `-m` left out."""
    stash = items[0].config.stash
    stash[DESELECTED] = stash.get(DESELECTED, 0) + len(items)


def coverage(run: Run) -> list[Coverage]:
    """Every asked cell of phase x point x mode, and how often its tap fired; after an early end, of what had begun."""
    assert run.audit is not None
    cells = []
    for phase, point, layer, mode, who in run.audit.coverage_points():
        steps = None if phase == "prefill" else (0, run.steps - 1)
        expected = 1 if steps is None else run.steps
        observed = run.audit.fired(who, point, phase, steps)
        if run.audit.stopped and observed < expected:
            if not observed:
                continue  # nobody asked for it any more; the header says where the run ended
            expected = observed
        cells.append(Coverage(phase, layer, point, mode, expected, observed))
    return cells + device_witness.coverage(run.audit)


def graphs(audit: Audit) -> list[Measurement]:
    """The captured graphs that decode was replayed from: of the whole chain, and of each layer alone."""
    held = [graph for who in ("production", "isolated") for graph in getattr(audit.states.get(who), "graphs", {}).values()]
    return [Measurement("graph", layer=graph.layer, phase="decode", values=graph.facts()) for graph in held]


def kernels(run: Run) -> list[Kernel]:
    """What really ran, from the launcher's own count."""
    assert run.audit is not None
    counts: dict[tuple[str, str, str, str], int] = {}
    models = [run.audit.production, getattr(run.audit.beside, "model", None)]
    for entries in [*[model.kernels() for model in models if hasattr(model, "kernels")], *[device.ran for device in run.devices]]:
        for source, kernel, arch, build, launches in entries:
            counts[source, kernel, arch, build] = counts.get((source, kernel, arch, build), 0) + launches
    return [Kernel(*key, launches=n) for key, n in sorted(counts.items())]


def unconfigure(config: pytest.Config) -> None:
    """Close what a killed run left open and remove the mutated copy."""
    run = config.stash.get(RUN, None)
    if run is None:
        return
    for number, before in ((signal.SIGTERM, run.on_terminate), (signal.SIGINT, run.on_interrupt)):
        if before is not None:
            signal.signal(number, before)
    if run.ledger is not None:
        run.ledger.close()
    if run.fault_copy is not None:
        shutil.rmtree(run.fault_copy, ignore_errors=True)
        if str(run.fault_copy) in sys.path:
            sys.path.remove(str(run.fault_copy))
