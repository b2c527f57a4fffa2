"""What a run made the model do, counted from recorded values, and which checks judge what the prompt did not reach.

A count is what taps, launches and verdicts of this run showed, over judged layers. A cover is a check of single operations
whose inputs reach the mechanism whatever the prompt is; it counts only if this run judged it. A mechanism with neither is named
in the verdict. Tests: parity/unit/test_mechanisms.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from parity import witness
from parity.audit import Audit
from probes.core.records import Mechanism, Record, State, Verdict
from probes.core.rows import absent_rows
from probes.core.wording import plural

SPLIT_ABOVE = {"sparse_attn": 64, "sparse_attn_decode": 128, "sparse_attn_wgmma": 128}  # keys of one decode step that one softmax takes, by source of the kernel
MERGE = "sparse_attn_combine"  # the kernel that merges split softmaxes
SINK_SHARE = 0.01  # of the softmax: less could be missing without a trace in attn.core
LEAST_AMAX = 1e-4  # a block of e4m3 codes whose values are smaller has the smallest scale there is


@dataclass(frozen=True)
class Cover:
    """Checks of one operation: those whose case holds `case` (empty: every case)."""

    operation: str
    case: str = ""

    def judged(self, verdicts: Sequence[Verdict]) -> int:
        """How many of them this run judged."""
        return sum(v.state is not State.NOT_RUN and v.rows > 0 and self.fits(v.point) for v in verdicts)

    def fits(self, point: str) -> bool:
        operation, bracket, case = point.partition("[")
        return bracket == "[" and operation == self.operation and self.case in case

    def words(self, checks: int) -> str:
        cases = plural(checks, "check")
        return f"{self.operation} ({self.case}: {cases})" if self.case else f"{self.operation} ({cases})"


WINDOW = (Cover("store_window", "positions"), Cover("sparse_attn", "window only"), Cover("sparse_attn", "positions 1048567"))
CSA_ENTRY = (Cover("compressor", "width 128, after call"), Cover("sparse_attn", "CSA list"))
HCA_ENTRY = (Cover("compressor", "5 calls"), Cover("sparse_attn", "HCA all"))
DISCARDS = (Cover("topk", "random"), Cover("topk", "E=262144 k=1024"), Cover("recall", "k=512"))
# Inputs of these checks reach the mechanism by construction; their own docstrings say how.
COVERS: dict[str, tuple[Cover, ...]] = {
    "window wraps, prefill": WINDOW,
    "window wraps, decode": WINDOW,
    "CSA entry finished in prefill": CSA_ENTRY,
    "CSA entry finished in decode": (Cover("compressor", "which entry a step completes"), Cover("compressor", "decode = prefill")),
    "HCA entry finished in prefill": HCA_ENTRY,
    "HCA entry finished in decode": (Cover("compressor", "border at 128 and at 256"),),
    "open CSA group carried into decode": (Cover("compressor", "which entry a step completes"), Cover("compressor", "decode = prefill")),
    "open HCA group carried into decode": (Cover("compressor", "border at 128 and at 256"),),
    "indexer discards entries, prefill": DISCARDS,
    "indexer discards entries, decode": DISCARDS,
    "hash-routed layers": (Cover("gate_choose", "hash"), Cover("moe", "hash")),
    "score-routed layers": (Cover("gate_choose", "score"), Cover("moe", "score")),
    "keys split in decode": (Cover("sparse_attn", "2 splits"), Cover("sparse_attn", "7 splits"), Cover("sparse_attn", "splits for")),
    "sink takes its share": (Cover("sparse_attn", "sink="), Cover("sparse_attn", "one vector")),
    "extreme scales": (Cover("store_window", "every byte"), Cover("store_entries", "every byte"), Cover("act_quant", "group"), Cover("experts_up", "scale byte")),
    "near-ties": (Cover("topk", "ties"), Cover("recall", "ties"), Cover("gate_choose", "x 8, k 2")),
    "batch rows of unequal length": (Cover("batching", "uneven batch"), Cover("token_positions"), Cover("compressor", "after call")),
    "SwiGLU clamp": (Cover("swiglu", "routed"), Cover("swiglu", "shared"), Cover("shared_experts"), Cover("moe")),
}  # fmt: skip


def mechanisms(audit: Audit, records: Sequence[Record]) -> list[Mechanism]:
    """Every mechanism that the judged layers have, with its count and its covers, from this run's values, launches and verdicts."""
    verdicts = [record for record in records if isinstance(record, Verdict)]
    there = {layer: (audit.config.kind(layer), audit.config.is_hash(layer)) for layer in audit.plan.layers}
    counts = {name: count for name, count in ({name: (0, "") for name in COVERS} | _counted(audit, verdicts)).items() if applies(name, set(there.values()), hasattr(audit.production, "kernels"))}
    return [Mechanism(name, count, meaning, _covered(name, verdicts)) for name, (count, meaning) in counts.items()]


