"""A repro replays what went wrong, bit for bit, and the present tree's answer beside it; a broken file is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import pytest
import torch

import production
import reference
from parity import attribution, evaluate, isolation, selection
from parity.audit import Audit, Plan
from parity.gates import GATES
from parity.isolation import failed_verdict
from parity.planted import find_fault, plant
from parity.repro import NoReproError, capture
from probes import replay
from probes.core.inputs import read_prompt
from probes.core.records import Divergence, State, Verdict
from probes.core.repro import Memory, Repro, View, bytes_of, compare, extent
from production.attention import MainCompressor
from production.cpu_device import KERNELS
from reference.config import InputError
from reference.points import points_of_layer, points_of_model

CHECKPOINT = KERNELS.parent / "checkpoints" / "tiny-dsv4"
NAN = float("nan")
with_repro: Any = isolation.with_repro


def audit_of(layers, judged, tokens, steps, **options):
    torch.set_num_threads(1)
    model = reference.load(CHECKPOINT, policy="published", layers=range(layers), max_context=256)
    made = production.load(CHECKPOINT, layers=range(layers), max_context=256, **options)
    rows = [read_prompt(f"medium.txt:{300 * i}:{300 * i + n}", CHECKPOINT, 2048).ids for i, n in enumerate(tokens)]
    plan = Plan(rows, [()] * len(rows), ("prefill", "decode") if steps else ("prefill",), judged, steps, 256)
    return Audit(model, made, [model.twin(order) for order in (1, 2, 3)], plan, say=lambda _: None)


def first_of(audit):
    """Judge every point of the judged layers; the first divergence, its gate and all verdicts."""
    cases = selection.layer_cases(audit.config, audit.plan.layers, audit.plan.phases, audit.plan.steps)
    records = [evaluate.judge_case(audit, case, case.id) for case in cases]
    divergence: Any = attribution.first_divergence(records, points_of_model(audit.config, audit.layers_run))
    return divergence, divergence and failed_verdict(divergence, records), records


def replayed(capsys, *arguments):
    """Exit code and JSON line of the replay."""
    code = replay.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    return code, json.loads(lines[-1]) if lines else {"error": captured.err}


# ---- planted faults ----


def test_the_sink_counted_per_split_replays_from_the_recorded_kernels_and_not_from_the_present_ones(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(GATES, "attn.core", replace(GATES["attn.core"], isolated=1e-2))  # here the sink's own witness is not asked
    copy = plant(find_fault("B086"))
    divergence, verdict, _ = first_of(audit := audit_of(1, (0,), (250,), 1, kernels_dir=copy / "kernels"))
    assert (divergence.point, divergence.phase, divergence.step) == ("layers.0.attn.core", "decode", 0)
    path = capture(audit, divergence, verdict, tmp_path / "repro.safetensors")
    code, recorded = replayed(capsys, path)
    assert code == 0
    assert recorded["value_bit_equal"]
    assert recorded["replay"]["error"] == verdict.value > verdict.limit
    assert [one["kernel"] for one in recorded["launches"]][1:] == ["sparse_attn_split_tile", "sparse_attn_combine"]
    assert all(one["same_build"] and not any(o["different"] for o in one["outputs"].values()) for one in recorded["launches"])
    for kernels in ("current", KERNELS):
        code, current = replayed(capsys, path, "--kernels", kernels)
        assert code == 0
        assert not current["value_bit_equal"]
        assert current["replay"]["error"] <= verdict.limit / 2
    assert [one["same_build"] for one in current["launches"]] == [True, False, False]
    code, checked = replayed(capsys, path, "--checked")
    assert (code, checked["value_bit_equal"]) == (0, True)


def test_a_launch_that_production_leaves_out_shows_in_the_present_code_only(tmp_path, capsys, monkeypatch):
    def unrotated(self, x, cache, step):  # B073
        buf = step.call.pool[f"compressor.{self.ratio}"]
        self.pool(x, buf, cache.state.kv, cache.state.gate, step)
        production.ops.store_entries(self.dev, buf.rows, buf.entry, cache.entries)

    monkeypatch.setattr(MainCompressor, "__call__", unrotated)
    divergence, verdict, _ = first_of(audit := audit_of(3, (2,), (37,), 0))
    assert divergence.point == "layers.2.attn.compressor"
    path = capture(audit, divergence, verdict, tmp_path / "repro.safetensors")
    monkeypatch.undo()
    code, recorded = replayed(capsys, path)
    assert (code, recorded["value_bit_equal"]) == (0, True)
    assert recorded["replay"]["error"] == verdict.value > verdict.limit
    assert "rope_pairs" not in [one["kernel"] for one in recorded["launches"]]
    code, current = replayed(capsys, path, "--kernels", "current")
    assert (code, current["value_bit_equal"]) == (0, False)
    assert current["replay"]["error"] <= verdict.limit


# ---- any point, either chain, any chunk ----


@pytest.fixture(scope="module")
def healthy():
    """Three layers, two rows of unequal length, prefill in chunks of 16."""
    audit = audit_of(3, (0, 1, 2), (37, 22), 3, prefill_chunk=16)
    audit.ensure("decode")
    return audit


def claim(point, phase, step, mode, first=(0, 0)):
    """What the audit would say, had this point failed."""
    layer = int(point.split(".")[1])
    verdict = Verdict("g", point, mode, State.FAIL, "m", layer=layer, phase=phase, step_first=step, limit=0.1, where=list(first), details={"first": list(first)})
    return Divergence(layer, point, phase, step, mode == "isolated", "component"), verdict


def captured(audit, folder, point, phase, step, mode, first=(0, 0)) -> Path:
    divergence, verdict = claim(point, phase, step, mode, first)
    return capture(audit, divergence, verdict, folder / "repro.safetensors")


@pytest.mark.parametrize(("phase", "step", "mode", "first"), [("prefill", None, "isolated", (1, 5)), ("prefill", None, "free", (0, 33)), ("decode", 2, "isolated", (0, 1)), ("decode", 2, "free", (0, 1))])
def test_every_point_of_a_layer_replays_bit_for_bit(healthy, tmp_path, capsys, phase, step, mode, first):
    points = [p for p in points_of_layer(healthy.config, 2) if not p.endswith(("hc_ffn.post", "hc_ffn.comb", "hc_ffn.pre", "hc_attn.post", "hc_attn.pre"))]
    for point in points[:: 2 if phase == "prefill" and mode == "isolated" else 5]:
        path = captured(healthy, tmp_path, point, phase, step, mode, first)
        repro = Repro.load(path)
        assert repro.facts["notes"] == [], point
        assert repro.facts["first_column"] == (first[1] // 16 * 16 if phase == "prefill" else 0)
        for kernels in ("recorded", "current"):
            code, found = replayed(capsys, path, "--kernels", kernels)
            assert code == 0, point
            assert found["value_bit_equal"], (point, kernels)
            assert found["replay"]["error"] <= 0.2, point
        assert len(repro.launches) < 14, point


def test_the_launches_are_those_between_agreeing_points(healthy, tmp_path):
    def kernels(point):
        repro = Repro.load(captured(healthy, tmp_path, point, "decode", 2, "isolated"))
        return [one.source for one in repro.launches]

    assert kernels("layers.2.attn.o") == ["rope"] or kernels("layers.2.attn.o") == ["positions", "rope"]
    assert kernels("layers.2.hc_ffn.X") == ["hyper_connection"]
    assert kernels("layers.2.attn.out") == ["act_quant", "linear_fp8"]
    assert "indexer" not in kernels("layers.2.attn.indexer.compressor")
    assert kernels("layers.2.attn.indexer.compressor")[-1] == "kv_store"


def test_an_audit_that_passes_watches_nothing(healthy):
    assert healthy.production.device._observer is None
    assert healthy.production.taps.observers == 0


def test_a_place_that_is_no_layers_point_has_no_repro(healthy, tmp_path):
    divergence, verdict = claim("layers.2.attn.q", "decode", 0, "isolated")
    with pytest.raises(NoReproError, match="no layer's point"):
        capture(healthy, replace(divergence, layer=None, point="logits"), verdict, tmp_path / "r")


def test_too_much_memory_is_said_and_nothing_is_written(healthy, tmp_path, monkeypatch):
    monkeypatch.setattr("parity.repro.LIMIT_BYTES", 1000)
    divergence, verdict = claim("layers.2.ffn.out", "decode", 0, "isolated")
    found = with_repro(divergence, [verdict], healthy, tmp_path)
    assert found.repro is None
    assert "more than" in found.no_repro
    assert list(tmp_path.iterdir()) == []


def test_a_layer_too_large_for_the_file_leaves_the_launches(healthy, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("parity.repro.LIMIT_BYTES", 100_000)
    path = captured(healthy, tmp_path, "layers.0.hc_attn.X", "decode", 0, "isolated")
    assert replayed(capsys, path)[1]["value_bit_equal"]
    code, found = replayed(capsys, path, "--kernels", "current")
    assert code == 3
    assert "no weights" in found["reason"]


def test_production_that_fails_again_does_not_hide_the_verdict(healthy, tmp_path, monkeypatch):
    def stop(*_args, **_kwargs):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(healthy.production, "run_layer", stop)
    divergence, verdict = claim("layers.2.attn.q", "decode", 0, "isolated")
    assert "out of luck" in with_repro(divergence, [verdict], healthy, tmp_path).no_repro


# ---- files ----


@pytest.mark.parametrize("spoil", ["missing", "empty", "cut off", "a trace", "another schema"])
def test_a_file_that_is_no_repro_is_refused_in_one_line(healthy, tmp_path, capsys, spoil):
    path = captured(healthy, tmp_path, "layers.0.attn.o", "decode", 0, "isolated")
    if spoil == "missing":
        path.unlink()
    elif spoil == "empty":
        path.write_bytes(b"")
    elif spoil == "cut off":
        path.write_bytes(path.read_bytes()[:-5])
    elif spoil == "another schema":
        path.write_bytes(path.read_bytes().replace(rb"\"schema\": 1", rb"\"schema\": 9"))
    else:
        from safetensors.torch import save_file

        save_file({"x": torch.zeros(3)}, path)
    code, found = replayed(capsys, path)
    assert code == 2
    assert found["error"].count("\n") == 1


@pytest.mark.parametrize(("arguments", "code"), [(["--kernels", "nowhere"], 2), (["--kernels", "EMPTY"], 3), (["--device", "cuda", "--checked"], 2)])
def test_bad_options_and_missing_kernels(healthy, tmp_path, capsys, arguments, code):
    path = captured(healthy, tmp_path, "layers.0.attn.o", "decode", 0, "isolated")
    (tmp_path / "none").mkdir()
    assert replayed(capsys, path, *[str(tmp_path / "none") if a == "EMPTY" else a for a in arguments])[0] == code


# ---- memory and comparison ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8, torch.int32])
def test_strided_views_come_back_with_what_lies_between(dtype):
    base = torch.arange(60).reshape(6, 10).to(dtype)
    view = base[1::2, 3:7]
    first, end = extent(view)
    assert bytes_of(view).numel() == end - first == 44 * base.element_size()
    memory = Memory([200], torch.device("cpu"))
    at = View(0, 16, str(dtype).removeprefix("torch."), (3, 4), (20, 1))
    memory.put(at, bytes_of(view))
    assert torch.equal(memory.tensor(at), view)


def test_memory_that_nothing_filled_is_nan():
    assert Memory([64], torch.device("cpu")).tensor(View(0, 0, "float32", (4,), (1,))).isnan().all()


def test_sets_are_compared_as_sets():
    want = torch.tensor([[[1, 2, 3, -1], [4, 5, -1, -1]]])
    got = torch.tensor([[[3, 1, 2, -1], [4, 6, -1, -1]]])
    found = compare("layers.2.attn.selected", "isolated", got, want, torch.ones(1, 2, dtype=torch.bool))
    assert (found["error"], found["where"], found["missing"], found["extra"]) == (1.0, [0, 1], [5], [6])


def test_numbers_are_compared_by_their_worst_row_and_nan_is_the_worst():
    want = torch.ones(1, 3, 2, 4)
    got = want.clone()
    got[0, 1, 1, 2] = 1.5
    valid = torch.ones(1, 3, dtype=torch.bool)
    found = compare("layers.0.attn.q", "isolated", got, want, valid)
    assert (found["error"], found["where"], found["element"], found["got"]) == (0.25, [0, 1, 1], [0, 1, 1, 2], 1.5)
    got[0, 2, 0, 0] = NAN
    found = compare("layers.0.attn.q", "isolated", got, want, valid)
    assert isnan(found["error"])
    assert (found["where"], found["masks"]) == ([0, 2, 0], 1)
    with pytest.raises(RuntimeError, match="shape"):
        compare("layers.0.attn.q", "isolated", got[..., :3], want, valid)


def test_a_repro_of_another_schema_names_both(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        Repro.load(tmp_path / "x")
