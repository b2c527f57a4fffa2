"""Bytes, lines and formulas by hand, and every memory gate seen red: growth, allocations, a wrong width, a full state that lies."""

from __future__ import annotations

import gc
import json
import shutil
from array import array
from collections import deque
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch

import production
from parity import capacity, gates
from parity.unit.worlds import PROMPTS, config_dict, write_checkpoint
from probes import memory as probe
from probes.core import memory
from probes.core.records import State
from production import cache, ops
from production.engine import count_allocations
from production.model import State as Held
from reference.config import InputError, ModelConfig

META, CPU = torch.device("meta"), torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
PRESETS = ROOT / "checkpoints" / "presets"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """One layer of each kind."""
    return write_checkpoint(tmp_path_factory.mktemp("memory"), seed=3, num_hidden_layers=3, compress_ratios=[0, 4, 128])


@pytest.fixture(scope="module")
def model(directory):
    return production.load(directory, max_context=400)


@pytest.fixture(scope="module")
def fast(directory):
    """The same where operations share launches, and decode steps come from graphs."""
    return production.load(directory, max_context=400, variants="fast", decoding="replay")


def preset(name: str) -> ModelConfig:
    return ModelConfig.from_dir(PRESETS / name)


def states(result: capacity.Result) -> dict[str, State]:
    return {verdict.gate: verdict.state for verdict in result[0]}


# ---- bytes ----


def test_a_view_counts_as_the_memory_it_keeps() -> None:
    whole = torch.zeros(1000)
    root = SimpleNamespace(a=whole[:3], b={"c": [whole[5:7]]}, d=(torch.zeros(2, dtype=torch.uint8),))
    assert memory.held_bytes(root) == 4000 + 2
    assert memory.held_bytes(root, (root.d,)) == 4000


def test_a_cycle_ends_and_meta_tensors_count() -> None:
    root = SimpleNamespace(t=torch.zeros(8, device=META))
    root.own = root
    assert memory.held_bytes(root) == 32


def test_live_bytes_see_a_tensor_in_a_list_of_a_module() -> None:
    before = memory.live_bytes()
    memory._hidden = [torch.zeros(250_000)]  # type: ignore[attr-defined]
    try:
        assert memory.live_bytes() - before == 1_000_000
    finally:
        del memory._hidden  # type: ignore[attr-defined]


def test_a_line_needs_three_lengths_and_shows_what_is_off_it() -> None:
    assert memory.fit_line([1, 2, 4], [12, 14, 18]) == memory.Line(10.0, 2.0, 0.0)
    assert memory.fit_line([1, 2, 4, 8], [12, 14, 18, 40]).off > 1
    with pytest.raises(InputError, match="three different lengths"):
        memory.fit_line([1, 2, 2], [1, 2, 2])


# ---- closed formulas, by hand from dsv4.md section 4 ----


def test_published_records_and_keys() -> None:
    config = preset("pro")
    assert memory.record_bytes(512, 64) == 584
    assert memory.key_bytes(config) == 68
    assert memory.expected(config, "csa", 512).per_token == (584 + 68) / 4
    assert memory.expected(config, "hca", 512).per_token == 584 / 128
    assert memory.expected(config, "window", 512).per_token == 0


def test_bf16_and_the_wrong_width_are_the_numbers_of_the_field_report() -> None:
    config = preset("pro")
    growth = {how: sum(memory.expected(config, config.kind(n), 512, how).per_token for n in range(61)) * memory.MILLION for how in ("bf16", "wrong width")}
    assert growth["bf16"] == pytest.approx(30 * (268.4e6 + 67.1e6) + 31 * 8.39e6, rel=1e-3)
    assert growth["wrong width"] == pytest.approx(137.1e9, rel=2e-3)


@pytest.mark.parametrize(("name", "kinds"), [("flash", (2, 21, 20)), ("pro", (0, 30, 31))])
def test_presets_have_the_published_layers(name, kinds) -> None:
    config = preset(name)
    found = [config.kind(layer) for layer in range(config.num_hidden_layers)]
    assert tuple(found.count(kind) for kind in ("window", "csa", "hca")) == kinds
    assert config.max_position_embeddings == memory.MILLION
    assert not config.unknown_keys
    assert (config.num_hash_layers, config.head_dim, config.index_n_heads * config.index_head_dim) == (3, 512, 8192)


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_a_million_tokens_pass(name) -> None:
    result = capacity.footprint(Held, preset(name), name, 512, CPU)
    assert set(states(result).values()) == {State.PASS}
    values = result[1][0].values
    assert values["kv_gb"] < values["bf16_gb"] < 15 < values["wrong_width_gb"]


