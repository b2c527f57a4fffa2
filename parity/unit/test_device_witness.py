"""The third witness, on two CPU devices: one stands for the GPU. Green as they are, red where one of the two is otherwise.

What a GPU's hardware functions do is planted in a copy of the CPU device's own header: every expf, log1pf, sinf, cosf and rsqrtf
is moved by up to 2 units in the last place. Faults are planted in one of the two devices only, as a compiler or a race would.
"""

from __future__ import annotations

import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import production
import reference
from parity import attribution, device_witness, gates
from parity.audit import TWIN_ORDERS, Audit, Plan
from parity.device_witness import STEPS, Beside
from parity.session import GPU_FILES
from parity.unit.test_session import Shell
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.records import State, Verdict, read_run
from production.model import POLICY
from reference.points import INDICES, LAYER_POINTS, places_of_model

ROOT = Path(__file__).resolve().parents[2]
LENGTHS, CONTEXT, LAYERS = (31, 22), 64, (0, 1, 2, 3)

MOVED = """
// A GPU's functions: by a hash of the bits half of the results stay, most others move by 1 unit in the last place, some by 2.
inline float cuemu_moved(float v, unsigned salt) {
  unsigned b; memcpy(&b, &v, 4);
  if (v == 0.f || v == 1.f || v != v || (b & 0x7f800000u) == 0x7f800000u || (b & 0x7f800000u) == 0) return v;
  unsigned h = (b ^ salt) * 2654435761u; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13;
  const unsigned r = h & 15u;
  b += r < 8 ? 0u : r < 11 ? 1u : r < 14 ? ~0u : r == 14 ? 2u : ~1u;
  memcpy(&v, &b, 4); return v;
}
"""
FUNCTIONS = ("expf", "exp2f", "log1pf", "cosf", "sinf", "rsqrtf")
HEADER, ANCHOR = "cpu/cuda_on_cpu.h", "inline float __expf(float x) {"

