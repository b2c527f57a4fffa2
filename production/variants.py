"""Which variant of each kernel a phase runs: one plan for decode and one for prefill.

    model = production.load("checkpoints/tiny-dsv4", variants="fast")      # or "portable"; None: fast on sm_90a, else portable

A phase keeps its variants whatever the batch or the length, so that a token's result does not depend on what comes with it.
`portable` runs everywhere and is what the CPU device audits by default; `fast` is what a Hopper GPU runs. Fast variants that
need no Hopper instruction run on the CPU too. Tests: parity/unit/test_variants.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from production.launch import Device
from production.ops.at_once import fits_at_once
from production.ops.hyper_connection import AT_ONCE_VARIANTS, mixing_fits
from production.ops.indexer import FAST_DIM, PREPARED_HEADS, TILE_WARPS, prepared_heads
from production.ops.sparse_attn import FLASH, WGMMA, flash_fits, wgmma_fits
from reference.config import InputError, ModelConfig


@dataclass(frozen=True)
class Variants:
    """Variants of one phase, by operation; the names are those of the wrappers in production/ops. None: the wrapper's default.

    linear          of linear_bf16 and linear_fp8 | experts  of experts_up and experts_down
    indexer_score, topk, sparse_attn, hyper_connection   as the wrappers
    at_once         operations around the products share launches (production/ops/at_once.py): the same bits in fewer of them
    """

    linear: str
    experts: str
    indexer_score: str | None = None
    topk: str | None = None
    sparse_attn: str | None = None
    hyper_connection: str | None = None
    at_once: bool = False

    @property
    def mixes_at_once(self) -> bool:
        """Whether hc_post, hc_pre and the norm after it are one operation."""
        return self.hyper_connection in AT_ONCE_VARIANTS


@dataclass(frozen=True)
class Plan:
    """name, and the variants of both phases."""

    name: str
    decode: Variants
    prefill: Variants

    @property
    def p_bf16(self) -> bool:
        """Whether softmax weights are rounded to bf16 before they weigh the values: the rounding point p.bf16."""
        return any((FLASH | WGMMA).get(v.sparse_attn or "") == 1 for v in (self.decode, self.prefill))


PORTABLE = Plan("portable", decode=Variants(linear="thin", experts="thin"), prefill=Variants(linear="mma", experts="mma"))
FAST = Plan(
    "fast",
    decode=Variants(linear="stream", experts="stream", topk="stream", indexer_score="wgmma", sparse_attn="flash", hyper_connection="split", at_once=True),
    prefill=Variants(linear="wgmma", experts="wgmma", topk="stream", indexer_score="wgmma_tiles", sparse_attn="wgmma", hyper_connection="mma", at_once=True),
)
PLANS = {plan.name: plan for plan in (PORTABLE, FAST)}

# By operation, variants that only sm_90a has, and what a plan runs in their place on other devices.
HOPPER_ONLY = {
    "linear": {"wgmma": "tiles"},
    "experts": {"wgmma": "tiles"},
    "indexer_score": {"wgmma": "int8", "wgmma_16": "int8", "wgmma_tiles": "int8_tiles"},
    "sparse_attn": {"wgmma": "flash", "wgmma_p_bf16": "flash_p_bf16"},
}


def without_hopper(plan: Plan) -> Plan:
    """The plan with every variant that only sm_90a has replaced by that of HOPPER_ONLY."""

    def changed(variants: Variants) -> Variants:
        return replace(variants, **{op: names.get(getattr(variants, op), getattr(variants, op)) for op, names in HOPPER_ONLY.items()})

    return replace(plan, decode=changed(plan.decode), prefill=changed(plan.prefill))


def plan_of(name: str | None, device: Device) -> Plan:
    """The plan of that name; None takes the device's own. Off sm_90a without what only sm_90a has. Raises InputError."""
    if name is None:
        return FAST if device.arch == "sm_90a" else PORTABLE
    if name not in PLANS:
        raise InputError(f"--variants {name!r}: there are {', '.join(PLANS)}")
    return PLANS[name] if device.arch == "sm_90a" else without_hopper(PLANS[name])


def scoring(variants: Variants, heads: int, width: int) -> Variants:
    """The variants for index keys of `width` dims and so many heads: see `fitted`."""
    prepared = prepared_heads(heads) if width == FAST_DIM else None
    if prepared != PREPARED_HEADS[-1] and variants.indexer_score in HOPPER_ONLY["indexer_score"]:
        variants = replace(variants, indexer_score=HOPPER_ONLY["indexer_score"][variants.indexer_score])
    if prepared is None and variants.indexer_score in ("int8", *TILE_WARPS):
        variants = replace(variants, indexer_score="entries")
    return variants


def fitted(plan: Plan, config: ModelConfig) -> Plan:
    """The plan for a model of these shapes: scores of other keys than those of 128 dims, or of too many heads, by `entries`, of 16
    heads and fewer by `int8` where `wgmma` is named; attention of heads that `wgmma` is not built for by `flash`, of those that `flash`
    is not built for, and mixing of other streams than four of a multiple of 256, by the wrapper's own choice; rows that
    are not of 16-byte pieces, or too wide for one warp, an operation a launch.
    """
    flash = flash_fits(config.head_dim, config.qk_rope_head_dim)
    wgmma = wgmma_fits(config.head_dim, config.qk_rope_head_dim)
    mixing = mixing_fits(config.hc_mult, config.hidden_size, config.hc_eps)
    rows = fits_at_once(
        config.hidden_size, config.q_lora_rank, config.head_dim, config.index_head_dim, config.moe_intermediate_size, config.n_routed_experts,
        config.num_experts_per_tok,
    )  # fmt: skip

    def fit(variants: Variants) -> Variants:
        variants = scoring(variants, config.index_n_heads, config.index_head_dim)
        if not wgmma and variants.sparse_attn in WGMMA:
            variants = replace(variants, sparse_attn=HOPPER_ONLY["sparse_attn"][variants.sparse_attn or ""])
        if not flash and variants.sparse_attn in FLASH:
            variants = replace(variants, sparse_attn=None)
        if not mixing and variants.mixes_at_once:
            variants = replace(variants, hyper_connection=None)
        if not rows:
            variants = replace(variants, at_once=False)
        return variants

    return replace(plan, decode=fit(plan.decode), prefill=fit(plan.prefill))


ROUNDING = {"flash": "flash_p_bf16", "wgmma": "wgmma_p_bf16"}  # attention variants, and the same with p rounded


def with_p_bf16(plan: Plan) -> Plan:
    """The plan with softmax weights rounded to bf16 in both phases. Raises InputError where a phase has no such variant."""
    for phase, variants in (("decode", plan.decode), ("prefill", plan.prefill)):
        if variants.sparse_attn not in ROUNDING.keys() | ROUNDING.values():
            raise InputError(f"p_bf16: {phase} attention of the {plan.name} variants, {variants.sparse_attn or 'the default'}, keeps p exact; flash can round it")

    def rounding(variants: Variants) -> Variants:
        return replace(variants, sparse_attn=ROUNDING.get(variants.sparse_attn or "", variants.sparse_attn))

    return replace(plan, decode=rounding(plan.decode), prefill=rounding(plan.prefill))