class Block:
    """Bytes of an allocator that counts; `used` is the reading."""

    used = 0

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        Block.used += size_bytes

    def __del__(self) -> None:
        Block.used -= self.size_bytes


@pytest.mark.parametrize("was_on", [True, False])
def test_garbage_of_earlier_calls_is_no_part_of_a_footprint(was_on) -> None:
    """States and captured graphs are reference cycles: they die when the collector comes by."""

    def cycle(size_bytes: int) -> SimpleNamespace:
        found = SimpleNamespace(buffers=Block(size_bytes), cache=SimpleNamespace(held=Block(100)))
        found.own = found
        return found

    def make() -> SimpleNamespace:
        state = cycle(7)
        if gc.isenabled():
            gc.collect()  # as it may come by at any allocation
        return state

    was = gc.isenabled()
    try:
        gc.disable()
        cycle(1000)
        if was_on:
            gc.enable()
        assert memory.allocated_by(make, lambda: Block.used) == (100, 7)
        assert gc.isenabled() is was_on
        assert Block.used == 0
    finally:
        (gc.enable if was else gc.disable)()


# ---- gates, green and red ----


def test_every_bound_has_a_reason() -> None:
    assert all(row.why and row.component and row.limit >= 0 for row in gates.BOUNDS.values())
    assert gates.judge_bound("load", float("nan"), 1, "x").state is State.FAIL
    assert gates.judge_bound("load", 0.0, 0, "x").state is State.NOT_RUN


@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("plan", ["model", "fast"])
def test_widths_pass_for_every_kind(plan, layer, request) -> None:
    verdicts, values = capacity.widths(request.getfixturevalue(plan), layer)
    assert verdicts[0].state is State.PASS
    assert verdicts[0].rows == len(values) == {0: 1, 1: 4, 2: 2}[layer]
    alone = {"ring": ("store_window",), "entries": ("store_entries",), "keys": ("store_index_keys",)}
    shared = {"ring": ("latents",), "entries": ("store_entries", "latents"), "keys": ("store_index_keys", "latents")}
    wanted = shared if plan == "fast" else alone
    assert [v.values["stores"] for v in values] == [wanted[name] for name in ("ring", "entries", "keys", "keys")][: len(values)]


def test_widths_see_a_store_that_writes_too_little(model, monkeypatch) -> None:
    stored = ops.store_entries
    monkeypatch.setattr(ops, "store_entries", lambda dev, rows, entry, entries: stored(dev, rows, entry * 2, entries))
    (verdict,), _ = capacity.widths(model, 1)
    assert verdict.state is State.FAIL
    assert verdict.component == "KV quant"
    assert "compressed entry" in verdict.reason


@pytest.mark.parametrize(
    ("source", "text", "broken", "part"),
    [
        ("latents", "slot * ring_slot_stride, out, d, ", "slot * ring_slot_stride, out, d - 64, ", "window row"),
        ("latents", "(long long)batch * d, d, 2 * half_r", "(long long)batch * d, d - 64, 2 * half_r", "compressed entry"),
        ("latents", "first < di; first += KEY_BLOCK", "first + KEY_BLOCK < di; first += KEY_BLOCK", "indexer key"),
        ("kv_store", "kv + token * kv_stride, d, r", "kv + token * kv_stride, d - 64, r", "window row"),
        ("kv_store", "blockIdx.x * row_stride, d, r", "blockIdx.x * row_stride, d - 64, r", "compressed entry"),
        ("kv_store", "first < di; first += KEY_BLOCK", "first + KEY_BLOCK < di; first += KEY_BLOCK", "indexer key"),
    ],
)
def test_widths_see_a_kernel_that_stores_a_narrower_row(directory, tmp_path, source, text, broken, part) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(ROOT / "kernels", kernels)
    path = kernels / f"{source}.cu"
    assert path.read_text().count(text) == 1
    path.write_text(path.read_text().replace(text, broken))
    plan = "fast" if source == "latents" else "portable"
    (verdict,), _ = capacity.widths(production.load(directory, max_context=400, variants=plan, kernels_dir=kernels), 1)
    assert verdict.state is State.FAIL
    assert f"{part}: " in verdict.reason
    assert "bytes of a row written" in verdict.reason


@pytest.mark.parametrize("kernel", ["store_window", "latents"])
def test_widths_see_rows_of_two_widths_and_a_store_that_nobody_knows(kernel, model, fast, monkeypatch) -> None:
    run = fast if kernel == "latents" else model
    told = {name: dict(targets) for name, targets in memory.STORES.items()}
    told[kernel]["ring"] = ("kv", "slots")
    monkeypatch.setattr(memory, "STORES", told)
    assert "window row: rows of 96 and of " in capacity.widths(run, 0)[0][0].reason
    monkeypatch.setattr(memory, "STORES", {})
    assert f"window row: given to launches of {kernel}, of whose arguments nothing is known" in capacity.widths(run, 0)[0][0].reason


