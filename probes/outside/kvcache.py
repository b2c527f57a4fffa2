"""Somebody's KV cache alone: pages of packed entries, described in cache.json, found, decoded and explained entry by entry.

    cache = read_cache("their-cache", config)
    for pool in cache.pools: found = compare(pool, want, ...)          # want: the reference's entries after the same tokens

An entry is (d - r) e4m3 codes, r bf16 values and (d - r) / 64 e8m0 scales (584 bytes with its padding at d = 512, r = 64); an
indexer key is index_head_dim e2m1 codes, two a byte, low nibble first, and a scale per 32 (68 bytes at 128). Scales stand behind
their codes or apart. Where an entry differs, what it holds instead is looked for: another position's, an older turn of the ring,
nothing, the right codes under another scale, the right values rotated for another position. Measured, not judged; run by
probes/kv_cache.py. The description: docs/trace.md. Tests: parity/unit/test_kvcache.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.config import InputError, ModelConfig
from reference.formats import INDEX_BLOCK, KV_BLOCK, decode_e2m1, decode_e4m3, decode_e8m0

KIND, SCHEMA = "dsv4-kv-cache", 1
WINDOW, ENTRIES, INDEXER = "window", "entries", "indexer"
TURNED_E2M1 = 0.25  # relative error of a key that was rounded to e2m1, turned, and rounded again: 0.1 to 0.2
STORES = (WINDOW, ENTRIES, INDEXER)
NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
KEYS = {"tensor", "block_size", "page_table", "page_stride", "entry_stride", "offset", "scales", "slots"}


@dataclass(frozen=True)
class Format:
    """How one entry is packed. codes, scales  bytes of each; size  of an entry whose scales follow its codes, padded."""

    codes: int
    scales: int
    size: int
    rotary: int
    index: bool

    def decode(self, codes: Tensor, scales: Tensor) -> Tensor:
        """[..., codes] and [..., scales] u8 -> fp32 [..., d]."""
        return self.scaled(codes, decode_e8m0(scales))

    def scaled(self, codes: Tensor, factors: Tensor) -> Tensor:
        """As `decode`, with a factor per block [..., scales]."""
        if self.index:
            values = decode_e2m1(codes)
            blocks: Tensor = values.unflatten(-1, (self.scales, INDEX_BLOCK)) * factors[..., None]
            return blocks.flatten(-2)
        plain = self.scales * KV_BLOCK
        values = decode_e4m3(codes[..., :plain].contiguous()).unflatten(-1, (self.scales, KV_BLOCK)) * factors[..., None]
        return torch.cat((values.flatten(-2), codes[..., plain:].contiguous().view(torch.bfloat16).float()), -1)


def format_of(config: ModelConfig, store: str) -> Format:
    if store == INDEXER:
        codes, scales = config.index_head_dim // 2, config.index_head_dim // INDEX_BLOCK
        return Format(codes, scales, codes + scales, config.qk_rope_head_dim, True)
    plain = config.head_dim - config.qk_rope_head_dim
    codes, scales = plain + 2 * config.qk_rope_head_dim, plain // KV_BLOCK
    return Format(codes, scales, -(-(codes + scales) // 8) * 8, config.qk_rope_head_dim, False)


@dataclass(frozen=True)
class Place:
    """Where an entry lies: column of the row's page table, page there, slot in the page."""

    column: int
    page: int
    slot: int


@dataclass(frozen=True)
class Pool:
    """One store of one layer. data, scale_data  flat bytes; table [b, columns] pages, -1 none; slots of a ring, 0: none."""

    layer: int
    store: str
    format: Format
    data: Tensor
    table: Tensor
    block_size: int
    page_stride: int
    entry_stride: int
    offset: int
    scale_data: Tensor
    scale_offset: int
    scale_stride: int
    scale_page_stride: int
    slots: int = 0

    def place(self, row: int, number: int) -> Place | None:
        """Where entry `number` of a row lies; None: its page table has no page for it."""
        slot = number % self.slots if self.slots else number
        column = slot // self.block_size
        if column >= self.table.shape[1] or int(self.table[row, column]) < 0:
            return None
        return Place(column, int(self.table[row, column]), slot % self.block_size)

    def read(self, place: Place) -> tuple[Tensor, Tensor]:
        """Codes and scales of an entry. Raises InputError where it lies outside of the tensor."""
        start = self.offset + place.page * self.page_stride + place.slot * self.entry_stride
        first = self.scale_offset + place.page * self.scale_page_stride + place.slot * self.scale_stride
        codes, scales = self.data[start : start + self.format.codes], self.scale_data[first : first + self.format.scales]
        if len(codes) < self.format.codes or len(scales) < self.format.scales:
            raise InputError(
                f"layer {self.layer} {self.store}: page {place.page} slot {place.slot} lies at byte {max(start, first)}, the tensor has {min(len(self.data), len(self.scale_data))}; expected another block_size or stride"
            )
        return codes, scales


