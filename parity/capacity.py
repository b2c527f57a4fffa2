"""From what a state really holds to verdicts: widths, bytes per token, footprint, steps, capacity. Limits: gates.BOUNDS.

Measured by probes/core/memory.py on production's own classes; closed formulas come from the formats' text, so that
production's arithmetic cannot agree with itself. Every function returns verdicts and the numbers for the report.
Tests: parity/unit/test_memory.py; in the audit: parity/test_memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from parity import gates
from probes.core import memory
from probes.core.records import Measurement, State, Verdict
from probes.core.wording import plural
from reference.config import InputError, ModelConfig

MILLION = memory.MILLION
PRESET_LENGTHS = (65_536, 262_144, MILLION)  # tokens
Result = tuple[list[Verdict], list[Measurement]]


def bounded(gate: str, point: str, value: float, compared: int, what: str, **facts: Any) -> Verdict:
    """A verdict of one row of gates.BOUNDS; `facts` are further fields of it."""
    row = gates.BOUNDS[gate]
    judged = gates.judge_bound(gate, value, compared, what)
    given: dict[str, Any] = {"component": row.component, "local": True} | facts
    return Verdict(
        gate=gate, point=point, mode="operation", state=judged.state, reason=judged.reason, metric=what, value=value, limit=judged.limit,
        spent=judged.spent, rows=compared, why=row.why, **given,
    )  # fmt: skip


def widths(model: Any, layer: int) -> Result:
    """Every buffer of a layer is as wide as what its first calls wrote into it. B148, and an indexer key of heads * dim, are red."""
    try:
        parts = memory.observed_widths(model, layer)
    except InputError as error:  # production's own door: buffers that do not fit are an error where a state is made
        refused = bounded("widths", f"memory.widths[layer {layer}]", 1.0, 1, "widths that disagree", layer=layer)
        return [_because(refused, str(error))], []
    wrong = [text for part in parts for text in part.disagreements()]
    component = "indexer" if any("indexer" in text for text in wrong) or not wrong else "KV quant"
    verdict = bounded("widths", f"memory.widths[layer {layer}]", float(len(wrong)), len(parts), "widths that disagree", layer=layer, component=component)
    if wrong:
        verdict = _because(verdict, "; ".join(wrong[:4]))
    values = [
        Measurement("memory.widths", layer=layer, values={
            **asdict(part), "off_bytes": part.held - part.wanted, "bf16": 2 * part.values,
            **({"wrong_width": part.wanted * model.config.index_n_heads} if "indexer key" in part.name else {}),
        })
        for part in parts
    ]  # fmt: skip
    return [verdict], values


def rate(state_class: type, config: ModelConfig, kind: str, where: str, prefill_chunk: int, device: torch.device) -> Result:
    """Bytes at three lengths or more lie on the closed formula's line, constant and slope. B173 is red."""
    if where == "checkpoint":
        lengths: Sequence[int] = memory.lengths_for(config, prefill_chunk, 8192)
    else:
        lengths, device = PRESET_LENGTHS, torch.device("meta")
    line, sizes = memory.kind_line(state_class, config, kind, lengths, prefill_chunk, device)
    cost = memory.expected(config, kind, prefill_chunk)
    off = max(abs(size - cost.at(length)) for size, length in zip(sizes, lengths, strict=True))
    verdict = bounded("memory.rate", f"memory.rate[{where} {kind}]", off, len(lengths), "bytes off the closed formula, largest of the lengths")
    if verdict.state is State.FAIL:
        verdict = _because(verdict, f"{kind}: {line.constant:.0f} B + {line.per_token:.6g} B a token measured, {cost.constant:.0f} B + {cost.per_token:.6g} B by the formula")
    values = {
        "of": where, "kind": kind, "lengths": list(lengths), "bytes": sizes, "constant_bytes": line.constant, "bytes_per_token": line.per_token,
        "off_the_line": line.off, "formula_constant": cost.constant, "formula_per_token": cost.per_token,
        "bf16_per_token": memory.expected(config, kind, prefill_chunk, "bf16").per_token,
        "wrong_width_per_token": memory.expected(config, kind, prefill_chunk, "wrong width").per_token,
    }  # fmt: skip
    return [verdict], [Measurement("memory.rate", values=values)]


