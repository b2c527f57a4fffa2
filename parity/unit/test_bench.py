"""Benchmarks without a card: checks, tables and files of the harness; the synthetic model; a million tokens in small."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch

from bench import harness, memory, million, results
from bench.oracle import Seen
from bench.synthetic import preset, synthetic_model, synthetic_weights
from bench.timing import KERNELS, Ceilings
from production import ops
from production.launch import open_device
from production.model import State, Transformer
from reference.checkpoint import expected_tensors


def bench_of(tmp_path, *argv: str) -> harness.Bench:
    return harness.Bench("example", ["--device", "cpu", "--out", str(tmp_path), *argv])


def norm_case(bench: harness.Bench, variant: str = "warp", spoil: float = 0.0) -> harness.Row | None:
    """RMSNorm against torch, on poisoned outputs."""
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(5, 256, generator=generator).bfloat16(), torch.rand(256, generator=generator)
    out = torch.empty_like(x)
    want = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * weight

    def run() -> None:
        ops.rms_norm(bench.device, x, weight, out, 1e-6)

    def check() -> tuple[float, float]:
        out.fill_(torch.nan)
        run()
        return float((out.float() + spoil - want).abs().max()), 0.02

    return bench.case(kernel="rms_norm", variant=variant, shape="5 x 256", run=run, check=check, bytes=5 * 256 * 4, public_us=3.0)


# ---- the harness ----


def test_a_right_kernel_is_checked_and_never_timed_on_the_cpu(tmp_path) -> None:
    bench = bench_of(tmp_path)
    row = norm_case(bench)
    assert row is not None
    assert (row.state, row.us, row.launches) == ("ok", None, 1)
    assert row.error is not None
    assert 0 < row.error <= 0.02
    assert row.kernels[0]["source"] == "rms_norm"
    bench.finish()
    content = json.loads((tmp_path / "example.json").read_text())
    assert content["rows"][0]["kernel"] == "rms_norm"
    assert {"card", "date", "driver", "torch", "cupy", "nvrtc", "commit", "tree"} <= set(content["facts"])


@pytest.mark.parametrize("spoil", [0.5, float("nan")])
def test_a_wrong_result_is_wrong_nan_included(tmp_path, capsys, spoil) -> None:
    bench = bench_of(tmp_path)
    row = norm_case(bench, spoil=spoil)
    assert row is not None
    assert row.state == "wrong"
    with pytest.raises(SystemExit, match="1"):
        bench.finish()
    assert "before timing: error" in capsys.readouterr().out
    json.loads((tmp_path / "example.json").read_text(), parse_constant=pytest.fail)  # strict JSON, whatever the error was


def test_a_case_that_raises_loses_nothing_else(tmp_path, capsys) -> None:
    bench = bench_of(tmp_path)

    def run() -> None:
        raise ValueError("planted")

    failed = bench.case(kernel="broken", variant="", shape="", run=run)
    with bench.section("setup of three"):
        raise KeyError("planted too")
    right = norm_case(bench)
    assert failed is not None
    assert right is not None
    assert (failed.state, right.state) == ("failed", "ok")
    with pytest.raises(SystemExit, match="1"):
        bench.finish()
    out = capsys.readouterr().out
    assert "Traceback" in out
    assert "setup of three: KeyError: 'planted too'" in out
    assert "1 of 2 cases ok" in out


def test_nothing_measured_is_no_success(tmp_path) -> None:
    bench = bench_of(tmp_path, "--only", "attention")
    assert norm_case(bench) is None
    with pytest.raises(SystemExit, match="1"):
        bench.finish()


def test_after_the_time_limit_cases_are_listed_as_not_run(tmp_path) -> None:
    bench = bench_of(tmp_path, "--seconds", "0")
    row = norm_case(bench)
    assert row is not None
    assert row.state == "not run"


def test_a_floor_is_the_larger_of_bytes_and_flops() -> None:
    ceilings = Ceilings(copy_gbs=4000.0, read_gbs=4300.0, bf16_tflops=800.0, fp8_tflops=1400.0)
    assert ceilings.floor_us(4e9, 1.0, "bf16") == pytest.approx(1000.0)
    assert ceilings.floor_us(1.0, 8e12, "bf16") == pytest.approx(10_000.0)
    assert ceilings.floor_us(1.0, 1.4e12, "fp8") == pytest.approx(1000.0)


def test_results_go_above_older_ones(tmp_path) -> None:
    bench = bench_of(tmp_path)
    norm_case(bench, variant="nan")  # a name that reads like a number
    bench.note(budget=float("inf"))
    into = tmp_path / "RESULTS.md"
    into.write_text("# Results\n\nNewest first.\n\n## old\n\ntext\n")
    assert results.main([str(bench.write()), "--into", str(into)]) == 0
    text = into.read_text()
    assert text.index("example") < text.index("## old")
    assert "| rms_norm | nan | 5 x 256 |" in text
    assert text.startswith("# Results\n\nNewest first.\n\n## ")
    assert text.endswith("## old\n\ntext\n")


def result_of(*rows: harness.Row, **facts: Any) -> str:
    names = ("card", "date", "driver", "torch", "cupy", "nvrtc", "commit", "tree")
    return results.markdown({"bench": "example", "facts": dict.fromkeys(names, "x") | facts, "ceilings": None, "rows": [asdict(row) for row in rows], "errors": []})


def test_results_show_the_fastest_right_variant_and_what_was_missed() -> None:
    ok = partial(harness.Row, "mix", shape="b 1", state="ok", error=0.1, limit=1.0, public_us=10.0)
    text = result_of(
        ok(variant="slow", us=30.0, predicted_us=20.0), ok(variant="quick", us=12.0, predicted_us=8.0), ok(variant="usual", shape="b 8", us=9.0, predicted_us=8.0),
        harness.Row("mix", "broken", "b 1", state="wrong", message="error 2, limit 1", us=1.0), harness.Row("rate", "quick", "all", state="ok", value=5.0, of="tokens/s", predicted=4.0),
    )  # fmt: skip
    assert "| mix | b 1 | quick | 12 | 10 | **1.20** | 8 | **1.50** | 0.1 / 1 | slow 30 (20) |" in text
    assert "|  | b 8 | usual | 9 | 10 | 0.90 | 8 | 1.12 | 0.1 / 1 | - |" in text
    assert "| rate | quick | all | 5 tokens/s | 4 | 1.25 |" in text
    assert "* mix broken b 1: **wrong**: error 2, limit 1" in text
    assert "4 of 5 cases ok. Public time met or beaten in 1 of 2 shapes, at worst 1.20 of it. Predicted time held within 25 % in 1 of 2 shapes" in text


def test_results_leave_out_what_says_nothing() -> None:
    checks = [harness.Row("same", "fast", f"b {n}", state="ok", error=0.01 * n, limit=1.0) for n in range(7)]
    text = result_of(*checks, *(harness.Row(f"check {n}", "fast", "b 1", state="ok", error=0.0, limit=0.0) for n in range(3)), budget=3, nested={"a": {"b": 1}}, many=[0] * 50)
    assert "All of these: variants fast." in text
    assert "| same | 7 of them | 0.06 / 1 |" in text
    assert "| check 2 | b 1 | 0 / 0 |" in text
    assert "Also: budget 3." in text


@pytest.mark.parametrize("size", [16, 512 * 16, 512 * 16 * 9 + 32])
def test_the_reader_takes_every_word_once(size) -> None:
    device = open_device("cpu", checked=True, kernels_dir=KERNELS)
    data, sink = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((2,), -1, dtype=torch.int32)
    device.launch("stream", "read_all", (2,), (512,), (data, sink, size))
    words, total = data.view(torch.int32).tolist(), 0
    for word in words:
        total ^= word
    assert int(sink[0]) ^ int(sink[1]) == total


# ---- models of real width, in small ----


@pytest.fixture(scope="module")
def small() -> Transformer:
    return synthetic_model(preset("flash", (0, 4, 128), **million.SMALL), open_device("cpu"), max_context=320, prefill_chunk=64)


def test_activations_of_a_synthetic_model_stay_of_order_one(small) -> None:
    points = [point for point in small.taps.points if point.endswith(("norm", "attn.q", "attn.kv", "attn.out", "ffn.out", "hc_ffn.X"))]
    sizes: dict[str, float] = {}

    def take(point: str, value: torch.Tensor) -> None:
        sizes[point] = float(value.float().square().mean().sqrt())

    tokens = torch.randint(0, small.config.vocab_size, (1, 64), generator=torch.Generator().manual_seed(5))
    with small.taps.observe(points, take):
        logits = small.prefill(tokens, small.new_state())
    assert set(sizes) == set(points)
    assert all(0.1 < size < 10 for size in sizes.values()), sizes
    assert 0.3 < float(logits.std()) < 3


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_synthetic_weights_have_the_published_shapes_and_no_nan(name) -> None:
    config = preset(name, (4, 128), **million.SMALL)
    weights = synthetic_weights(config, torch.device("cpu"), seed=2)
    for layer in range(2):
        held, specs = weights.layers[layer], expected_tensors(config, [layer])
        shapes = {name.removeprefix(f"layers.{layer}."): spec.shape for name, spec in specs.items()}
        assert tuple(held.attn.wq_b.weight.shape) == shapes["attn.wq_b.weight"]
        assert tuple(held.attn.wo_a.scale.shape) == shapes["attn.wo_a.scale"]
        assert tuple(held.attn.wo_b.weight.shape) == shapes["attn.wo_b.weight"]
        assert tuple(held.experts.w2.shape[1:]) == shapes["ffn.experts.0.w2.weight"]
        assert tuple(held.experts.s1.shape[1:]) == shapes["ffn.experts.0.w1.scale"]
        assert tuple(held.hc_attn.fn.shape) == shapes["hc_attn_fn"]
        for matrix in (held.attn.wq_a, held.attn.wq_b, held.attn.wkv, held.attn.wo_a, held.attn.wo_b, held.shared_experts.w2):
            assert bool(matrix.weight.view(torch.float8_e4m3fn).float().isfinite().all())
            assert int(matrix.scale.max()) < 140
    assert weights.layers[0].gate.tid2eid is not None
    assert weights.layers[1].gate.bias is not None


def test_the_real_presets_are_named_by_their_layers() -> None:
    assert preset("flash").num_hidden_layers == 43
    assert preset("pro").num_hidden_layers == 61
    four = preset("pro", (128, 4, 0, 4))
    assert (four.num_hidden_layers, four.hidden_size, four.n_routed_experts, four.index_topk) == (4, 7168, 384, 1024)
    assert [four.kind(layer) for layer in range(4)] == ["hca", "csa", "window", "csa"]


# ---- witnesses ----


def seen_after_prefill(model: Transformer, columns: list[int]) -> tuple[State, Seen]:
    """The second chunk of a prompt, observed: column 0 is position 192."""
    state, ids = model.new_state(), torch.randint(0, model.config.vocab_size, (1, 256), generator=torch.Generator().manual_seed(7))
    model.prefill(ids[:, :192], state)
    seen = Seen(model, model.layers, columns, visible=True)
    with model.taps.observe(seen.points, seen.take):
        model.prefill(ids[:, 192:], state)
    return state, seen


def test_witnesses_agree_with_a_right_model(small) -> None:
    state, seen = seen_after_prefill(small, [0, 31, 63])
    for layer in small.layers:
        assert seen.attention_error(state.cache, small.weights.layers[layer].attn.attn_sink, layer, 192) <= million.ATTENTION_LIMIT
        assert seen.visible_counts(layer) == seen.due_counts(layer, 192)
    found = seen.recall(state.cache, 1, 192)
    assert (found.queries, found.discarding, found.lost) == (3, 3, 0.0)


def test_witnesses_see_another_entry_a_lost_token_and_a_wrong_choice(small) -> None:
    state, seen = seen_after_prefill(small, [0, 31, 63])
    sink = small.weights.layers[2].attn.attn_sink
    entries = state.cache.layers[2].entries
    assert entries is not None
    entries[0, 0, :64] ^= 0x80  # signs of one entry that every query reads
    assert seen.attention_error(state.cache, sink, 2, 192) > million.ATTENTION_LIMIT
    state.cache.layers[0].ring_position[0, 200 % state.cache.layers[0].ring.shape[1]] = 7
    assert not seen.attention_error(state.cache, small.weights.layers[0].attn.attn_sink, 0, 192) <= million.ATTENTION_LIMIT
    selected = seen.get(1, "selected")
    chosen = set(selected[2].tolist())
    selected[2, 0] = next(entry for entry in range(64) if entry not in chosen)
    assert seen.recall(state.cache, 1, 192).lost > million.RECALL_LIMIT
    seen.get(0, "visible")[1, 0] = -1
    assert seen.visible_counts(0) != seen.due_counts(0, 192)


# ---- a million tokens, and what they weigh ----


def million_in_small(tmp_path, *argv: str) -> dict[str, Any]:
    size = ["--tokens", "320", "--chunk", "64", "--call", "128", "--steps", "8", "--ratios", "0,4,128"]
    try:
        million.main(["--device", "cpu", "--out", str(tmp_path), *size, *argv])
        code = 0
    except SystemExit as error:
        code = int(str(error))
    content: dict[str, Any] = json.loads((tmp_path / "million.json").read_text())
    return content | {"code": code}


@pytest.mark.parametrize("argv", [[], ["--skip", "128"]])
def test_a_run_goes_to_the_limit_and_is_refused_one_token_more(tmp_path, capsys, argv) -> None:
    content = million_in_small(tmp_path, *argv)
    assert content["code"] == 0, [row for row in content["rows"] if row["state"] != "ok"]
    assert {row["state"] for row in content["rows"]} == {"ok"}
    out = capsys.readouterr().out
    assert out.count("raise --max-context to at least 321") == 3
    assert ("were NOT computed" in out) == bool(argv)
    assert content["facts"]["eager_allocations"] == content["facts"]["captured_allocations"] == 0
    rates = {row["kernel"]: (row["value"], row["of"]) for row in content["rows"] if row["value"] is not None}
    assert rates["prefill, all calls"][1] == "tokens/s"
    assert {rates[f"{how} steps"][1] for how in ("eager", "captured")} == {"ms a step"}
    assert all(value > 0 for value, _ in rates.values())


def test_a_run_that_is_cut_off_tells_how_far_it_came(tmp_path, capsys) -> None:
    content = million_in_small(tmp_path, "--seconds", "0")
    assert content["code"] == 1
    assert content["facts"]["reached"] == 192
    wrong = [row["kernel"] for row in content["rows"] if row["state"] == "wrong"]
    assert wrong == ["prefill, tokens not taken", "tokens short of the limit"]
    assert "cut off by --seconds" in capsys.readouterr().out


def test_steps_end_when_their_time_is_over(tmp_path) -> None:
    content = million_in_small(tmp_path, "--step-seconds", "0", "--steps", "24", "--tokens", "256")
    assert content["code"] == 1
    short = {row["kernel"]: row["error"] for row in content["rows"] if row["kernel"].endswith("not taken in --step-seconds")}
    assert short == {"eager steps, not taken in --step-seconds": 10, "captured steps, not taken in --step-seconds": 10}


def test_the_real_models_are_weighed_without_memory(tmp_path, capsys) -> None:
    memory.main(["--device", "cpu", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "memory.json").read_text())
    assert {row["state"] for row in content["rows"]} == {"ok"}
    pro, flash = content["facts"]["pro, chunk 512"], content["facts"]["flash, chunk 512"]
    assert pro["entries_and_keys"] == 30 * (1 << 18) * (584 + 68) + 31 * (1 << 13) * 584
    assert flash["entries_and_keys"] == 21 * (1 << 18) * (584 + 68) + 20 * (1 << 13) * 584
    for one in (pro, flash):
        assert one["cache"]["tensors"] == pytest.approx(one["formula"], rel=0.01)
        assert one["backup"]["tensors"] < 0.02 * one["cache"]["tensors"]
        assert one["state"]["tensors"] == pytest.approx(sum(one[part]["tensors"] for part in ("cache", "backup", "workspace")), rel=0.01)
    assert "exact bytes of tensors" in capsys.readouterr().out
