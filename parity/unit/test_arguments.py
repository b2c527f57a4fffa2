"""What wrappers refuse before anything is launched: outputs that share memory, scratch with gaps, numbers that no kernel is built for.

`apart` decides by addresses; that every wrapper tells it what its kernels write is checked on what really is launched.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import production
from parity import test_operations_attention as checks
from parity.unit.test_dense_kernels import every_kernel
from probes.core.inputs import Hostile
from production import ops
from production.launch import CpuDevice, KernelError, Launch, open_device
from production.ops import arguments
from production.signatures import POINTER

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
WRAPPERS: list[ModuleType] = [importlib.import_module(f"production.ops.{name}") for name in ("at_once", "dense", "hyper_connection", "indexer", "sparse_attn", "storage", "topk")]
TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"


@pytest.fixture(scope="module")
def device() -> CpuDevice:
    made = open_device("cpu")
    assert isinstance(made, CpuDevice)
    return made


@pytest.fixture(autouse=True)
def nothing_runs(request: pytest.FixtureRequest) -> Iterator[None]:
    """What is refused is refused before anything is launched."""
    if "device" not in request.fixturenames:
        yield
        return
    device = request.getfixturevalue("device")
    before = list(device.ran)
    yield
    assert device.ran == before, "something was launched"


# ---- memory ----


def numbers(count: int) -> Tensor:
    return torch.zeros(count)


def shared_cases() -> dict[str, tuple[Tensor, Tensor]]:
    m = numbers(256)
    rows = m.view(16, 16)
    return {
        "the same": (m, m), "one element": (m[:100], m[99:]), "inside": (m, m[10:20]), "around": (m[10:20], m), "from before": (m[50:], m[:51]),
        "an input with gaps over an output": (m[60:70], m[::64]), "an output with gaps over an input": (rows[:, :4], m[64:66]),
        "rows whose columns meet": (rows[:, :9], rows[:, 8:]), "rows a row later": (rows[:8, :4], rows[1:9, 3:7]),
        "rows and what reaches into the next gap and row": (rows[:, :4], m[10:17]), "another period": (rows[:, :4], m.view(32, 8)[:, 2:6]),
        "another type": (m, m.view(BF16)[300:310]), "rows around a border": (m[12:].view(-1)[:240].view(15, 16)[:, :6], rows[:15, :3]),
    }  # fmt: skip


SHARED = shared_cases()


@pytest.mark.parametrize("name", SHARED)
def test_an_output_that_shares_memory_is_refused(name):
    out, given = SHARED[name]
    for outputs, inputs in (({"out": out}, {"x": given}), ({"out": out, "x": given}, {}), ({"x": given, "out": out}, {"w": numbers(3)})):
        with pytest.raises(KernelError, match=r"op: (out|x) \[.*\] and (out|x) \[.*\] share memory, .* of its own"):
            arguments.apart("op", outputs, inputs)


APART = {
    "neighbours": (numbers(8)[:4], numbers(8)[4:]), "of one memory": (SHARED["the same"][0][:100], SHARED["the same"][0][100:]),
    "columns of one memory": (numbers(64).view(8, 8)[:, :3], None), "an empty one inside": (numbers(8), numbers(8)[4:4]), "one element": (numbers(1), numbers(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_what_is_apart_is_taken(name):
    out, given = APART[name]
    if given is None:
        memory = numbers(64).view(8, 8)
        out, given = memory[:, :3], memory[:, 3:]
    arguments.apart("op", {"out": out, "none": None}, {"x": given, "nothing": None})
    arguments.apart("op", {"out": out, "x": given}, {})
    arguments.apart("op", {"x": given}, {"out": out})


def test_a_row_in_the_gaps_of_others_is_apart():
    memory = numbers(160).view(10, 16)
    arguments.apart("op", {"out": memory[:, :8]}, {"x": memory[3, 8:], "w": memory[:, 8:12]})
    arguments.apart("op", {"out": memory[4, 8:], "other": memory[:, :8].view(10, 2, 4)}, {})


def test_inputs_may_share_memory_with_each_other():
    x = numbers(16)
    arguments.apart("op", {"out": numbers(16)}, {"x": x, "again": x, "part": x[3:], "spread": x[:1].expand(9)})


@pytest.mark.parametrize(
    "out",
    [numbers(4).expand(3, 4), numbers(3)[:, None].expand(3, 4), numbers(40).as_strided((4, 8), (7, 1)), numbers(40).as_strided((3, 3), (2, 2))],
    ids=["rows", "columns", "rows a step too short", "both strides alike"],
)
def test_an_output_whose_elements_share_memory_is_refused(out):
    with pytest.raises(KernelError, match=r"op: elements of out \[.*\] with strides \[.*\] share memory"):
        arguments.apart("op", {"out": out}, {})
    arguments.apart("op", {"y": numbers(3)}, {"out": out})


def test_an_output_with_gaps_or_turned_is_taken():
    for out in (numbers(64).view(8, 8)[:, :5], numbers(64).view(8, 8).t(), numbers(60).view(3, 4, 5).transpose(0, 1), numbers(8)[None].expand(1, 8)):
        arguments.apart("op", {"out": out}, {"x": numbers(8)})


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(str(func))
        return func(*args, **(kwargs or {}))


def test_the_check_runs_no_operation_of_torch():
    tensors, rows = [numbers(64) for _ in range(6)], numbers(64).view(8, 8)
    with Seen() as seen:
        arguments.apart("op", {"a": tensors[0], "b": tensors[1]}, {"c": tensors[2], "d": tensors[3]})
        arguments.apart("op", {"a": tensors[4].view(8, 8)}, {"c": tensors[5]})
    assert seen.operations == ["aten.view.default"]
    left, right = rows[:, :4], rows[:, 4:]
    with Seen() as seen:
        arguments.apart("op", {"a": left}, {"b": right})
    assert seen.operations == []


# ---- every wrapper says what its kernels write ----


class Declared:
    """What the last wrapper called said of its tensors; a launch that writes or reads anything else fails."""

    def __init__(self) -> None:
        self.operations: set[str] = set()
        self.sources: set[str] = set()
        self.written: list[Tensor] = []
        self.read: list[Tensor] = []

    def apart(self, operation: str, outputs: dict[str, Tensor | None], inputs: dict[str, Tensor | None]) -> None:
        self.operations.add(operation)
        self.written, self.read = ([t for t in given.values() if t is not None] for given in (outputs, inputs))
        arguments.apart(operation, outputs, inputs)

    def before(self, launch: Launch) -> None:
        self.sources.add(launch.source)
        for parameter, tensor in zip(launch.parameters, launch.args, strict=True):
            if isinstance(tensor, Tensor) and tensor.numel():
                among = self.written if parameter.kind == POINTER else [*self.written, *self.read]
                assert any(t.data_ptr() == tensor.data_ptr() and t.numel() >= tensor.numel() for t in among), f"{launch.kernel}: {parameter.name} is not declared"

    def after(self, launch: Launch) -> None:
        pass


@contextmanager
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Declared]:
    seen = Declared()
    for module in WRAPPERS:
        monkeypatch.setattr(module, "_apart", seen.apart)
    yield seen


def wrappers() -> set[str]:
    """Names of all functions that launch: public, with the device first."""
    found = {name: f for module in WRAPPERS for name, f in vars(module).items() if inspect.isfunction(f) and f.__module__ == module.__name__ and not name.startswith("_")}
    return {name for name, f in found.items() if next(iter(inspect.signature(f).parameters), "") == "dev"}


def test_every_pointer_that_a_kernel_writes_is_an_output_of_its_wrapper(monkeypatch):
    """All wrappers, in the model's phases and plans and in variants of their own; all kernel files that this device runs."""
    with declared(monkeypatch) as seen:
        tokens = torch.randint(0, 512, (2, 140), generator=torch.Generator().manual_seed(3))
        for plan in ("portable", "fast"):
            model = production.load(TINY, max_context=300, layers=range(4), prefill_chunk=80, variants=plan)
            state = model.new_state(2)
            with model.device.watched(seen):
                model.prefill(tokens, state, [140, 9])
                model.decode(tokens[:, 0].contiguous(), state)
                model.run_layer(2, torch.randn(2, 1, 4, model.config.hidden_size), tokens[:, :1], state, decode=True)
        device = open_device("cpu")
        with device.watched(seen):
            every_kernel(device)
            only_run: dict[str, Any] = {"device": device, "hostile": Hostile(), "judge": lambda *args, **kwargs: None}
            for way in ("naive", "7 splits", "mma, 7 splits", "flash, 7 splits", "flash, 7 splits, one launch"):
                checks.test_sparse_attn_skips_holes_in_the_list(way=way, **only_run)
            for way in ("split, one launch", "split", "mma, 4 warps"):
                checks.test_hc_pre_at_once_puts_a_half_back_mixes_and_norms(iters=3, hc_eps=0.03, norm_eps=0.5, way=way, **only_run)
                checks.test_hc_head_at_once(before=True, way=way, **only_run)
            checks.test_topk_of_rows_unlike_their_samples(parts=4, **only_run)
            checks.test_hadamard_e2m1_rounds_to_bf16_and_then_to_e2m1(di=32, variant="naive", **only_run)
            checks.test_indexer_score_looks_at_complete_entries_only(hi=5, di=32, variant="mma", **only_run)
    assert seen.operations == wrappers() - {"quant_rows"}, "quant_rows is act_quant"
    runnable = {path.stem for path in device.own_paths(None)}
    assert seen.sources == runnable


