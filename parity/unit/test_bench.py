"""Benchmarks without a card: checks, tables and files of the harness; the synthetic model; a million tokens in small."""

from __future__ import annotations

import json

import pytest
import torch

from bench import harness, results
from bench.timing import KERNELS, Ceilings
from production import ops
from production.launch import open_device


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


@pytest.mark.parametrize("size", [16, 512 * 16, 512 * 16 * 9 + 32])
def test_the_reader_takes_every_word_once(size) -> None:
    device = open_device("cpu", checked=True, kernels_dir=KERNELS)
    data, sink = torch.randint(0, 256, (size,), dtype=torch.uint8), torch.full((2,), -1, dtype=torch.int32)
    device.launch("stream", "read_all", (2,), (512,), (data, sink, size))
    words, total = data.view(torch.int32).tolist(), 0
    for word in words:
        total ^= word
    assert int(sink[0]) ^ int(sink[1]) == total