def unexercised(records: Sequence[Record]) -> list[str]:
    """What stands in the verdict: mechanisms that neither the prompt nor a check of this run reached, in one line."""
    names = [record.name for record in records if isinstance(record, Mechanism) and not record.count and not record.covered_by]
    return [f"not exercised, and reached by no check of this run: {'; '.join(names)}"] if names else []


def applies(name: str, layers: set[tuple[str, bool]], launches: bool = True) -> bool:
    """Whether judged layers (kind, routed by hash) have a mechanism at all. launches  production says which kernels it launched."""
    kinds = {kind for kind, _ in layers}
    if "CSA" in name or "indexer" in name:
        return "csa" in kinds
    if "HCA" in name:
        return "hca" in kinds
    if name in ("hash-routed layers", "score-routed layers"):
        return (name == "hash-routed layers") in {hashed for _, hashed in layers}
    return launches or name != "keys split in decode"


def _covered(name: str, verdicts: Sequence[Verdict]) -> str:
    found = [(cover, cover.judged(verdicts)) for cover in COVERS[name]]
    return ", ".join(cover.words(checks) for cover, checks in found if checks)


def _counted(audit: Audit, verdicts: Sequence[Verdict]) -> dict[str, tuple[int, str]]:
    config, layers = audit.config, audit.plan.layers
    found: dict[str, tuple[int, str]] = {}
    for phase in ("prefill", "decode"):
        found[f"window wraps, {phase}"] = (
            max((_wrapped(audit, layer, phase) for layer in layers), default=0), "queries whose window no longer starts at token 0",
        )  # fmt: skip
    for kind, ratio in (("csa", 4), ("hca", 128)):
        of_kind = [layer for layer in layers if config.kind(layer) == kind]
        done = {phase: sum(int(_completed(audit, layer, phase).sum()) for layer in of_kind) for phase in ("prefill", "decode")}
        found[f"{kind.upper()} entry finished in prefill"] = (done["prefill"], f"groups of {ratio} completed by the prompt")
        found[f"{kind.upper()} entry finished in decode"] = (done["decode"], f"groups of {ratio} completed while decoding")
        carried = sum(int((_completed(audit, layer, "decode") & _opened_before(audit, ratio)).sum()) for layer in of_kind)
        found[f"open {kind.upper()} group carried into decode"] = (carried, f"groups of {ratio} that the prompt began and decode completed")
    csa = [layer for layer in layers if config.kind(layer) == "csa"]
    for phase in ("prefill", "decode"):
        found[f"indexer discards entries, {phase}"] = (
            sum(_discarding(audit, layer, phase) for layer in csa), "queries that chose fewer entries than were complete: recall over the run is judged on no others",
        )  # fmt: skip
    routed = [layer for layer in layers if _seen(audit, f"layers.{layer}.ffn.experts", "prefill")]
    found["hash-routed layers"] = (sum(config.is_hash(layer) for layer in routed), "layers whose experts come from tid2eid")
    found["score-routed layers"] = (sum(not config.is_hash(layer) for layer in routed), "layers whose experts come from the gate")
    found["keys split in decode"] = (_split(audit), f"decode queries of more keys than one softmax takes ({' or '.join(str(n) for n in SPLIT_ABOVE.values())}), where production launched {MERGE}")
    shares = [_sink_takes(audit, layer, phase) for layer in layers for phase in ("prefill", "decode")]
    found["sink takes its share"] = (sum(shares), f"queries and heads whose sink takes over {100 * SINK_SHARE:g} % of the attention")
    found["extreme scales"] = (sum(_smallest(audit, layer, phase) for layer in layers for phase in ("prefill", "decode")), f"stored blocks of 64 values below {LEAST_AMAX:g}, where the scale is the smallest there is")
    found["near-ties"] = (sum(v.near_ties for v in verdicts), "choices that differ within the score noise")
    found["batch rows of unequal length"] = (len(set(audit.lengths.tolist())) - 1, "further lengths in the batch")
    found["SwiGLU clamp"] = (audit.clamped, "gate or up values beyond swiglu_limit")
    return found


