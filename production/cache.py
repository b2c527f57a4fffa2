"""The KV state: one class, allocated once, every layer sized by its own ratio from `max_context`.

A layer keeps a ring of its last tokens (the window plus one prefill chunk), and where it compresses, one entry per
`ratio` tokens, the rows of the compressor that later entries still need, and (CSA) FP4 indexer keys with the rows of
their own compressor. Nothing grows; one token more than fits is an error that names `--max-context`.

Kernels read and write the packed bytes. The torch code at the end decodes and encodes them for taps, export and import
only; no step of the model runs through it.

    python -c "from production.cache import formula; from reference.config import ModelConfig as M;
    print(formula(M.from_dir('checkpoints/tiny-dsv4'), 1, 8192, 512))"

Tests: parity/unit/test_cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from production.ops import entry_bytes
from reference.config import InputError, ModelConfig
from reference.points import STATE_LEGEND

T = TypeVar("T")

RING_ALIGN = 8  # slots
E4M3_BLOCK, E2M1_BLOCK = 64, 32  # values per scale
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def ring_slots(window: int, prefill_chunk: int, max_context: int) -> int:
    """Slots of a window ring: a whole chunk is stored before its first query reads window - 1 tokens back."""
    slots = window - 1 + min(prefill_chunk, max_context)
    return min(-(-slots // RING_ALIGN) * RING_ALIGN, max_context)


def state_rows(ratio: int) -> int:
    """Rows a compressor carries: its group, and where groups overlap (ratio 4) the group before."""
    return 2 * ratio if ModelConfig.overlap(ratio) == 2 else ratio


def entry_capacity(ratio: int, max_context: int) -> int:
    """Compressed entries of a layer: ceil(max_context / ratio)."""
    return -(-max_context // ratio)


def formula(config: ModelConfig, batch: int, max_context: int, prefill_chunk: int, layers: int | None = None) -> dict[str, int]:
    """Bytes of a cache by part, in closed form; equals `KVCache.nbytes()`. Allocates nothing."""
    c = config
    record, slots = entry_bytes(c.head_dim, c.qk_rope_head_dim), ring_slots(c.sliding_window, prefill_chunk, max_context)
    kinds = [c.ratio(layer) for layer in range(c.num_hidden_layers if layers is None else layers)]
    csa, hca = kinds.count(4), kinds.count(128)
    key = c.index_head_dim // 2 + c.index_head_dim // E2M1_BLOCK
    rows = {ratio: state_rows(ratio) * c.overlap(ratio) * c.head_dim for ratio in (4, 128)}
    parts = {
        "kv": len(kinds) * slots * record,
        "kv.position": len(kinds) * slots * 4,
        "compressor.entries": sum(n * entry_capacity(m, max_context) * record for n, m in ((csa, 4), (hca, 128))),
        "compressor.state": 2 * 4 * (csa * rows[4] + hca * rows[128]),
        "indexer.compressor.entries": csa * entry_capacity(4, max_context) * key,
        "indexer.compressor.state": 2 * 4 * csa * state_rows(4) * 2 * c.index_head_dim,
        "length": len(kinds) * 4,
    }
    return {part: batch * size for part, size in parts.items()}


def cost(config: ModelConfig, prefill_chunk: int, layers: int | None = None) -> tuple[int, float]:
    """(constant bytes, bytes per token) of a row: a line through two lengths. NOTE: total / length would be no rate."""
    short = 128 * -(-(config.sliding_window + prefill_chunk + RING_ALIGN) // 128)  # whole groups, and the ring is full
    low, high = (sum(formula(config, 1, length, prefill_chunk, layers).values()) for length in (short, 2 * short))
    return 2 * low - high, (high - low) / short


@dataclass(frozen=True)
class CompressorState:
    """Rows (token p at row p % R) that entries still to come need.

    kv, gate  [b, R, c*d'] f32; gate carries ape
    """

    kv: Tensor
    gate: Tensor


@dataclass(frozen=True)
class LayerCache:
    """What one layer keeps.

    ring           [b, slots, entry_bytes] u8, token p at slot p % slots
    ring_position  [b, slots] i32, position of the token in each slot, -1 = never written
    entries        [b, cap, entry_bytes] u8 (layers with a ratio)
    state          rows of the main compressor
    keys, scales   [b, cap, di/2] u8 e2m1 pairs, [b, cap, di/32] u8 e8m0 (CSA)
    index_state    rows of the indexer's key compressor
    length         [b] i32, tokens this layer has taken
    """

    ratio: int
    ring: Tensor
    ring_position: Tensor
    entries: Tensor | None
    state: CompressorState | None
    keys: Tensor | None
    scales: Tensor | None
    index_state: CompressorState | None
    length: Tensor


class KVCache:
    """The state of `batch` rows over the given number of layers; see the module's text.

    layers    LayerCache per layer
    lengths   [layers, b] i32 on the device; row l is `layers[l].length`
    mirror    the same on the host, for validation and sizes only: kernels read the device's
    """

    def __init__(
        self, config: ModelConfig, layers: int, batch: int, max_context: int, prefill_chunk: int, device: torch.device
    ) -> None:
        c = self.config = config
        self.batch, self.max_context, self.device = batch, max_context, device
        self.lengths = torch.zeros(layers, batch, dtype=torch.int32, device=device)
        self.mirror = [[0] * batch for _ in range(layers)]
        record, slots = entry_bytes(c.head_dim, c.qk_rope_head_dim), ring_slots(c.sliding_window, prefill_chunk, max_context)

        def bytes_(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=torch.uint8, device=device)

        def rows(ratio: int, width: int) -> CompressorState:
            shape = (batch, state_rows(ratio), c.overlap(ratio) * width)
            kv = torch.zeros(shape, dtype=torch.float32, device=device)
            return CompressorState(kv, torch.full(shape, -torch.inf, dtype=torch.float32, device=device))

        caches = []
        for layer in range(layers):
            ratio = c.ratio(layer)
            cap = entry_capacity(ratio, max_context) if ratio else 0
            caches.append(
                LayerCache(
                    ratio=ratio,
                    ring=bytes_(slots, record),
                    ring_position=torch.full((batch, slots), -1, dtype=torch.int32, device=device),
                    entries=bytes_(cap, record) if ratio else None,
                    state=rows(ratio, c.head_dim) if ratio else None,
                    keys=bytes_(cap, c.index_head_dim // 2) if ratio == 4 else None,
                    scales=bytes_(cap, c.index_head_dim // E2M1_BLOCK) if ratio == 4 else None,
                    index_state=rows(4, c.index_head_dim) if ratio == 4 else None,
                    length=self.lengths[layer],
                )
            )
        self.layers: tuple[LayerCache, ...] = tuple(caches)

    # ---- sizes ----

    def nbytes(self) -> dict[str, int]:
        """Bytes really held, by part, summed over the layers."""
        parts = dict.fromkeys(formula(self.config, self.batch, self.max_context, 1, layers=0), 0)
        for layer in self.layers:
            for part, tensors in self.parts(layer).items():
                parts[part] += sum(t.numel() * t.element_size() for t in tensors)
        return parts

    @staticmethod
    def parts(layer: LayerCache) -> dict[str, list[Tensor]]:
        """The tensors of a layer under the names of `formula`."""
        held: dict[str, list[Tensor | None]] = {
            "kv": [layer.ring],
            "kv.position": [layer.ring_position],
            "compressor.entries": [layer.entries],
            "compressor.state": [layer.state.kv, layer.state.gate] if layer.state else [],
            "indexer.compressor.entries": [layer.keys, layer.scales],
            "indexer.compressor.state": [layer.index_state.kv, layer.index_state.gate] if layer.index_state else [],
            "length": [layer.length],
        }
        return {part: [t for t in tensors if t is not None] for part, tensors in held.items()}

    # ---- capacity ----

    def check_room(self, layers: range, counts: list[int]) -> None:
        """Every row has room for its tokens in these layers. Raises InputError; nothing is written."""
        for layer in layers:
            for row, (length, count) in enumerate(zip(self.mirror[layer], counts, strict=True)):
                if length + count > self.max_context:
                    raise InputError(
                        f"row {row}: {length} tokens held and {count} more do not fit in {self.max_context}; "
                        f"raise --max-context to at least {length + count}"
                    )

    def check_level(self) -> None:
        """All layers hold the same tokens: after `run_layer` or `import_layer` of some layers the whole cannot go on."""
        for layer, lengths in enumerate(self.mirror):
            if lengths != self.mirror[0]:
                raise InputError(f"layer {layer} holds {lengths} tokens, layer 0 {self.mirror[0]}: import or run every layer first")

    def advanced(self, layers: range, counts: list[int]) -> None:
        """Note on the host what the device's `advance` did."""
        for layer in layers:
            self.mirror[layer] = [length + count for length, count in zip(self.mirror[layer], counts, strict=True)]

    def entry_count(self, layer: int, counts: list[int] | None) -> int:
        """The largest number of complete entries of a layer after `counts` more tokens; None: at any length, its capacity."""
        ratio = self.layers[layer].ratio
        if ratio and counts is None:
            return entry_capacity(ratio, self.max_context)
        return max((n + count) // ratio for n, count in zip(self.mirror[layer], counts, strict=True)) if ratio and counts is not None else 0

    # ---- inspection: the bytes as values, in torch ----

    def read_window(self, layer: int, position: Tensor) -> Tensor:
        """Window rows [b, s, d] f32 of the given positions [b, s], decoded; NaN where the ring holds another token."""
        cache = self.layers[layer]
        slot = (position.clamp(min=0) % cache.ring.shape[1]).long()
        rows = decode_entries(_gather(cache.ring, slot), self.config)
        held = (_gather(cache.ring_position, slot) == position) & (position >= 0)
        return rows.masked_fill(~held[..., None], torch.nan)

    def read_entries(self, layer: int, entry: Tensor) -> Tensor:
        """Compressed entries [b, s, d] f32 of the given numbers [b, s], decoded; NaN where the number is negative."""
        entries = _needed(self.layers[layer].entries)
        rows = decode_entries(_gather(entries, entry.clamp(min=0).long()), self.config)
        return rows.masked_fill((entry < 0)[..., None], torch.nan)

    def read_index_keys(self, layer: int, entry: Tensor) -> Tensor:
        """Indexer keys [b, s, di] f32 of the given numbers [b, s], decoded; NaN where the number is negative."""
        cache, safe = self.layers[layer], entry.clamp(min=0).long()
        rows = decode_index_keys(_gather(_needed(cache.keys), safe), _gather(_needed(cache.scales), safe))
        return rows.masked_fill((entry < 0)[..., None], torch.nan)

    def export_layer(self, layer: int) -> dict[str, Tensor]:
        """The layer's state under the names of reference.points.STATE_LEGEND, fp32 on the CPU, as really stored."""
        cache, W = self.layers[layer], self.config.sliding_window
        length = cache.length.long()
        snapshot = {
            "length": length.cpu(),
            "kv": self.read_window(layer, length[:, None] + torch.arange(-W, 0, device=self.device)),
        }
        if cache.ratio:
            snapshot |= self._export_state("compressor", cache, _needed(cache.state), length)
            snapshot["compressor.entries"] = self.read_entries(layer, _complete(length, cache.ratio))
        if cache.keys is not None:
            snapshot |= self._export_state("indexer.compressor", cache, _needed(cache.index_state), length)
            snapshot["indexer.compressor.entries"] = self.read_index_keys(layer, _complete(length, cache.ratio))
        return {name: snapshot[name].cpu() for name in STATE_LEGEND if name in snapshot}

    def _export_state(self, name: str, cache: LayerCache, state: CompressorState, length: Tensor) -> dict[str, Tensor]:
        unused = ~live_rows(length, cache.ratio)[..., None]
        return {
            f"{name}.kv": state.kv.masked_fill(unused, torch.nan),
            f"{name}.gate": state.gate.masked_fill(unused, torch.nan),
        }

    def import_layer(self, layer: int, snapshot: Mapping[str, Tensor]) -> None:
        """Take over a state in the form of `export_layer`. Raises InputError on another shape; then nothing is changed."""
        cache, length = self.layers[layer], self._checked(layer, snapshot)
        kv = snapshot["kv"].to(self.device)
        slots = cache.ring.shape[1]
        cache.ring_position.fill_(-1)
        packed = encode_entries(kv, self.config)
        for row, n in enumerate(length):
            positions = torch.arange(max(0, n - kv.shape[1]), n, device=self.device)
            cache.ring[row, positions % slots] = packed[row, kv.shape[1] - len(positions) :]
            cache.ring_position[row, positions % slots] = positions.to(torch.int32)
        if cache.ratio:
            entries = snapshot["compressor.entries"].to(self.device)
            _needed(cache.entries)[:, : entries.shape[1]] = encode_entries(entries, self.config)
            self._import_state("compressor", _needed(cache.state), snapshot, cache.ratio)
        if cache.keys is not None:
            keys, scales = encode_index_keys(snapshot["indexer.compressor.entries"].to(self.device))
            cache.keys[:, : keys.shape[1]] = keys
            _needed(cache.scales)[:, : keys.shape[1]] = scales
            self._import_state("indexer.compressor", _needed(cache.index_state), snapshot, cache.ratio)
        cache.length.copy_(torch.tensor(length, dtype=torch.int32))
        self.mirror[layer] = length

    def _import_state(self, name: str, state: CompressorState, snapshot: Mapping[str, Tensor], ratio: int) -> None:
        unused = ~live_rows(snapshot["length"].cpu(), ratio)[..., None]
        state.kv.copy_(snapshot[f"{name}.kv"].cpu().masked_fill(unused, 0.0))
        state.gate.copy_(snapshot[f"{name}.gate"].cpu().masked_fill(unused, -torch.inf))

    def _checked(self, layer: int, snapshot: Mapping[str, Tensor]) -> list[int]:
        """The lengths of a snapshot whose names and shapes fit this layer."""
        c, cache, b = self.config, self.layers[layer], self.batch
        shapes: dict[str, tuple[int, ...]] = {"length": (b,), "kv": (b, c.sliding_window, c.head_dim)}
        if cache.ratio:
            shapes["compressor.entries"] = (b, -1, c.head_dim)
            shapes["compressor.kv"] = shapes["compressor.gate"] = tuple(_needed(cache.state).kv.shape)
        if cache.keys is not None:
            shapes["indexer.compressor.entries"] = (b, -1, c.index_head_dim)
            at = "indexer.compressor"
            shapes[f"{at}.kv"] = shapes[f"{at}.gate"] = tuple(_needed(cache.index_state).kv.shape)
        if set(snapshot) != set(shapes):
            odd = sorted(set(snapshot) ^ set(shapes))
            raise InputError(f"layer {layer}: snapshot has other parts than a layer of ratio {cache.ratio}, first {odd[0]!r}")
        length = [int(n) for n in snapshot["length"].tolist()]
        if min(length) < 0 or max(length) > self.max_context:
            raise InputError(f"layer {layer}: snapshot of {max(length)} tokens does not fit; raise --max-context to at least {max(length)}")
        for name, shape in shapes.items():
            got = tuple(snapshot[name].shape)
            if len(got) != len(shape) or any(want not in (-1, have) for want, have in zip(shape, got, strict=True)):
                raise InputError(f"layer {layer}: snapshot part {name!r} has shape {list(got)}, expected {list(shape)}")
        for name in [name for name in shapes if name.endswith(".entries")]:
            held, need, cap = snapshot[name].shape[1], max(length) // cache.ratio, _needed(cache.entries).shape[1]
            if not need <= held <= cap:
                raise InputError(f"layer {layer}: snapshot part {name!r} has {held} entries, expected {need} to {cap}")
        return length


class Backup:
    """Room for what a prefill overwrites, so that a call that fails half way has taken nothing. Allocated once, beside the cache.

    Entries and keys are not copied: those of groups still to come are read by nobody. Decode needs none of this: until its
    length advances, at its end, it has written only what nobody reads.
    """

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.copies = [[torch.empty_like(tensor) for tensor in self.overwritten(layer)] for layer in cache.layers]

    @staticmethod
    def overwritten(layer: LayerCache) -> list[Tensor]:
        states = [state for state in (layer.state, layer.index_state) if state is not None]
        return [layer.ring, layer.ring_position, layer.length, *(rows for state in states for rows in (state.kv, state.gate))]

    @contextmanager
    def kept_on_error(self, layers: range) -> Iterator[None]:
        """What these layers hold is put back when the block raises."""
        pairs = [pair for n in layers for pair in zip(self.overwritten(self.cache.layers[n]), self.copies[n], strict=True)]
        mirror = [self.cache.mirror[n] for n in layers]
        for tensor, copy in pairs:
            copy.copy_(tensor)
        try:
            yield
        except BaseException:
            for tensor, copy in pairs:
                tensor.copy_(copy)
            for n, lengths in zip(layers, mirror, strict=True):
                self.cache.mirror[n] = lengths
            raise


def live_rows(length: Tensor, ratio: int) -> Tensor:
    """Rows of a compressor's state that later entries need: [b, R] bool (the unfinished group; ratio 4: and the one before)."""
    rows = torch.arange(state_rows(ratio), device=length.device)
    first = length // ratio * ratio - (ratio if ModelConfig.overlap(ratio) == 2 else 0)
    newest = length[:, None] - 1 - (length[:, None] - 1 - rows) % state_rows(ratio)  # newest position with this row
    live: Tensor = newest >= first.clamp(min=0)[:, None]
    return live


def decode_entries(packed: Tensor, config: ModelConfig) -> Tensor:
    """[..., entry_bytes] u8 -> [..., d] f32: (d-r) e4m3 | r bf16 | (d-r)/64 e8m0 scales | padding."""
    plain, r = config.head_dim - config.qk_rope_head_dim, config.qk_rope_head_dim
    codes = packed[..., :plain].contiguous().view(torch.float8_e4m3fn).float()
    rotary = packed[..., plain : plain + 2 * r].contiguous().view(torch.bfloat16).float()
    scales = _power_of_two(packed[..., plain + 2 * r : plain + 2 * r + plain // E4M3_BLOCK])
    values = (_blocks(codes, E4M3_BLOCK) * scales[..., None]).flatten(-2)
    return torch.cat((values, rotary), -1)


def encode_entries(rows: Tensor, config: ModelConfig) -> Tensor:
    """[..., d] f32 -> [..., entry_bytes] u8; exact for values that were stored so before. NaN rows become zeros."""
    plain, r = config.head_dim - config.qk_rope_head_dim, config.qk_rope_head_dim
    rows = rows.float().nan_to_num(nan=0.0)
    packed = torch.zeros(*rows.shape[:-1], entry_bytes(config.head_dim, r), dtype=torch.uint8, device=rows.device)
    blocks = _blocks(rows[..., :plain], E4M3_BLOCK)
    exponent = _scale_exponent(blocks, 448.0, 1e-4)
    scales = (exponent + 127).to(torch.uint8)
    scaled = (blocks / _power_of_two(scales)[..., None]).clamp(-448, 448)
    packed[..., :plain] = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)
    packed[..., plain : plain + 2 * r] = rows[..., plain:].bfloat16().contiguous().view(torch.uint8)
    packed[..., plain + 2 * r : plain + 2 * r + plain // E4M3_BLOCK] = scales
    return packed


def decode_index_keys(keys: Tensor, scales: Tensor) -> Tensor:
    """[..., di/2] u8 pairs (low nibble first) and [..., di/32] e8m0 -> [..., di] f32."""
    codes = torch.stack((keys & 15, keys >> 4), -1).flatten(-2).long()
    values = _e2m1_table(keys.device)[codes]
    rows: Tensor = (_blocks(values, E2M1_BLOCK) * _power_of_two(scales)[..., None]).flatten(-2)
    return rows


@cache
def _e2m1_table(device: torch.device) -> Tensor:
    """The 16 values by code, made once: a captured graph can read them and cannot copy them from the host."""
    magnitudes = torch.tensor(E2M1_VALUES, device=device)
    return torch.cat((magnitudes, -magnitudes))


def encode_index_keys(rows: Tensor) -> tuple[Tensor, Tensor]:
    """[..., di] f32 -> keys, scales; exact for values that were stored so before. NaN rows become zeros."""
    blocks = _blocks(rows.float().nan_to_num(nan=0.0), E2M1_BLOCK)
    exponent = _scale_exponent(blocks, 6.0, 6.0 * 2.0**-126)
    scales = (exponent + 127).to(torch.uint8)
    scaled = (blocks / _power_of_two(scales)[..., None]).clamp(-6, 6)
    # Nearest code, ties to the even one: the midpoint above an even code stays below it.
    magnitude, code = scaled.abs(), torch.zeros_like(scaled, dtype=torch.uint8)
    for lower, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = (low + high) / 2
        code += (magnitude > middle if lower % 2 == 0 else magnitude >= middle).to(torch.uint8)
    code += 8 * torch.signbit(scaled).to(torch.uint8)
    pairs = _blocks(code.flatten(-2), 2)
    return pairs[..., 0] | pairs[..., 1] << 4, scales


def _blocks(rows: Tensor, size: int) -> Tensor:
    """[..., f] -> [..., f / size, size]."""
    return rows.reshape(*rows.shape[:-1], rows.shape[-1] // size, size)


def _scale_exponent(blocks: Tensor, largest: float, least: float) -> Tensor:
    """n with 2^n the smallest power of two not below amax / largest, exact at powers of two; int32 [...]."""
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=least).double() / largest)
    return torch.where(mantissa == 0.5, exponent - 1, exponent)


def _power_of_two(scales: Tensor) -> Tensor:
    """e8m0 byte b -> 2^(b-127) f32, by its bits; byte 0 is the subnormal 2^-127."""
    return (scales.int() << 23).masked_fill(scales == 0, 1 << 22).view(torch.float32)


def _complete(length: Tensor, ratio: int) -> Tensor:
    """Numbers of the complete entries [b, e], -1 beyond a row's own."""
    count = length // ratio
    numbers = torch.arange(int(count.max()), device=length.device)
    return torch.where(numbers < count[:, None], numbers, -1)


def _gather(table: Tensor, index: Tensor) -> Tensor:
    """table [b, rows, ...], index [b, s] -> [b, s, ...]."""
    return table[torch.arange(table.shape[0], device=table.device)[:, None], index]


def _needed(value: T | None) -> T:
    if value is None:
        raise InputError("this layer keeps no such part")
    return value
