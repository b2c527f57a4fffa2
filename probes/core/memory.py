"""What a model's state really holds and allocates: bytes by walking tensors, lines through lengths, closed formulas.

Nothing here trusts what production says of itself: bytes are those of the storages that can be reached from a state, and
`expected` is the arithmetic of the published formats from config facts alone. Models and states are passed in.

    state = model.new_state(1); held_bytes(state.cache)
    fit_line([1024, 2048, 4096], [held_bytes(cache(n)) for n in ...])

Used by probes/memory.py and parity. Tests: parity/unit/test_memory.py.
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path, PurePath
from types import CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
from numpy import ndarray
from torch import Tensor

from reference.config import InputError, ModelConfig

CACHED = type(lru_cache(len))  # functions that remember: others may answer to any name

MILLION = 1 << 20  # tokens
KINDS = {"window": 0, "csa": 4, "hca": 128}
STATEMENT = Path("/proc/self/statm")


# ---- bytes that are really there ----


def tensors_within(root: Any, without: Sequence[Any] = ()) -> Iterator[Tensor]:
    """Every tensor that can be reached from an object through attributes and containers, each object once."""
    seen = {id(thing) for thing in without}
    stack = [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, Tensor):
            yield thing
        elif isinstance(thing, dict):
            stack.extend(thing.values())
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            stack.extend(thing)
        elif not isinstance(thing, type | str | bytes | int | float | torch.device | torch.dtype) and not callable(thing):
            stack.extend(getattr(thing, "__dict__", {}).values())
            stack.extend(getattr(thing, slot) for slot in getattr(type(thing), "__slots__", ()) if hasattr(thing, slot))


def storage_bytes(tensors: Iterator[Tensor] | Sequence[Tensor]) -> int:
    """Bytes of the storages behind tensors, each once: a view counts as the whole it keeps alive."""
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storages.values())


def held_bytes(root: Any, without: Sequence[Any] = ()) -> int:
    """Bytes that an object keeps alive."""
    return storage_bytes(tensors_within(root, without))


def live_bytes() -> int:
    """Bytes of every tensor of this process that is alive, wherever it hangs."""
    gc.collect()
    return storage_bytes([thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)])


@dataclass(frozen=True)
class Hosted:
    """What objects keep on the host beside tensors: bytes of strings and buffers, elements of containers, and both by place."""

    size_bytes: int
    elements: int
    places: dict[str, int]

    def grown(self, before: Hosted, most: int = 3) -> list[str]:
        """The places that hold more than before, largest growth first, in words."""
        growth = {place: count - before.places.get(place, 0) for place, count in self.places.items()}
        ranked = sorted((place for place in growth if growth[place] > 0), key=lambda place: -growth[place])
        return [f"{place} (+{growth[place]})" for place in ranked[:most]]


def hosted(roots: dict[str, Any], package: str = "production") -> Hosted:
    """Bytes and elements that can be reached from objects, and from the globals of a package's loaded modules, each object once.

    Elements: of lists, tuples, dicts, sets and deques, attributes of objects, and entries of functools caches. Numbers are free,
    so that counters may count. Paths are left out: they fill in their own fields when they are read.
    """
    seen: set[int] = set()
    places: dict[str, int] = {}
    totals = {"bytes": 0, "elements": 0}
    modules = {name: vars(module) for name, module in sys.modules.items() if name.split(".")[0] == package}
    stack: list[tuple[str, Any]] = [*reversed(modules.items()), *reversed(roots.items())]

    def note(kind: str, place: str, count: int) -> None:
        totals[kind] += count
        places[place] = places.get(place, 0) + count

    while stack:
        place, thing = stack.pop()
        if isinstance(thing, int | float | PurePath | ModuleType | torch.device | torch.dtype) or id(thing) in seen:
            continue
        seen.add(id(thing))
        if isinstance(thing, str | bytes | bytearray):
            note("bytes", place, len(thing))
        elif isinstance(thing, memoryview | array):
            note("bytes", place, memoryview(thing).nbytes)
        elif isinstance(thing, ndarray):
            note("bytes", place, thing.nbytes)
        elif isinstance(thing, dict):
            note("elements", place, len(thing))
            stack.extend((f"{place}[keys]", key) for key in thing)
            stack.extend((f"{place}[{key}]" if isinstance(key, str | int) else f"{place}[]", value) for key, value in thing.items())
        elif isinstance(thing, list | tuple | set | frozenset | deque):
            note("elements", place, len(thing))
            stack.extend((f"{place}[]", item) for item in thing)
        elif isinstance(thing, MethodType):
            stack.append((place, thing.__self__))
        elif isinstance(thing, partial):
            stack += [(f"{place}()", part) for part in (thing.args, thing.keywords, thing.func)]
        elif not isinstance(thing, type) or thing.__module__.split(".")[0] == package:
            if isinstance(thing, FunctionType):
                stack.extend((f"{place}()", cell.cell_contents) for cell in thing.__closure__ or () if cell != CellType())
                stack.append((f"{place}()", thing.__defaults__))
            if isinstance(thing, CACHED):
                note("elements", f"{place}.cache", thing.cache_info().currsize)
            own = dict(getattr(thing, "__dict__", {}))
            note("elements", place, len(own))
            slots = [slot for kind in type(thing).__mro__ for slot in (kind.__dict__.get("__slots__") or ())]
            own |= {slot: getattr(thing, slot) for slot in slots if hasattr(thing, slot)}
            stack.extend((f"{place}.{name}", value) for name, value in own.items())
    return Hosted(totals["bytes"], totals["elements"], places)


def process_bytes(device: torch.device) -> tuple[str, int]:
    """What the allocator holds: reserved bytes on a GPU, resident bytes of the process elsewhere."""
    if device.type == "cuda":
        return "memory_reserved", int(torch.cuda.memory_reserved(device))
    if STATEMENT.is_file():
        return "resident", int(STATEMENT.read_text().split()[1]) * 4096
    raise RuntimeError("resident bytes cannot be read on this system: no /proc/self/statm")


# ---- a line through lengths ----


@dataclass(frozen=True)
class Line:
    """bytes = constant + per_token * tokens; off is the largest distance of a measured length from it, bytes."""

    constant: float
    per_token: float
    off: float


def fit_line(tokens: Sequence[int], size_bytes: Sequence[int]) -> Line:
    """Least squares through at least three different lengths. Raises InputError on fewer: two always fit."""
    if len(set(tokens)) < 3 or len(tokens) != len(size_bytes):
        raise InputError(f"a line needs three different lengths, got {list(tokens)}")
    n = len(tokens)
    mean_x, mean_y = Fraction(sum(tokens), n), Fraction(sum(size_bytes), n)
    spread = sum(((x - mean_x) ** 2 for x in tokens), Fraction(0))
    slope = sum(((x - mean_x) * (y - mean_y) for x, y in zip(tokens, size_bytes, strict=True)), Fraction(0)) / spread
    constant = mean_y - slope * mean_x
    off = max(abs(constant + slope * x - y) for x, y in zip(tokens, size_bytes, strict=True))
    return Line(float(constant), float(slope), float(off))


# ---- closed formulas, from the text of the formats ----


@dataclass(frozen=True)
class Cost:
    """Bytes of one layer for one row: constant, and per token of context."""

    constant: float
    per_token: float

    def at(self, tokens: int) -> float:
        return self.constant + self.per_token * tokens


def record_bytes(d: int, r: int) -> int:
    """A window row or compressed entry: d - r e4m3 codes, r bf16, a scale per 64 codes, up to a multiple of 8."""
    plain = d - r
    return -(-(plain + 2 * r + plain // 64) // 8) * 8


def key_bytes(config: ModelConfig) -> int:
    """An indexer key: two e2m1 codes a byte and a scale per 32."""
    return config.index_head_dim // 2 + config.index_head_dim // 32


def expected(config: ModelConfig, kind: str, prefill_chunk: int, how: str = "published") -> Cost:
    """The closed formula of a layer kind, for contexts of at least a window and a chunk.

    how   "published" formats; "bf16": two bytes a value; "wrong width": bf16, and indexer keys taken to be
          index_n_heads * index_head_dim wide
    """
    c, ratio = config, KINDS[kind]
    record, key = float(record_bytes(c.head_dim, c.qk_rope_head_dim)), float(key_bytes(c))
    if how != "published":
        record, key = 2.0 * c.head_dim, 2.0 * c.index_head_dim * (c.index_n_heads if how == "wrong width" else 1)
    slots = -(-(c.sliding_window - 1 + prefill_chunk) // 8) * 8  # a whole chunk is stored before its first query reads back
    constant = slots * (record + 4) + 4  # a position per slot, and the length
    per_token = 0.0
    if ratio:
        rows = ratio * c.overlap(ratio)
        constant += 2 * 4 * rows * c.overlap(ratio) * c.head_dim  # kv and gate, fp32
        per_token = record / ratio
    if kind == "csa":
        constant += 2 * 4 * rows * 2 * c.index_head_dim
        per_token += key / ratio
    return Cost(constant, per_token)


def expected_total(config: ModelConfig, tokens: int, prefill_chunk: int, how: str = "published", layers: int | None = None) -> float:
    """Bytes of all layers of a model for one row."""
    count = config.num_hidden_layers if layers is None else layers
    return sum(expected(config, config.kind(layer), prefill_chunk, how).at(tokens) for layer in range(count))


# ---- production's own classes, sized for other configurations ----


def one_layer(model: Any, layer: int, max_context: int | None = None, prefill_chunk: int | None = None) -> Any:
    """A model of embed, one of `model`'s layers and its head, on the same weights."""
    c = model.config
    config = dataclasses.replace(c, num_hidden_layers=1, compress_ratios=(c.ratio(layer),), num_hash_layers=int(c.is_hash(layer)))
    weights = dataclasses.replace(model.weights, layers=(model.weights.layers[layer],))
    context = model.max_context if max_context is None else max_context
    return type(model)(config, weights, model.audit, model.device, context, prefill_chunk or model.prefill_chunk, model.plan, model.decoding)