def footprint(state_class: type, config: ModelConfig, where: str, prefill_chunk: int, device: torch.device) -> Result:
    """A million tokens of a published configuration: the closed formula within 1 %, and the promise of 15 GB."""
    measured = memory.footprint(state_class, config, MILLION, prefill_chunk, device)
    formula = memory.expected_total(config, MILLION, prefill_chunk)
    off = abs(measured.cache - formula) / formula
    verdicts = [
        bounded("memory.footprint", f"memory.footprint[{where}]", off, 1, "KV bytes at 1,048,576 tokens, share off the closed formula"),
        bounded("memory.promise", f"memory.promise[{where}]", float(measured.cache), 1, "KV bytes at 1,048,576 tokens"),
    ]
    values = {
        "of": where, "tokens": MILLION, "kv_gb": measured.cache / 1e9, "formula_gb": formula / 1e9, "off_share": off, "measured_by": measured.how,
        "buffers_gb": measured.buffers / 1e9, "bf16_gb": memory.expected_total(config, MILLION, prefill_chunk, "bf16") / 1e9,
        "wrong_width_gb": memory.expected_total(config, MILLION, prefill_chunk, "wrong width") / 1e9,
        "wrong_width": f"bf16, indexer key taken to be {config.index_n_heads} * {config.index_head_dim} wide",
    }  # fmt: skip
    return verdicts, [Measurement("memory.footprint", values=values)]


def reported(cache_module: Any, state_class: type, config: ModelConfig, where: str, prefill_chunk: int) -> Result:
    """What production says (its formula, its constant and rate) is what tensors of that size hold. B172, B175 are red."""
    meta = torch.device("meta")
    lengths = memory.lengths_for(config, prefill_chunk, 8192) if where == "checkpoint" else list(PRESET_LENGTHS)
    held = [memory.held_bytes(memory.empty_state(state_class, config, n, prefill_chunk, meta).cache) for n in lengths]
    said = [sum(cache_module.formula(config, 1, n, prefill_chunk).values()) for n in lengths]
    line = memory.fit_line(lengths, held)
    constant, per_token = cache_module.cost(config, prefill_chunk)
    by_rate = [constant + per_token * n for n in lengths]
    off = max(abs(a - b) for one in (said, by_rate) for a, b in zip(one, held, strict=True))
    off = max(off, abs(constant - line.constant)) if off < 1 else off  # below a byte it is the fit's own rounding
    verdict = bounded("memory.reported", f"memory.reported[{where}]", float(round(off)), len(lengths), "bytes between what is said and what is held")
    if verdict.state is State.FAIL:
        verdict = _because(
            verdict,
            f"at {lengths[-1]} tokens {held[-1]} B held, formula says {said[-1]}; {line.constant:.0f} B + {line.per_token:.6g} B a token held, "
            f"{constant} B + {per_token:.6g} said",
        )
    values = {
        "of": where, "lengths": lengths, "held": held, "formula": said, "constant_held": line.constant, "constant_said": constant,
        "per_token_held": line.per_token, "per_token_said": per_token, "total_over_length": held[0] / lengths[0],
        "off_bytes": off,
    }  # fmt: skip
    return [verdict], [Measurement("memory.reported", values=values)]


