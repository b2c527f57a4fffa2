"""Failures beside the first divergence: which of them it explains, as far as the records say.

    Behind(verdicts, first).of(index)    `behind`, `same` or nothing, and the reason in words

Same: a gate of the first divergence's component. Behind: in a layer run alone, what is computed from such a point, no earlier than it; in
the chain, what is right on the reference's input and comes later. Nothing is said of the rest: it may have a cause of its own.
Tests: parity/unit/test_ci.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from probes.core.records import Divergence, State, Verdict
from reference.points import LAYER_ROWS, MODEL_POINTS
from reports import heat, words

ALONE = ("isolated", "device")  # modes that give a layer the reference's input
# What each point of a layer is computed from, within the layer; a part of the state is what its point wrote.
READS: dict[str, tuple[str, ...]] = {
    "hc_attn.pre": (), "hc_attn.post": (), "hc_attn.comb": (), "hc_attn.a": ("hc_attn.pre",),
    "attn.norm": ("hc_attn.a",), "attn.q_norm": ("attn.norm",), "attn.q": ("attn.q_norm",), "attn.kv": ("attn.norm",),
    "state.length": (), "state.kv": ("attn.kv",),
    "attn.compressor": ("attn.norm",), "state.compressor.entries": ("attn.compressor",), "state.compressor.kv": ("attn.norm",), "state.compressor.gate": ("attn.norm",),
    "attn.indexer.q": ("attn.q_norm",), "attn.indexer.weights": ("attn.norm",), "attn.indexer.compressor": ("attn.norm",),
    "state.indexer.compressor.entries": ("attn.indexer.compressor",), "state.indexer.compressor.kv": ("attn.norm",), "state.indexer.compressor.gate": ("attn.norm",),
    "attn.indexer.score": ("attn.indexer.q", "attn.indexer.weights", "attn.indexer.compressor"), "attn.selected": ("attn.indexer.score",), "attn.visible": ("attn.selected",),
    "attn.core": ("attn.q", "attn.kv", "attn.compressor", "attn.visible"), "attn.o": ("attn.core",), "attn.wo_a": ("attn.o",), "attn.out": ("attn.wo_a",),
    "hc_attn.X": ("hc_attn.post", "hc_attn.comb", "attn.out"),
    "hc_ffn.pre": ("hc_attn.X",), "hc_ffn.post": ("hc_attn.X",), "hc_ffn.comb": ("hc_attn.X",), "hc_ffn.a": ("hc_attn.X", "hc_ffn.pre"),
    "ffn.norm": ("hc_ffn.a",), "ffn.gate": ("ffn.norm",), "ffn.experts": ("ffn.gate",), "ffn.weights": ("ffn.gate", "ffn.experts"),
    "ffn.routed": ("ffn.norm", "ffn.experts", "ffn.weights"), "ffn.shared_experts": ("ffn.norm",), "ffn.out": ("ffn.routed", "ffn.shared_experts"),
    "hc_ffn.X": ("hc_attn.X", "hc_ffn.post", "hc_ffn.comb", "ffn.out"),
}  # fmt: skip


def computed_from(name: str) -> frozenset[str]:
    """Every point of the layer that this one is computed from, directly or not."""
    direct = READS.get(name, ())
    return frozenset(direct).union(*(computed_from(one) for one in direct))


FROM = {name: computed_from(name) for name in READS}


class Behind:
    """The failures of a run beside its first divergence. gate  the verdict that the first divergence stands for, None: none does."""

    def __init__(self, verdicts: Sequence[Verdict], first: Divergence | None, gate: Verdict | None) -> None:
        self.verdicts, self.first, self.gate = verdicts, first, gate
        self.alone: dict[tuple[str, str | None], list[Verdict]] = {}
        self.roots: dict[tuple[int | None, str | None], list[Verdict]] = {}
        for v in verdicts:
            if v.mode in ALONE:
                self.alone.setdefault((v.point, v.phase), []).append(v)
                if v.state is State.FAIL and self._same(v):
                    self.roots.setdefault((v.layer, v.phase), []).append(v)

    def of(self, index: int) -> tuple[str, str]:
        """What a failure has to do with the first divergence: behind, same or nothing; and why, in words."""
        v = self.verdicts[index]
        if self.first is None or self.gate is None or v is self.gate:
            return "", ""
        if self._same(v):
            return "same", "the component of the first divergence: probably the same cause"
        if v.mode in ALONE:
            return self._alone(v)
        return self._chain(v) if v.mode == "free" else ("", "")

    def _same(self, v: Verdict) -> bool:
        return self.first is not None and bool(v.component) and v.component == self.first.component

    def _alone(self, v: Verdict) -> tuple[str, str]:
        name = heat.short_name(v.point, v.layer)
        for root in self.roots.get((v.layer, v.phase), ()):
            if heat.short_name(root.point, v.layer) in FROM.get(name, ()) and _from_step(root) <= _from_step(v):
                return "behind", f"computed from {root.point}, which is red: probably its consequence"
        return "", ""

    def _chain(self, v: Verdict) -> tuple[str, str]:
        if not self._later(v):
            return "", ""
        alone = self.alone.get((v.point, v.phase), [])
        if not alone:
            return "behind", "later in the chain than the first divergence: probably its consequence"
        if all(one.state is State.PASS for one in alone):
            return "behind", "right on the reference's input, and later in the chain than the first divergence: probably its consequence"
        red = [one for one in alone if one.state is State.FAIL]
        return self._alone(red[0]) if red else ("", "")

    def _later(self, v: Verdict) -> bool:
        """Later than the first divergence in phase, or no earlier in step and later in dataflow."""
        assert self.gate is not None
        phases = [heat.PHASES.index(one.phase) if one.phase in heat.PHASES else -1 for one in (self.gate, v)]
        if -1 in phases or phases[0] != phases[1]:
            return -1 not in phases and phases[0] < phases[1]
        return _from_step(self.gate) <= _from_step(v) and _flow(self.gate) < _flow(v)


def _from_step(v: Verdict) -> int:
    step = words.first_step(v)
    return v.step_first or 0 if step is None else step


def _flow(v: Verdict) -> tuple[int, int]:
    """Where a point stands in the dataflow: the embedding, the layers, the head."""
    name = heat.short_name(v.point, v.layer)
    if v.layer is not None:
        return (v.layer, LAYER_ROWS.index(name) if name in LAYER_ROWS else len(LAYER_ROWS))
    model = [spec.name for spec in MODEL_POINTS]
    return (-1, 0) if name == "embed" else (1 << 30, model.index(name) if name in model else len(model))