# ---- what wrappers refuse ----


def bf16(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=BF16)


def shifted(*shape: int, by: int) -> tuple[Tensor, Tensor]:
    """Two tensors of one memory, the second `by` elements later."""
    size = torch.Size(shape).numel()
    memory = bf16(size + by)
    return memory[:size].view(shape), memory[by:].view(shape)


def hc_pre(device: CpuDevice, **given: Any) -> None:
    T, n, D = 2, 4, 256
    tensors: dict[str, Any] = {
        "X": bf16(T, n, D), "fn": torch.zeros(24, n * D), "base": torch.zeros(24), "scale": torch.zeros(3), "pre": torch.zeros(T, n), "post": torch.zeros(T, n),
        "comb": torch.zeros(T, n, n), "a": bf16(T, D),
    }  # fmt: skip
    more: dict[str, Any] = {"sums": torch.zeros(ops.mix_scratch(T, D, "split")), "counters": torch.zeros(T, dtype=I32), "variant": "split"}
    tensors |= {name: value for name, value in given.items() if name in tensors}
    ops.hc_pre(device, **tensors, iters=3, hc_eps=1e-6, norm_eps=1e-6, **(more | {name: value for name, value in given.items() if name not in tensors}))


def experts(device: CpuDevice, scratch: Tensor | None = None, variant: str = "mma", slices: int | None = None, same: bool = False) -> None:
    T, k, E, D, width = 12, 2, 8, 64, 64
    w, s = torch.zeros(E, width, D // 2, dtype=U8), torch.zeros(E, width, D // 32, dtype=U8)
    gate, up = bf16(T, k, width), bf16(T, k, width)
    ops.experts_up(device, bf16(T, D), torch.zeros(T, k, dtype=I32), w, s, w, s, gate, gate if same else up, variant, scratch, slices)


EXPERTS_SCRATCH = ops.experts_scratch(12, 2, 8)


def lines_apart(count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers with gaps between them."""
    return torch.zeros(count, 4, dtype=dtype)[:, :1]


def rms_norm_shifted(device: CpuDevice) -> None:
    x, out = shifted(4, 64, by=16)
    ops.rms_norm(device, x, None, out, 1e-6)


def linear_into_itself(device: CpuDevice) -> None:
    x = bf16(8, 64)
    ops.linear_bf16(device, x, bf16(64, 64), x)


def linear_fp8_over_its_scale(device: CpuDevice) -> None:
    memory = torch.zeros(8 * 64 * 2, dtype=U8)
    ops.linear_fp8(device, bf16(8, 128), torch.zeros(64, 128, dtype=U8), memory[4:5].view(1, 1), memory.view(BF16).view(8, 64))


def rope_of_expanded_heads(device: CpuDevice) -> None:
    ops.rope(device, bf16(2, 1, 64).expand(2, 4, 64), torch.zeros(2, dtype=I32), torch.zeros(16))


def hc_post_shifted(device: CpuDevice, by: int = 8, variant: str = "block") -> None:
    X, out = shifted(2, 4, 256, by=by)
    ops.hc_post(device, bf16(2, 256), X, torch.zeros(2, 4), torch.zeros(2, 4, 4), out, variant=variant)


def streams_of_a_half_before(device: CpuDevice) -> None:
    X, streams = shifted(2, 4, 256, by=8)
    hc_pre(device, X=X, before=(bf16(2, 256), streams))


def a_in_streams(device: CpuDevice, variant: str) -> None:
    X = bf16(2, 4, 256)
    hc_pre(device, X=X, a=X.view(-1)[:512].view(2, 256), variant=variant)


def pre_is_post(device: CpuDevice) -> None:
    pre = torch.zeros(2, 4)
    hc_pre(device, pre=pre, post=pre)


def pre_in_sums(device: CpuDevice) -> None:
    sums = torch.zeros(ops.mix_scratch(2, 256, "split"))
    hc_pre(device, sums=sums, pre=sums[:8].view(2, 4))


def queries_for_an_output(device: CpuDevice) -> None:
    q = bf16(1, 4, 128)
    ring, ring_position = torch.zeros(1, 8, ops.entry_bytes(128, 64), dtype=U8), torch.zeros(1, 8, dtype=I32)
    zero = torch.zeros(1, dtype=I32)
    ops.sparse_attn(device, q, ring, ring_position, None, None, zero, zero.clone(), torch.zeros(4), q, 8, 0)


def a_cache_that_is_its_rows(device: CpuDevice) -> None:
    memory = torch.zeros(1, 4, ops.entry_bytes(128, 64), dtype=U8)
    ops.store_entries(device, memory.view(-1)[:512].view(BF16).view(1, 2, 128), torch.zeros(1, 2, dtype=I32), memory)


def chosen_in_scores(device: CpuDevice) -> None:
    score = torch.zeros(2, 64)
    ops.topk(device, score, torch.zeros(2, dtype=I32), score.view(I32)[:, :8], 4)


def experts_of_counters(device: CpuDevice) -> None:
    scratch = torch.zeros(EXPERTS_SCRATCH + 24, dtype=I32)
    w, s = torch.zeros(8, 64, 32, dtype=U8), torch.zeros(8, 64, 2, dtype=U8)
    ops.experts_up(device, bf16(12, 64), scratch[-30:-6].view(12, 2), w, s, w, s, bf16(12, 2, 64), bf16(12, 2, 64), "mma", scratch[:EXPERTS_SCRATCH])


REFUSED: dict[str, tuple[Callable[[CpuDevice], None], str]] = {
    "rms_norm: out is x, shifted": (rms_norm_shifted, r"rms_norm: out \[4, 64\] and x \[4, 64\] share memory, x begins -32 bytes after out"),
    "rms_norm: an output of one row": (lambda d: ops.rms_norm(d, bf16(4, 64), None, bf16(1, 64).expand(4, 64), 1e-6), r"elements of out \[4, 64\] with strides \[0, 1\] share memory"),
    "linear_bf16: out is x": (linear_into_itself, r"linear_bf16: out \[8, 64\] and x \[8, 64\] share memory"),
    "linear_fp8: a scale inside out": (linear_fp8_over_its_scale, r"linear_fp8: out \[8, 64\] and scale \[1, 1\] share memory"),
    "act_quant: in place": (lambda d: (lambda x: ops.act_quant(d, x, x))(bf16(4, 128)), r"act_quant: out .* and x .* share memory"),
    "rope: expanded heads": (rope_of_expanded_heads, r"rope: elements of x \[2, 4, 64\] with strides \[64, 0, 1\] share memory"),
    "hc_post: out is X": (lambda d: hc_post_shifted(d, 0), r"hc_post: out .* and X .* share memory"),
    "hc_post: out is X, shifted": (hc_post_shifted, r"hc_post: out .* and X .* share memory"),
    "hc_post columns: out is X, shifted": (lambda d: hc_post_shifted(d, 8, "columns"), r"hc_post: out .* and X .* share memory"),
    "hc_pre: X is streams, shifted": (streams_of_a_half_before, r"hc_pre: X .* and streams .* share memory"),
    "hc_pre block: a in X": (lambda d: a_in_streams(d, "block"), r"hc_pre: a .* and X .* share memory"),
    "hc_pre split: a in X": (lambda d: a_in_streams(d, "split"), r"hc_pre: a .* and X .* share memory"),
    "hc_pre: pre is post": (pre_is_post, r"hc_pre: pre \[2, 4\] and post \[2, 4\] share memory"),
    "hc_pre: pre in sums": (pre_in_sums, r"hc_pre: pre \[2, 4\] and sums \[.*\] share memory"),
    "sparse_attn: out is q": (queries_for_an_output, r"sparse_attn: out .* and q .* share memory"),
    "store_entries: rows in the cache": (a_cache_that_is_its_rows, r"store_entries: cache .* and rows .* share memory"),
    "topk: chosen in scores": (chosen_in_scores, r"topk: selected .* and score .* share memory"),
    "experts_up: gate is up": (lambda d: experts(d, torch.zeros(EXPERTS_SCRATCH, dtype=I32), same=True), r"experts_up: out .* and the second out .* share memory"),
    "experts_up: experts in scratch": (experts_of_counters, r"experts_up: scratch .* and experts .* share memory"),
    "experts_up mma: scratch with gaps": (lambda d: experts(d, lines_apart(EXPERTS_SCRATCH, I32)), r"experts_up: scratch \[.*\] has strides \[4, 1\], expected contiguous"),
    "experts_up tiles: scratch with gaps": (lambda d: experts(d, lines_apart(EXPERTS_SCRATCH, I32), "tiles"), r"experts_up: scratch .* expected contiguous"),
    "hc_pre split: sums with gaps": (lambda d: hc_pre(d, sums=lines_apart(ops.mix_scratch(2, 256, "split"), F32)), r"hc_pre split: sums .* expected contiguous"),
    "hc_pre mma: sums with gaps": (lambda d: hc_pre(d, sums=lines_apart(ops.mix_scratch(2, 256, "mma"), F32), variant="mma"), r"hc_pre mma: sums .* expected contiguous"),
    "hc_pre: counters with gaps": (lambda d: hc_pre(d, counters=lines_apart(2, I32)), r"hc_pre split: counters .* expected contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_memory_that_a_kernel_must_not_be_given_is_refused(case, device):
    call, said = REFUSED[case]
    with pytest.raises(KernelError, match=said):
        call(device)


def test_done_and_parts_of_attention_with_gaps_are_refused(device):
    T, h, d, splits = 1, 16, 128, 2
    ring, ring_position = torch.zeros(1, 128, ops.entry_bytes(d, 64), dtype=U8), torch.zeros(1, 128, dtype=I32)
    zero = torch.zeros(1, dtype=I32)
    given: dict[str, Any] = {"part_o": torch.zeros(T, splits, h, d), "part_ml": torch.zeros(T, splits, h, 2), "done": torch.zeros(ops.merge_counters(T, h) + 1, dtype=I32)}
    for name, wrong in (("part_o", torch.zeros(T, splits, h, 2 * d)[..., :d]), ("part_ml", torch.zeros(T, splits, h, 4)[..., :2]), ("done", torch.zeros(4, 2, dtype=I32)[:, :1])):
        with pytest.raises(KernelError, match=f"sparse_attn: {name} .* expected contiguous"):
            ops.sparse_attn(device, bf16(T, h, d), ring, ring_position, None, None, zero, zero, torch.zeros(h), bf16(T, h, d), 128, 0, splits, variant="flash", **(given | {name: wrong}))


@pytest.mark.parametrize("slices", [-1, 0, 3, 5, 6, 7, 16, 64])
def test_slices_that_do_not_divide_the_warps_of_a_block_are_refused(slices, device):
    said = f"{slices} slices, expected 1, 2, 4, 8"
    with pytest.raises(KernelError, match=f"linear_bf16: {said}"):
        ops.linear_bf16(device, bf16(3, 512), bf16(64, 512), bf16(3, 64), variant="stream", slices=slices)
    with pytest.raises(KernelError, match=f"linear_fp8: {said}"):
        ops.linear_fp8(device, bf16(3, 512), torch.zeros(64, 512, dtype=U8), torch.zeros(1, 4, dtype=U8), bf16(3, 64), variant="stream", slices=slices)
    with pytest.raises(KernelError, match=f"experts_up: {said}"):
        experts(device, variant="stream", slices=slices)
    with pytest.raises(KernelError, match=f"experts_down: {said}"):
        ops.experts_down(device, bf16(2, 1, 64), torch.zeros(2, 1, dtype=I32), torch.zeros(3, 8, 32, dtype=U8), torch.zeros(3, 8, 2, dtype=U8), bf16(2, 1, 8), "stream", slices=slices)


@pytest.mark.parametrize("slices", [None, 1, 2, 4, 8])
def test_slices_that_do_give_the_product(slices):
    g = torch.Generator().manual_seed(5)
    x, weight, out = torch.randint(-3, 4, (3, 4096), generator=g).to(BF16), torch.randint(-3, 4, (20, 4096), generator=g).to(BF16), torch.full((3, 20), torch.nan)
    ops.linear_bf16(open_device("cpu"), x, weight, out, variant="stream", slices=slices)
    assert torch.equal(out, x.float() @ weight.float().T)


def test_a_norm_in_place_is_a_norm():
    device = open_device("cpu")
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(6)).to(BF16)
    out = torch.empty_like(x)
    ops.rms_norm(device, x, None, out, 1e-6)
    ops.rms_norm(device, x, None, x, 1e-6)
    assert torch.equal(x, out)
