"""Ceilings of a card and L2-cold times, on the card only.

    timer = Timer(device); timer.ceilings(); timer.cold(run)

Cold: a CUDA graph of n times {read 256 MB, run()} less the same graph without run(), over n: the median of several replays,
done twice; the spread is what the two differ by. Tests: parity/unit/test_bench.py; the numbers need a GPU.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from production.launch import Device, open_device

KERNELS = Path(__file__).resolve().parent / "kernels"
FLUSH_BYTES = 256 << 20  # four times an H200's L2
STREAM_BYTES = 2 << 30
MATRIX = 8192
MOST_CALLS = 50  # of run() in a graph
ABOUT_MS = 6.0  # of a graph


@dataclass(frozen=True)
class Ceilings:
    """What the card does at most, measured: copy and read GB/s (copy counts bytes read and written), bf16 and fp8 TFLOP/s."""

    copy_gbs: float
    read_gbs: float
    bf16_tflops: float
    fp8_tflops: float

    def line(self) -> str:
        return (
            f"copy {self.copy_gbs / 1e3:.2f} TB/s (read + write), read {self.read_gbs / 1e3:.2f} TB/s, "
            f"BF16 {self.bf16_tflops:.0f} TFLOP/s, FP8 {self.fp8_tflops:.0f} TFLOP/s"
        )

    def floor_us(self, size_bytes: float, flops: float, unit: str) -> float:
        """max(bytes at the copy rate, flops at the MMA rate of `unit`)."""
        rate = {"bf16": self.bf16_tflops, "fp8": self.fp8_tflops}[unit]
        return max(size_bytes / self.copy_gbs * 1e-3, flops / rate * 1e-6)


@dataclass(frozen=True)
class Timing:
    """us of one call; spread: what two measurements differ by, of their mean; calls in a graph."""

    us: float
    spread: float
    calls: int


class Timer:
    """Times callables on a CUDA device. They allocate nothing and can be captured in a graph."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.reader = open_device("cuda", kernels_dir=KERNELS)
        where = device.torch_device
        self.blocks = 4 * torch.cuda.get_device_properties(where).multi_processor_count
        self.filler = torch.randint(0, 256, (FLUSH_BYTES,), dtype=torch.uint8, device=where)
        self.sink = torch.zeros(self.blocks, dtype=torch.int32, device=where)
        self.flush()
        self.device.synchronize()

    def read(self, data: torch.Tensor) -> None:
        self.reader.launch("stream", "read_all", (self.blocks,), (512,), (data, self.sink, data.numel()))

    def flush(self) -> None:
        """Reads 256 MB: nothing of what was there before is left in the L2."""
        self.read(self.filler)

    def ceilings(self) -> Ceilings:
        """Copy, read and matrix products of random data; takes about a second and 5 GB, which are given back."""
        copy, read = self._streams()
        bf16, fp8 = self._products()
        torch.cuda.empty_cache()
        return Ceilings(copy, read, bf16, fp8)

    def _streams(self) -> tuple[float, float]:
        one = torch.randint(0, 256, (STREAM_BYTES,), dtype=torch.uint8, device=self.device.torch_device)
        words = one.view(torch.int32)
        other = torch.empty_like(words)
        # A kernel, not two.copy_(one): in a graph that is a copy node, which reached 2.77 TB/s where kernels reach 4.2.
        copy = self.warm(lambda: torch.bitwise_not(words, out=other)).us
        return 2e-3 * STREAM_BYTES / copy, 1e-3 * STREAM_BYTES / self.warm(lambda: self.read(one)).us

    def _products(self) -> tuple[float, float]:
        where = self.device.torch_device
        a, b = (torch.randn(MATRIX, MATRIX, dtype=torch.bfloat16, device=where) for _ in range(2))
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
        out, scale = torch.empty_like(a), torch.ones((), dtype=torch.float32, device=where)
        ways: tuple[Callable[[], object], ...] = (
            lambda: torch.matmul(a, b, out=out),
            lambda: torch._scaled_mm(a8, b8, scale, scale, out_dtype=torch.bfloat16, use_fast_accum=True, out=out),
        )
        rates = [float("nan"), float("nan")]
        for at, way in enumerate(ways):
            try:
                rates[at] = 2e-6 * MATRIX**3 / self.warm(way).us
            except Exception as error:  # a ceiling that cannot be measured costs its floors, not the run
                print(f"ceiling not measured: {type(error).__name__}: {error}", flush=True)
        return rates[0], rates[1]

    def cold(self, run: Callable[[], object], replays: int = 7) -> Timing:
        """Time of a call that finds nothing of its data in the L2."""

        def both() -> None:
            self.flush()
            run()

        calls = self._calls(both)
        whole, empty = self._graph(both, calls), self._graph(self.flush, calls)
        return self._twice(lambda: 1e3 * (self._median_ms(whole, replays) - self._median_ms(empty, replays)) / calls, calls)

    def warm(self, run: Callable[[], object], replays: int = 7) -> Timing:
        """Time of a call right after the same call."""
        calls = self._calls(run)
        graph = self._graph(run, calls)
        return self._twice(lambda: 1e3 * self._median_ms(graph, replays) / calls, calls)

    def _calls(self, run: Callable[[], object]) -> int:
        """Calls that make a graph of ABOUT_MS; builds and loads everything on the way."""
        stream = torch.cuda.Stream(self.device.torch_device)
        stream.wait_stream(torch.cuda.current_stream(self.device.torch_device))
        with torch.cuda.stream(stream):
            run()
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            run()
            ended.record()
        torch.cuda.current_stream(self.device.torch_device).wait_stream(stream)
        self.device.synchronize()
        return max(2, min(MOST_CALLS, int(ABOUT_MS / max(began.elapsed_time(ended), 1e-3))))

    def _graph(self, run: Callable[[], object], calls: int) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        graph.replay()
        self.device.synchronize()
        return graph

    def _median_ms(self, graph: torch.cuda.CUDAGraph, replays: int) -> float:
        times: list[float] = []
        for _ in range(replays):
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            graph.replay()
            ended.record()
            ended.synchronize()
            times.append(began.elapsed_time(ended))
        return statistics.median(times)

    @staticmethod
    def _twice(measure: Callable[[], float], calls: int) -> Timing:
        one, two = measure(), measure()
        mean = (one + two) / 2
        return Timing(mean, abs(one - two) / mean if mean > 0 else float("inf"), calls)
