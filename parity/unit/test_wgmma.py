"""Hopper's instructions as they are emulated, and what a wrong prefill attention kernel does to its gates.

The instructions themselves are asked of a card by bench/attention_prefill.py, with the same kernels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import attention_prefill as bench
from bench.harness import Bench
from parity import test_operations_wgmma as checks
from probes.core.inputs import Hostile
from production import cpu_device, cubins
from production.launch import KernelError, open_device
from production.ops.sparse_attn import WGMMA_SHARED

Check = tuple[Callable[..., None], dict[str, Any]]
KERNELS = Path(bench.__file__).resolve().parent / "kernels"
EDGES: Check = (checks.test_sparse_attn_wgmma_at_the_edges, {"source": "CSA list", "h": 70, "variant": "wgmma", "splits": 1})
SPLIT: Check = (checks.test_sparse_attn_wgmma_at_the_edges, {"source": "CSA list", "h": 70, "variant": "wgmma", "splits": 2})
MOVES: Check = (checks.test_sparse_attn_wgmma_follows_a_maximum_that_moves, {"variant": "wgmma", "splits": 1})
CODES: Check = (checks.test_sparse_attn_wgmma_reads_every_code_at_every_scale, {})
OPPOSITE: Check = (checks.test_sparse_attn_wgmma_keeps_what_bf16_would_round_off_p, {})


def test_instructions_are_emulated_as_torch_computes_them(tmp_path):
    run = Bench("attention_prefill", ["--device", "cpu", "--out", str(tmp_path)])
    bench.instructions(run, open_device("cpu", kernels_dir=KERNELS, emulate="sm_90a"))
    assert [row.state for row in run.rows] == ["ok"] * 6, run.rows


def test_a_descriptor_with_leading_and_stride_exchanged_gives_another_product():
    device = open_device("cpu", kernels_dir=KERNELS, emulate="sm_90a")
    a, b, d = torch.randn(64, 64).bfloat16(), torch.randn(64, 256).bfloat16(), torch.empty(64, 256)
    for leading, stride, same in ((8192, 1024, True), (1024, 8192, False)):
        device.launch("hopper_check", "check_mn_major", (1,), (128,), (a, b, d, leading, stride, 0), 6 * 8192)
        assert torch.allclose(d, a.float() @ b.float(), atol=1e-3) == same


def test_a_wait_for_a_phase_that_never_ends_is_an_error(tmp_path):
    (tmp_path / "stuck.cu").write_text(
        '#include "hopper.cuh"\nextern __shared__ __align__(1024) unsigned char smem[];\nextern "C" __global__ void stuck(float *x) {\n'
        "  Mbarrier *barrier = reinterpret_cast<Mbarrier *>(smem);\n  mbarrier_init(barrier, 2);\n  mbarrier_arrive(barrier);\n  mbarrier_wait(barrier, 0);\n  x[0] = 1.f;\n}\n"
    )
    device = open_device("cpu", kernels_dir=tmp_path, emulate="sm_90a")
    with pytest.raises(KernelError, match=r"waits for ever: phase of parity 0 .* in phase 0 and lacks 1 of 2 arrivals"):
        device.launch("stuck", "stuck", (1,), (1,), (torch.zeros(1),), 1024)


def test_the_wrapper_asks_for_the_shared_memory_that_the_kernel_lays_out():
    lines = [line for line in (cpu_device.KERNELS / "sparse_attn_wgmma.cu").read_text().splitlines() if line.startswith("constexpr int") and "//" not in line.split("AT_")[0]]
    names: dict[str, Any] = {"SWIZZLE_ROW_BYTES": 128}
    for line in lines:
        for statement in line.split("//")[0].removeprefix("constexpr int ").rstrip("; ").split(", "):
            name, _, value = statement.partition(" = ")
            try:
                names[name] = eval(value.replace("/", "//"), {}, names)
            except NameError:
                continue
    assert names["SHARED_BYTES"] == WGMMA_SHARED <= 227 * 1024


@pytest.mark.skipif(cubins.nvrtc_missing() is not None, reason="no NVRTC here")
def test_products_of_the_attention_kernel_run_without_waiting_for_each_other():
    """ptxas says C7510 to C7519 where it serialises wgmma; on NVRTC it says so in the log that the build keeps from us, so ask again."""
    source = cpu_device.KERNELS / "sparse_attn_wgmma.cu"
    _, log = cubins.nvrtc().compile(source.name, source.read_text(), ["-arch=sm_90a", *cubins.FLAGS, f"-I{source.parent}", *(f"-I{p}" for p in cpu_device.cuda_include_paths())])
    assert "registers" in log
    assert "C75" not in log, log


MUTATIONS: dict[str, tuple[str, str, Check]] = {
    "sinks of the first block for all": ("call.sink[item.head0 + head]", "call.sink[head]", EDGES),
    "places without a key take weight": ("if (seen != ~0ull) {", "if (seen == 0) {", EDGES),
    "p is handed over as if the maximum had not moved": ("hand_over<PARTS, false>(p, other", "hand_over<PARTS, true>(p, other", MOVES),
    "the second part of p is lost": ("low - bf16_low(p[0][k][pair])", "0.f * bf16_low(p[0][k][pair])", OPPOSITE),
    "a split leaves the exponentials of even tiles only": ("sums[head] + sums[HEADS + head]);", "sums[head]);", SPLIT),
    "a split has the keys of the first": ("start = item.split * splits.keys;", "start = 0;", SPLIT),
    "any scale goes the quick way": ("slow & 0x80808080u", "slow & 0u", CODES),
    "half a stage is given back before its sums": ("        mbarrier_wait(barrier(P_READY + 1), uses & 1);\n", "        mbarrier_arrive_warp(barrier(FREE));\n        mbarrier_wait(barrier(P_READY + 1), uses & 1);\n", EDGES),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("find", "replace", "check"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_kernel_turns_its_gate_red(find: str, replace: str, check: Check, tmp_path: Path, judge: Callable[..., None]) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(cpu_device.KERNELS, kernels)
    path = kernels / "sparse_attn_wgmma.cu"
    text = path.read_text()
    assert text.count(find) == 1, "a mutation must find its place exactly once"
    path.write_text(text.replace(find, replace))
    function, arguments = check
    with pytest.raises((AssertionError, pytest.fail.Exception, KernelError)):
        function(**arguments, device=open_device("cpu", kernels_dir=kernels, emulate="sm_90a"), hostile=Hostile(), judge=judge)
