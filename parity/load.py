"""Load audit: every parameter filled once, every tensor consumed or listed, dtype, range, and bits after repacking.

Measured by probes/core/loading.py; here it becomes verdicts of gates.BOUNDS["load"], with the component of the first
parameter that differs. Tests: parity/unit/test_load.py; in the audit: parity/test_load.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from parity.capacity import bounded
from probes.core.loading import Comparison, books
from probes.core.records import Measurement, State, Verdict
from reference.checkpoint import Checkpoint

# Names in open.md's words; the first that is part of a name wins.
COMPONENTS = (
    ("hc_head", "checkpoint loading"),
    ("hc_", "mHC"),
    ("attn_sink", "sink"),
    ("ffn.gate", "MoE router"),
    ("ffn.experts", "experts quant"),
    ("compressor", "compressor"),
    ("indexer", "indexer"),
    ("", "checkpoint loading"),
)


def component_of(name: str) -> str:
    """The part of the stack that a tensor belongs to."""
    return next(component for part, component in COMPONENTS if part in name)


def judge_parameters(found: Comparison, where: str, layer: int | None) -> tuple[Verdict, Measurement]:
    """One verdict for a set of parameters; its component is that of the first one that differs."""
    first = found.differences[0] if found.differences else None
    verdict = bounded(
        "load", f"load.{where}" if first is None else f"load.{first.name}", float(len(found.differences)), found.tensors + len(found.differences),
        "parameters that are not what the checkpoint stores", layer=layer, component=component_of(first.name) if first else "checkpoint loading",
    )  # fmt: skip
    if first is not None:
        verdict = replace(
            verdict, reason=f"{len(found.differences)} of {found.tensors} differ, first {first.name}: {first.what}" + (f", first at {first.element}" if first.element else ""),
            where=first.element, element=first.element, got=first.got, want=first.want,
        )  # fmt: skip
    values = {
        "of": where, "tensors": found.tensors, "megabytes": found.size_bytes / 1e6, "least_scale": found.least_scale if found.largest_scale else None, "largest_scale": found.largest_scale or None,
        "largest_value": found.largest_value, "checksum_held": f"{found.held_checksum:08x}", "checksum_stored": f"{found.stored_checksum:08x}", "different": len(found.differences),
    }  # fmt: skip
    return verdict, Measurement("load", layer=layer, values=values)


def judge_books(model: Any, checkpoint: Checkpoint) -> tuple[Verdict, Measurement]:
    """Every parameter filled once and every tensor consumed once or listed as ignored: by the blocks and by the loader's own list."""
    filled, wrong = books(model, checkpoint)
    verdict = bounded("load", "load.books", float(len(wrong)), filled, "tensors not filled or consumed exactly once")
    if wrong:
        verdict = replace(verdict, reason=f"{len(wrong)}: " + "; ".join(wrong[:4]), component=component_of(wrong[0].split(":")[0]))
    values = {"of": "books", "tensors": filled, "in_checkpoint": len(checkpoint.specs), "ignored": len(checkpoint.ignored), "wrong": len(wrong)}
    return verdict, Measurement("load.books", values=values)


def not_loaded(message: str) -> Verdict:
    """Production could not be loaded. Without a device that is not run; else it is a failure of the load."""
    verdict = bounded("load", "load", 1.0, 1, "production loads")
    if message.split(": ", 1)[-1].startswith("RuntimeError: no device"):
        return replace(verdict, state=State.NOT_RUN, value=None, spent=None, reason=message)
    return replace(verdict, reason=message, rows=0)