@dataclass(frozen=True)
class KvCache:
    """What a folder describes. tokens  ids that each row's cache has taken."""

    root: Path
    engine: str
    tokens: list[list[int]]
    policy: Any
    pools: list[Pool]


def read_cache(directory: str | Path, config: ModelConfig) -> KvCache:
    """Read cache.json and the tensors it names. Raises InputError, one line."""
    root = Path(directory)
    path = root / "cache.json"
    if not path.is_file():
        raise InputError(f"{root}: no cache.json; next: docs/trace.md says how a KV cache is described")
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from None
    if not isinstance(said, dict) or said.get("kind") != KIND or said.get("schema") != SCHEMA:
        raise InputError(f"{path}: expected kind {KIND!r} of schema {SCHEMA}")
    tokens = said.get("tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(row, list) and row and all(type(t) is int and 0 <= t < config.vocab_size for t in row) for row in tokens):
        raise InputError(f"{path}: tokens: expected for each row the ids that its cache has taken, prompt and decoded, each in 0..{config.vocab_size - 1}")
    held = _tensors(root, said.get("file", "cache.safetensors"))
    pools = []
    layers = said.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise InputError(f"{path}: layers: expected layer number -> {', '.join(STORES)}")
    for layer, stores in layers.items():
        if not layer.isdigit() or int(layer) >= config.num_hidden_layers or not isinstance(stores, dict):
            raise InputError(f"{path}: layers: {layer!r}: expected one of 0..{config.num_hidden_layers - 1} with {', '.join(STORES)}")
        for store, given in stores.items():
            kind = config.kind(int(layer))
            if store not in STORES or (store == ENTRIES and kind == "window") or (store == INDEXER and kind != "csa"):
                raise InputError(f"{path}: layer {layer}: {store!r}: a {kind} layer has {WINDOW}" + (f", {ENTRIES}" if kind != "window" else "") + (f", {INDEXER}" if kind == "csa" else ""))
            pool = _pool(f"{path}: layer {layer} {store}", int(layer), store, given, held, config, len(tokens))
            if int(pool.table.max()) >= 0:
                pool.read(Place(0, int(pool.table.max()), pool.block_size - 1))  # the furthest byte
            pools.append(pool)
    return KvCache(root, str(said.get("engine", "")), tokens, said.get("policy", "published"), pools)


def _tensors(root: Path, name: Any) -> dict[str, Tensor]:
    if not isinstance(name, str) or Path(name).name != name:
        raise InputError(f"{root / 'cache.json'}: file {name!r}: expected a .safetensors file of this directory")
    path = root / name
    if not path.is_file():
        raise InputError(f"{path}: missing; cache.json names it")
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (safe_open is no mapping)
    except (SafetensorError, OSError, ValueError) as error:
        raise InputError(f"{path}: truncated or broken: {str(error).splitlines()[0]}") from None


def _pool(where: str, layer: int, store: str, given: Any, held: Mapping[str, Tensor], config: ModelConfig, rows: int) -> Pool:
    if not isinstance(given, dict) or set(given) - KEYS:
        raise InputError(f"{where}: {sorted(set(given) - KEYS) if isinstance(given, dict) else given!r}: expected {', '.join(sorted(KEYS))}")

    def number(name: str, default: int | None, least: int = 0, source: Mapping[str, Any] = given) -> int:
        value = source.get(name, default)
        if type(value) is not int or value < least:
            raise InputError(f"{where}: {name} {value!r}: expected a whole number of at least {least}")
        return value

    def raw(name: Any) -> Tensor:
        if name not in held:
            raise InputError(f"{where}: tensor {name!r} is not in the file; it holds {', '.join(sorted(held)[:6])}")
        tensor = held[name]
        if tensor.element_size() != 1:
            dtype = NAMES.get(tensor.dtype, str(tensor.dtype).removeprefix("torch."))
            plain = "pack a plain cache first, docs/trace.md has the lines" if tensor.is_floating_point() else "its .view(torch.uint8)"
            raise InputError(f"{where}: tensor {name!r} is {dtype} {list(tensor.shape)}, expected bytes (uint8); next: {plain}")
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    packed = format_of(config, store)
    table = held.get(given["page_table"]) if isinstance(given.get("page_table"), str) else given.get("page_table")
    try:
        pages = torch.as_tensor(table, dtype=torch.int64)
    except (TypeError, ValueError, RuntimeError):
        raise InputError(f"{where}: page_table: expected [rows, pages], numbers or the name of a tensor") from None
    if pages.dim() != 2 or pages.shape[0] != rows or not pages.shape[1]:
        raise InputError(f"{where}: page_table {list(pages.shape)}: expected {rows} rows, one for each row of tokens")
    block, apart = number("block_size", None, 1), given.get("scales")
    if apart is not None and not isinstance(apart, dict):
        raise InputError(f"{where}: scales {apart!r}: expected offset, stride, page_stride and tensor")
    entry = number("entry_stride", packed.size if apart is None else packed.codes, packed.codes)
    page = number("page_stride", block * entry if apart is None or "tensor" in apart else None, 1)
    offset = number("offset", 0)
    data = raw(given.get("tensor"))
    if apart is None:
        scale = (data, offset + packed.codes, entry, page)
    else:
        scale = (raw(apart.get("tensor", given.get("tensor"))), number("offset", 0, 0, apart), number("stride", packed.scales, packed.scales, apart), 0)
        scale = (*scale[:3], number("page_stride", page if "tensor" not in apart else block * scale[2], 1, apart))
    return Pool(layer, store, packed, data, pages, block, page, entry, offset, *scale, slots=number("slots", 0))


# ---- comparison ----


@dataclass(frozen=True)
class Wrong:
    """One entry that differs. number  entry, or position in the window; what  a kind of WHAT; words  in full; shift  how far off."""

    row: int
    number: int
    position: int
    place: Place | None
    error: float
    what: str
    words: str
    shift: int | None = None


WHAT = ("no page", "never written", "stale", "another entry", "rotation", "scale", "code")


@dataclass
class Found:
    """One store of one layer. worst  (error, row, number, place) of the worst entry; wrong  those above the threshold, in order."""

    layer: int
    store: str
    entries: int = 0
    errors: list[float] = field(default_factory=list)
    worst: tuple[float, int, int, Place | None] = (math.nan, 0, 0, None)
    wrong: list[Wrong] = field(default_factory=list)


Angles = Callable[[Tensor, Tensor], Tensor]  # (values [n, d], turn [n] in positions) -> rotated by that much


def compare(pool: Pool, want: Sequence[Tensor], numbers: Sequence[Sequence[int]], position_of: Callable[[int], int], turned_at: Callable[[int], int], turn: Angles, above: float, longest: int) -> Found:
    """Hold every entry that a row should have against the reference's.

    want     per row, [n, d] every entry of the reference since the start, NaN where there is none
    numbers  per row, the entries that its cache should hold
    position_of, turned_at   an entry's last token, and the position that it is rotated for
    longest  positions that a wrong rotation may be for
    """
    found = Found(pool.layer, pool.store)
    every = torch.cat(list(want))
    said: dict[int, list[Told]] = {}  # place in found.wrong -> what it may be, the likeliest first
    starts = [0]
    for rows in want:
        starts.append(starts[-1] + len(rows))
    for row, mine in enumerate(numbers):
        for number in mine:
            place = pool.place(row, number)
            target = want[row][number].double()
            found.entries += 1
            if place is None:
                error, wrong = math.inf, Wrong(row, number, position_of(number), None, math.inf, "no page", "its page table has no page there")
            else:
                codes, scales = pool.read(place)
                got = pool.format.decode(codes, scales).double()
                error = float(_error(got, target))
                wrong = None
                if not error <= above:
                    said[len(found.wrong)] = _explain(pool, row, number, codes, scales, got, target, every, starts, turned_at, turn, above, longest)
                    wrong = Wrong(row, number, position_of(number), place, error, *said[len(found.wrong)][0])
            if wrong is not None:
                found.wrong.append(wrong)
            found.errors.append(error)
            if not error <= found.worst[0]:  # the first of equals; NaN comes first
                found.worst = (error, row, number, place)
    for at, (what, words, shift) in _fewest(said).items():
        found.wrong[at] = replace(found.wrong[at], what=what, words=words, shift=shift)
    return found


Told = tuple[str, str, int | None]  # what, in words, how far off


def _fewest(said: Mapping[int, Sequence[Told]]) -> dict[int, Told]:
    """One explanation for each wrong entry: what is true of most of them first, so that one fault is told as one; of equals the likelier."""

    def kind(told: Told) -> Told:
        return told if told[2] is None else (told[0], "", told[2])  # a distance is the same however the entries are numbered

    left, chosen = dict(said), {}
    while left:
        counts: dict[Told, int] = {}
        for each in left.values():
            for told in each:
                counts[kind(told)] = counts.get(kind(told), 0) + 1
        best = max(counts, key=counts.__getitem__)  # the first of equals
        for at, each in list(left.items()):
            for told in each:
                if kind(told) == best:
                    chosen[at] = told
                    del left[at]
                    break
    return chosen


def _error(got: Tensor, want: Tensor) -> Tensor:
    """Relative L2 over the last axis; inf where got is not finite."""
    size = want.norm(dim=-1)
    error = (got - want).norm(dim=-1) / size.clamp_min(torch.finfo(torch.float64).tiny)
    return torch.where(got.isfinite().all(-1), error, math.inf)


def _explain(
    pool: Pool, row: int, number: int, codes: Tensor, scales: Tensor, got: Tensor, want: Tensor, every: Tensor, starts: Sequence[int],
    turned_at: Callable[[int], int], turn: Angles, above: float, longest: int,
) -> list[Told]:  # fmt: skip
    """What an entry holds in place of its own; more than one where its bytes cannot tell, the likeliest first."""
    if not bool(codes.any()):
        return [("never written", "all of its codes are zero", None)]
    errors = _error(got.expand(len(every), -1), every.double()).masked_fill(every.isnan().any(-1), math.inf)
    best = int(errors.argmin())
    if float(errors[best]) <= above:
        other = next(b for b in range(len(starts) - 1) if starts[b] <= best < starts[b + 1])
        held = best - starts[other]
        if other != row:
            return [("another entry", f"it holds entry {held} of row {other}", None)]
        turns = pool.slots and held < number and (number - held) % pool.slots == 0
        if turns:
            return [("stale", f"it holds position {held}, of {(number - held) // pool.slots} turn of the ring before", held - number)]
        return [("another entry", f"it holds entry {held}, {abs(held - number)} {'behind' if held > number else 'before'} its own", held - number)]
    block = INDEX_BLOCK if pool.format.index else KV_BLOCK
    width = pool.format.scales * block
    plain = pool.format.scaled(codes, torch.ones(pool.format.scales)).double()
    norms = [x[:width].unflatten(0, (pool.format.scales, block)).norm(dim=-1) for x in (want, plain)]
    power = (norms[0] / norms[1].clamp_min(1e-300)).clamp_min(1e-300).log2().round()
    right = pool.format.scaled(codes, torch.exp2(power).float()).double()
    if float(_error(right, want)) <= above:
        off = [(i, int(scales[i]) - 127 - int(power[i])) for i in range(pool.format.scales) if int(scales[i]) - 127 != int(power[i])]
        found: list[Told] = []
        for step in (1, -1):
            beside = pool.place(row, number + step) if number + step >= 0 else None
            if beside is not None and torch.equal(pool.read(beside)[1], scales) and bool(scales.any()):
                found.append(("scale", f"right codes under the scales of entry {number + step}", step))
        alike = len(off) == pool.format.scales > 1 and len({n for _, n in off}) == 1
        each = f"every scale is 2^{off[0][1]:+d} off" if alike else ", ".join(f"scale of block {i} is 2^{n:+d} off" for i, n in off[:4])
        return [*found, ("scale", f"right codes, {each}", None)]
    positions = torch.arange(longest)
    turned = turn(want.float().expand(longest, -1), positions - turned_at(number)).double()
    errors = _error(got.expand(longest, -1), turned)
    best = int(errors.argmin())
    if float(errors[best]) <= (max(above, TURNED_E2M1) if pool.format.index else above):
        said = "its rotary part is not rotated" if best == 0 else f"its rotary part is rotated for position {best}, expected {turned_at(number)}"
        return [("rotation", said, best - turned_at(number))]
    difference = (got - want).abs() > 0.25 * want.abs().clamp_min(float(want.norm()) / math.sqrt(len(want)))
    count = int(difference.sum())
    return [("code", f"{count} of {len(want)} values differ by more than a quarter" + (f", first at {int(difference.nonzero()[0])}" if count else ""), None)]
