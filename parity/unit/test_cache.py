"""The KV cache: bytes against the closed formula, packed rows against plain arithmetic, snapshots that lose nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.unit.worlds import config_dict
from production.cache import (
    KVCache,
    decode_entries,
    decode_index_keys,
    encode_entries,
    encode_index_keys,
    entry_capacity,
    formula,
    live_rows,
    ring_slots,
    state_rows,
)
from production.ops import entry_bytes
from reference.config import InputError, ModelConfig

CPU = torch.device("cpu")
MILLION = 1 << 20
FLASH_RATIOS = [0, 0, *[4, 128] * 20, 4]
PRO_RATIOS = [128, 128, *[4, 128] * 29, 4]
REAL = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "sliding_window": 128, "max_position_embeddings": MILLION}


def world(**overrides: object) -> ModelConfig:
    return ModelConfig.from_dict(config_dict(**overrides))


def real(ratios: list[int], **overrides: object) -> ModelConfig:
    return world(num_hidden_layers=len(ratios), compress_ratios=ratios, **REAL, **overrides)


# Grid rationale: shorter than the window, one entry short of and past a group, one chunk longer than the context.
@pytest.mark.parametrize("max_context", [1, 3, 4, 15, 16, 127, 128, 129, 300])
@pytest.mark.parametrize(("batch", "chunk"), [(1, 512), (3, 5)])
def test_bytes_held_are_the_formula(max_context: int, batch: int, chunk: int) -> None:
    config = world()
    cache = KVCache(config, config.num_hidden_layers, batch, max_context, min(chunk, max_context), CPU)
    assert cache.nbytes() == formula(config, batch, max_context, chunk)
    for layer, ratio in zip(cache.layers, config.compress_ratios, strict=True):
        held = 0 if layer.entries is None else layer.entries.shape[1]
        assert held == (-(-max_context // ratio) if ratio else 0), "each layer is sized by its own ratio"


def test_a_record_is_584_bytes_at_the_real_width() -> None:
    assert entry_bytes(512, 64) == 584
    assert 512 - 64 + 2 * 64 + 7 <= 584


def test_state_rows_do_not_grow_with_the_context() -> None:
    config = real(FLASH_RATIOS)
    short, long = (formula(config, 1, n, 512) for n in (8192, MILLION))
    for part in ("kv", "compressor.state", "indexer.compressor.state", "length"):
        assert short[part] == long[part]
    assert (state_rows(4), state_rows(128)) == (8, 128)


# dsv4.md section 4, by hand: CSA layers hold n/4 entries of 584 + 68 bytes, HCA layers n/128 entries of 584.
@pytest.mark.parametrize(("ratios", "csa", "hca"), [(FLASH_RATIOS, 21, 20), (PRO_RATIOS, 30, 31)], ids=["flash", "pro"])
def test_a_million_tokens_fit_the_promise(ratios: list[int], csa: int, hca: int) -> None:
    parts = formula(real(ratios), 1, MILLION, 512)
    assert parts["compressor.entries"] == (csa * MILLION // 4 + hca * MILLION // 128) * 584
    assert parts["indexer.compressor.entries"] == csa * MILLION // 4 * 68
    assert sum(parts.values()) < 15e9
    growth = csa * MILLION // 4 * (584 + 68) + hca * MILLION // 128 * 584
    assert sum(parts.values()) == pytest.approx(growth, rel=0.01), "the rest is constant and small"


@pytest.mark.parametrize("ratios", [FLASH_RATIOS, PRO_RATIOS], ids=["flash", "pro"])
def test_the_formula_is_what_a_million_tokens_would_hold(ratios: list[int]) -> None:
    config = real(ratios)
    cache = KVCache(config, config.num_hidden_layers, 1, MILLION, 512, torch.device("meta"))  # shapes without memory
    assert cache.nbytes() == formula(config, 1, MILLION, 512)


@given(window=st.integers(1, 300), chunk=st.integers(1, 600), context=st.integers(1, 2000))
def test_a_chunk_never_overwrites_what_its_first_query_sees(window: int, chunk: int, context: int) -> None:
    slots = ring_slots(window, min(chunk, context), context)
    assert slots <= context
    assert slots == context or slots >= window - 1 + min(chunk, context)


@given(length=st.integers(0, 600), ratio=st.sampled_from([4, 128]))
def test_live_rows_are_those_a_later_entry_reads(length: int, ratio: int) -> None:
    rows, reach = state_rows(ratio), 2 * ratio if ratio == 4 else ratio
    next_entry = length // ratio
    read = range(max(0, (next_entry + 1) * ratio - reach), length)  # of the tokens the next entry pools, those taken already
    want = {p % rows for p in read}
    live = live_rows(torch.tensor([length]), ratio)[0]
    assert {row for row in range(rows) if live[row]} == want


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-20, 20), plain=st.sampled_from([64, 448]))
def test_entries_are_exact_once_rounded(seed: int, exponent: int, plain: int) -> None:
    config = world(head_dim=plain + 32)
    rows = torch.randn(5, plain + 32, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = decode_entries(encode_entries(rows, config), config)
    assert torch.equal(decode_entries(encode_entries(once, config), config), once)
    scale = rows[:, :plain].view(5, -1, 64).abs().amax(-1).clamp(min=1e-4) / 448
    step = torch.exp2(torch.ceil(torch.log2(scale)))[..., None]
    want = ((rows[:, :plain].view(5, -1, 64) / step).to(torch.float8_e4m3fn).float() * step).view(5, -1)
    assert torch.equal(once[:, :plain], want)
    assert torch.equal(once[:, plain:], rows[:, plain:].bfloat16().float())


@pytest.mark.parametrize("power", range(-12, 20))
def test_a_block_whose_largest_value_is_exactly_a_scale_keeps_it(power: int) -> None:
    config = world(head_dim=96)
    rows = torch.zeros(1, 96)
    rows[0, 3] = -448.0 * 2.0**power
    packed = encode_entries(rows, config)
    assert int(packed[0, 64 + 64]) == power + 127, "448 * 2^n gives the scale 2^n, not 2^(n+1)"
    assert torch.equal(decode_entries(packed, config), rows)


@settings(deadline=None)
@given(seed=st.integers(0, 10_000), exponent=st.integers(-100, 100))
def test_index_keys_are_exact_once_rounded(seed: int, exponent: int) -> None:
    rows = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**exponent
    once = decode_index_keys(*encode_index_keys(rows))
    assert torch.equal(decode_index_keys(*encode_index_keys(once)), once)
    blocks, step = rows.view(4, 2, 32), once.view(4, 2, 32)
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1) / 6)))[..., None]
    assert bool(((step - blocks).abs() <= scale).all()), "the widest gap between codes is 2 scales"


def test_every_code_survives_and_ties_go_to_the_even_code() -> None:
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    rows = torch.tensor([*values, *(-v for v in values)] * 2)[None]
    keys, scales = encode_index_keys(rows)
    assert torch.equal(decode_index_keys(keys, scales), rows)
    assert keys[0, :4].tolist() == [0x10, 0x32, 0x54, 0x76], "low nibble is the even index"
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)[None]
    assert decode_index_keys(*encode_index_keys(ties))[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def filled(config: ModelConfig, lengths: list[int], max_context: int = 300) -> KVCache:
    """A cache whose layers hold random rows for the given lengths, put there by import."""
    cache = KVCache(config, config.num_hidden_layers, len(lengths), max_context, 32, CPU)
    rng = torch.Generator().manual_seed(1)
    for number, layer in enumerate(cache.layers):
        b, W = len(lengths), config.sliding_window
        snapshot = {"length": torch.tensor(lengths), "kv": torch.randn(b, W, config.head_dim, generator=rng)}
        if layer.ratio:
            e = max(lengths) // layer.ratio
            snapshot["compressor.entries"] = torch.randn(b, e, config.head_dim, generator=rng)
            assert layer.state is not None
            for part in ("kv", "gate"):
                snapshot[f"compressor.{part}"] = torch.randn(layer.state.kv.shape, generator=rng)
        if layer.index_state is not None:
            snapshot["indexer.compressor.entries"] = torch.randn(b, e, config.index_head_dim, generator=rng)
            for part in ("kv", "gate"):
                snapshot[f"indexer.compressor.{part}"] = torch.randn(layer.index_state.kv.shape, generator=rng)
        cache.import_layer(number, snapshot)
    return cache


@pytest.mark.parametrize("lengths", [[0, 0], [1, 0], [3, 4], [15, 17], [128, 131], [260, 5]], ids=str)
def test_a_snapshot_comes_back_as_it_was(lengths: list[int]) -> None:
    config = world()
    cache, other = filled(config, lengths), filled(config, [7, 133])
    for layer in range(config.num_hidden_layers):
        snapshot = cache.export_layer(layer)
        other.import_layer(layer, snapshot)
        again = other.export_layer(layer)
        assert set(again) == set(snapshot)
        for name, value in snapshot.items():
            assert torch.equal(torch.nan_to_num(value, nan=1e9), torch.nan_to_num(again[name], nan=1e9)), name
            assert value.device.type == "cpu"
    assert other.mirror == cache.mirror


def test_a_window_row_that_another_token_has_taken_reads_as_nan() -> None:
    cache = filled(world(), [40])
    slots = cache.layers[0].ring.shape[1]
    rows = cache.read_window(0, torch.tensor([[39, 24, 39 - slots, 39 + slots, -1]]))[0]
    assert torch.isfinite(rows).all(-1).tolist() == [True, True, False, False, False]


def test_a_snapshot_of_another_shape_changes_nothing() -> None:
    cache = filled(world(), [40])
    before = {name: value.clone() for name, value in cache.export_layer(1).items()}
    bad = [
        {name: value for name, value in before.items() if name != "kv"},
        before | {"kv": before["kv"][:, 1:]},
        before | {"length": torch.tensor([301])},
        before | {"length": torch.tensor([-1])},
        before | {"compressor.entries": before["compressor.entries"][:, :3]},
    ]
    for snapshot in bad:
        with pytest.raises(InputError):
            cache.import_layer(1, snapshot)
    for name, value in cache.export_layer(1).items():
        assert torch.equal(torch.nan_to_num(value, nan=1e9), torch.nan_to_num(before[name], nan=1e9))


def test_one_token_more_than_fits_names_the_option() -> None:
    cache = filled(world(), [299, 7])
    cache.check_room(range(4), [1, 293])
    with pytest.raises(InputError, match=r"row 1: 7 tokens held and 294 more .*--max-context"):
        cache.check_room(range(4), [1, 294])
    assert entry_capacity(4, 300) == 75