def test_a_wrong_width_is_refused_where_the_state_is_made(model, monkeypatch) -> None:
    """D1: a key buffer taken to be heads * dim wide."""
    attention = model.blocks[1].attn
    monkeypatch.setattr(attention.indexer, "key_width", model.config.index_n_heads * model.config.index_head_dim)
    with pytest.raises(InputError, match="indexer keys: buffer for keys of 64, the compressor makes keys of 192"):
        model.new_state(1)


def test_a_refused_state_is_a_verdict_of_the_indexer(model, monkeypatch) -> None:
    monkeypatch.setattr("production.model.KVCache", Widened)
    (verdict,), _ = capacity.widths(model, 1)
    assert (verdict.state, verdict.component) == (State.FAIL, "indexer")
    assert "buffer for keys of 192" in verdict.reason


class Widened(cache.KVCache):
    """An indexer key buffer of heads * dim, as from arithmetic on the config."""

    def __init__(self, config: ModelConfig, *rest: object) -> None:
        from dataclasses import replace

        super().__init__(replace(config, index_head_dim=config.index_n_heads * config.index_head_dim), *rest)  # type: ignore[arg-type]


class Raw(cache.KVCache):
    """B173: compressor state with a row per token, of which a view is used."""

    def __init__(self, config: ModelConfig, layers: int, batch: int, max_context: int, prefill_chunk: int, device: torch.device) -> None:
        super().__init__(config, layers, batch, max_context, prefill_chunk, device)
        self.rows = [torch.zeros(batch, max_context, 4, device=device)[:, :8]]


@pytest.mark.parametrize("broken", [Widened, Raw])
def test_rate_footprint_and_report_see_a_cache_that_is_too_large(broken, monkeypatch) -> None:
    monkeypatch.setattr("production.model.KVCache", broken)
    config = preset("pro")
    assert states(capacity.rate(Held, config, "csa", "pro", 512, CPU))["memory.rate"] is State.FAIL
    assert states(capacity.footprint(Held, config, "pro", 512, CPU))["memory.footprint"] is (State.FAIL if broken is Widened else State.PASS)
    assert states(capacity.reported(cache, Held, config, "pro", 512))["memory.reported"] is State.FAIL


@pytest.mark.parametrize("kind", memory.KINDS)
def test_rate_and_report_of_a_small_world_pass(kind) -> None:
    config = ModelConfig.from_dict(config_dict())
    assert states(capacity.rate(Held, config, kind, "checkpoint", 512, CPU))["memory.rate"] is State.PASS
    assert states(capacity.reported(cache, Held, config, "checkpoint", 512))["memory.reported"] is State.PASS


def test_a_total_divided_by_its_length_is_no_rate() -> None:
    """B175."""
    config = preset("flash")
    lying = SimpleNamespace(formula=cache.formula, cost=lambda c, chunk: (0, sum(cache.formula(c, 1, 8192, chunk).values()) / 8192))
    assert states(capacity.reported(lying, Held, config, "flash", 512))["memory.reported"] is State.FAIL


# ---- steps ----


def test_host_memory_is_counted_once_and_numbers_are_free() -> None:
    shared = b"12345"
    root = SimpleNamespace(a=[shared, shared], b=array("d", [1.0]), c=numpy.zeros(3), d=deque([1, 2, 3]), e={"k": {7}}, f=10**9)
    before = memory.hosted({"root": root}, "none")
    assert (before.size_bytes, before.elements) == (5 + 8 + 24 + len("k"), 6 + 2 + 3 + 1 + 1)
    root.f += 1
    root.d.append(4)
    after = memory.hosted({"root": root}, "none")
    assert (after.size_bytes, after.elements) == (before.size_bytes, before.elements + 1)
    assert after.grown(before) == ["root.d (+1)"]


class Leaky:
    """A model of one layer that misbehaves at each step in one way."""

    def __init__(self, model, way: str) -> None:
        self.inner, self.way = model, way
        self.kept: list[torch.Tensor] = []
        self.device, self.config = model.device, model.config
        self.new_state, self.prefill = model.new_state, model.prefill

    def decode(self, token, state, out=None):
        if self.way == "a clone that dies":
            state.cache.layers[0].ring.clone()
        elif self.way == "old versions kept outside":
            self.kept.append(state.cache.layers[0].ring.clone())
        elif self.way == "old versions kept in the state":
            state.old = [*getattr(state, "old", []), torch.zeros(64)]
        elif self.way == "host bytes in the state":
            state.__dict__.setdefault("old", []).append(bytes(64))
        elif self.way == "one buffer that gets longer":
            state.__dict__.setdefault("old", bytearray()).extend(bytes(64))
        elif self.way == "numbers in a closure of a module":
            cache.cost.__dict__.setdefault("old", lambda kept=deque(): kept).__defaults__[0].append(0.5)
        elif self.way == "a counter":
            state.steps = getattr(state, "steps", 0) + 1
        return self.inner.decode(token, state, out=out)


