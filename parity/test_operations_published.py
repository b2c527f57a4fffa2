"""Single-operation checks at the sizes of the published models: every kernel in every variant, on Flash's and Pro's own shapes.

The other files choose sizes that break tiles; this one takes those that a GPU will meet: 64 and 128 heads of 512, an indexer of
64 x 128 that keeps 512 or 1024 of 262,144 entries, streams of 4 x 4096 and 4 x 7168, 256 and 384 experts, linears as large as the
vocabulary. 1, 3 and 131 tokens, so that nothing fills a tile. Rows differ in size by powers of two, outputs are poisoned, memory
that nobody owns is NaN, positions go to 1,048,575, sinks to both infinities.

Inputs are made on the device, and so is the reference: plain torch in FP32 without TF32. Twins: the same in two other orders of
sums. Collected with --device cuda; on the CPU only by name, and there without the 131 tokens.

    pytest parity/test_operations_published.py --device cuda -k "sparse_attn and pro"

Variants are those that the wrappers accept, so that a new one is judged too; parity/unit/test_published.py says which operation
has no test here.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import test_operations_at_once as together
from parity.session import RUN
from parity.test_operations_attention import Pooling, entry_values, stored_entry
from probes.core.inputs import Hostile
from production import ops
from production.launch import KernelError
from production.ops.hyper_connection import AT_ONCE_VARIANTS, mix_scratch
from reference import formats
from reference import ops as ref
from reference.config import ModelConfig
from reference.ops import Sums

BF16, F32, F64, I32, I64, U8 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8
PRESETS = Path(__file__).resolve().parents[1] / "checkpoints" / "presets"
MODELS = ("flash", "pro")
ORDERS = (1, 3)
LAST = 1_048_575
INF = float("inf")

def known_variants() -> dict[str, tuple[str, ...]]:
    """operation -> the variants that its wrapper accepts: the last argument of its call of `choose`, read from its source."""
    found: dict[str, tuple[str, ...]] = {}
    for path in sorted(Path(str(ops.__file__)).parent.glob("*.py")):
        module = importlib.import_module("production.ops" if path.stem == "__init__" else f"production.ops.{path.stem}")
        for function in (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)):
            for call in (node for node in ast.walk(function) if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_choose"):
                names = eval(compile(ast.Expression(call.args[3]), str(path), "eval"), vars(module))
                for operation in SHARED.get(function.name, (function.name,)):
                    found[operation] = tuple(names)
    return found


SHARED = {"_experts": ("experts_up", "experts_down")}  # wrappers that choose in a function they share
VARIANTS = known_variants()  # a new one is judged here from its first day
# Operations that are judged at these sizes in another file.
ELSEWHERE = {
    "store_window": "test_operations_attention.py, d=512; test_operations_long_context.py",
    "store_entries": "test_operations_attention.py, d=512; test_operations_long_context.py",
    "store_index_keys": "test_operations_attention.py, di=128",
    "token_positions": "test_operations_dense.py: integers of any size",
    "advance": "test_operations_dense.py: integers of any size",
}


def pytest_generate_tests(metafunc):
    """Tokens of a call: few of them on the CPU, where a file of this size would take hours. Variants by the operation's name."""
    run = metafunc.config.stash.get(RUN, None)
    on_gpu = run is not None and run.device == "cuda"
    if "T" in metafunc.fixturenames:
        counts = (1, 3, 131) if on_gpu else (1, 3)
        metafunc.parametrize("T", counts, ids=lambda n: f"{n} tokens")
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", VARIANTS[metafunc.function.operation])