def slope(model: Any, steps: int, counting: memory.Counting, what: str, layer: int | None = None) -> Result:
    """Decode steps allocate nothing, and nothing grows: no tensor, no host buffer, no container. B166, B177, B178, X13 are red."""
    seen = memory.decode_slope(model, steps, counting)
    growth = (seen.state_growth, seen.live_growth, seen.host_growth, seen.element_growth)
    at: dict[str, Any] = {"phase": "decode", "layer": layer, "step_first": 0, "step_last": steps - 1}
    point = f"[{what}]"
    verdicts = [
        bounded("memory.allocations", f"memory.allocations{point}", float(seen.allocations), steps, "tensors allocated in decode steps", **at),
        bounded("memory.growth", f"memory.growth{point}", float(max(map(abs, growth))), steps, "bytes or container elements more after the last step", **at),
        bounded("memory.slope", f"memory.slope{point}", float(seen.spread), len(seen.samples), f"{seen.source}: largest less smallest sample, bytes", **at),
    ]
    if seen.operations and verdicts[0].state is State.FAIL:
        verdicts[0] = _because(verdicts[0], f"{plural(seen.allocations, 'tensor')}, {plural(seen.allocated_bytes, 'byte')} in {plural(steps, 'step')}, by {', '.join(seen.operations)}")
    if verdicts[1].state is State.FAIL:
        words = f"{growth[0]} B more of the state's tensors, {growth[1]} B of all tensors, {growth[2]} B on the host, {plural(growth[3], 'container element')}"
        verdicts[1] = _because(verdicts[1], words + (f"; {', '.join(seen.grew)}" if seen.grew else ""))
    values = {
        "of": what, "steps": steps, "allocations": seen.allocations, "allocated_bytes": seen.allocated_bytes, "state_growth_bytes": seen.state_growth,
        "live_growth_bytes": seen.live_growth, "host_growth_bytes": seen.host_growth, "element_growth": seen.element_growth, "sampled": seen.source, "every": seen.every, "samples": len(seen.samples),
        "first_mb": seen.samples[0] / 1e6, "last_mb": seen.samples[-1] / 1e6, "spread_mb": seen.spread / 1e6,
    }  # fmt: skip
    return verdicts, [Measurement("memory.slope", layer=layer, phase="decode", values=values)]


def transients(model: Any, layer: int, contexts: Sequence[int], counting: memory.Counting) -> Result:
    """A prefill allocates its logits alone, wherever it stands and whatever fits; capacity changes no bit. B177 is red."""
    seen = memory.prefill_transients(model, layer, contexts, counting)
    worst = max(seen, key=lambda one: (one.count, one.size_bytes))
    at: dict[str, Any] = {"phase": "prefill", "layer": layer}
    verdict = bounded("memory.allocations", f"memory.allocations[prefill, layer {layer}]", float(worst.count), len(seen), "tensors allocated in a prefill, logits aside", **at)
    if verdict.state is State.FAIL:
        verdict = _because(verdict, f"{plural(worst.count, 'tensor')}, {plural(worst.size_bytes, 'byte')} at capacity {worst.max_context}, position {worst.position}, by {', '.join(worst.operations)}")
    by_position: dict[int, set[str]] = {}
    for one in seen:
        by_position.setdefault(one.position, set()).add(one.logits)
    differing = sum(len(bits) > 1 for bits in by_position.values())
    same = bounded("memory.capacity", f"memory.capacity[{max(contexts)} tokens, layer {layer}]", float(differing), len(by_position), "positions whose logits depend on the capacity", **at)
    return [verdict, same], [Measurement("memory.transients", layer=layer, phase="prefill", values=asdict(one)) for one in seen]


def capacity(model: Any, layer: int) -> Result:
    """A state takes exactly its capacity; one token more is refused with the flag's name and changes nothing. B170 is red."""
    seen = memory.fill_to_capacity(model, layer)
    wrong = []
    if seen.failed:
        wrong.append(f"token {seen.taken + 1} of {seen.capacity} was refused: {seen.failed}")
    elif seen.taken != seen.capacity:
        wrong.append(f"{seen.taken} of {seen.capacity} tokens taken")
    for way, said in seen.refusals.items():
        if not said:
            wrong.append(f"{way}: a token past the capacity was taken")
        elif "--max-context" not in said:
            wrong.append(f"{way}: the refusal does not name --max-context: {said}")
    if seen.changed:
        wrong.append(f"a refused call changed {', '.join(seen.changed)}")
    verdict = bounded("memory.capacity", f"memory.capacity[layer {layer}]", float(len(wrong)), 1 + len(seen.refusals), "ways in which a full state misbehaves", layer=layer)
    if wrong:
        verdict = _because(verdict, "; ".join(wrong))
    return [verdict], [Measurement("memory.capacity", layer=layer, values={**asdict(seen)})]


def _because(verdict: Verdict, reason: str) -> Verdict:
    return replace(verdict, reason=reason)