@pytest.mark.parametrize(
    ("way", "red"),
    [
        ("nothing", set()),
        ("a clone that dies", {"memory.allocations"}),
        ("old versions kept outside", {"memory.allocations", "memory.growth"}),
        ("old versions kept in the state", {"memory.allocations", "memory.growth"}),
        ("host bytes in the state", {"memory.growth"}),
        ("one buffer that gets longer", {"memory.growth"}),
        ("numbers in a closure of a module", {"memory.growth"}),
        ("a counter", set()),
    ],
)
def test_steps_that_allocate_or_keep_are_seen(model, way, red) -> None:
    """B166: lazy caches that keep what was. X13: on the host."""
    leaky = Leaky(memory.one_layer(model, 1, 256), way)
    result = capacity.slope(leaky, 20, count_allocations, "layer 1")
    cache.cost.__dict__.pop("old", None)
    assert {gate for gate, state in states(result).items() if state is State.FAIL} == red
    assert result[1][0].values["samples"] == 3


def test_the_slope_gate_is_fifty_megabytes() -> None:
    assert gates.judge_bound("memory.slope", 49e6, 2, "x").state is State.PASS
    assert gates.judge_bound("memory.slope", 51e6, 2, "x").state is State.FAIL


def test_a_prefill_allocates_its_logits_alone(model, monkeypatch) -> None:
    assert set(states(capacity.transients(model, 1, (128, 4096), count_allocations)).values()) == {State.PASS}
    turned = ops.rope
    monkeypatch.setattr(ops, "rope", lambda dev, x, position, freq, inverse=False: (torch.arange(4096).cos(), turned(dev, x, position, freq, inverse))[1])
    result = capacity.transients(model, 1, (128, 4096), count_allocations)
    assert result[0][0].state is State.FAIL
    assert "aten.cos" in result[0][0].reason


# ---- full states ----


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_full_state_behaves(model, layer) -> None:
    assert states(capacity.capacity(model, layer))["memory.capacity"] is State.PASS


def test_a_state_that_refuses_too_early_too_late_or_without_a_name_is_seen(model, monkeypatch) -> None:
    """B170, and an admission that counts wrong."""

    def early(self, layers, counts):
        if self.mirror[0][0] + counts[0] > self.layers[0].ring.shape[1]:
            raise InputError("raise --max-context")

    def late(self, layers, counts):
        if self.mirror[0][0] + counts[0] > self.max_context + 1:
            raise InputError("raise --max-context")

    def nameless(self, layers, counts):
        if self.mirror[0][0] + counts[0] > self.max_context:
            raise InputError("too long")

    for broken, words in ((early, "was refused"), (late, "was taken"), (nameless, "does not name --max-context")):
        with monkeypatch.context() as patch:
            patch.setattr(cache.KVCache, "check_room", broken)
            (verdict,), _ = capacity.capacity(model, 0)
        assert verdict.state is State.FAIL
        assert words in verdict.reason


# ---- the probe ----


def test_the_probe_prints_a_table_and_one_json_line(model, tmp_path, capsys) -> None:
    directory = write_checkpoint(tmp_path / "world", seed=5, num_hidden_layers=2, compress_ratios=[0, 4])
    assert probe.main(["--checkpoint", str(directory), "--steps", "10", "--preset", "flash"]) == 0
    *table, line = capsys.readouterr().out.rstrip("\n").split("\n")
    values = json.loads(line)
    assert (values["probe"], values["measured"]) == ("memory", True)
    assert values["footprints"][0]["kv_bytes"] == values["footprints"][0]["production_says"]
    assert values["slope"]["allocations"] == 0
    assert not any(part["disagreements"] for part in values["widths"])
    assert any("wrong width" in row for row in table)


def test_the_probe_refuses_a_context_that_does_not_fit(capsys) -> None:
    assert probe.main(["--max-context", "5"]) == 2
    assert "--max-context 5" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        probe.main(["--help"])
    assert stop.value.code == 0
    assert "example:\n  python -m probes.memory " in capsys.readouterr().out


def test_the_bundled_prompts_stay_beside_the_presets() -> None:
    assert PROMPTS.is_dir()
    assert sorted(path.name for path in PRESETS.iterdir()) == ["README.md", "flash", "pro"]