# ---- what production showed ----


def _steps(audit: Audit, phase: str) -> tuple[int, int] | None:
    return None if phase == "prefill" else (0, audit.plan.steps - 1)


def _seen(audit: Audit, point: str, phase: str, who: str = "production") -> bool:
    expected = 1 if phase == "prefill" else audit.plan.steps
    return 0 < expected <= audit.fired(who, point, phase, _steps(audit, phase))


def _value(audit: Audit, layer: int, name: str, phase: str) -> Tensor | None:
    """A point over a phase [b, s, ...]; None where its tap did not fire in every pass."""
    point = f"layers.{layer}.{name}"
    return audit.values("production", point, phase, _steps(audit, phase)) if _seen(audit, point, phase) else None


def _wrapped(audit: Audit, layer: int, phase: str) -> int:
    visible = _value(audit, layer, "attn.visible", phase)
    if visible is None:
        return 0
    window = visible[..., : audit.config.sliding_window]
    first = window.masked_fill(window < 0, torch.iinfo(window.dtype).max).amin(-1)
    return int(((first > 0) & (window >= 0).any(-1) & audit.valid_over(phase, _steps(audit, phase))).sum())


def _completed(audit: Audit, layer: int, phase: str) -> Tensor:
    """[b, s] queries at which production wrote a compressed entry."""
    entries = _value(audit, layer, "attn.compressor", phase)
    if entries is None:
        return torch.zeros(audit.batch, 0 if phase == "prefill" else audit.plan.steps, dtype=torch.bool)
    return ~absent_rows(entries, 1) & audit.valid_over(phase, _steps(audit, phase))


def _opened_before(audit: Audit, ratio: int) -> Tensor:
    """[b, steps] decode queries whose group of `ratio` tokens began in the prompt."""
    position = audit.lengths[:, None] + torch.arange(audit.plan.steps)[None]
    return position // ratio * ratio < audit.lengths[:, None]


def _discarding(audit: Audit, layer: int, phase: str) -> int:
    score, selected = (_value(audit, layer, name, phase) for name in ("attn.indexer.score", "attn.selected"))
    if score is None or selected is None:
        return 0
    return int((((selected >= 0).sum(-1) < score.isfinite().sum(-1)) & audit.valid_over(phase, _steps(audit, phase))).sum())


def _split(audit: Audit) -> int:
    launched: Callable[[], list[tuple[str, str, str, str, int]]] = getattr(audit.production, "kernels", list)
    above = max((SPLIT_ABOVE[source] for source, kernel, _, _, launches in launched() if kernel == MERGE and launches), default=0)
    if not above:
        return 0
    shown = [_value(audit, layer, "attn.visible", "decode") for layer in audit.plan.layers]
    return max((int(((visible >= 0).sum(-1) > above).sum()) for visible in shown if visible is not None), default=0)


def _sink_takes(audit: Audit, layer: int, phase: str) -> int:
    share = witness.sink_share(audit, layer, phase)
    return 0 if share is None else int((share[audit.valid_over(phase, _steps(audit, phase))] > SINK_SHARE).sum())


def _smallest(audit: Audit, layer: int, phase: str) -> int:
    """Blocks of the window's and the compressed rows' e4m3 part; a part that is no multiple of 64 ends in a short block."""
    count, plain = 0, audit.config.head_dim - audit.config.qk_rope_head_dim
    for name in ("attn.kv", "attn.compressor"):
        value = _value(audit, layer, name, phase)
        if value is not None:
            rows = value[audit.valid_over(phase, _steps(audit, phase))]
            rows = rows[~rows.isnan().any(-1), :plain]
            count += sum(int((block.abs().amax(-1) < LEAST_AMAX).sum()) for block in rows.split(64, -1))
    return count
