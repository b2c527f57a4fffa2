"""The vocabulary of points, and the taps."""

from pathlib import Path

import pytest
import torch

from reference.config import InputError, ModelConfig
from reference.points import (
    INDICES,
    LAYER_POINTS,
    MODEL_POINTS,
    SCORES,
    VALUES,
    Taps,
    layer_of,
    points_of_layer,
    points_of_model,
    spec_of,
)

CONFIG = ModelConfig.from_dir(Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4")
# What users of the project were promised.
PROMISED = [f"hc_{half}.{part}" for half in ("attn", "ffn") for part in ("pre", "post", "comb", "a", "X")]
PROMISED += [
    f"attn.{name}"
    for name in [
        "norm",
        "q",
        "kv",
        "compressor",
        "indexer.q",
        "indexer.compressor",
        "indexer.score",
        "selected",
        "visible",
        "core",
        "out",
    ]
]
PROMISED += [f"ffn.{name}" for name in ["norm", "gate", "experts", "routed", "shared_experts", "out"]]


def test_the_promised_points_exist():
    every = points_of_model(CONFIG)
    for name in ("embed", "hc_head", "norm", "logits"):
        assert name in every
    csa = points_of_layer(CONFIG, 2)
    assert {f"layers.2.{name}" for name in PROMISED} <= set(csa)


def test_names_are_unique_and_known():
    every = points_of_model(CONFIG)
    assert len(every) == len(set(every))
    for point in every:
        assert spec_of(point).kind in (VALUES, SCORES, INDICES)
    assert [s.name for s in LAYER_POINTS if s.kind == INDICES] == ["attn.selected", "attn.visible", "ffn.experts"]


def test_a_layer_has_the_points_of_its_kind():
    kinds = {
        kind: {p.split(".", 2)[2] for p in points_of_layer(CONFIG, n)} for n, kind in ((0, "window"), (2, "csa"), (3, "hca"))
    }
    assert "attn.compressor" not in kinds["window"]
    assert "attn.compressor" in kinds["hca"]
    assert "attn.indexer.score" not in kinds["hca"]
    assert {"attn.indexer.score", "attn.selected"} <= kinds["csa"]
    assert kinds["window"] < kinds["hca"] < kinds["csa"]


def test_points_stand_in_dataflow_order():
    names = [p.split(".", 2)[2] for p in points_of_layer(CONFIG, 2)]
    order = [
        "hc_attn.a",
        "attn.norm",
        "attn.q",
        "attn.indexer.score",
        "attn.selected",
        "attn.visible",
        "attn.core",
        "attn.out",
        "hc_attn.X",
    ]
    order += ["hc_ffn.a", "ffn.norm", "ffn.gate", "ffn.experts", "ffn.routed", "ffn.out", "hc_ffn.X"]
    assert [n for n in names if n in order] == order
    every = points_of_model(CONFIG, (0, 1))
    assert every[0] == "embed"
    assert every[-3:] == ("hc_head", "norm", "logits")
    layers = [layer for p in every if (layer := layer_of(p)) is not None]
    assert layers == sorted(layers)


def test_every_legend_starts_with_batch_and_query():
    for spec in (*LAYER_POINTS, *MODEL_POINTS):
        assert spec.shape.startswith("[b, s")
        assert spec.meaning
        assert spec.component


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("layers.2.attn.sellected", "layers.2.attn.selected"),
        ("layers.11.ffn.expert", "layers.11.ffn.experts"),
        ("logit", "logits"),
        ("attn.q", ""),
        ("layers.2.logits", ""),
        ("layers.x.attn.q", ""),
        ("layers.2", ""),
        ("", ""),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name, near):
    with pytest.raises(InputError) as caught:
        spec_of(name)
    assert near in str(caught.value)
    assert "\n" not in str(caught.value)


# ---- taps ----


def test_a_model_is_asked_only_for_what_somebody_wants():
    taps = Taps(("embed", "norm", "logits"))
    seen = []
    with taps.observe(["embed", "norm"], lambda point, value: seen.append(point)):
        assert (taps.wants("embed"), taps.wants("logits")) == (True, False)
        taps.emit("logits", torch.zeros(1))
        taps.emit("norm", torch.zeros(1))
    assert seen == ["norm"]
    assert not taps.wants("embed")


def test_two_observers_see_their_own_points_and_leave_one_by_one():
    taps = Taps(("embed", "norm"))
    first, second = [], []
    with taps.observe(["embed"], lambda p, v: first.append(p)):
        with taps.observe(["embed", "norm"], lambda p, v: second.append(p)):
            taps.emit("embed", torch.zeros(1))
            taps.emit("norm", torch.zeros(1))
            assert taps.observers == 2
        assert not taps.wants("norm")
        taps.emit("embed", torch.zeros(1))
    assert (first, second, taps.observers) == (["embed", "embed"], ["embed", "norm"], 0)


def test_an_observer_that_raises_is_still_let_go():
    taps = Taps(("embed",))

    def refuse(point, value):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), taps.observe(["embed"], refuse):
        taps.emit("embed", torch.zeros(1))
    assert taps.observers == 0
