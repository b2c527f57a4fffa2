"""Checks of production against itself and against the checkpoint's bytes, bit for bit, on a small random model.

What a comparison with the reference lets pass, because it lies below a rounding or because one prompt does not engage it:
a parameter that lost bits, a row that knows of its neighbours, a chunk border, a step that touches what is stored already,
a state that does not come back, memory that grows. Each is exact, so each is judged exactly; the first point that
differs, in dataflow order, names the component.

    pytest parity/test_operations_whole.py -k alone
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from parity import gates
from parity.unit.worlds import prompt, write_checkpoint
from probes.core.records import Verdict
from production.cache import formula
from production.engine import count_allocations
from production.launch import KernelError
from production.model import State, Transformer, load
from production.weights import load_weights
from reference.checkpoint import Checkpoint
from reference.config import InputError
from reference.ops import rope_frequencies, yarn_frequencies
from reference.points import points_of_model, spec_of

MAX_CONTEXT = 300
# Window 16, one layer of each kind and CSA twice; 131 tokens end inside a group of 4 and just past one of 128.
LENGTHS = [33, 0, 131, 6]
# A layer's stored parts, and whose they are.
PART_COMPONENT = {
    "length": "batching", "kv": "SWA ring", "compressor.entries": "compressor", "compressor.kv": "compressor", "compressor.gate": "compressor",
    "indexer.compressor.entries": "indexer", "indexer.compressor.kv": "compressor", "indexer.compressor.gate": "compressor",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """A small random checkpoint whose norm weights are small, so that a format with an offset from one loses their bits."""
    path = write_checkpoint(tmp_path_factory.mktemp("world"), seed=5, shards=1)
    file = path / "model.safetensors"
    stored = load_file(file)
    save_file({name: t * 0.03 if name.endswith(".attn_norm.weight") else t for name, t in stored.items()}, file)
    return path


@pytest.fixture(scope="module")
def loaded(directory, device) -> Callable[[int], Transformer]:
    """The model by its prefill chunk; at 16 a prompt of 131 tokens is cut eight times and laps its ring."""
    made: dict[int, Transformer] = {}

    def get(chunk: int) -> Transformer:
        if chunk not in made:
            kind = "cpu" if device.torch_device.type == "cpu" else "cuda"
            made[chunk] = load(directory, device=kind, max_context=MAX_CONTEXT, prefill_chunk=chunk)
        return made[chunk]

    return get


@pytest.fixture
def judge_equal(record) -> Callable[..., None]:
    """judge_equal(gate, what, compared, [(what differs, component), ..]): passes when the list is empty."""

    def judged(gate: str, what: str, compared: int, different: list[tuple[str, str]]) -> None:
        judgement = gates.judge_exact(len(different), compared, "differ")
        names = ", ".join(name for name, _ in different[:4])
        component = different[0][1] if different else ""
        record(
            Verdict(
                f"operation.{gate}", f"{gate}[{what}]", "operation", judgement.state, "different values", value=float(len(different)), limit=0.0,
                spent=judgement.spent, rows=compared, component=component, local=True, reason=judgement.reason + (f": {names}" if names else ""),
                why="the same sums in the same order",
            )
        )  # fmt: skip

    return judged


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN."""
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


# ---- loading ----


