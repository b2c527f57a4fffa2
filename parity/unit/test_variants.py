"""The plan of kernel variants is the device's own unless one is named. Production: production/variants.py."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from production.ops.sparse_attn import FLASH, WGMMA
from production.variants import (
    FAST,
    HOPPER_ONLY,
    PLANS,
    PORTABLE,
    Plan,
    fitted,
    plan_of,
    with_p_bf16,
    without_hopper,
)
from reference.config import InputError


def on(arch: str) -> Any:
    return SimpleNamespace(arch=arch)


@pytest.mark.parametrize(("arch", "plan"), [("sm_90a", FAST), ("sm_100a", PORTABLE), ("cpu-x86_64", PORTABLE)])
def test_each_device_has_its_own_plan(arch, plan):
    assert plan_of(None, on(arch)) is plan


def shapes(**others: Any) -> Any:
    """What a plan asks of a model: Flash's, but for `others`."""
    flash = {"index_n_heads": 64, "index_head_dim": 128, "head_dim": 512, "qk_rope_head_dim": 64, "hc_mult": 4, "hidden_size": 4096, "hc_eps": 1e-6}
    flash |= {"q_lora_rank": 1024, "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 6}
    return SimpleNamespace(**flash | others)


@pytest.mark.parametrize("name", PLANS)
def test_a_named_plan_is_taken_on_any_device(name):
    assert plan_of(name, on("cpu-x86_64")).name == name


def test_an_unknown_plan_is_bad_input():
    with pytest.raises(InputError, match="portable, fast"):
        plan_of("quick", on("sm_90a"))


@pytest.mark.parametrize(("heads", "width", "takes"), [(64, 128, True), (8, 128, True), (65, 128, False), (64, 64, False), (64, 256, False)])
def test_index_scores_by_integers_are_for_keys_of_128_and_64_heads_at_most(heads, width, takes):
    config = shapes(index_n_heads=heads, index_head_dim=width)
    plan = fitted(without_hopper(FAST), config)
    assert (plan.decode.indexer_score, plan.prefill.indexer_score) == (("int8", "int8_tiles") if takes else ("entries", "entries"))
    assert fitted(PORTABLE, config) == PORTABLE


@pytest.mark.parametrize(("heads", "decode", "prefill"), [(64, "wgmma", "wgmma_tiles"), (17, "wgmma", "wgmma_tiles"), (16, "int8", "int8_tiles"), (65, "entries", "entries")])
def test_index_scores_by_wgmma_are_for_17_to_64_heads(heads, decode, prefill):
    plan = fitted(FAST, shapes(index_n_heads=heads, index_head_dim=128))
    assert (plan.decode.indexer_score, plan.prefill.indexer_score) == (decode, prefill)


@pytest.mark.parametrize(("width", "rotary", "takes"), [(512, 64, True), (128, 64, True), (96, 32, False), (512, 32, False), (256, 64, False)])
def test_flash_attention_is_for_the_widths_it_is_built_for(width, rotary, takes):
    config = shapes(head_dim=width, qk_rope_head_dim=rotary)
    plan = fitted(FAST, config)
    assert (plan.decode.sparse_attn, plan.prefill.sparse_attn) == (("flash", "wgmma" if width == 512 else "flash") if takes else (None, None))
    assert fitted(PORTABLE, config) == PORTABLE


@pytest.mark.parametrize(("streams", "width", "eps", "takes"), [(4, 4096, 1e-6, True), (4, 7168, 1e-6, True), (4, 256, 1e-6, True), (2, 4096, 1e-6, False), (4, 320, 1e-6, False), (4, 4096, 0.0, False)])
def test_mixing_at_once_is_for_four_streams_of_multiples_of_256(streams, width, eps, takes):
    config = shapes(hc_mult=streams, hidden_size=width, hc_eps=eps)
    plan = fitted(FAST, config)
    assert (plan.decode.hyper_connection, plan.prefill.hyper_connection) == (("split", "mma") if takes else (None, None))
    assert (plan.decode.mixes_at_once, plan.prefill.mixes_at_once) == (takes, takes)
    assert fitted(PORTABLE, config) == PORTABLE


@pytest.mark.parametrize(
    ("others", "takes"),
    [({}, True), ({"q_lora_rank": 1536, "hidden_size": 7168, "moe_intermediate_size": 3072, "n_routed_experts": 384}, True), ({"q_lora_rank": 2056}, False), ({"hidden_size": 252}, False), ({"moe_intermediate_size": 48}, False), ({"index_head_dim": 512}, False), ({"n_routed_experts": 2000}, False)],
    ids=["Flash", "Pro", "too wide a norm", "rows of odd pieces", "half a scale", "too wide a key", "too many experts"],
)  # fmt: skip
def test_launches_are_shared_where_rows_fit_one_warp(others, takes):
    plan = fitted(FAST, shapes(**others))
    assert (plan.decode.at_once, plan.prefill.at_once) == (takes, takes)
    assert not (fitted(PORTABLE, shapes(**others)).decode.at_once)


def attending(variant: str | None) -> Plan:
    return replace(FAST, prefill=replace(FAST.prefill, sparse_attn=variant))


def test_what_only_hopper_has_is_replaced_by_name_elsewhere():
    for variant, other in (("wgmma", "flash"), ("wgmma_p_bf16", "flash_p_bf16"), ("flash", "flash"), (None, None)):
        plan = without_hopper(attending(variant))
        assert (plan.name, plan.prefill.sparse_attn, plan.prefill.topk) == ("fast", other, FAST.prefill.topk)
        assert (plan.decode, plan.prefill.indexer_score) == (replace(FAST.decode, indexer_score="int8"), "int8_tiles")
    assert plan_of("fast", on("cpu-x86_64")) == without_hopper(FAST)
    assert plan_of("fast", on("sm_90a")) is FAST
    known = set(FLASH) | set(WGMMA)
    assert set(HOPPER_ONLY["sparse_attn"]) == set(WGMMA)
    assert set(HOPPER_ONLY["sparse_attn"].values()) <= known


@pytest.mark.parametrize(("width", "runs"), [(512, "wgmma"), (128, "flash"), (256, None)])
def test_wgmma_attention_is_for_heads_of_512(width, runs):
    config = shapes(head_dim=width)
    assert fitted(attending("wgmma"), config).prefill.sparse_attn == runs


def test_softmax_weights_are_rounded_in_both_phases_or_not_at_all():
    rounding = with_p_bf16(FAST)
    assert (rounding.decode.sparse_attn, rounding.prefill.sparse_attn) == ("flash_p_bf16", "wgmma_p_bf16")
    assert (FAST.p_bf16, PORTABLE.p_bf16, rounding.p_bf16) == (False, False, True)
    assert with_p_bf16(attending("wgmma")).prefill.sparse_attn == "wgmma_p_bf16"
    assert with_p_bf16(attending("wgmma")).p_bf16
    assert (rounding.decode.topk, rounding.prefill.linear) == (FAST.decode.topk, FAST.prefill.linear)
    with pytest.raises(InputError, match="p_bf16: decode attention of the portable variants, the default, keeps p exact"):
        with_p_bf16(PORTABLE)
