"""Single-operation checks at the end of the longest context: rotation and index arithmetic at position 1,048,575, alone.

A context of 1,048,576 tokens has 262,144 CSA entries and 8,192 HCA entries; with 16 rows a cache is larger than 2^31 bytes
and has more than 2^24 entries a layer, so an index held in 32 bits or in fp32 shows here. Buffers are sized like that and
only their ends are touched. Elsewhere: positions, top-k over 262,144 entries, the compressor and the ring after a million
tokens (test_operations_dense.py, test_operations_attention.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from parity.session import run_of
from production import ops
from production.ops import dense
from production.weights import inv_freq
from reference import formats
from reference import ops as ref
from reference.config import ModelConfig
from reference.ops import Sums

BF16, F32, F64, I32, U8 = torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.uint8
LAST = 1_048_575
ENTRIES = {4: (LAST + 1) // 4, 128: (LAST + 1) // 128}
ROWS = 16  # 16 * 262,144 * 584 bytes = 2.4 GB: past 2^31
PRESETS = Path(__file__).resolve().parents[1] / "checkpoints" / "presets"


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=I32)


def configs(pytestconfig: pytest.Config) -> dict[str, ModelConfig]:
    return {"checkpoint": ModelConfig.from_dir(run_of(pytestconfig).checkpoint_dir)} | {name: ModelConfig.from_dir(PRESETS / name) for name in ("flash", "pro")}


# ---- rotation ----


@pytest.mark.parametrize("source", ["checkpoint", "flash", "pro"])
def test_rope_frequencies_of_every_layer_are_the_reference(source, judge, pytestconfig):
    """B067, B070: bases and YaRN by layer kind, bit for bit."""
    config = configs(pytestconfig)[source]
    c = config
    yarn = ref.yarn_frequencies(c.qk_rope_head_dim, c.compress_rope_theta, c.rope_factor, c.rope_original_max, c.rope_beta_fast, c.rope_beta_slow)
    plain = ref.rope_frequencies(c.qk_rope_head_dim, c.rope_theta)
    judge("rope_frequencies", source, torch.stack([inv_freq(c, layer) for layer in range(c.num_hidden_layers)]), exact=True,
          reference=lambda: torch.stack([yarn if c.ratio(layer) else plain for layer in range(c.num_hidden_layers)]))  # fmt: skip


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize("ratio", [0, 4, 128], ids=["window", "csa", "hca"])
def test_rope_at_the_last_positions(ratio, inverse, device, hostile, judge, pytestconfig):
    """The model's own frequencies at 1,048,571 to 1,048,575 and at the last entries' positions: fp32 angles, nothing rounded before."""
    config = configs(pytestconfig)["pro"]
    layer = next((n for n in range(config.num_hidden_layers) if config.ratio(n) == ratio), None)
    config = config if layer is not None else configs(pytestconfig)["flash"]
    layer = next(n for n in range(config.num_hidden_layers) if config.ratio(n) == ratio)
    step = max(ratio, 1)
    position = ints([LAST - i for i in range(5)] + [(LAST // step - i) * step for i in range(4)] + [1 << 19, (1 << 16) + 1])
    freq = inv_freq(config, layer)
    x = hostile.bf16((len(position), 3, config.head_dim), seed=71)
    before = x.cpu().float()
    dense.rope(device, x, hostile.packed(position), hostile.packed(freq), inverse)

    def compute() -> Tensor:
        cos, sin = ref.rope_angles(position, freq)
        return ref.rope(before, cos[:, None], sin[:, None], inverse)

    judge("rope", f"ratio {ratio}, {'back' if inverse else 'forward'}, last positions", x, reference=compute, twins=[lambda: compute().bfloat16().float()])


# ---- storing and reading at the end of a cache of 2.4 GB ----


def large(device: torch.device, *shape: int) -> Tensor:
    """Memory that nobody touches but the test: uninitialised, so that only touched pages exist."""
    return torch.empty(*shape, dtype=U8, device=device)


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_store_entries_at_the_end_of_a_large_cache(row, device, hostile, judge):
    """The last entries of the first and the last row: 584 * 4,194,303 bytes from the start for the latter."""
    d, r, E = 512, 64, ENTRIES[4]
    size = ops.entry_bytes(d, r)
    cache = large(device.torch_device, ROWS, E, size)
    cache[row, E - 3 :].fill_(255)
    rows, entry = hostile.bf16((ROWS, 2, d), seed=72, packed=True), torch.full((ROWS, 2), -1, dtype=I32)
    entry[row] = ints([E - 2, E - 1])
    ops.store_entries(device, rows, hostile.packed(entry), cache)
    got = cache[row, E - 3 :].cpu()

    def stored() -> Tensor:
        small = torch.full((1, 3, size), 255, dtype=U8, device=device.torch_device)
        ops.store_entries(device, rows[row : row + 1], torch.tensor([[1, 2]], dtype=I32, device=device.torch_device), small)
        return small[0]

    judge("store_entries", f"row {row}, entries {E - 2} and {E - 1} of a cache of {ROWS} rows, as in a small one", got, exact=True, reference=stored)


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_sparse_attn_reads_the_end_of_a_large_cache(row, device, hostile, judge):
    """A list of the last entries, at the last position; the same keys in a small cache give the same bits."""
    d, r, h, E, window, slots = 512, 64, 4, ENTRIES[4], 8, 16
    size = ops.entry_bytes(d, r)
    chosen = [E - 1 - 3 * i for i in range(8)][::-1]
    rows = hostile.bf16((1, len(chosen), d), seed=73, packed=True)
    kv = hostile.bf16((window, d), seed=74, packed=True)
    q, sink = hostile.bf16((1, h, d), seed=75, packed=True), hostile.f32((h,), seed=76, packed=True)
    at = torch.full((1,), LAST, dtype=I32, device=device.torch_device)

    def attend(batch: int, which: int, cache: Tensor, entries: list[int]) -> Tensor:
        where = torch.full((batch, len(entries)), -1, dtype=I32)
        where[which] = ints(entries)
        spread = torch.zeros(batch, len(entries), d, dtype=BF16, device=device.torch_device)
        spread[which] = rows[0]
        ops.store_entries(device, spread, where.to(device.torch_device), cache)
        ring = torch.zeros(batch, slots, size, dtype=U8, device=device.torch_device)
        ring_position = torch.full((batch, slots), -1, dtype=I32, device=device.torch_device)
        position = torch.arange(LAST - window + 1, LAST + 1, dtype=I32).to(device.torch_device)
        ops.store_window(device, kv, position, torch.full_like(position, which), ring, ring_position)
        out = torch.full((1, h, d), float("nan"), dtype=BF16, device=device.torch_device)
        visible = torch.full((1, window + len(entries)), -7, dtype=I32, device=device.torch_device)
        listed = torch.tensor([entries], dtype=I32, device=device.torch_device)
        ops.sparse_attn(device, q, ring, ring_position, cache, listed, at, torch.full_like(at, which), sink, out, window, 4, visible=visible)
        seen.append(visible.cpu())
        return out.cpu()

    seen: list[Tensor] = []
    out = attend(ROWS, row, large(device.torch_device, ROWS, E, size), chosen)
    case = f"row {row} of {ROWS}, entries up to {E - 1}"
    judge("sparse_attn", f"{case}: as in a small cache", out, exact=True,
          reference=lambda: attend(1, 0, torch.zeros(1, len(chosen), size, dtype=U8, device=device.torch_device), list(range(len(chosen)))))  # fmt: skip
    judge("sparse_attn", f"{case}: keys seen", seen[0], exact=True, reference=lambda: ints([*range(LAST - window + 1, LAST + 1), *chosen])[None])


@pytest.mark.parametrize("variant", ["naive", "entries", "mma"])
def test_indexer_score_sees_262144_entries_at_the_last_position(variant, device, hostile, judge):
    """(p + 1) // 4 complete entries, no more: all of them at 1,048,575, one less before. Scores at both ends and past 2^16 and 2^17."""
    E, hi, di = ENTRIES[4], 2, 32
    position = ints([LAST, LAST - 4])
    T = len(position)
    probed = torch.tensor([0, 1, 65_535, 65_536, 131_071, 131_072, E - 3, E - 2, E - 1])
    keys = torch.randint(256, (1, E, di // 2), generator=generator(77), dtype=torch.int32).to(U8)
    scales = torch.randint(120, 134, (1, E, 1), generator=generator(78), dtype=torch.int32).to(U8)
    q = hostile.strided(formats.round_e2m1_blocks(torch.randn(T, hi, di, generator=generator(79)), 32).bfloat16())
    weights, score = hostile.f32((T, hi), seed=80), hostile.poisoned((T, E), F32)
    ops.indexer_score(device, q, weights, hostile.packed(keys), hostile.packed(scales), hostile.packed(position), hostile.packed(torch.zeros(T, dtype=I32)),
                      score, 4, variant=variant)  # fmt: skip
    complete = (position + 1) // 4
    got = score.cpu()
    seen = torch.arange(E) < complete[:, None]
    judge("indexer_score", f"{variant}, 262144 entries: who is seen", torch.isneginf(got), exact=True, reference=lambda: ~seen)
    values = formats.decode_fp4_weight(keys[0, probed], scales[0, probed])

    def compute(sums: Sums, dtype: torch.dtype = F32) -> Tensor:
        many = torch.full((T, 1), len(probed))
        result = ref.indexer_score(q.cpu().to(dtype)[:, None], values.to(dtype).expand(T, -1, -1), weights.cpu().to(dtype)[:, None], many, sums)[:, 0]
        return result.masked_fill(~seen[:, probed], 0.0)

    judge("indexer_score", f"{variant}, both ends of 262144 entries", got[:, probed].masked_fill(~seen[:, probed], 0.0), reference=lambda: compute(Sums(), F64),
          twins=[lambda order=order: compute(Sums(order)) for order in (1, 2, 3)])  # fmt: skip


# ---- integers ----


@pytest.mark.parametrize("slots", [136, 640, 1_048_576], ids=lambda n: f"{n} slots")
def test_window_slot_of_the_last_positions(slots, device, hostile, judge):
    """Slot p % slots and its position, with a ring that wrapped thousands of times and with one that never did."""
    d, r, count = 64 + 64, 64, 5
    position = ints([LAST - i for i in range(count)][::-1])
    ring = large(device.torch_device, 1, slots, ops.entry_bytes(d, r))
    ring_position = torch.full((1, slots), -1, dtype=I32, device=device.torch_device)
    ops.store_window(device, hostile.bf16((count, d), seed=81), hostile.packed(position), hostile.packed(torch.zeros(count, dtype=I32)), ring, ring_position)
    want = torch.full((1, slots), -1, dtype=I32)
    want[0, position.long() % slots] = position
    judge("store_window", f"{slots} slots: positions up to {LAST}", ring_position, exact=True, reference=lambda: want)