def parameters(weights: Any, at: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the loaded weights by its path."""
    if isinstance(weights, Tensor):
        yield at.removeprefix("."), weights
    elif isinstance(weights, tuple):
        for i, item in enumerate(weights):
            yield from parameters(item, f"{at}.{i}")
    elif dataclasses.is_dataclass(weights):
        for field in dataclasses.fields(weights):
            yield from parameters(getattr(weights, field.name), f"{at}.{field.name}")


def stored_value(checkpoint: Checkpoint, path: str) -> Tensor:
    """What the checkpoint holds for a path of `parameters`, experts stacked."""
    name = path.replace("hc_attn.", "hc_attn_").replace("hc_ffn.", "hc_ffn_").replace("hc_head.", "hc_head_")
    for part in ("gate", "experts", "shared_experts"):
        name = name.replace(f".{part}.", f".ffn.{part}.")
    if ".ffn.experts." in name:
        stem, matrix = name.rsplit(".", 1)
        part = "scale" if matrix[0] == "s" else "weight"
        return torch.stack([checkpoint.raw(f"{stem}.{e}.w{matrix[1]}.{part}").view(torch.uint8) for e in range(checkpoint.config.n_routed_experts)])
    raw = checkpoint.raw(name if name in checkpoint.specs else f"{name}.weight")
    return raw.view(torch.uint8) if raw.element_size() == 1 else raw


@pytest.mark.parametrize("many_experts", [False, True], ids=["norms of 0.03", "300 experts"])
def test_every_parameter_is_the_checkpoints(many_experts, directory, device, tmp_path, judge_equal):
    """Packed ones byte for byte, the others value for value, in a type that holds them: ids past 256 do not survive bf16."""
    if many_experts:
        directory = write_checkpoint(tmp_path, shards=1, num_hidden_layers=1, compress_ratios=[0], n_routed_experts=300, moe_intermediate_size=32)
    checkpoint = Checkpoint(directory)
    weights, _ = load_weights(checkpoint, device.torch_device)
    found = dict(parameters(weights))
    different = []
    for path, value in found.items():
        if not same(value.cpu().double(), stored_value(checkpoint, path).double()):
            different.append((path, "checkpoint loading"))
    judge_equal("load", "300 experts" if many_experts else "every parameter", len(found), different)


def test_every_layer_rotates_by_its_own_frequencies(loaded, judge_equal):
    """Window-only layers: the plain base. Layers with a ratio: the other base, with the YaRN ramp."""
    model = loaded(512)
    c = model.config
    plain = rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
    scaled = yarn_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_factor, c.rope_original_max, c.rope_beta_fast, c.rope_beta_slow)
    different = [
        (f"layer {layer}, ratio {c.ratio(layer)}", "rope")
        for layer in model.layers
        if not same(model.blocks[layer].attn.freq.cpu(), scaled if c.ratio(layer) else plain)
    ]
    judge_equal("rope", "frequencies of every layer", len(model.layers), different)


def ragged(model: Transformer, lengths: list[int]) -> Tensor:
    """One row of text per length, right-padded."""
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, n in enumerate(lengths):
        tokens[row, :n] = torch.tensor(prompt(n, model.config.vocab_size, 50 * row), dtype=torch.int64)
    return tokens


# ---- memory ----


def test_a_row_takes_max_context_tokens(loaded, judge_equal):
    """A prompt several rings long is taken; then as many tokens as --max-context says, and not one more."""
    model = loaded(16)
    state, prompt_length, different = model.new_state(1), 140, []
    try:
        model.prefill(ragged(model, [prompt_length]), state)
        state.cache.check_room(range(len(model.layers)), [MAX_CONTEXT - prompt_length])
    except InputError as error:
        different.append((f"refused: {error}", "memory"))
    else:
        with contextlib.suppress(InputError):
            state.cache.check_room(range(len(model.layers)), [MAX_CONTEXT - prompt_length + 1])
            different.append((f"{MAX_CONTEXT + 1} tokens are taken", "memory"))
    judge_equal("memory", f"a row of {MAX_CONTEXT} tokens", 2, different)


def held(state: State) -> int:
    """Bytes of all storages that a cache keeps alive, whatever view of them it uses."""
    storages: dict[int, int] = {}
    seen: set[int] = set()

    def walk(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, Tensor):
            storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, list | tuple):
            for item in value:
                walk(item)
        elif isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif dataclasses.is_dataclass(value) or type(value).__module__.startswith("production"):
            for item in vars(value).values():
                walk(item)

    walk(vars(state.cache))
    return sum(storages.values())


def by_hand(model: Transformer, chunk: int) -> int:
    """Bytes of one row's cache, written down from the formats: dsv4.md section 4."""
    c = model.config
    d, r, di = c.head_dim, c.qk_rope_head_dim, c.index_head_dim
    record = -(-(d + r + (d - r) // 64) // 8) * 8
    slots = -(-(c.sliding_window - 1 + chunk) // 8) * 8
    total = 0
    for layer in model.layers:
        ratio = c.ratio(layer)
        total += slots * (record + 4) + 4
        if ratio:
            total += -(-MAX_CONTEXT // ratio) * record
            total += 2 * 4 * (8 * 2 * d if ratio == 4 else ratio * d)
        if ratio == 4:
            total += -(-MAX_CONTEXT // 4) * (di // 2 + di // 32) + 2 * 4 * 8 * 2 * di
    return total


def test_a_cache_holds_what_its_formats_need(loaded, judge_equal):
    """Storages, not views; the closed formula says the same; 140 prefilled tokens and 5 steps hold no byte more."""
    model = loaded(16)
    state, want = model.new_state(1), by_hand(model, 16)
    sizes = {"storages": held(state), "formula": sum(formula(model.config, 1, MAX_CONTEXT, 16).values()), "nbytes": sum(state.cache.nbytes().values())}
    model.prefill(ragged(model, [140]), state)
    sizes["after a prompt of 140 tokens"] = held(state)
    for step in range(5):
        model.decode(torch.tensor([step]), state)
    sizes["after 5 steps"] = held(state)
    judge_equal("memory", "bytes of a cache", len(sizes), [(f"{name}: {size} bytes, expected {want}", "memory") for name, size in sizes.items() if size != want])


def test_a_decode_step_allocates_nothing(loaded, judge_equal):
    """Across the ends of groups of 4 and of 128."""
    model = loaded(16)
    state = model.new_state(1)
    out = torch.empty(1, model.config.vocab_size, device=model.device.torch_device)
    model.prefill(ragged(model, [122]), state)
    token = torch.tensor([7])
    different = []
    for _ in range(8):
        with count_allocations() as counted:
            model.decode(token, state, out=out)
        if counted.count or counted.device_count:
            different.append((f"{counted.count} tensors, {counted.bytes} bytes, first {(*counted.operations, 'on the device')[0]}", "memory"))
    judge_equal("memory", "allocations of a decode step", 8, different)


# ---- kernels under the checker ----


def component_of_kernel(message: str) -> str:
    """The component of a kernel that an error message begins with."""
    word = message.split(":", 1)[0].split("_")[0]
    return next((row.component for name, row in gates.OPERATIONS.items() if name.split("_")[0] == word), "")


def test_no_kernel_leaves_its_memory(directory, judge_equal):
    """Prefill of uneven rows and decode in the checked CPU build: bounds, races, unwritten shared memory, divergent barriers."""
    model = load(directory, device="cpu", max_context=40, prefill_chunk=20, checked=True)
    state, different = model.new_state(3), []
    try:
        model.prefill(ragged(model, [20, 7, 0]), state, [20, 7, 0])
        model.decode(torch.tensor([1, 2, 3]), state)
    except KernelError as error:
        different.append((str(error).splitlines()[0], component_of_kernel(str(error))))
    judge_equal("checked", "every kernel of the model", len(model.kernels()), different)


# ---- calls ----


Seen = dict[str, list[Tensor]]


def watched(model: Transformer, run: Callable[[], Any]) -> Seen:
    """Every point of a run, [b, s, ...] per call."""
    seen: Seen = {}
    with model.taps.observe(list(model.taps.points), lambda point, value: seen.setdefault(point, []).append(value.detach().cpu().clone())):
        run()
    return seen


def wide(value: Tensor, width: int) -> Tensor:
    """Scores and visible sets grow with the context: padded to one width by "none"."""
    value = value.double().masked_fill(value == -torch.inf, -1.0)
    return torch.nn.functional.pad(value, (0, width - value.shape[-1]), value=-1.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """The first `count` queries of one batch row of what was seen, over several calls."""

    seen: Seen
    row: int
    count: int

    def value(self, point: str) -> Tensor:
        values = self.seen[point]
        width = max(v.shape[-1] for v in values)
        grows = len({v.shape[-1] for v in values}) > 1
        return torch.cat([wide(v[self.row], width) if grows else v[self.row] for v in values])[: self.count]


def differing(model: Transformer, got: Row, want: Row) -> list[tuple[str, str]]:
    """Points that are not bit-equal, in dataflow order, with their components; index sets and scores up to padding."""
    different, W = [], model.config.sliding_window
    for point in points_of_model(model.config):
        a, b = got.value(point), want.value(point)
        if point.endswith(("indexer.score", "selected", "visible")):
            a, b = (wide(v, max(a.shape[-1], b.shape[-1])) for v in (a, b))
        if not same(a, b):
            lost = point.endswith("attn.kv") and bool(a.isnan().any())  # the slot holds another token
            lost = lost or (point.endswith("attn.visible") and not same(a[..., :W], b[..., :W]))
            different.append((point, "SWA ring" if lost else spec_of(point).component))
    return different


# Points that show tokens, positions and whose row is read; behind others a part of its own depends on the batch.
OF_ROWS = ("embed", "attn.q", "attn.kv", "attn.visible", "attn.core", "logits")


def mixed(point: str, component: str) -> str:
    """Whose fault it is that a point of one row depends on the other rows."""
    return "batching" if spec_of(point).name in OF_ROWS else component


@pytest.mark.parametrize("split", [False, True], ids=["", "keys split"])
def test_a_row_alone_is_the_row_in_an_uneven_batch(split, loaded, device, tmp_path, judge_equal):
    """Prefill and three decode steps, every point: rows of 33, 0, 131 and 6 tokens do not know of each other.

    split: a window of 80, so that decode attention splits its keys and merges the parts
    """
    model = loaded(512)
    if split:
        model = load(write_checkpoint(tmp_path, seed=5, shards=1, sliding_window=80, num_hidden_layers=2, compress_ratios=[0, 4]), device=device.name, max_context=MAX_CONTEXT)
        assert max(model.new_state(1).splits.values()) > 1
    tokens, steps = ragged(model, LENGTHS), [torch.tensor([1, 2, 3, 4]) + i for i in range(3)]
    state = model.new_state(len(LENGTHS))
    together = watched(model, partial(model.prefill, tokens, state, LENGTHS))
    decoded = [watched(model, partial(model.decode, token, state)) for token in steps]
    different, compared = [], 0
    for row, n in enumerate(LENGTHS):
        alone = model.new_state(1)
        if n:
            seen = watched(model, partial(model.prefill, tokens[row : row + 1, :n], alone))
            different += [(f"prefill row {row} {point}", mixed(point, part)) for point, part in differing(model, Row(together, row, n), Row(seen, 0, n))]
        for i, token in enumerate(steps):
            seen = watched(model, partial(model.decode, token[row : row + 1], alone))
            different += [(f"decode step {i} row {row} {point}", mixed(point, part)) for point, part in differing(model, Row(decoded[i], row, 1), Row(seen, 0, 1))]
        compared += len(model.taps.points) * (len(steps) + bool(n))
    judge_equal("batching", "alone = in an uneven batch" + (", keys split" if split else ""), compared, different)


@pytest.mark.parametrize("chunk", [5, 16], ids=lambda chunk: f"chunk {chunk}")
def test_chunked_prefill_is_one_shot_prefill(chunk, loaded, judge_equal):
    """Every point and the state behind them, past 128 tokens, in chunks that end inside groups and lap the ring."""
    one, cut, n = loaded(512), loaded(chunk), 131
    tokens = ragged(one, [n])
    states = one.new_state(1), cut.new_state(1)
    want, got = (watched(model, partial(model.prefill, tokens, state)) for model, state in zip((one, cut), states, strict=True))
    different = differing(one, Row(got, 0, n), Row(want, 0, n))
    different += state_differs(one, states[1], states[0])
    judge_equal("chunking", f"chunks of {chunk} = one shot", len(one.taps.points), different)


# ---- state ----


def exported(model: Transformer, state: State) -> dict[str, Tensor]:
    return {f"layers.{layer}.{name}": t.clone() for layer in model.layers for name, t in state.export_layer(layer).items()}


def state_differs(model: Transformer, a: State, b: State) -> list[tuple[str, str]]:
    first, second = exported(model, a), exported(model, b)
    return [(f"state {name}", PART_COMPONENT[name.split(".", 2)[2]]) for name in first if not same(first[name], second[name])]


def test_what_is_stored_stays(loaded, judge_equal):
    """A decode step adds: entries and keys that were complete keep their bits, the window moves by one, rows of the open group stay."""
    model = loaded(512)
    state = model.new_state(2)
    model.prefill(ragged(model, [126, 9]), state, [126, 9])
    different, compared = [], 0
    for step in range(6):  # completes groups of 4, and one of 128
        before = exported(model, state)
        model.decode(torch.tensor([step, 9 - step]), state)
        after = exported(model, state)
        for name, old in before.items():
            part = name.split(".", 2)[2]
            new = after[name]
            if part == "length":
                kept = same(new, old + 1)
            elif part == "kv":
                kept = same(new[:, :-1], old[:, 1:])
            elif part.endswith("entries"):
                kept = same(new[:, : old.shape[1]].where(~old.isnan(), torch.nan), old)
            else:
                both = ~(old.isnan() | new.isnan())
                kept = int((both & (old != new)).any(-1).sum(-1).max()) <= 1  # the new token's own row
            compared += 1
            if not kept:
                different.append((f"step {step} {name}", PART_COMPONENT[part]))
    judge_equal("stored", "a step changes nothing that is stored", compared, different)


def test_a_state_comes_back_as_it_was(loaded, judge_equal):
    """Exported, put into a state that held something else, exported again: every part, and the next step's logits."""
    model = loaded(512)
    state, other = model.new_state(2), model.new_state(2)
    model.prefill(ragged(model, [131, 9]), state, [131, 9])  # past the window, and short of it
    model.prefill(ragged(model, [30, 30]).flip(0), other)
    for layer in model.layers:
        other.import_layer(layer, state.export_layer(layer))
    different = state_differs(model, other, state)
    token = torch.tensor([3, 8])
    if not same(model.decode(token, other).cpu(), model.decode(token, state).cpu()):
        different.append(("logits of the next step", "batching"))
    judge_equal("restore", "export, import, export", len(exported(model, state)) + 1, different)


class BrokenError(Exception):
    """What an observer of this file raises."""


@pytest.mark.parametrize("call", ["prefill", "layer"])
def test_a_call_that_breaks_half_way_leaves_the_state_as_it_was(call, loaded, judge_equal):
    """An observer stops a prefill in its third chunk, and one layer in its second: every part, and the next step's logits."""
    model = loaded(16)
    broken, kept = model.new_state(2), model.new_state(2)
    for state in (broken, kept):
        model.prefill(ragged(model, [37, 9]), state, [37, 9])
    calls = 0

    def stop(point: str, value: Tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == (3 if call == "prefill" else 2):
            raise BrokenError

    layer, tokens = model.layers[-1], ragged(model, [45, 45])
    X = torch.randn(2, 45, model.config.hc_mult, model.config.hidden_size, generator=torch.Generator().manual_seed(4))
    run = partial(model.prefill, tokens, broken, [45, 40]) if call == "prefill" else partial(model.run_layer, layer, X, tokens, broken)
    with pytest.raises(BrokenError), model.taps.observe([f"layers.{layer}.ffn.out"], stop):
        run()
    different = state_differs(model, broken, kept)
    token = torch.tensor([3, 8])
    if not different and not same(model.decode(token, broken).cpu(), model.decode(token, kept).cpu()):
        different.append(("logits of the next step", "batching"))
    judge_equal("restore", f"a {call} that breaks", len(exported(model, kept)) + 1, different)
