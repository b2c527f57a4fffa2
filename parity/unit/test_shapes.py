"""Sizes and dtypes of every point, held against what the reference itself shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import reference
from probes.core.recorder import Recorder
from probes.outside.shapes import expected, wrong
from reference.config import ModelConfig

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"


def test_every_point_that_the_reference_shows_fits():
    model = reference.load(CHECKPOINT, layers=range(4))
    with Recorder(model, model.taps.points) as trace:
        trace.begin("prefill")
        model.prefill(torch.arange(300, 340).reshape(2, 20), model.new_state(2, 64), torch.tensor([20, 20]))
    fired = [point for point in model.taps.points if trace.fired(point, "prefill", None)]
    assert len(fired) > 100
    assert {point: wrong(model.config, point, trace.get(point, "prefill"), 2, 20) for point in fired} == dict.fromkeys(fired, "")


@pytest.mark.parametrize(
    ("point", "value", "said"),
    [
        ("layers.0.attn.q", torch.zeros(1, 8, 20, 128), "shown as [1, 8, 20, 128], expected [1, 20, 8, 128]"),
        ("layers.0.attn.q", torch.zeros(20, 8, 128), "shown as [20, 8, 128], expected [1, 20, 8, 128]"),
        ("layers.0.attn.q", torch.zeros(1, 40, 8, 128), "shown as [1, 40, 8, 128], expected [1, 20, 8, 128]"),
        ("layers.0.attn.q", torch.zeros(1, 20, 8, 128, dtype=torch.int8), "shown in int8, expected real numbers"),
        ("layers.0.attn.q", torch.zeros(1, 20, 8, 128, dtype=torch.complex64), "shown in complex64, expected real numbers"),
        ("layers.0.ffn.experts", torch.zeros(1, 20, 2), "shown in float32, expected whole numbers"),
        ("layers.0.attn.visible", torch.zeros(1, 20, dtype=torch.int32), "shown as [1, 20], expected [1, 20, any]"),
        ("logits", torch.zeros(1, 20, 7), "shown as [1, 20, 7], expected [1, 20, 2048]"),
        ("layers.0.attn.q", torch.zeros(1, 20, 8, 128, dtype=torch.bfloat16), ""),
        ("layers.0.attn.visible", torch.zeros(1, 20, 999, dtype=torch.int32), ""),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told(point, value, said):
    assert wrong(ModelConfig.from_dir(CHECKPOINT), point, value, 1, 20) == said


def test_the_legends_products_and_names():
    config = ModelConfig.from_dir(CHECKPOINT)
    assert expected(config, "layers.0.hc_attn.comb", 3, 5) == [3, 5, config.hc_mult, config.hc_mult]
    assert expected(config, "layers.0.attn.wo_a", 3, 5) == [3, 5, config.o_groups * config.o_lora_rank]
    assert expected(config, "layers.2.attn.indexer.score", 3, 5) == [3, 5, None]
