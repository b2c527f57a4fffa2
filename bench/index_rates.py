"""Cycles of what index scores are made of, on one card: products, sums over heads, decoding; and the clock they ran at.

    python -m bench.index_rates

A line each: cycles of a multiprocessor for one product of 64 keys and 64 heads (of 128 dims), for the sums of one, for decoding 64 keys
(16 a warp), with one to three warpgroups. At the full rate of the card a product is 128 cycles; sums are 64 instructions a warp, so at
best 64; decoding is some 70 a warp for the pipe of integers, which takes one every two cycles, so 140.
"""

from __future__ import annotations

import torch

from bench.timing import KERNELS
from production.launch import open_device

ROUNDS, SHARED = 4096, 32 * 1024
EXPECTED = {"products_64": 128, "products_128": 128, "sums_64": 64, "both_64": 135, "decode_16": 140}  # cycles with three warpgroups


def main() -> None:
    device = open_device("cuda", kernels_dir=KERNELS)
    where = device.torch_device
    processors = torch.cuda.get_device_properties(where).multi_processor_count
    data = torch.randint(-(2**31), 2**31 - 1, (8192,), dtype=torch.int32, device=where)
    for kernel, expected in EXPECTED.items():
        for groups in (1, 2) if kernel == "products_128" else (1, 2, 3):
            cycles = torch.zeros(processors, dtype=torch.int64, device=where)
            sink = torch.zeros(processors, 128 * groups, dtype=torch.int32, device=where)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(3):
                begin.record()
                device.launch("index_rates", kernel, (processors,), (128 * groups,), (data, cycles, sink, ROUNDS), SHARED)
                end.record()
            torch.cuda.synchronize()
            taken = float(cycles.double().mean())
            units = 2 * ROUNDS * groups * (2 if kernel == "products_128" else 1)
            print(f"{kernel:13} {groups} warpgroups  {taken / units:7.1f} cycles (expected {expected}), {taken / begin.elapsed_time(end) / 1e3:.0f} MHz")


if __name__ == "__main__":
    main()