# A fault of one device: file, text, what stands there instead, the points (one of them) where it must show first.
FAULTS: dict[str, tuple[str, str, str, set[str]]] = {
    "a norm by too large a mean": ("rms_norm.cu", "rsqrtf(sum / (float)dim + eps)", "rsqrtf(sum / (float)dim * 1.004f + eps)", {"attn.norm", "attn.q_norm"}),
    "an activation that saturates": ("swiglu.cu", "g / (1.f + expf(-g)) * u", "g / (1.f + expf(-g) * 1.002f) * u", {"ffn.routed", "ffn.shared_experts"}),
    "a router whose exponentials are small": ("gate.cu", "log1pf(expf(-fabsf(v)))", "log1pf(expf(-fabsf(v)) * 0.999f)", {"ffn.gate"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Window, CSA, HCA and CSA layer; a window of 16 that wraps, an indexer that discards from entry 8 on."""
    return write_checkpoint(tmp_path_factory.mktemp("beside") / "world", seed=7, hc_mult=3, hc_sinkhorn_iters=6)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """make(edits) -> a copy of kernels/ with these texts replaced, each of which stands there at least once."""

    def make(*edits: tuple[str, str, str]) -> Path:
        copy: Path = tmp_path_factory.mktemp("kernels") / "kernels"
        shutil.copytree(ROOT / "kernels", copy)
        for file, find, put in edits:
            path = copy / file
            text = path.read_text()
            assert find in text, f"{file} no longer has {find!r}"
            path.write_text(text.replace(find, put))
        return copy

    return make


@pytest.fixture(scope="module")
def as_a_gpu(kernels):
    """A copy whose hardware functions are a GPU's."""
    named = "".join(f"inline float cuemu_{f}(float x) {{ return cuemu_moved({f}(x), {n}u); }}\n" for n, f in enumerate(FUNCTIONS))
    return kernels((HEADER, ANCHOR, MOVED + named + "".join(f"#define {f} cuemu_{f}\n" for f in FUNCTIONS) + ANCHOR))


@pytest.fixture(scope="module")
def models(checkpoint):
    model = reference.load(checkpoint, policy=POLICY, max_context=CONTEXT)
    return model, [model.twin(order) for order in TWIN_ORDERS]


def run(checkpoint, models, there: dict[str, Any], here: dict[str, Any] | None = None, layers=LAYERS, steps=4) -> Audit:
    """An audit of two rows of unequal length. there  how the device that stands for the GPU is opened; here  the one beside it."""
    model, twins = models
    if layers != LAYERS:
        twins = twins[:1]  # a fault needs no careful floor
    made = production.load(checkpoint, max_context=CONTEXT, mma_sum="tensor_core", **there)
    rows = [tuple(prompt(n, 128, 17 * i)) for i, n in enumerate(LENGTHS)]
    more = [tuple(prompt(steps, 128, 17 * i + n)) for i, n in enumerate(LENGTHS)]
    plan = Plan(rows, more, ("prefill", "decode"), layers, steps, CONTEXT, str(checkpoint), greedy_tokens=4)
    audit = Audit(model, made, twins, plan, say=lambda line: None)
    audit.beside = Beside.load(checkpoint, made, CONTEXT, range(max(layers) + 1), **(here or {}))
    audit.ensure("decode")
    return audit


def verdicts(audit: Audit) -> list[Verdict]:
    found = device_witness.cases(audit.config, audit.plan.layers, audit.plan.phases, audit.plan.steps)
    return [device_witness.judge(audit, case, case.id) for case in found]


def red(audit: Audit) -> list[Verdict]:
    return [v for v in verdicts(audit) if v.state is State.FAIL]


@pytest.fixture(scope="module")
def moved(checkpoint, models, as_a_gpu):
    return run(checkpoint, models, {"kernels_dir": as_a_gpu, "order": "reverse"})


def test_a_device_whose_functions_round_otherwise_is_green(moved):
    found = verdicts(moved)
    assert [f"{v.point} {v.phase}: {v.reason}" for v in found if v.state is not State.PASS] == []
    assert all(v.rows > 0 and v.mode == "device" for v in found)
    assert {v.gate for v in found} == {f"device.{spec.name}" for spec in LAYER_POINTS}
    assert max(v.value or 0.0 for v in found) > 0, "nothing was moved: the copy ran the project's own kernels"


def test_equal_devices_are_equal_in_every_bit(checkpoint, models):
    audit = run(checkpoint, models, {"order": "random"}, {"order": "reverse"}, layers=(1, 2))
    for v in verdicts(audit):
        assert v.state is State.PASS, f"{v.point} {v.reason}"
        assert v.value == 0.0
        assert v.details.get("equal_bits", 1.0) == 1.0
    assert {m.values["of"]: m.values["equal_bits"] for m in device_witness.measurements(audit) if m.name == "device.points"} == {
        spec.name: 1.0 for spec in LAYER_POINTS if {"csa", "hca"} & set(spec.layer_kinds)
    }


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_one_device_is_red_where_it_is_and_green_in_both(name, checkpoint, models, kernels):
    file, find, put, points = FAULTS[name]
    faulty = kernels((file, find, put))
    alone = run(checkpoint, models, {"kernels_dir": faulty}, layers=(0, 1), steps=2)
    failed = red(alone)
    first = attribution.first_divergence(failed, places_of_model(alone.config, alone.layers_run))
    assert first is not None, "nothing is red"
    assert first.point.split(".", 2)[2] in points, first
    assert first.local is True
    assert attribution.OTHERWISE_THERE in first.because
    both = run(checkpoint, models, {"kernels_dir": faulty}, {"kernels_dir": faulty}, layers=(0, 1), steps=2)
    assert red(both) == []


def test_many_elements_that_differ_by_one_unit_show_as_a_share(moved):
    """A tenth of the elements of attn.norm one unit off: no row is over its limit, too many elements differ."""
    point = "layers.1.attn.norm"
    trace = moved.passes["isolated", "prefill", None]
    kept = trace.passes["prefill", None].chunks[point]
    spoiled = kept[0].clone()
    spoiled.view(-1)[::10] = torch.nextafter(spoiled.view(-1)[::10], torch.tensor(9.0))
    try:
        trace.passes["prefill", None].chunks[point] = [spoiled]
        (case,) = [c for c in device_witness.cases(moved.config, (1,), ("prefill",), 0) if c.point == point]
        verdict = device_witness.judge(moved, case, "id")
    finally:
        trace.passes["prefill", None].chunks[point] = kept
    assert verdict.state is State.FAIL
    assert "differ in a bit" in verdict.reason
    assert verdict.numbers[0]["number"] == "elements that differ in a bit"


def test_only_a_stored_key_that_differs_lets_typical_rows_behind_it_be_as_far_off_as_the_reference_s(moved):
    """Half of the rows of attn.core off by 1e-3: red where every key is the same, within the limit where one is another."""
    chunks = moved.passes["isolated", "prefill", None].passes["prefill", None].chunks
    beside = moved.passes["device", "prefill", None].passes["prefill", None].chunks
    core, kv = "layers.1.attn.core", "layers.1.attn.kv"
    kept = {point: chunks[point] for point in (core, kv, "layers.1.attn.compressor", "layers.1.attn.indexer.compressor")}
    (case,) = [c for c in device_witness.cases(moved.config, (1,), ("prefill",), 0) if c.point == core]
    try:
        for point in kept:
            chunks[point] = [beside[point][0].clone()]
        chunks[core][0].mul_(1.001)
        moved.memo.clear()
        same = device_witness.judge(moved, case, "id")
        chunks[kv][0][0, 3, 5] += 1.0
        moved.memo.clear()
        other = device_witness.judge(moved, case, "id")
    finally:
        chunks.update(kept)
        moved.memo.clear()
    assert (same.state, same.details["stored_keys_equal"]) == (State.FAIL, True)
    assert "typical" in same.reason
    assert other.details["stored_keys_equal"] is False
    assert "typical" not in other.reason


def test_another_key_or_expert_than_the_other_device_is_red(moved):
    for name, gate in (("attn.visible", "keys"), ("attn.selected", "entries"), ("ffn.experts", "experts")):
        point = f"layers.1.{name}"
        chunks = moved.passes["isolated", "prefill", None].passes["prefill", None].chunks
        kept = chunks[point]
        spoiled = kept[0].clone()
        row = spoiled[0, 30]
        row[0] = row[0] + 1 if name == "attn.visible" else next(v for v in range(len(row) + 1) if v not in row.tolist())
        try:
            chunks[point] = [spoiled]
            (case,) = [c for c in device_witness.cases(moved.config, (1,), ("prefill",), 0) if c.point == point]
            verdict = device_witness.judge(moved, case, "id")
        finally:
            chunks[point] = kept
        assert verdict.state is State.FAIL, point
        assert gate in verdict.reason


# ---- variants ----


def test_a_kernel_that_the_gpu_does_not_run_is_named_and_loosens_what_follows(moved):
    there = moved.beside.there["prefill"]
    gone = ("sparse_attn", "sparse_attn_tile")
    assert gone in there
    try:
        moved.beside.there["prefill"] = (there - {gone}) | {("sparse_attn_wgmma", "sparse_attn")}
        cases = {c.point: c for c in device_witness.cases(moved.config, (1,), ("prefill",), 0)}
        before, after = (device_witness.judge(moved, cases[f"layers.1.attn.{name}"], "id") for name in ("selected", "core"))
        rows = {m.phase: m.values for m in device_witness.measurements(moved) if m.name == "device.kernels"}
    finally:
        moved.beside.there["prefill"] = there
    assert "kernels_not_on_the_gpu" not in before.details
    assert after.details["kernels_not_on_the_gpu"] == ["sparse_attn.sparse_attn_tile"]
    assert "does not run sparse_attn.sparse_attn_tile" in after.why
    assert after.k == gates.K_ISOLATED
    assert (rows["prefill"]["only_gpu"], rows["prefill"]["only_cpu"]) == ("sparse_attn_wgmma.sparse_attn", "sparse_attn.sparse_attn_tile")
    assert rows["prefill"]["other_from"] == "attn.visible"
    assert rows["decode"]["other_from"] == ""


def test_launches_that_are_not_counted_are_looked_for_in_the_whole_run(moved):
    there = moved.beside.there["decode"]
    try:
        moved.beside.there["decode"] = set()
        assert moved.beside.others(moved, "decode", "layers.1.hc_ffn.X") == []
    finally:
        moved.beside.there["decode"] = there


@pytest.mark.parametrize("plan", [{"variants": "fast"}, {"variants": "fast", "p_bf16": True}], ids=["fast", "p in bf16"])
def test_the_other_device_runs_the_same_plan(plan):
    bundled = ROOT / "checkpoints" / "tiny-dsv4"  # heads of 128, for which there are fast variants
    made = production.load(bundled, max_context=CONTEXT, layers=range(1), **plan)
    beside = Beside.load(bundled, made, CONTEXT, range(1))
    assert beside.problem == ""
    assert beside.model.plan == made.plan
    assert beside.model.policy == made.policy


# ---- what is asked, and what is not run ----


def test_only_the_first_steps_are_compared(checkpoint, models):
    audit = run(checkpoint, models, {}, layers=(0,), steps=STEPS + 2)
    assert audit.fired("device", "layers.0.attn.q", "decode", (0, STEPS - 1)) == STEPS
    assert audit.fired("device", "layers.0.attn.q", "decode", (STEPS, STEPS)) == 0
    cells = device_witness.coverage(audit)
    assert {(c.phase, c.expected, c.observed) for c in cells} == {("prefill", 1, 1), ("decode", STEPS, STEPS)}
    assert {c.mode for c in cells} == {"device"}
    assert max(c.steps[1] for c in device_witness.cases(audit.config, (0,), ("decode",), STEPS + 2) if c.steps) == STEPS - 1


@pytest.mark.parametrize("when", ["load", "run"])
def test_a_witness_that_cannot_run_is_not_run_with_the_reason(when, checkpoint, models, kernels):
    here = {"kernels_dir": "nowhere"} if when == "load" else {"kernels_dir": kernels(("gate.cu", "out[e] =", "out[e] = nothing +"))}
    audit = run(checkpoint, models, {}, here, layers=(0,), steps=1)
    assert audit.crash is None
    words = {"load": "was not loaded", "run": "stopped in prefill"}[when]
    for v in verdicts(audit):
        assert v.state is State.NOT_RUN
        assert words in v.reason
    assert all(c.observed == 0 for c in device_witness.coverage(audit))


def test_without_another_device_nothing_is_asked_for(checkpoint, models):
    model, _ = models
    audit = Audit(model, production.load(checkpoint, max_context=CONTEXT), [], Plan([(1, 2, 3)], [(4,)], ("prefill",), (0,), 0, CONTEXT, str(checkpoint)), say=lambda line: None)
    assert device_witness.coverage(audit) == []
    assert device_witness.measurements(audit) == []
    (case, *_) = device_witness.cases(audit.config, (0,), ("prefill",), 0)
    assert device_witness.judge(audit, case, "id").state is State.NOT_RUN


# ---- the table and what it is used for ----


def test_every_point_but_sets_has_limits_below_the_reference_s():
    assert set(gates.DEVICE) == {spec.name for spec in LAYER_POINTS if spec.kind != INDICES}
    for name, row in gates.DEVICE.items():
        assert row.worst <= gates.GATES[name].isolated, name
        assert row.typical <= gates.GATES[name].typical / 5 or row.typical <= 5e-6, name
        assert gates.typical_of_device(name, True) == row.typical
        assert row.why
    order = [spec.name for spec in LAYER_POINTS if spec.name in gates.DEVICE]
    assert [name for name in order if gates.typical_of_device(name, False) > gates.DEVICE[name].typical] == order[order.index("attn.indexer.score") :]
    assert gates.K_DEVICE < gates.K_ISOLATED


def verdict_of(mode: str, state: State, phase="prefill", steps=(None, None), point="layers.1.attn.core", **details: Any) -> Verdict:
    return Verdict("g", point, mode, state, "m", 1, phase, steps[0], steps[1], component="attention core", local=True, details=details)


@pytest.fixture(scope="module")
def places(moved):
    return places_of_model(moved.config)


def test_what_the_other_device_says_of_the_first_divergence(places):
    core, there = verdict_of("isolated", State.FAIL), verdict_of("device", State.PASS)
    found = attribution.first_divergence([core, there], places)
    assert found is not None
    assert found.because == attribution.SAME_THERE
    found = attribution.first_divergence([core, replace(there, state=State.FAIL)], places)
    assert found is not None
    assert (found.because, found.local) == (attribution.OTHERWISE_THERE, True)
    found = attribution.first_divergence([core], places)
    assert found is not None
    assert found.because == ""
    found = attribution.first_divergence([core, replace(there, state=State.NOT_RUN)], places)
    assert found is not None
    assert found.because == ""


def test_only_steps_that_were_compared_have_a_say(places):
    late = verdict_of("isolated", State.FAIL, "decode", (1, 32), first_step=20)
    there = verdict_of("device", State.PASS, "decode", (1, 7))
    found = attribution.first_divergence([late, there], places)
    assert found is not None
    assert found.because == ""
    found = attribution.first_divergence([replace(late, details={"first_step": 5}), there], places)
    assert found is not None
    assert found.because == attribution.SAME_THERE


def test_a_red_device_gate_stands_at_its_point_behind_the_isolated_one(places):
    later = verdict_of("isolated", State.FAIL, point="layers.1.attn.out")
    device = verdict_of("device", State.FAIL)
    found = attribution.first_divergence([later, device], places)
    assert found is not None
    assert (found.point, found.local) == ("layers.1.attn.core", True)
    assert attribution.place(verdict_of("isolated", State.FAIL), {p: i for i, p in enumerate(places)}) < attribution.place(device, {p: i for i, p in enumerate(places)})  # type: ignore[operator]


def test_launches_of_a_model_without_a_device_are_none():
    from parity.audit import launches_of

    assert launches_of(object()) == Counter()


# ---- the command line ----

SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20")


def test_the_command_line_judges_the_witness_where_it_is_asked_for(tmp_path):
    shell = Shell(tmp_path)
    code, out, err = shell("parity/test_device.py", "-p", "parity.unit.witness_on_cpu", *SMALL)
    assert code == 0, out + err
    _, found, _ = shell.records()
    assert "prefill: the same layers on the CPU device" in out, "progress does not reach the terminal"
    assert {(v.mode, v.state) for v in found} == {("device", State.PASS)}
    assert {(v.phase, v.step_first, v.step_last) for v in found} == {("prefill", None, None), ("decode", 0, 0), ("decode", 1, 1)}
    names = [getattr(record, "name", "") for record in read_run(shell.report / "run.jsonl")]
    assert names.count("device.kernels") == 2


def test_on_the_cpu_nothing_of_a_gpu_is_asked_for(tmp_path):
    shell = Shell(tmp_path)
    _, out, err = shell("parity/", "--collect-only", "-q")
    assert "test_layers.py" in out, out + err
    assert not [file for file in GPU_FILES if file in out]
    code, out, _ = shell("parity/test_device.py", *SMALL)
    assert code == 1
    assert "production runs on the CPU device itself" in out
    _, found, summary = shell.records()
    assert ([v.state for v in found], summary.verdict) == ([State.NOT_RUN], "incomplete")
