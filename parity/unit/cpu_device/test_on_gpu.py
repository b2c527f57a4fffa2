"""The CPU device against a real GPU, same inputs.   pytest parity/unit/cpu_device/test_on_gpu.py -s   (after any change of mma.cuh)

The exact model of the tensor core was found on an H200 (sm_90a); on another chip the tests that need it are not run.
Flags are those of production/cubins.py: nothing is contracted, denormals are kept.
"""

from __future__ import annotations

import functools

import pytest
import torch

from parity.unit.cpu_device import kernel_cases
from production.cpu_device import Module
from production.launch import cuda_missing, open_device

REASON = cuda_missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(REASON is not None, reason=f"not run: {REASON}")]

POSITIONS = [4000, 500, 127, 128, 3, 0]
# No mma, or tensor_core: the same bits. What is left in attention comes from __expf.
SAME_BITS = [kernel_cases.rms_norm(), kernel_cases.rms_norm(7, 4096), kernel_cases.index_score(),
             kernel_cases.index_score(16, 200, lowest_scale=0), kernel_cases.gemm(64, 512, 512), kernel_cases.gemm(13, 64, 2048)]  # fmt: skip
NEAR = [
    *(kernel_cases.attention(POSITIONS, splits=splits, compressed=300) for splits in (1, 2, 8)),
    kernel_cases.attention(POSITIONS, heads=32, window=16, topk=7, compressed=9, splits=2),
    kernel_cases.attention(POSITIONS, splits=4, compressed=300, whole_tiles=True),
    kernel_cases.sinkhorn(1024),
]


@pytest.fixture(scope="module")
def gpu():
    return open_device("cuda", kernels_dir=kernel_cases.KERNELS)


@functools.cache
def module(source):
    return Module(kernel_cases.KERNELS / source)


def on_cpu(case, **how):
    return kernel_cases.run(case, lambda name, *rest: module(case.source).kernel(name)(*rest, **how))


def on_gpu(gpu, case):
    source = case.source.removesuffix(".cu")
    inputs = {name: tensor.cuda() for name, tensor in case.inputs.items()}
    outputs = kernel_cases.run(case, lambda name, *rest: gpu.launch(source, name, *rest), inputs, "cuda")
    gpu.synchronize()
    return {name: tensor.cpu() for name, tensor in outputs.items()}


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def hopper(gpu):
    if gpu.arch != "sm_90a":
        pytest.skip(f"not run: the exact model is of sm_90a, this is {gpu.arch}")


@pytest.mark.parametrize("case", SAME_BITS, ids=lambda case: case.name)
def test_same_bits(gpu, case):
    hopper(gpu)
    actual, expected = on_gpu(gpu, case), on_cpu(case, mma_sum="tensor_core")
    for name in case.results:
        assert same_bits(actual[name], expected[name]), name


@pytest.mark.parametrize("case", NEAR, ids=lambda case: case.name)
def test_near_and_repeatable(gpu, case):
    actual, again, expected = on_gpu(gpu, case), on_gpu(gpu, case), on_cpu(case, mma_sum="tensor_core")
    for name in case.results:
        error = kernel_cases.relative_error(actual[name], expected[name])
        print(f"{case.name} {name}: {error:.2e} of the maximum")
        assert error <= case.tolerance, name
        assert same_bits(actual[name], again[name]), name


@pytest.mark.parametrize("kind", kernel_cases.MMA_KINDS)
def test_one_mma(gpu, kind):
    hopper(gpu)
    case = kernel_cases.mma_probe(400, kind)
    assert same_bits(on_gpu(gpu, case)["d"], on_cpu(case, mma_sum="tensor_core")["d"])


def test_ldmatrix(gpu):
    case = kernel_cases.ldmatrix_probe()
    assert same_bits(on_gpu(gpu, case)["registers"], on_cpu(case)["registers"])


@pytest.mark.parametrize("case", [kernel_cases.integer_mma_probe(400), kernel_cases.integer_score_probe()], ids=lambda case: case.name)
def test_integers(gpu, case):
    """On any chip: nothing is rounded."""
    actual, expected = on_gpu(gpu, case), on_cpu(case)
    for name in case.results:
        assert same_bits(actual[name], expected[name]), name


def test_exact_scalar_operations(gpu):
    case = kernel_cases.scalar_probe()
    actual, expected = on_gpu(gpu, case)["out"], on_cpu(case)["out"]
    differ = (actual.view(torch.int32) != expected.view(torch.int32)).float().mean(1)
    for name, share in zip(kernel_cases.SCALAR_ROWS, differ.tolist(), strict=True):
        print(f"{name}: {100 * share:.1f} % differ")
    assert not differ[: kernel_cases.EXACT_SCALAR_ROWS].any()


def test_helpers_of_common_cuh(gpu):
    g = torch.Generator().manual_seed(5)
    x = torch.cat([torch.randn(4096, generator=g) * scale for scale in (1e-3, 1.0, 30.0, 300.0)])
    x = torch.cat(
        [x, torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 448.0, 464.0, 2.0**-10, 3 * 2.0**-10])]
    )
    count, grid = len(x), ((len(x) + 127) // 128,)

    def outputs(device):
        def new(shape, dtype):
            return torch.zeros(shape, dtype=dtype, device=device)

        f32, u8 = torch.float32, torch.uint8
        return {"decode_codes": [new(256, f32), new(256, f32), new(16, f32)], "encode_values": [new(count, u8), new(count, u8)],
                "scales_of": [new(count, u8), new(count, u8), new(count, f32)], "reduce": [new((4, 96), f32)]}  # fmt: skip

    def launch_all(launch, device):
        out, y = outputs(device), x.to(device)
        launch("decode_codes", (1,), (256,), out["decode_codes"])
        launch("encode_values", grid, (128,), [y, *out["encode_values"], count])
        launch("scales_of", grid, (128,), [y.abs().clamp(max=3e38), *out["scales_of"], count])
        launch("reduce", (1,), (96,), [y[:96], *out["reduce"]])
        return out

    probe = module("common_probe.cu")
    expected = launch_all(lambda name, *rest: probe.kernel(name)(*rest), "cpu")
    actual = launch_all(lambda name, *rest: gpu.launch("common_probe", name, *rest), "cuda")
    for name, tensors in expected.items():
        for want, got in zip(tensors, actual[name], strict=True):
            assert same_bits(got.cpu(), want), name


def test_a_replayed_graph_follows_positions_and_lists_on_the_device(gpu):
    case = kernel_cases.attention([5, 60, 127], splits=2)
    tensors = {name: t.cuda() for name, t in case.inputs.items()} | kernel_cases.new_outputs(case, "cuda")

    def launch():
        for step in case.steps:
            args = [tensors[a] if isinstance(a, str) else a for a in step.args]
            gpu.launch("sparse_attention", step.kernel, step.grid, step.block, args, step.shared_bytes)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    for positions in ([5, 60, 127], [128, 500, 4000], [0, 1, 2]):
        tensors["pos"].copy_(torch.tensor(positions, dtype=torch.int32))
        tensors["idx"].random_(-1, 200)
        for name in case.output_shapes:
            tensors[name].fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        replayed = tensors["out"].clone()
        launch()
        torch.cuda.synchronize()
        assert same_bits(replayed.cpu(), tensors["out"].cpu())
        expected = case.reference({n: tensors[n].cpu() for n in case.inputs}, torch.float64)["out"]
        assert kernel_cases.relative_error(replayed.cpu(), expected) <= case.tolerance
