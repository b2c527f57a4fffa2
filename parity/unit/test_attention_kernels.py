"""The checks of attention-side kernels are checked themselves: the checked build is clean, and one-line mutations turn red.

Calls the single-operation checks of parity/test_operations_attention.py with other devices: kernels under the memory
checker in random order, and copies of kernels/ with one planted mistake each.

    pytest parity/unit/test_attention_kernels.py
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parity import test_operations_attention as checks
from probes.core.inputs import Hostile
from production import cpu_device
from production.launch import CpuDevice, KernelError, open_device

Check = tuple[Callable[..., None], Mapping[str, Any]]

HC = {"n": 4, "D": 256, "iters": 20, "hc_eps": 1e-6, "norm_eps": 1e-6, "variant": "block"}
INDEXER = {"hi": 5, "di": 32}
ONE_SHOT: Check = (checks.test_compressor_of_csa_pools_eight_slots, {"width": 70, "chunks": checks.CSA_CHUNKS["borders inside groups"]})
STEPS: Check = (checks.test_compressor_step_goes_on_from_any_prefill, {"first_chunk": [1, 2]})
STORE_128: Check = (checks.test_store_window_writes_one_slot_per_token, {"d": 128, "r": 64})
STORE_512: Check = (checks.test_store_window_writes_one_slot_per_token, {"d": 512, "r": 64})
STORE_KEYS: Check = (checks.test_store_index_keys_packs_the_low_nibble_first, {"di": 32})
HADAMARD: Check = (checks.test_hadamard_e2m1_rounds_to_bf16_and_then_to_e2m1, {"di": 64, "variant": "butterfly"})
TIES: Check = (checks.test_topk_is_the_exact_set, {"kind": "ties", "variant": "radix"})
ZEROS: Check = (checks.test_topk_is_the_exact_set, {"kind": "zeros of both signs", "variant": "radix"})
UNLIKE: Check = (checks.test_topk_of_rows_unlike_their_samples, {"parts": 4})
UNLIKE_ALONE: Check = (checks.test_topk_of_rows_unlike_their_samples, {"parts": 1})
STREAM: Check = (checks.test_topk_of_rows_in_parts, {"parts": 4, "kind": "clustered"})
PREFILL: Check = (checks.test_sparse_attn_at_the_edges, {"source": "CSA list", "shape": "17 heads, d=70", "way": "one kernel"})
DECODE: Check = (checks.test_sparse_attn_at_the_edges, {"source": "HCA all", "shape": "tiny", "way": "2 splits"})
WIDE: Check = (checks.test_sparse_attn_at_the_edges, {"source": "window only", "shape": "published width", "way": "one kernel"})
TENSOR_CORES: Check = (checks.test_sparse_attn_at_the_edges, {"source": "CSA list", "shape": "17 heads, d=70", "way": "mma"})
HOLES: Check = (checks.test_sparse_attn_skips_holes_in_the_list, {"way": "7 splits"})
SINK: Check = (checks.test_sparse_attn_counts_the_sink_once, {"splits": 7, "sink": 10.0})
FLASH: Check = (checks.test_sparse_attn_at_the_edges, {"source": "HCA all", "shape": "tiny", "way": "flash"})
FLASH_WIDE: Check = (checks.test_sparse_attn_at_the_edges, {"source": "CSA list", "shape": "published width", "way": "flash, 2 splits"})
FLASH_HOLES: Check = (checks.test_sparse_attn_skips_holes_in_the_list, {"way": "flash, 7 splits, one launch"})
FLASH_SINK: Check = (checks.test_sparse_attn_flash_counts_the_sink_once, {"splits": 7, "sink": 10.0, "merged": False})
FLASH_BLOCKS: Check = (checks.test_sparse_attn_flash_does_not_depend_on_who_shares_a_block, {"splits": 3, "variant": "flash"})
FLASH_P: Check = (checks.test_sparse_attn_flash_keeps_what_bf16_would_round_off_p, {"d": 128})
FLASH_CODES: Check = (checks.test_sparse_attn_flash_reads_every_code_at_every_scale, {"d": 512, "splits": 1})
TOWER: Check = (checks.test_sparse_attn_of_a_split_that_towers_over_the_others, {"way": "7 splits", "where": "last"})
FLASH_TOWER: Check = (checks.test_sparse_attn_of_a_split_that_towers_over_the_others, {"way": "flash, 7 splits", "where": "last"})
HC_PRE: Check = (checks.test_hc_pre_normalises_columns_last, HC)
HC_EPS: Check = (checks.test_hc_pre_normalises_columns_last, {**HC, "iters": 3, "hc_eps": 0.03, "norm_eps": 0.5})
EPS = {"iters": 3, "hc_eps": 0.03, "norm_eps": 0.5}
SPLIT: Check = (checks.test_hc_pre_at_once_puts_a_half_back_mixes_and_norms, {**EPS, "way": "split, one launch"})
BY_MMA: Check = (checks.test_hc_pre_at_once_puts_a_half_back_mixes_and_norms, {**EPS, "way": "mma, 8 warps"})
HC_POST: Check = (checks.test_hc_post_sums_over_the_first_axis_of_comb, {"n": 4, "D": 256})
HC_HEAD: Check = (checks.test_hc_head_mixes_by_pre_alone, {"n": 2, "D": 161})

CLEAN: dict[str, Check] = {
    "store_window": STORE_128,
    "store_entries": (checks.test_store_entries_writes_listed_entries_only, {"d": 128}),
    "store_index_keys": STORE_KEYS,
    "hadamard": HADAMARD,
    "hadamard naive": (checks.test_hadamard_e2m1_rounds_to_bf16_and_then_to_e2m1, {"di": 32, "variant": "naive"}),
    "compressor": ONE_SHOT,
    "compressor steps": STEPS,
    **{f"indexer {v}": (checks.test_indexer_score_looks_at_complete_entries_only, {**INDEXER, "variant": v}) for v in ("naive", "entries", "mma")},
    "topk": TIES,
    "topk in parts": STREAM,
    "topk, a wrong guess": UNLIKE,
    "topk, a wrong guess in one part": UNLIKE_ALONE,
    "topk naive": (checks.test_topk_is_the_exact_set, {"kind": "random", "variant": "naive"}),
    "attention, one kernel": PREFILL,
    "attention, splits": HOLES,
    "attention, mma": TENSOR_CORES,
    "attention, mma and splits": (checks.test_sparse_attn_skips_holes_in_the_list, {"way": "mma, 7 splits"}),
    "attention, flash": FLASH,
    "attention, flash and splits": FLASH_WIDE,
    "attention, flash in one launch": FLASH_HOLES,
    "attention, flash in blocks of 16, 32 and 64 heads": FLASH_BLOCKS,
    "attention, flash, every code": FLASH_CODES,
    "attention, a split that towers": TOWER,
    "attention, flash, a split that towers": FLASH_TOWER,
    "attention naive": (checks.test_sparse_attn_at_the_end_of_the_longest_context, {"way": "naive"}),
    "hc_pre": (checks.test_hc_pre_normalises_columns_last, {**HC, "n": 3, "D": 100}),
    "hc_pre naive": (checks.test_hc_pre_normalises_columns_last, {**HC, "n": 2, "D": 161, "variant": "naive"}),
    "hc_post": (checks.test_hc_post_sums_over_the_first_axis_of_comb, {"n": 2, "D": 161}),
    "hc_head": HC_HEAD,
    **{f"hc at once, {way}": (checks.test_hc_pre_at_once_puts_a_half_back_mixes_and_norms, {**EPS, "way": way}) for way in ("split, one launch", "split", "mma, 4 warps")},
    "hc_post by columns": (checks.test_hc_post_by_columns_gives_the_bits_of_a_block_per_token, {}),
}


@pytest.fixture(scope="module")
def checked() -> CpuDevice:
    device = open_device("cpu", checked=True, order="random")
    assert isinstance(device, CpuDevice)
    return device


@pytest.mark.parametrize("check", CLEAN.values(), ids=CLEAN)
def test_kernels_are_clean_under_the_memory_checker_in_random_order(check: Check, checked: CpuDevice, judge: Callable[..., None]) -> None:
    function, arguments = check
    function(**arguments, device=checked, hostile=Hostile(), judge=judge)


MUTATIONS: dict[str, tuple[str, str, str, Check]] = {
    "decode sees one key less": ("sparse_attn.cu", "oldest_in_decode = max(0, p - window + 1)", "oldest_in_decode = max(0, p - window + 2)", DECODE),
    "sink counted per split": ("sparse_attn.cu", "denominator += ml[1] * exp_below(ml[0], largest);", "denominator += ml[1] * exp_below(ml[0], largest) + (s ? exp_below(sink[h], largest) : 0.f);", SINK),
    "the last split is left out of the maximum": ("sparse_attn.cu", "for (int s = 0; s < splits; s++) largest", "for (int s = 0; s < splits - 1; s++) largest", TOWER),
    "flash: the last split is left out of the maximum": ("sparse_attn_splits.cuh", "for (int s = 0; s < used; s++) largest", "for (int s = 0; s < used - 1; s++) largest", FLASH_TOWER),
    "a group is seen before it is complete": ("sparse_attn_keys.cuh", "min((p + 1) / ratio, capacity)", "min((p + ratio) / ratio, capacity)", HOLES),
    "sum not rescaled with the maximum": ("sparse_attn.cu", "s.sum[tid] = s.sum[tid] * s.rescale[tid] + added;", "s.sum[tid] = s.sum[tid] + added;", PREFILL),
    "sink of the first head for all": ("sparse_attn.cu", "exp_below(sink[head0 + h], with_sink)", "exp_below(sink[head0], with_sink)", PREFILL),
    "the leading part of p is lost": ("sparse_attn.cu", "for (int part = 2; part >= 0; part--)", "for (int part = 2; part > 0; part--)", TENSOR_CORES),
    "flash: sink counted per split": ("sparse_attn_splits.cuh", "denominator += l[s * stride] * share;", "denominator += l[s * stride] * share + (s ? exp_below(sink, largest) : 0.f);", FLASH_SINK),
    "flash: sums not rescaled with the maximum": ("sparse_attn_flash.cuh", "if (__any_sync(FULL_MASK, upper != 1.f || lower != 1.f))", "if (tile < 0)", FLASH),
    "flash: the second part of p is lost": ("sparse_attn_flash.cuh", "x[2 * j] -= bf16_low(pair), x[2 * j + 1] -= bf16_high(pair);", "x[2 * j] = x[2 * j + 1] = 0.f;", FLASH_P),
    "flash: the second half of the dims is lost": ("sparse_attn_flash.cuh", "(a.x + b.x) * scale", "a.x * scale", FLASH),
    "flash: a tile's keys are those of the tile before": ("sparse_attn_flash.cuh", "seen + slot * 2, a.scale", "seen + (slot ^ 1) * 2, a.scale", FLASH_HOLES),
    "flash: sinks of the first block for all": ("sparse_attn_flash.cuh", "l + threadIdx.x, HEADS, used, a.sink[head0 + threadIdx.x]", "l + threadIdx.x, HEADS, used, a.sink[threadIdx.x]", FLASH_BLOCKS),
    "flash: scales of the first four blocks for all": ("sparse_attn_flash.cuh", "(block < 4 ? scales.x : scales.y)", "scales.x", FLASH_CODES),
    "flash: large scales go the quick way": ("entry.cuh", "+ 0x79797979u & word", "& 0u", FLASH_CODES),
    "flash: a counter is left behind": ("sparse_attn_flash.cuh", "if (*last) *counter = 0;", "", FLASH_HOLES),
    "scale of another block": ("entry.cuh", "entry[entry_scales(d, r) + part]", "entry[entry_scales(d, r) + part / 2]", WIDE),
    "scale one up at an exact power": ("common.cuh", "(bits & 0x7fffffu) > 0x600000u", "(bits & 0x7fffffu) >= 0x600000u", STORE_512),
    "e2m1 tie away from even": ("common.cuh", "(magnitude > .25f)", "(magnitude >= .25f)", HADAMARD),
    "no bf16 before e2m1": ("entry.cuh", "  v = round_bf16(v);\n", "", (checks.test_hadamard_e2m1_rounds_to_bf16_and_then_to_e2m1, {"di": 32, "variant": "naive"})),
    "high nibble first": ("kv_store.cu", "key.code | odd << 4", "odd | key.code << 4", STORE_KEYS),
    "decode loses the previous group": ("compressor.cu", "previous = overlap && e > 0 ? ratio : 0;", "previous = 0;", STEPS),
    "unfinished groups write entry 0": ("compressor.cu", "entry[batch] = complete ? e : -1;", "entry[batch] = complete ? e : 0;", STEPS),
    "previous group not kept": ("compressor.cu", "(complete_groups(end, ratio) - overlap) * ratio", "complete_groups(end, ratio) * ratio", ONE_SHOT),
    "halves swapped": ("compressor.cu", "overlap && t >= own ? width + channel : channel;", "overlap && t < own ? width + channel : channel;", ONE_SHOT),
    "one tie too many": ("topk.cu", "ties++ < rest", "ties++ <= rest", TIES),
    "one tie too few of a part": ("topk.cu", "(same[j] >> lane & 1u) && ties < cut.ties", "(same[j] >> lane & 1u) && ties + 1 < cut.ties", STREAM),
    "a list one entry short": ("topk.cu", "if (tid == 0) list[0] = count,", "if (tid == 0) list[0] = count - 1,", STREAM),
    "a guessed bound is not doubted": ("topk.cu", "merging = shared.counted >= k;", "merging = true;", UNLIKE),
    "a guessed bound of a row in one part is not doubted": ("topk.cu", "if (count >= k || !rank) break;", "break;", UNLIKE_ALONE),
    "-0 below +0": ("topk.cu", "__float_as_uint(score + 0.f)", "__float_as_uint(score)", ZEROS),
    "comb not transposed": ("hyper_connection.cu", "sum[k] = fmaf(mixing[i * n + j]", "sum[k] = fmaf(mixing[j * n + i]", HC_POST),
    "comb not transposed, at once": ("hyper_connection_split.cu", "sum = fmaf(m.comb[1][j], x1, sum);", "sum = fmaf(m.comb[j][1], x1, sum);", SPLIT),
    "fn in bf16": ("hyper_connection_split.cu", "for (int term = TERMS - 1; term >= 0; term--)", "for (int term = 0; term >= 0; term--)", BY_MMA),
    "a part of the columns left out": ("hyper_connection_split.cu", "mine && s < parts ?", "mine && s < parts - 1 ?", SPLIT),
    "one Sinkhorn iteration less": ("hyper_connection.cu", "iteration < iters;", "iteration < iters - 1;", HC_PRE),
    "pre without its eps": ("hyper_connection.cu", "mixes[m] = sigmoid(v) + hc_eps", "mixes[m] = sigmoid(v)", HC_EPS),
}  # fmt: skip


@pytest.mark.parametrize(("source", "find", "replace", "check"), MUTATIONS.values(), ids=MUTATIONS)
def test_a_mutated_kernel_turns_its_check_red(source: str, find: str, replace: str, check: Check, tmp_path: Path, judge: Callable[..., None]) -> None:
    kernels = tmp_path / "kernels"
    shutil.copytree(cpu_device.KERNELS, kernels)
    text = (kernels / source).read_text()
    assert text.count(find) == 1, "a mutation must find its place exactly once"
    (kernels / source).write_text(text.replace(find, replace))
    function, arguments = check
    with pytest.raises((pytest.fail.Exception, AssertionError)):
        function(**arguments, device=open_device("cpu", kernels_dir=kernels), hostile=Hostile(), judge=judge)


@pytest.mark.parametrize(
    ("shape", "way", "said"),
    [
        ("17 heads, d=70", {"variant": "flash"}, "is built for d in"),
        ("tiny", {"variant": "flash", "splits": 65}, "65 splits"),
        ("tiny", {"variant": "flash", "heads": 64}, "with 64 heads a block"),
        ("tiny", {"variant": "mma", "merged": True}, "are for flash"),
    ],
)
def test_flash_refuses_what_it_is_not_built_for(shape: str, way: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelError, match=said):
        checks.edge_keys("window only", shape).run(open_device("cpu"), Hostile(), **way)