def of(operation: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Which row of VARIANTS a test's `variant` comes from."""

    def mark(test: Callable[..., None]) -> Callable[..., None]:
        test.operation = operation  # type: ignore[attr-defined]
        return test

    return mark


class World:
    """A published model's sizes, and inputs on the device; what several tests need is made once."""

    def __init__(self, name: str, device: Any, **sizes: Any) -> None:
        """sizes  config values that take the place of the published ones."""
        self.name, self.device, self.at = name, device, device.torch_device
        self.c = replace(ModelConfig.from_dir(PRESETS / name), **sizes)
        self.kept: dict[Any, Any] = {}
        self.kept_for = ""

    def rng(self, seed: int) -> torch.Generator:
        return torch.Generator(device=self.at).manual_seed(seed)

    def normal(self, *shape: int, seed: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.rng(seed), device=self.at) * scale

    def integers(self, low: int, high: int, *shape: int, seed: int, dtype: torch.dtype = U8) -> Tensor:
        return torch.randint(low, high, shape, generator=self.rng(seed), device=self.at, dtype=dtype)

    def rows(self, T: int, width: int, seed: int) -> Tensor:
        """bf16 [T, width]: rows of a normal, each in a size of its own between 2^-6 and 2^6."""
        size = torch.exp2(self.integers(-6, 7, T, 1, seed=seed + 1, dtype=I32).float())
        return (self.normal(T, width, seed=seed) * size).bfloat16()

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def owned(self, tensor: Tensor) -> Tensor:
        """The same values between NaN that nobody owns."""
        return Hostile(device=self.at).packed(tensor)

    def ints(self, values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=I32).to(self.at)


@pytest.fixture(scope="module", params=MODELS)
def world(request, device):
    made = World(request.param, device)
    yield made
    made.kept.clear()
    if made.at.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def only_one_operation_is_kept(request, world):
    """Pro's experts take 9 GB: what was made for one test function goes before the next."""
    if world.kept_for != request.function.__name__:
        world.kept.clear()
        world.kept_for = request.function.__name__


@pytest.fixture(autouse=True)
def fp32_without_tf32_and_guards(device, hostile):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
    hostile.check_guards()


@contextlib.contextmanager
def on(world: World) -> Iterator[None]:
    """The reference's functions make their small tables where the inputs are, and powers of two are exact there too."""
    powers = world.keep("powers of two", lambda: torch.ldexp(torch.ones(601), torch.arange(-300, 301)).to(world.at))

    def exact_ldexp(x: Tensor, exponent: Tensor) -> Tensor:  # torch's own takes a power, which a GPU need not round exactly
        scaled: Tensor = x * powers[(exponent.clamp(-300, 300) + 300).long()]
        return scaled

    with torch.device(world.at), pytest.MonkeyPatch.context() as patch:
        if world.at.type != "cpu":
            patch.setattr(torch, "ldexp", exact_ldexp)
        yield


def test_powers_of_two_are_exact_where_the_reference_runs(world, equal):
    exponents = torch.arange(-160, 140)
    with on(world):
        found = torch.ldexp(torch.ones(len(exponents), device=world.at), exponents.to(world.at))
    equal("act_quant", "powers of two of the reference", found, lambda: torch.tensor([2.0**n if n < 128 else INF for n in exponents.tolist()], dtype=F64).float())


@pytest.fixture
def compare(judge, world):
    """compare(operation, case, actual, compute, rounded): compute(Sums) on the device is the reference, and its twins."""

    def compared(operation: str, case: str, actual: Tensor, compute: Callable[[Sums], Tensor], rounded: bool, row_dims: int = 1) -> None:
        def run(order: int, as_production: bool) -> Tensor:
            with on(world):
                found = compute(Sums(order))
            return found.bfloat16().float() if as_production else found

        judge(operation, f"{world.name}, {case}", actual, reference=lambda: run(0, False), row_dims=row_dims, on_device=True,
              twins=[functools.partial(run, order, rounded) for order in ORDERS])  # fmt: skip

    return compared


@pytest.fixture
def equal(judge, world):
    """equal(operation, case, actual, reference): bit for bit, on the device."""

    def compared(operation: str, case: str, actual: Tensor, reference: Callable[[], Tensor]) -> None:
        def run() -> Tensor:
            with on(world):
                return reference()

        judge(operation, f"{world.name}, {case}", actual, reference=run, exact=True, on_device=True)

    return compared


@contextlib.contextmanager
def where_it_runs(world: World) -> Iterator[None]:
    """On the CPU device a kernel of a GPU's own instructions is not run; on a GPU a refusal is a failure."""
    try:
        yield
    except KernelError as error:
        if world.device.name == "cpu" and "sm_" in str(error):
            pytest.skip(str(error).splitlines()[0])
        raise


def positions(T: int) -> list[int]:
    """The last position, one short of a window, the first; then every 8,009th from the end; every seventh is a pad, but the first."""
    some = [LAST, 126, 0] + [LAST - 8_009 * i for i in range(max(0, T - 3))]
    return [-1 if t % 7 == 4 else p for t, p in enumerate(some[:T])]


# ---- embedding, norms, rotation, rounding ----


@of("embed")
def test_embed(world, T, variant, device, hostile, equal):
    c = world.c
    weight = world.keep("embed", lambda: world.owned(world.normal(c.vocab_size, c.hidden_size, seed=1).bfloat16()))
    tokens = world.integers(0, c.vocab_size, T, seed=2, dtype=I64)
    tokens[-1] = c.vocab_size - 1
    position, X = hostile.packed(world.ints(positions(T))), hostile.poisoned((T, c.hc_mult, c.hidden_size), BF16)
    ops.embed(device, hostile.packed(tokens), weight, position, X, variant=variant)
    real = position >= 0
    equal("embed", f"{variant}, {T} tokens", X[real], lambda: weight[tokens[real]][:, None].expand(-1, c.hc_mult, -1))
    assert X[~real].isnan().all(), "a pad's rows were written"


@of("rms_norm")
@pytest.mark.parametrize("what", ["hidden", "q_lora", "kv", "heads", "index key"])
def test_rms_norm(what, world, T, variant, device, hostile, compare):
    c = world.c
    width = {"hidden": c.hidden_size, "q_lora": c.q_lora_rank, "kv": c.head_dim, "heads": c.head_dim, "index key": c.index_head_dim}[what]
    rows = T * (c.num_attention_heads if what == "heads" else 1)
    x = hostile.strided(world.rows(rows, width, seed=3))
    weight = None if what == "heads" else hostile.packed(world.normal(width, seed=5))
    out = hostile.poisoned((rows, width), BF16)
    with where_it_runs(world):
        ops.rms_norm(device, x, weight, out, c.rms_norm_eps, variant=variant)
    compare("rms_norm", f"{what}, {variant}, {rows} x {width}", out, lambda sums: ref.rms_norm(x.float(), weight, c.rms_norm_eps, sums), rounded=True)


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("what", ["heads", "kv", "index heads"])
def test_rope(what, inverse, world, T, device, hostile, compare, equal):
    c = world.c
    heads, dim = {"heads": (c.num_attention_heads, c.head_dim), "kv": (1, c.head_dim), "index heads": (c.index_n_heads, c.index_head_dim)}[what]
    r = c.qk_rope_head_dim
    with on(world):
        freq = ref.yarn_frequencies(r, c.compress_rope_theta, c.rope_factor, c.rope_original_max, c.rope_beta_fast, c.rope_beta_slow)
    x, position = hostile.strided(world.rows(T, heads * dim, seed=6).view(T, heads, dim)), hostile.packed(world.ints(positions(T)))
    before = x.float().clone()
    ops.rope(device, x, position, hostile.packed(freq), inverse)
    real, case = position >= 0, f"{what}, {T} tokens, {'back' if inverse else 'forward'}"

    def compute(sums: Sums) -> Tensor:
        cos, sin = ref.rope_angles(position, freq)
        return ref.rope(before, cos[:, None], sin[:, None], inverse)[real]

    compare("rope", case, x[real], compute, rounded=True)
    equal("rope", f"{case}: the other dims", x[..., :-r].float(), lambda: before[..., :-r])
    if not real.all():
        equal("rope", f"{case}: pads", x[~real].float(), lambda: before[~real])


@of("act_quant")
@pytest.mark.parametrize("what", ["hidden", "q_lora", "wo_a", "experts"])
def test_act_quant(what, world, T, variant, device, hostile, equal):
    c = world.c
    rows, width = {"hidden": (T, c.hidden_size), "q_lora": (T, c.q_lora_rank), "wo_a": (T, c.o_groups * c.o_lora_rank), "experts": (T * c.num_experts_per_tok, c.moe_intermediate_size)}[what]
    x, out = hostile.strided(world.rows(rows, width, seed=8)), hostile.poisoned((rows, width), BF16)
    with where_it_runs(world):
        ops.act_quant(device, x, out, variant=variant)
    equal("act_quant", f"{what}, {variant}, {rows} x {width}", out.float(), lambda: formats.round_e4m3_blocks(x, formats.LINEAR_BLOCK))


# ---- linears ----

FP8: dict[str, Callable[[Any], tuple[int, int, int]]] = {  # rows, width of a group, groups
    "wq_a": lambda c: (c.q_lora_rank, c.hidden_size, 1),
    "wq_b": lambda c: (c.num_attention_heads * c.head_dim, c.q_lora_rank, 1),
    "wkv": lambda c: (c.head_dim, c.hidden_size, 1),
    "wo_a": lambda c: (c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups, c.o_groups),
    "wo_b": lambda c: (c.hidden_size, c.o_groups * c.o_lora_rank, 1),
    "indexer.wq_b": lambda c: (c.index_n_heads * c.index_head_dim, c.q_lora_rank, 1),
    "shared.w1": lambda c: (c.moe_intermediate_size, c.hidden_size, 1),
    "shared.w2": lambda c: (c.hidden_size, c.moe_intermediate_size, 1),
}


def e4m3_codes(world: World, *shape: int, seed: int) -> Tensor:
    """Every code but NaN."""
    code = world.integers(0, 254, *shape, seed=seed)
    return code + (code >= 0x7F).to(U8)


@of("linear_fp8")
@pytest.mark.parametrize("matrix", FP8)
def test_linear_fp8(matrix, world, T, variant, device, hostile, compare):
    rows, K, groups = FP8[matrix](world.c)
    weight, scale = world.keep(
        ("fp8", matrix),
        lambda: (world.owned(e4m3_codes(world, rows, K, seed=10)), world.owned(world.integers(118, 131, -(-rows // 128), -(-K // 128), seed=11))),
    )
    with on(world):
        x = world.rows(T, groups * K, seed=12)
        x = hostile.strided(x if matrix == "wo_a" else formats.round_e4m3_blocks(x, formats.LINEAR_BLOCK).bfloat16())  # the one input that is not rounded
    out = hostile.poisoned((T, rows), BF16)
    with where_it_runs(world):
        ops.linear_fp8(device, x, weight, scale, out, groups=groups, variant=variant)

    def compute(sums: Sums) -> Tensor:
        w = formats.decode_fp8_weight(weight, scale).view(groups, rows // groups, K)
        return torch.cat([sums.linear(x[:, g * K : (g + 1) * K].float(), w[g]) for g in range(groups)], -1)

    compare("linear_fp8", f"{matrix}, {variant}, {T} x {K} -> {rows}", out, compute, rounded=True)


BF16_LINEARS: dict[str, Callable[[Any], tuple[int, bool]]] = {  # rows, whether the output is rounded before its scale
    "compressor of CSA": lambda c: (2 * c.head_dim, False),
    "compressor of HCA": lambda c: (c.head_dim, False),
    "compressor of the indexer": lambda c: (2 * c.index_head_dim, False),
    "weights_proj": lambda c: (c.index_n_heads, True),
    "router": lambda c: (c.n_routed_experts, False),
    "head": lambda c: (c.vocab_size, False),
}


@of("linear_bf16")
@pytest.mark.parametrize("matrix", BF16_LINEARS)
def test_linear_bf16(matrix, world, T, variant, device, hostile, compare, equal):
    c = world.c
    rows, round_first = BF16_LINEARS[matrix](c)
    K = c.hidden_size
    if variant == "naive" and matrix == "head":
        T = min(T, 13)  # a thread a logit
    case = f"{matrix}, {variant}, {T} x {K} -> {rows}"
    weight = world.keep(("bf16", matrix), lambda: world.owned(world.normal(rows, K, seed=14, scale=K**-0.5).bfloat16()))
    x, plain = hostile.strided(world.rows(T, K, seed=15)), hostile.poisoned((T, rows), F32)
    with where_it_runs(world):
        ops.linear_bf16(device, x, weight, plain, variant=variant)
    compare("linear_fp32", case, plain, lambda sums: sums.linear(x.float(), weight.float()), rounded=False)
    if round_first:
        factor, scaled = c.index_head_dim**-0.5 * c.index_n_heads**-0.5, hostile.poisoned((T, rows), F32)
        ops.linear_bf16(device, x, weight, scaled, scale=factor, round_bf16=True, variant=variant)
        equal("linear_bf16", f"{case}: rounded before its scale", scaled, lambda: plain.bfloat16().float() * torch.tensor(factor, dtype=F32))


# ---- router and experts ----


def test_gate_scores_and_weights(world, T, device, hostile, compare):
    c = world.c
    E, k = c.n_routed_experts, c.num_experts_per_tok
    logits = hostile.packed(world.normal(T, E, seed=17, scale=4.0))
    scores, weights = hostile.poisoned((T, E), F32), hostile.poisoned((T, k), F32)
    ops.gate_scores(device, logits, "sqrtsoftplus", scores)
    compare("gate_scores", f"{T} x {E}", scores, lambda sums: ref.gate_scores(logits, "sqrtsoftplus", sums), rounded=False)
    chosen = torch.stack([torch.randperm(E, generator=world.rng(18 + t), device=world.at)[:k].sort().values for t in range(T)])
    ops.gate_weights(device, scores, hostile.packed(chosen.to(I32)), weights, True, c.routed_scaling_factor)
    compare("gate_weights", f"{T} x {k}", weights, lambda sums: ref.gate_weights(scores, chosen, True, c.routed_scaling_factor, sums), rounded=False)


@of("gate_choose")
def test_gate_choose(world, T, variant, device, hostile, equal):
    """By score, with bias and many ties, and by hash; pads have no expert."""
    c = world.c
    E, k = c.n_routed_experts, c.num_experts_per_tok
    scores, bias = hostile.packed(world.integers(1, 9, T, E, seed=19, dtype=I32).float() / 4), hostile.packed(world.integers(-4, 5, E, seed=20, dtype=I32).float() / 4)
    table = world.keep("tid2eid", lambda: torch.rand(c.vocab_size, E, generator=world.rng(21), device=world.at).topk(k, -1).indices.to(I32))
    tokens, position = world.integers(0, c.vocab_size, T, seed=22, dtype=I64), hostile.packed(world.ints(positions(T)))
    tokens[-1] = c.vocab_size - 1
    pads = (position < 0)[:, None]
    for name in ("score", "hash"):
        experts = hostile.poisoned((T, k), I32)
        with where_it_runs(world):
            by = (bias, None) if name == "score" else (None, table)
            ops.gate_choose(device, scores, by[0], by[1], hostile.packed(tokens), position, experts, variant=variant)
        wanted = table[tokens].sort(-1).values if name == "hash" else ref.gate_choose(scores, bias, k).to(I32)
        equal("gate_choose", f"by {name}, {variant}, {T} of {E}", experts, lambda wanted=wanted: wanted.masked_fill(pads, -1))


def some_experts(world: World, T: int) -> Tensor:
    """[T, k] ascending, of some thirty experts: the first in every row, the second in none, the last two often; pads have none."""
    c = world.c
    E, k = c.n_routed_experts, c.num_experts_per_tok
    pool = torch.cat((torch.tensor([2, 3, E - 2, E - 1]), torch.randperm(E - 6, generator=torch.Generator().manual_seed(23))[:26] + 4)).unique()
    rows = [torch.cat((torch.zeros(1, dtype=I64), pool[torch.randperm(len(pool), generator=torch.Generator().manual_seed(24 + t))[: k - 1]])) for t in range(T)]
    return world.ints(torch.stack(rows).sort(-1).values.masked_fill(torch.tensor(positions(T))[:, None] < 0, -1))


def fp4_experts(world: World, name: str, rows: int, K: int, seed: int) -> tuple[Tensor, Tensor]:
    E = world.c.n_routed_experts
    found: tuple[Tensor, Tensor] = world.keep(("fp4", name), lambda: (world.owned(world.integers(0, 256, E, rows, K // 2, seed=seed)), world.owned(world.integers(120, 130, E, rows, K // 32, seed=seed + 1))))
    return found


def by_expert(world: World, key: Any, order: int, x: Tensor, experts: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """[T, k, rows] in one order of sums, NaN where there is no expert; each expert's weights are decoded once. x [T, k, K]."""

    def make() -> dict[int, Tensor]:
        out = {order: torch.full((*experts.shape, weight.shape[1]), torch.nan, device=world.at) for order in (0, *ORDERS)}
        for e in experts.unique().tolist():
            if e >= 0:
                w, at = formats.decode_fp4_weight(weight[e], scale[e]), experts == e
                for order, found in out.items():
                    found[at] = Sums(order).linear(x[at].float(), w)
        return out

    found: dict[int, Tensor] = world.keep(key, make)
    return found[order]


@of("experts_up")
def test_experts_up(world, T, variant, device, hostile, compare):
    c = world.c
    D, width, E, k = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok
    (w1, s1), (w3, s3) = fp4_experts(world, "w1", width, D, 26), fp4_experts(world, "w3", width, D, 28)
    experts = some_experts(world, T)
    with on(world):
        x = hostile.strided(formats.round_e4m3_blocks(world.rows(T, D, seed=30), formats.LINEAR_BLOCK).bfloat16())
    gate, up = hostile.poisoned((T, k, width), BF16), hostile.poisoned((T, k, width), BF16)
    scratch = hostile.poisoned((ops.experts_scratch(T, k, E),), I32)
    with where_it_runs(world):
        ops.experts_up(device, x, hostile.packed(experts), w1, s1, w3, s3, gate, up, variant=variant, scratch=scratch)
    real, slots = experts >= 0, x[:, None].expand(-1, k, -1)
    for name, got, w, s in (("w1", gate, w1, s1), ("w3", up, w3, s3)):
        compute = lambda sums, name=name, w=w, s=s: by_expert(world, ("up", name, T), sums.order, slots, experts, w, s)[real]  # noqa: E731
        compare("experts_up", f"{name}, {variant}, {T} x {k} of {E}", got[real], compute, rounded=True)
        assert got[~real].isnan().all(), "a slot without an expert was written"


@of("experts_down")
def test_experts_down(world, T, variant, device, hostile, compare):
    c = world.c
    D, width, E, k = c.hidden_size, c.moe_intermediate_size, c.n_routed_experts, c.num_experts_per_tok
    w2, s2 = fp4_experts(world, "w2", D, width, 32)
    experts = some_experts(world, T)
    with on(world):
        h = hostile.packed(formats.round_e4m3_blocks(world.rows(T * k, width, seed=34), formats.LINEAR_BLOCK).bfloat16().view(T, k, width))
    out, scratch = hostile.poisoned((T, k, D), BF16), hostile.poisoned((ops.experts_scratch(T, k, E),), I32)
    with where_it_runs(world):
        ops.experts_down(device, h, hostile.packed(experts), w2, s2, out, variant=variant, scratch=scratch)
    real = experts >= 0
    compare("experts_down", f"{variant}, {T} x {k} of {E}", out[real], lambda sums: by_expert(world, ("down", T), sums.order, h, experts, w2, s2)[real], rounded=True)
    assert out[~real].isnan().all(), "a slot without an expert was written"


def test_swiglu_and_moe_combine(world, T, device, hostile, compare, equal):
    c = world.c
    width, D, k = c.moe_intermediate_size, c.hidden_size, c.num_experts_per_tok
    gate, up = (hostile.packed(world.normal(T * k, width, seed=seed, scale=12.0).bfloat16()) for seed in (36, 37))
    weight, out = hostile.packed(world.normal(T * k, seed=38)), hostile.poisoned((T * k, width), BF16)
    ops.swiglu(device, gate, up, weight, out, c.swiglu_limit)
    compare("swiglu", f"{T * k} x {width}", out, lambda sums: ref.swiglu(gate.float(), up.float(), c.swiglu_limit) * weight[:, None], rounded=True)
    experts = some_experts(world, T)
    down, shared = hostile.packed(world.rows(T * k, D, seed=39).view(T, k, D)), hostile.packed(world.rows(T, D, seed=41))
    routed, y = hostile.poisoned((T, D), F32), hostile.poisoned((T, D), BF16)
    ops.moe_combine(device, down, hostile.packed(experts), shared, routed, y)
    real = experts[:, 0] >= 0
    total = torch.zeros(T, D, device=world.at)
    for j in range(k):
        total = total + down[:, j].float()
    equal("moe_combine", f"routed, {T} x {k} x {D}", routed[real], lambda: total[real])
    equal("moe_combine", f"out, {T} x {k} x {D}", y[real], lambda: (total + shared.float())[real].bfloat16())
    assert y[~real].isnan().all(), "a pad's row was written"


# ---- compressors and indexer ----


@pytest.mark.parametrize("what", ["CSA", "HCA", "index keys"])
def test_compressor(what, world, device, hostile, judge):
    """Two rows of unequal chunks with borders inside groups, then steps over a border."""
    c = world.c
    ratio, width = {"CSA": (4, c.head_dim), "HCA": (128, c.head_dim), "index keys": (4, c.index_head_dim)}[what]
    pooled = Pooling(hostile, ratio, width, 3 * ratio + 5, 2, seed=44)
    for counts in ([ratio + 1, 1], [1, ratio]):
        pooled.run(device, counts)
    for _ in range(3):
        pooled.run(device, [1, 1], decode=True)
    pooled.run(device, [ratio - 2, 3])
    pooled.judge(judge, f"{world.name}, {what}, ratio {ratio}, width {width}")


@of("hadamard_e2m1")
def test_hadamard_e2m1(world, T, variant, device, hostile, equal):
    """Integers times a power of two: every sum is exact, so the order of the sums does not show."""
    c = world.c
    R, di = T * c.index_n_heads, c.index_head_dim
    values = world.integers(-128, 129, R, di, seed=46, dtype=I32) * torch.exp2(world.integers(-8, 9, R, 1, seed=47, dtype=I32).float())
    x, out = hostile.strided(values.bfloat16()), hostile.poisoned((R, di), BF16)
    with where_it_runs(world):
        ops.hadamard_e2m1(device, x, out, variant=variant)
    equal("hadamard_e2m1", f"{variant}, {R} x {di}", out.float(), lambda: formats.round_e2m1_blocks(formats.round_bf16(ref.hadamard(x.float()))))


def index_world(world: World, T: int) -> dict[str, Tensor]:
    """Keys of T rows at most 3: each sees what is complete, the rest is NaN. A million tokens' keys for few queries, an odd number for many."""
    c = world.c
    b, E = min(T, 3), 262_144 if T <= 3 else 16_387
    position = world.ints([LAST, 4 * E // 3, 2, *([4 * E - 1 - 3 * t for t in range(3, T)])][:T])
    position = torch.where((torch.arange(T, device=world.at) % 7 == 4) & (T > 3), -1, position).to(I32)
    row = world.ints([t % b for t in range(T)])
    keys, scales = world.integers(0, 256, b, E, c.index_head_dim // 2, seed=48), world.integers(120, 134, b, E, c.index_head_dim // 32, seed=49)
    for i in range(b):
        complete = int(((position[row == i] + 1) // 4).max())
        keys[i, complete:], scales[i, complete:] = 255, 255
    with on(world):
        q = formats.round_e2m1_blocks(world.normal(T, c.index_n_heads * c.index_head_dim, seed=50), 32).bfloat16()
    return {"position": position, "row": row, "keys": keys, "scales": scales, "q": q.view(T, c.index_n_heads, c.index_head_dim), "weights": world.normal(T, c.index_n_heads, seed=51)}


@of("indexer_score")
def test_indexer_score(world, T, variant, device, hostile, judge, compare, equal):
    w = world.keep(("index", T), lambda: index_world(world, T))
    E = w["keys"].shape[1]
    score = hostile.poisoned((T, E), F32)
    q, keys, scales, weights = (hostile.strided(w[name]) for name in ("q", "keys", "scales", "weights"))
    with where_it_runs(world):
        scratch = hostile.poisoned((ops.indexer_scratch(T, q.shape[1]),), U8)
        ops.indexer_score(device, q, weights, keys, scales, hostile.packed(w["position"]), hostile.packed(w["row"]), score, 4, variant=variant, scratch=scratch)
    complete = ((w["position"] + 1) // 4).clamp_max(E)
    seen, real = torch.arange(E, device=world.at) < complete[:, None], w["position"] >= 0

    def every() -> dict[int, Tensor]:
        found = {order: torch.zeros(T, E, device=world.at) for order in (0, *ORDERS)}
        for t in range(T):
            n = int(complete[t])
            values = formats.decode_fp4_weight(w["keys"][w["row"][t], :n], w["scales"][w["row"][t], :n])
            for order, all_of_them in found.items():
                sums = Sums(order)
                dots = sums.linear(values, w["q"][t].float())  # [n, heads]
                all_of_them[t, :n] = sums.sum(w["weights"][t] * dots.relu(), -1)
        return found

    case = f"{variant}, {T} queries, {E} entries"
    equal("indexer_score", f"{case}: who is seen", torch.isneginf(score[real]), lambda: ~seen[real])
    compare("indexer_score", case, score.masked_fill(~seen, 0.0)[real], lambda sums: world.keep(("scores", T), every)[sums.order][real], rounded=False)
    assert score[~real].isnan().all(), "a pad's scores were written"


@of("topk")
@pytest.mark.parametrize("kind", ["random", "ties", "all equal"])
def test_topk(kind, world, T, variant, device, hostile, equal):
    """262,144 entries, of which each row sees another number: none, one, k - 1, k, k + 1, all; what it may not see is NaN."""
    k, E = world.c.index_topk, 262_144
    if variant == "naive":
        E = 5_003  # one thread walks a row k times
    counts = [E, k + 1, k - 1, 1, 0, k, *[E - 1999 * t for t in range(6, T)]][:T]
    position = world.ints([4 * max(n, 0) - 1 + t % 4 if n > 0 else t % 3 for t, n in enumerate(counts)]).clamp_max(LAST)
    seen = ((position + 1) // 4).clamp_max(E)
    score = world.normal(T, E, seed=53)
    score = {"random": score, "ties": (score * 2).round() / 2 + 0.0, "all equal": torch.full_like(score, -0.25)}[kind]
    score = torch.where(torch.arange(E, device=world.at) < seen[:, None], score, torch.nan)
    selected = hostile.poisoned((T, k), I32).fill_(-7)
    counters, scratch = hostile.poisoned((T,), I32).zero_(), hostile.poisoned((ops.topk_scratch(k, E),), I32)
    with where_it_runs(world):
        ops.topk(device, hostile.strided(score), hostile.packed(position), selected, 4, variant=variant, counters=counters, scratch=scratch)
    assert not counters.any(), "a counter was left behind"
    equal("topk", f"{variant}, {kind}, {T} x {E}, k {k}", selected, lambda: ref.top_entries(score.nan_to_num(-INF, neginf=-INF), k).to(I32))


# ---- attention ----

WINDOW_SLOTS = 640  # a ring of a window of 128 and a chunk of 512


class Attending:
    """Keys in both sources for T queries: a decode step of T rows, or a prefill of two unequal rows; NaN where nothing was stored.

    kind  "window", "CSA" (a list of index_topk of some thousand entries), "HCA" (all 8,192 entries of a million tokens)
    """

    def __init__(self, world: World, kind: str, T: int) -> None:
        c = world.c
        self.kind, self.T, self.h, self.d, r = kind, T, c.num_attention_heads, c.head_dim, c.qk_rope_head_dim
        self.ratio = {"window": 0, "CSA": 4, "HCA": 128}[kind]
        self.decode = T <= 3
        if self.decode:  # a row each
            ends, position, row = [LAST, 130, 5][:T], [LAST, 130, 5][:T], list(range(T))
        else:  # the end of a long row, and a short one with a pad
            short = T // 3
            ends = [LAST, short - 2]
            position = [*range(LAST - (T - short) + 1, LAST + 1), *range(short - 1), -1]
            row = [0] * (T - short) + [1] * short
        self.position, self.row, b = world.ints(position), world.ints(row), len(ends)
        held = torch.stack([torch.arange(WINDOW_SLOTS) + (end // WINDOW_SLOTS) * WINDOW_SLOTS for end in ends])
        held = torch.where(held > torch.tensor(ends)[:, None], held - WINDOW_SLOTS, held)
        self.ring_position = world.ints(torch.where(held < 0, -1, held))
        with on(world):
            kv = world.normal(b, WINDOW_SLOTS, self.d, seed=56).bfloat16()
            self.ring, self.window_values = stored_entry(kv, r), entry_values(kv, r)
            self.ring[self.ring_position < 0] = 255
            self.entries = self.selected = None
            if self.ratio:
                self.capacity = 8192 if kind == "HCA" else 4 * c.index_topk + 3
                rows = world.normal(b, self.capacity, self.d, seed=57).bfloat16()
                self.entries, self.entry_values = stored_entry(rows, r), entry_values(rows, r)
                for i, end in enumerate(ends):
                    self.entries[i, (end + 1) // self.ratio :] = 255  # not complete for anybody
            if kind == "CSA":
                seen = ((self.position + 1) // 4).clamp_max(self.capacity)
                order = torch.rand(T, self.capacity, generator=world.rng(58)).masked_fill(torch.arange(self.capacity) >= seen[:, None], 2.0)
                best = order.topk(c.index_topk, -1, largest=False)
                self.selected = torch.where(best.values < 2, best.indices, self.capacity).sort(-1).values
                self.selected = torch.where(self.selected == self.capacity, -1, self.selected).to(I32)
        self.q = world.normal(T, self.h, self.d, seed=59).bfloat16()
        self.sink = world.normal(self.h, seed=60)
        self.sink[:4] = torch.tensor([-INF, INF, -1e4, 1e4])
        self.wanted: dict[tuple[int, bool], Tensor] = {}
        self.window = c.sliding_window

    def keys_of(self, t: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys that query t sees [n, d], and who they are: positions, then entries, as `visible` has them."""
        p, i = int(self.position[t]), int(self.row[t])
        at = torch.arange(max(0, p - self.window + 1), p + 1)
        entries = torch.arange(0)
        if self.selected is not None:
            entries = self.selected[t][self.selected[t] >= 0]
        elif self.entries is not None:
            entries = torch.arange(min(self.capacity, (p + 1) // self.ratio))
        keys = self.window_values[i, at % WINDOW_SLOTS]
        return (torch.cat((keys, self.entry_values[i, entries])) if self.ratio else keys), at, entries

    def compute(self, sums: Sums, p_bf16: bool) -> Tensor:
        """[real tokens, h, d], a query at a time: there is no other place where the keys are written out. p_bf16: the rounding point p.bf16."""
        if (sums.order, p_bf16) not in self.wanted:
            round_p = formats.round_bf16 if p_bf16 else (lambda p: p)
            rows = []
            for t in (self.position >= 0).nonzero().flatten().tolist():
                keys, _, _ = self.keys_of(t)
                valid = torch.ones(1, 1, len(keys), dtype=torch.bool)
                rows.append(ref.sparse_attention(self.q[t].float()[None, None], keys[None, None], valid, self.sink, sums, round_p)[0, 0])
            self.wanted[sums.order, p_bf16] = torch.stack(rows)
        return self.wanted[sums.order, p_bf16]

    def visible(self) -> Tensor:
        width = self.window + (0 if not self.ratio else self.capacity if self.selected is None else self.selected.shape[1])
        out = torch.full((self.T, width), -1, dtype=I32)
        for t in (self.position >= 0).nonzero().flatten().tolist():
            _, at, entries = self.keys_of(t)
            out[t, : len(at)], out[t, self.window : self.window + len(entries)] = at.to(I32), entries.to(I32)
        return out[self.position >= 0]


@of("sparse_attn")
@pytest.mark.parametrize("kind", ["window", "CSA", "HCA"])
def test_sparse_attn(kind, world, T, variant, device, hostile, compare, equal):
    """Up to 3 queries are a decode step: the keys in as many splits as a model takes, merged by a second launch, and by the last block."""
    keys: Attending = world.keep(("attention", kind, T), lambda: Attending(world, kind, T))
    h, d = keys.h, keys.d
    width = keys.window + (0 if not keys.ratio else keys.capacity if keys.selected is None else keys.selected.shape[1])
    splits = ops.splits_for(width, variant) if keys.decode and variant != "naive" else 1
    real, rounds = keys.position >= 0, variant.endswith("p_bf16")
    for merged in (False, True) if splits > 1 and variant.startswith("flash") else (False,):
        out, visible = hostile.poisoned((T, h, d), BF16), hostile.poisoned((T, width), I32).fill_(-7)
        part_o, part_ml = (hostile.poisoned((T, splits, h, d), F32), hostile.poisoned((T, splits, h, 2), F32)) if splits > 1 else (None, None)
        done = hostile.poisoned((ops.merge_counters(T, h),), I32).zero_() if merged else None
        entries, selected = (None if x is None else hostile.strided(x) for x in (keys.entries, keys.selected))
        with where_it_runs(world):
            ops.sparse_attn(device, hostile.strided(keys.q), hostile.strided(keys.ring), hostile.strided(keys.ring_position), entries, selected, hostile.packed(keys.position),
                            hostile.packed(keys.row), hostile.packed(keys.sink), out, keys.window, keys.ratio, splits, part_o, part_ml, visible, variant, done=done)  # fmt: skip
        case = f"{kind}, {variant}, {T} queries of {h} heads, {splits} splits{' merged in one launch' if merged else ''}"
        equal("sparse_attn", f"{case}: keys seen", visible[real], keys.visible)
        compare("sparse_attn", case, out[real], functools.partial(keys.compute, p_bf16=rounds), rounded=True)
        assert out[~real].isnan().all(), "a pad's output was written"
        assert done is None or not done.any(), "a counter was left behind"


# ---- hyper-connections ----


def mixing(world: World, T: int, lines: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """X, fn, base, scale with logits wide enough that comb is far from uniform and from symmetric."""
    n, D = world.c.hc_mult, world.c.hidden_size
    X = world.rows(T * n, D, seed=62).view(T, n, D)
    fn, base = world.normal(lines, n * D, seed=64, scale=1.5 * (n * D) ** -0.5), world.normal(lines, seed=65)
    return X, fn, base, 1 + 0.3 * world.normal(3 if lines > n else 1, seed=66)


def at_once(hostile: Hostile, T: int, D: int, variant: str) -> dict[str, Any]:
    """What the variants of hyper_connection_split.cu need beside; nothing for the others."""
    if variant not in AT_ONCE_VARIANTS:
        return {}
    return {"sums": hostile.poisoned((mix_scratch(T, D, variant),), F32), "counters": hostile.poisoned((T,), I32).zero_()}


@of("hc_pre")
def test_hc_pre(world, T, variant, device, hostile, compare):
    """Alone, and where a variant can, behind the half before and with the norm after it, in one call."""
    c = world.c
    n, D = c.hc_mult, c.hidden_size
    X, fn, base, scale = mixing(world, T, (2 + n) * n)
    weights = [hostile.packed(x) for x in (fn, base, scale)]
    y, before_post, before_comb, norm = world.rows(T, D, seed=72), world.normal(T, n, seed=74).abs(), world.normal(T, n, n, seed=75).abs(), world.normal(D, seed=76)
    for whole in (False, True) if variant in AT_ONCE_VARIANTS else (False,):
        held, pre, post, comb, a = hostile.strided(X), *(hostile.poisoned((T, *shape), dtype) for shape, dtype in (((n,), F32), ((n,), F32), ((n, n), F32), ((D,), BF16)))
        normed, extra = hostile.poisoned((T, D), BF16), at_once(hostile, T, D, variant)
        more: dict[str, Any] = {}
        if whole:  # the half before: its post and comb lie where this half's go
            streams, held = held, hostile.poisoned((T, n, D), BF16)
            post.copy_(before_post), comb.copy_(before_comb)
            more = {"before": (hostile.strided(y), streams), "norm": (hostile.packed(norm), normed)}
        with where_it_runs(world):
            ops.hc_pre(device, held, weights[0], weights[1], weights[2], pre, post, comb, a, c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, variant=variant, **extra, **more)
        case = f"{variant}, {T} x {n} x {D}{', between the half before and the norm' if whole else ''}"
        assert not any(name == "counters" and t.any() for name, t in extra.items()), "a counter was left behind"
        mixed = held.clone() if whole else X
        if whole:
            compare("hc_post", case, mixed, lambda sums: ref.hc_post(y.float(), X.float(), before_post, before_comb, sums), rounded=True, row_dims=2)
            compare("rms_norm", case, normed, lambda sums, a=a: ref.rms_norm(a.float(), norm, c.rms_norm_eps, sums), rounded=True)

        @functools.cache
        def every(sums: Sums, mixed: Tensor = mixed) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            dtype = F64 if sums.order == 0 else F32
            return ref.hc_pre(mixed.to(dtype), fn.to(dtype), base.to(dtype), scale.to(dtype), c.hc_sinkhorn_iters, c.hc_eps, c.rms_norm_eps, sums)

        for which, name, got, row_dims in ((1, "pre", pre, 1), (2, "post", post, 1), (3, "comb", comb, 2)):
            compare("hc_pre", f"{name}: {case}", got, lambda sums, which=which, every=every: every(sums)[which], rounded=False, row_dims=row_dims)
        compare("hc_a", case, a, lambda sums, every=every: every(sums)[0], rounded=True)


@of("hc_post")
def test_hc_post(world, T, variant, device, hostile, compare):
    c = world.c
    n, D = c.hc_mult, c.hidden_size
    X, y, post, comb = world.rows(T * n, D, seed=62).view(T, n, D), world.rows(T, D, seed=68), world.normal(T, n, seed=70).abs(), world.normal(T, n, n, seed=71).abs()
    out = hostile.poisoned((T, n, D), BF16)
    with where_it_runs(world):
        ops.hc_post(device, hostile.strided(y), hostile.strided(X), hostile.packed(post), hostile.packed(comb), out, variant=variant)
    compare("hc_post", f"{variant}, {T} x {n} x {D}", out, lambda sums: ref.hc_post(y.float(), X.float(), post, comb, sums), rounded=True, row_dims=2)


@of("hc_head")
def test_hc_head(world, T, variant, device, hostile, compare):
    c = world.c
    n, D = c.hc_mult, c.hidden_size
    X, fn, base, scale = mixing(world, T, n)
    a, extra = hostile.poisoned((T, D), BF16), at_once(hostile, T, D, variant)
    with where_it_runs(world):
        ops.hc_head(device, hostile.strided(X), hostile.packed(fn), hostile.packed(base), hostile.packed(scale), a, c.hc_eps, c.rms_norm_eps, variant=variant, **extra)
    compare("hc_head", f"{variant}, {T} x {n} x {D}", a, lambda sums: ref.hc_head(X.float(), fn, base, scale, c.hc_eps, c.rms_norm_eps, sums), rounded=True)


# ---- several operations in one launch: the bits of those they stand for, by the checks of test_operations_at_once.py ----

FEW = pytest.mark.parametrize("few", [1, 9], ids=lambda n: f"{n} tokens")  # a decode step


@FEW
def test_quant_rows_and_swiglu_quant_and_combine_rows(few, world, device, hostile):
    c = world.c
    k, width = c.num_experts_per_tok, c.moe_intermediate_size
    for rows, dim in ((few, c.hidden_size), (few, c.q_lora_rank), (few, c.o_groups * c.o_lora_rank), (few * k, width)):
        together.test_quant_rows_is_act_quant(rows, dim, device, hostile)
    together.test_swiglu_quant_is_swiglu_then_act_quant(few, k, width, device, hostile)
    together.test_combine_rows_is_moe_combine(few, k, c.hidden_size, device, hostile)


@FEW
@pytest.mark.parametrize("kind", ["window", "hca", "csa"])
def test_project_hidden(kind, few, world, device, hostile):
    c = world.c
    pooled = c.head_dim * (2 if kind == "csa" else 1)
    together.test_project_hidden_is_its_products(kind, c.hidden_size, c.q_lora_rank, c.head_dim, pooled, 2 * c.index_head_dim, c.index_n_heads, few, device, hostile)


@FEW
@pytest.mark.parametrize("indexed", [True, False], ids=["with an indexer", "without"])
def test_project_latents_and_query_heads(indexed, few, world, device, hostile):
    c = world.c
    hi, di = (c.index_n_heads, c.index_head_dim) if indexed else (0, 0)
    together.test_project_latents_is_its_products(c.q_lora_rank, c.num_attention_heads * c.head_dim, hi * di, few, device, hostile)
    together.test_query_heads_are_norms_rotations_and_hadamard(c.num_attention_heads, c.head_dim, c.qk_rope_head_dim, hi, di, few, device, hostile)


@FEW
def test_project_router_and_shared_and_down(few, world, device, hostile):
    """The router over all experts; products down over eight of them: what is made here is made on the host."""
    c = world.c
    D, E, k, width = c.hidden_size, c.n_routed_experts, c.num_experts_per_tok, c.moe_intermediate_size
    together.test_project_router_is_a_product_and_a_rounding(D, E, few, device, hostile)
    by = "hash" if few == 1 else "bias"
    together.test_project_shared_is_its_products_and_the_router(D, E, k, width, by, "sqrtsoftplus", few, device, hostile)
    together.test_project_down_is_both_products(8, k, width, D, few, device, hostile)


@pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "csa", "hca"])
def test_latents(ratio, world, device, hostile):
    c = world.c
    for start in ([3, 127, 6, 255, 4], [131], [LAST - 1_048_448]):  # the caches of this check hold 128 entries
        together.test_latents_are_norms_rotations_stores_and_compressors(start, c.q_lora_rank, c.head_dim, c.qk_rope_head_dim, c.index_head_dim, ratio, device, hostile)
