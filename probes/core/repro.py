"""A repro: one operation that went wrong, in one file, so that it can be run again without the model.

The file holds the kernel launches that made a point's value (source text, grid, block, every argument), the memory they read
and what they left behind, the reference's value, and what the gate said; and, where it is not too large, the layer's weights,
input and state, so that today's code of the layer can be run on them. parity/repro.py writes it, probes/replay.py runs it.

    repro = Repro.load(Path("repro.safetensors")); repro.facts["point"]; repro.launches[0].kernel

Memory: arguments are views into numbered regions; bytes a launch needs and no recorded launch has made are tensors of the
file. No model is named here. Tests: parity/unit/test_repro.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from probes.core.rows import absent_rows, least_size, row_errors, rows_of
from probes.core.trace import grow_last
from reference.config import InputError
from reference.points import INDICES, SCORES, spec_of

KIND, SCHEMA = "dsv4-repro", 1
ALIGN = 64  # bytes; a region starts as far off this as the memory it was copied from


@dataclass(frozen=True)
class View:
    """A tensor argument: where it lies in a region, in bytes, and its shape and strides in elements."""

    region: int
    offset: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One launch. args: views, numbers or None, in the order of `names`; writes: numbers of the arguments it may write."""

    source: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_bytes: int
    build: str
    names: tuple[str, ...]
    args: tuple[View | int | float | None, ...]
    writes: tuple[int, ...]


@dataclass
class Repro:
    """See the module's text.

    facts     point, phase, step, layer, mode, component, gate (its verdict), policy, device, arch, checkpoint, command, notes
    regions   bytes of each; launches  in order
    value     how the point's value lies in the regions: {"how": "direct" | "window" | "entries" | "index_keys", "views": {...}}
    sources   texts of the kernel files, headers included
    layer     config, shapes of all weights and numbers for running today's code of the layer; empty when left out
    tensors   "set|j|k" bytes put under argument k before launch j, "after|j|k" bytes it left, "want", "got", "positions",
              "valid"; "layer|...", "state|...", "choice|...", "weight|..." for the layer
    """

    facts: dict[str, Any]
    regions: list[int]
    launches: list[Step]
    value: dict[str, Any]
    sources: dict[str, str]
    layer: dict[str, Any]
    tensors: dict[str, Tensor]

    def save(self, path: Path) -> Path:
        """Write the file; whole or not at all."""
        listed = {
            "kind": KIND, "schema": SCHEMA, "facts": self.facts, "regions": self.regions, "launches": [asdict(one) for one in self.launches],
            "value": {**self.value, "views": {name: asdict(view) for name, view in self.value["views"].items()}}, "sources": self.sources, "layer": self.layer,
        }  # fmt: skip
        building = path.with_name(f".{path.name}.new")
        try:
            # clone: an alias of another tensor of the file is refused
            held = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
            save_file(held, building, metadata={"repro": json.dumps(listed)})
            building.chmod(0o644)
            building.replace(path)
        finally:
            building.unlink(missing_ok=True)
        return path

    @classmethod
    def load(cls, path: Path) -> Repro:
        """Read a file strictly. Raises InputError."""
        if not path.is_file():
            raise InputError(f"{path}: no such file")
        try:
            with safe_open(str(path), framework="pt", device="cpu") as file:
                meta = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
        except (SafetensorError, OSError, ValueError) as error:
            raise InputError(f"{path}: no safetensors file, or cut off: {str(error).splitlines()[0]}") from None
        try:
            listed = json.loads(meta["repro"])
            if listed["kind"] != KIND or listed["schema"] != SCHEMA:
                raise InputError(f"{path}: schema {listed.get('schema')!r} of {listed.get('kind')!r}; this version reads {SCHEMA} of {KIND!r}")
            value = {**listed["value"], "views": {name: _view(view) for name, view in listed["value"]["views"].items()}}
            return cls(listed["facts"], listed["regions"], [_step(one) for one in listed["launches"]], value, listed["sources"], listed["layer"], tensors)
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(f"{path}: no repro: {type(error).__name__}: {error}") from None

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


def _view(listed: Mapping[str, Any]) -> View:
    return View(listed["region"], listed["offset"], listed["dtype"], tuple(listed["shape"]), tuple(listed["stride"]))


def _step(listed: Mapping[str, Any]) -> Step:
    args = tuple(_view(arg) if isinstance(arg, dict) else arg for arg in listed["args"])
    return Step(
        listed["source"], listed["kernel"], tuple(listed["grid"]), tuple(listed["block"]), listed["shared_bytes"], listed["build"],
        tuple(listed["names"]), args, tuple(listed["writes"]),
    )  # fmt: skip