def resized(model: Any, max_context: int) -> Any:
    """The same model, for contexts of another size."""
    return type(model)(model.config, model.weights, model.audit, model.device, max_context, model.prefill_chunk, model.plan, model.decoding)


def one_kind(config: ModelConfig, kind: str) -> ModelConfig:
    """The configuration with a single layer of a kind."""
    return dataclasses.replace(config, num_hidden_layers=1, compress_ratios=(KINDS[kind],), num_hash_layers=0)


def empty_state(state_class: type, config: ModelConfig, tokens: int, prefill_chunk: int, device: torch.device) -> Any:
    """A state as `new_state` makes it, of a model that has no weights."""
    blocks = [SimpleNamespace(attn=SimpleNamespace(indexer=None))] * config.num_hidden_layers
    model = SimpleNamespace(
        config=config, device=SimpleNamespace(torch_device=device), prefill_chunk=prefill_chunk, layers=tuple(range(config.num_hidden_layers)),
        blocks=blocks, plan=SimpleNamespace(decode=SimpleNamespace(sparse_attn=None)),
    )  # fmt: skip
    return state_class(model, 1, tokens)


def lengths_for(config: ModelConfig, prefill_chunk: int, most: int, count: int = 4) -> list[int]:
    """Contexts of whole groups where every constant part has its full size: a first one, then doubled."""
    first = 128 * -(-(config.sliding_window + prefill_chunk + 8) // 128)
    return [first << i for i in range(count) if first << i <= max(most, first << 2)]


def kind_line(state_class: type, config: ModelConfig, kind: str, tokens: Sequence[int], prefill_chunk: int, device: torch.device) -> tuple[Line, list[int]]:
    """Bytes that a layer of a kind keeps in its cache at each length, and the line through them."""
    sizes = [held_bytes(empty_state(state_class, one_kind(config, kind), n, prefill_chunk, device).cache) for n in tokens]
    return fit_line(tokens, sizes), sizes


@dataclass(frozen=True)
class Footprint:
    """Bytes of one row of `tokens`: the cache, and everything else of a state (buffers of a call). how: what measured it."""

    tokens: int
    cache: int
    buffers: int
    how: str


@contextmanager
def no_collection() -> Iterator[None]:
    """Garbage is collected before, until there is none, and inside only where it is asked for: what is freed inside is one's own."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        while gc.collect():
            pass
        yield
    finally:
        if was_on:
            gc.enable()


def allocated_by(make: Callable[[], Any], allocated: Callable[[], int]) -> tuple[int, int]:
    """Bytes of a new state's cache, and of everything else of it, as readings of an allocator differ.

    States and captured graphs of earlier calls are reference cycles: freed between two readings they would count as negative bytes.
    """
    with no_collection():
        before = allocated()
        state = make()
        taken = allocated() - before
        cache = state.cache
        del state
        gc.collect()
        held = allocated() - before  # what is left is the cache
        del cache
    return held, taken - held


def footprint(state_class: type, config: ModelConfig, tokens: int, prefill_chunk: int, device: torch.device) -> Footprint:
    """A whole state at a length: by the allocator on a GPU, by the exact bytes of its tensors elsewhere (nothing is allocated)."""
    if device.type == "cuda":

        def allocated() -> int:
            torch.cuda.synchronize(device)
            return int(torch.cuda.memory_allocated(device))

        cache_bytes, buffers = allocated_by(lambda: empty_state(state_class, config, tokens, prefill_chunk, device), allocated)
        torch.cuda.empty_cache()
        return Footprint(tokens, cache_bytes, buffers, "device allocator")
    state = empty_state(state_class, config, tokens, prefill_chunk, torch.device("meta"))
    cache_bytes = held_bytes(state.cache)
    return Footprint(tokens, cache_bytes, held_bytes(state, (state.model,)) - cache_bytes, "exact tensor bytes")


# ---- widths, as the first calls show them ----


@dataclass(frozen=True)
class Part:
    """One buffer of a layer, as its first calls showed it.

    values          width of the rows handed to the store
    weights         width that the weights make, 0 where no one tensor says it
    written, held   bytes of a stored row that were written, and that the buffer keeps for it
    wanted          bytes that the format of rows this wide takes
    beyond          bytes written outside of the stored rows
    others          other widths that a launch was handed or told
    stores          kernels whose launches stored; unknown  kernels that may write the buffer and that STORES does not know
    """

    name: str
    values: int
    weights: int
    written: int
    held: int
    wanted: int
    beyond: int = 0
    others: tuple[int, ...] = ()
    stores: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()

    def disagreements(self) -> list[str]:
        """What does not fit together, in words."""
        found = []
        if self.values < 1:
            found.append(f"{self.name}: nothing was stored")
        if self.unknown:
            found.append(f"{self.name}: given to launches of {', '.join(self.unknown)}, of whose arguments nothing is known")
        if self.others:
            found.append(f"{self.name}: rows of {self.values} and of {', '.join(map(str, self.others))}")
        if self.weights not in (0, self.values):
            found.append(f"{self.name}: rows of {self.values} from weights for {self.weights}")
        if self.held != self.wanted:
            found.append(f"{self.name}: buffer of {self.held} bytes a row, rows of {self.values} take {self.wanted}")
        if self.written != self.wanted:
            found.append(f"{self.name}: {self.written} bytes of a row written, rows of {self.values} take {self.wanted}")
        if self.beyond:
            found.append(f"{self.name}: {self.beyond} bytes written outside of the stored rows")
        return found


FILLINGS = (0xA5, 0x5A)
BUFFERS = ("ring", "entries", "keys", "scales")  # of a layer's cache
WRITABLE = 1  # kind of a kernel's parameter: a pointer to what is not const

# Kernels that store: by the parameter of the buffer those of the rows and of their width.
STORES = {
    "store_window": {"ring": ("kv", "d")},
    "store_entries": {"cache": ("rows", "d")},
    "store_index_keys": {"keys": ("rows", "di"), "scales": ("rows", "di")},
    "latents": {"ring": ("kv", "d"), "entries": ("c_rows", "d"), "keys": ("i_rows", "di"), "scales": ("i_rows", "di")},
}


class Stores:
    """Watches a device: launches that are given a buffer of a layer's cache to write, and the widths that they are handed and told."""

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.widths: dict[str, dict[int, None]] = {name: {} for name in BUFFERS}
        self.kernels: dict[str, dict[str, None]] = {name: {} for name in BUFFERS}
        self.unknown: dict[str, dict[str, None]] = {name: {} for name in BUFFERS}

    def before(self, launch: Any) -> None:
        given = {parameter.name: argument for parameter, argument in zip(launch.parameters, launch.args, strict=True)}
        for parameter in launch.parameters:
            target = given[parameter.name]
            if parameter.kind != WRITABLE or not isinstance(target, Tensor):
                continue
            for name, buffer in self.buffers.items():
                if not 0 <= target.data_ptr() - buffer.data_ptr() < buffer.nbytes:
                    continue
                known = STORES.get(launch.kernel, {}).get(parameter.name)
                if known is None:
                    self.unknown[name][launch.kernel] = None
                else:
                    self.kernels[name][launch.kernel] = None
                    self.widths[name] |= {int(given[known[0]].shape[-1]): None, int(given[known[1]]): None}

    def after(self, launch: Any) -> None:
        pass


def observed_widths(model: Any, layer: int) -> list[Part]:
    """The first calls of a layer alone, made twice over differently filled buffers: a byte that came out equal was written.

    A prefill and then decode steps, each of which completes a group of the compressors: either phase has launches of its own.
    """
    alone = one_layer(model, layer, 1024, 160)
    alone.decoding = "eager"  # launches of a graph cannot be watched
    c, ratio = alone.config, alone.config.ratio(0)
    first = 2 * ratio - 1 if ratio else 2
    tokens = torch.arange(first + 3) % c.vocab_size
    stores, caches = Stores(), []
    for filling in FILLINGS:
        state = alone.new_state(1)
        cache = state.cache.layers[0]
        stores.buffers = {name: buffer for name in BUFFERS if (buffer := getattr(cache, name)) is not None}
        for buffer in stores.buffers.values():
            buffer.fill_(filling)
        with alone.device.watched(stores):
            alone.prefill(tokens[None, :first], state)
            for token in tokens[first:].split(1):
                alone.decode(token, state)
        caches.append(cache)

    def width(buffer: str) -> int:
        return next(iter(stores.widths[buffer]), 0)

    def part(name: str, buffer: str, weights: int, wanted: int) -> Part:
        one, two = (getattr(cache, buffer) for cache in caches)
        stored = len(tokens) // (ratio if buffer != "ring" else 1)
        same = (one == two)[0].cpu()  # [rows, bytes]
        return Part(
            name, width(buffer), weights, int(same[:stored].sum(-1).amin()), one.shape[-1], wanted, int(same[stored:].sum()),
            tuple(stores.widths[buffer])[1:], tuple(stores.kernels[buffer]), tuple(stores.unknown[buffer]),
        )  # fmt: skip

    attention = alone.blocks[0].attn
    parts = [part("window row", "ring", attention.weights.kv_norm.shape[0], record_bytes(width("ring"), c.qk_rope_head_dim))]
    if ratio:
        made = attention.compressor.weights.norm.shape[0]
        parts.append(part("compressed entry", "entries", made, record_bytes(width("entries"), c.qk_rope_head_dim)))
    if ratio == 4:
        made = attention.indexer.compressor.weights.wkv.shape[0] // 2
        parts.append(part("indexer key", "keys", made, width("keys") // 2))
        parts.append(part("scales of an indexer key", "scales", attention.indexer.key_width, width("scales") // 32))
    return parts


# ---- steps ----


@dataclass(frozen=True)
class Slope:
    """Decode steps of one state: what was allocated and what grew.

    allocations   tensors with new storage, over all steps; operations  the first few that made them
    state_growth  bytes that the state keeps after the last step and not after the first
    live_growth   the same over every tensor of the process
    host_growth   bytes of strings and buffers that state, model and production's modules keep more; element_growth  the same of
                  container elements; grew  the first few places of it
    samples       what the allocator held (reserved on a GPU, resident elsewhere), every `every` steps; spread  largest - smallest
    """

    steps: int
    every: int
    allocations: int
    allocated_bytes: int
    operations: list[str]
    state_growth: int
    live_growth: int
    host_growth: int
    element_growth: int
    grew: list[str]
    source: str
    samples: list[int]

    @property
    def spread(self) -> int:
        return max(self.samples) - min(self.samples)


Counting = Callable[[], AbstractContextManager[Any]]


def decode_slope(model: Any, steps: int, counting: Counting, prompt: int = 130, every: int = 10) -> Slope:
    """`steps` decode steps after a prompt and a few steps of warm-up, all counted.

    counting   production.engine.count_allocations
    """
    device = model.device.torch_device
    state = model.new_state(1)
    vocab = model.config.vocab_size
    tokens = torch.arange(prompt + 1) % vocab
    model.prefill(tokens[None, :-1], state)
    token, out = tokens[-1:], torch.empty(1, vocab, dtype=torch.float32, device=device)
    with counting():  # the counter's own first use, too
        for _ in range(2 * every):
            model.decode(token, state, out=out)
    roots = {"state": state, "model": model}
    state_before, live_before, host_before = held_bytes(state), live_bytes(), hosted(roots)
    source, first = process_bytes(device)
    samples = [first]
    with counting() as counted:
        for step in range(1, steps + 1):
            model.decode(token, state, out=out)
            if step % every == 0:
                samples.append(process_bytes(device)[1])
    host = hosted(roots)
    return Slope(
        steps, every, max(counted.count, counted.device_count), counted.bytes, list(dict.fromkeys(counted.operations))[:6],
        held_bytes(state) - state_before, live_bytes() - live_before,
        host.size_bytes - host_before.size_bytes, host.elements - host_before.elements, host.grown(host_before), source, samples,
    )  # fmt: skip


@dataclass(frozen=True)
class Transient:
    """New tensors of one prefill call, logits not counted. logits: sha256 of its logits' bytes, 16 hex digits."""

    max_context: int
    position: int
    count: int
    size_bytes: int
    operations: list[str]
    logits: str


def prefill_transients(model: Any, layer: int, contexts: Sequence[int], counting: Counting, tokens: int = 4, before: int = 40) -> list[Transient]:
    """What a short prefill allocates, at the start and further on, under small and large capacities, and what it says.

    Nothing may scale with capacity or position, and the same tokens give the same bits under every capacity.
    """
    found = []
    for context in contexts:
        alone = one_layer(model, layer, context, 16)
        state = alone.new_state(1)
        ids = torch.arange(tokens)[None] % alone.config.vocab_size
        for position in (0, before):
            if position:
                alone.prefill(torch.arange(before - tokens)[None] % alone.config.vocab_size, state)
            with counting() as counted:
                logits = alone.prefill(ids, state)
            own = logits.untyped_storage().nbytes()
            digest = hashlib.sha256(logits.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            found.append(Transient(context, position, counted.count - 1, counted.bytes - own, list(dict.fromkeys(counted.operations))[:6], digest))
    return found


# ---- capacity ----


@dataclass(frozen=True)
class Capacity:
    """Filling a state to its last token and asking for one more.

    taken     tokens that fitted; capacity  tokens asked for
    refusals  what each way of asking for one more said, by way; "" = it was taken
    changed   parts of the exported state, or lengths, that a refused call changed
    failed    what stopped the filling before it was full
    """

    capacity: int
    taken: int
    refusals: dict[str, str]
    changed: list[str]
    failed: str = ""


def fill_to_capacity(model: Any, layer: int, prefill_chunk: int = 16) -> Capacity:
    """A layer alone with a capacity just past its ring: prefill to two tokens short, decode them, then one more by every way."""
    window = model.config.sliding_window
    capacity = window + 2 * prefill_chunk + 5
    alone = one_layer(model, layer, capacity, prefill_chunk)
    c, device = alone.config, alone.device.torch_device
    state = alone.new_state(1)
    ids = torch.arange(capacity + 1) % c.vocab_size
    try:
        alone.prefill(ids[None, : capacity - 2], state)
        for position in (capacity - 2, capacity - 1):
            alone.decode(ids[position : position + 1], state)
    except InputError as error:
        return Capacity(capacity, int(state.length[0]), {}, [], str(error))
    before, length = state.export_layer(0), state.length.clone()
    X = torch.zeros(1, 1, c.hc_mult, c.hidden_size, device=device)
    fresh = alone.new_state(1)
    ways: dict[str, Callable[[], Any]] = {
        "decode": lambda: alone.decode(ids[-1:], state),
        "prefill": lambda: alone.prefill(ids[None, -1:], state),
        "run_layer": lambda: alone.run_layer(0, X, ids[None, -1:], state),
        "prefill of capacity + 1": lambda: alone.prefill(ids[None], fresh),
    }
    refusals = {}
    for way, ask in ways.items():
        try:
            ask()
            refusals[way] = ""
        except InputError as error:
            refusals[way] = str(error)
    after = state.export_layer(0)
    changed = [name for name in before if not torch.equal(before[name].nan_to_num(nan=1e30), after[name].nan_to_num(nan=1e30))]
    changed += [] if torch.equal(length, state.length) else ["length on the host"]
    changed += [] if int(fresh.length[0]) == 0 and int(fresh.export_layer(0)["length"][0]) == 0 else ["length of a new state"]
    return Capacity(capacity, int(length[0]), refusals, changed)