# ---- memory ----


def extent(tensor: Tensor) -> tuple[int, int]:
    """First byte of a tensor's elements and the one after the last, as addresses."""
    if not tensor.numel():
        return tensor.data_ptr(), tensor.data_ptr()
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def bytes_of(tensor: Tensor) -> Tensor:
    """A CPU copy of all bytes from a tensor's first to its last element, gaps between rows included."""
    first, end = extent(tensor)
    start = first - tensor.untyped_storage().data_ptr()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage(), start, (end - first,), (1,))
    return raw.cpu().clone()


class Memory:
    """The regions of a repro on a device. What no launch and no recorded byte fills is 0xFF: NaN in every format but e2m1."""

    def __init__(self, regions: list[int], device: torch.device) -> None:
        self.regions = [torch.full((size + ALIGN,), 0xFF, dtype=torch.uint8, device=device) for size in regions]

    def tensor(self, view: View) -> Tensor:
        """The live tensor of a view."""
        region, dtype = self.regions[view.region], getattr(torch, view.dtype)
        size = torch.empty(0, dtype=dtype).element_size()
        made: Tensor = torch.empty(0, dtype=dtype, device=region.device)
        return made.set_(region.untyped_storage(), view.offset // size, view.shape, view.stride)

    def put(self, view: View, raw: Tensor) -> None:
        """Recorded bytes under a view."""
        self.regions[view.region][view.offset : view.offset + raw.numel()] = raw.to(self.regions[view.region].device)


# ---- a value against the reference's ----


def compare(point: str, mode: str, got: Tensor, want: Tensor, valid: Tensor, unit: float = 0.0) -> dict[str, Any]:
    """How far a value [b, s, ...] is from the reference's, over the valid queries [b, s]; no opinion. unit: typical score.

    Sets: `different` queries and the first of them. Numbers: `error` worst row rel-L2, `norm` worst |norm ratio - 1|,
    `median` of the rows, worst element with both values, and `masks` where only one side is finite.
    """
    spec = spec_of(point)
    if spec.kind == INDICES:
        width = max(got.shape[-1], want.shape[-1])
        g, w = (grow_last(value.long(), width, -1).sort(-1).values for value in (got, want))
        different = (g != w).any(-1) & valid
        found: dict[str, Any] = {"what": "queries with another set", "error": float(different.sum()), "rows": int(valid.sum())}
        if different.any():
            b, s = different.nonzero()[0].tolist()
            have, due = set(g[b, s].tolist()) - {-1}, set(w[b, s].tolist()) - {-1}
            found |= {"where": [b, s], "missing": sorted(due - have)[:16], "extra": sorted(have - due)[:16]}
        return found
    if spec.kind == SCORES:
        width = max(got.shape[-1], want.shape[-1])
        got, want = grow_last(got, width, -math.inf), grow_last(want, width, -math.inf)
    if got.shape != want.shape:
        raise RuntimeError(f"{point}: shape {list(got.shape)}, the reference has {list(want.shape)}")
    use = valid.reshape(*valid.shape, *[1] * (got.dim() - 2)).expand(got.shape)
    masks = int(((got.isfinite() != want.isfinite()) & use).sum())
    least = None
    if spec.kind == SCORES:
        seen = want.isfinite() & use
        least = least_size(unit, seen)
        got, want = got.masked_fill(~seen, 0.0), want.masked_fill(~seen, 0.0)
    dims = rows_of(spec, mode, want.dim())
    error, norm = row_errors(got, want, dims, least)
    rows = valid.reshape(*valid.shape, *[1] * (error.dim() - 2)).expand(error.shape) & ~(absent_rows(want, dims) & absent_rows(got, dims))
    found = {"what": "worst row rel-L2", "masks": masks, "rows": int(rows.sum())}
    if not rows.any():
        return found | {"error": 0.0 if not masks else math.inf}
    ranked = torch.where(rows, error.nan_to_num(math.inf), -1.0)
    where = [int(i) for i in torch.unravel_index(ranked.argmax(), error.shape)]
    g, w = got[tuple(where)].double(), want[tuple(where)].double()
    gap = (g - w).abs().nan_to_num(math.inf)
    inner = [int(i) for i in torch.unravel_index(gap.argmax(), gap.shape)] if gap.dim() else []
    return found | {
        "error": float(error[tuple(where)]), "norm": float(torch.where(rows, norm.nan_to_num(math.inf), -1.0).max()), "median": float(error[rows].nan_to_num(math.inf).median()),
        "where": where, "element": [*where, *inner], "got": float(g[tuple(inner)]), "want": float(w[tuple(inner)]),
    }  # fmt: skip
