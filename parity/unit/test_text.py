"""When a text counts as stuck, and distances of two next-token distributions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from probes.core.text import degeneration, logits_measurement, top_agreement, trailing_loop

VARIED = random.Random(0).sample(range(2000), 40)


def test_a_varied_text_is_not_stuck():
    m = degeneration(VARIED)
    assert m["degenerate"] is False
    assert (m["repeated_ngrams"], m["distinct"], m["loop"]) == (0, 1, None)
    assert m["entropy"] == pytest.approx(1)


@pytest.mark.parametrize("block", [[7], [1, 2], [5, 6, 7, 8, 9]], ids=["one token", "two tokens", "five tokens"])
def test_a_loop_at_the_end_is_stuck(block):
    text = VARIED[:12] + block * (20 // len(block))
    m = degeneration(text)
    assert m["degenerate"] is True
    assert m["loop"] == len(block)


def test_a_sentence_that_comes_back_with_small_changes_is_stuck():
    text = [t for i in range(6) for t in [*VARIED[:10], 1000 + i]]
    m = degeneration(text)
    assert m["loop"] is None
    assert m["repeated_ngrams"] >= 0.5
    assert m["degenerate"] is True


def test_a_short_text_shows_nothing():
    assert degeneration([1] * 10)["degenerate"] is None


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_a_trailing_loop_is_there(text):
    loop = trailing_loop(text)
    if loop is not None:
        length, repeats = loop
        assert text[-length * repeats :] == text[-length:] * repeats
        assert repeats >= 3


def test_equal_logits_agree_everywhere():
    want = torch.randn(9, 50, generator=torch.Generator().manual_seed(0))
    m = logits_measurement(want.clone(), want)
    assert (m["flips"], m["kl_max"], m["top5_agreement"], m["top10_rows"], m["top5_gap"]) == (0, 0, 1, 1, 0)


def test_the_worst_position_and_the_margin_of_a_flip_are_named():
    want = torch.zeros(4, 50)
    want[:, 0], want[:, 1] = 3.0, 2.5
    got = want.clone()
    got[2, 1] = 4.0
    m = logits_measurement(got, want)
    assert (m["flips"], m["kl_worst_row"], m["top1_agreement"]) == (1, 2, 0.75)
    assert m["largest_flip_margin"] == pytest.approx(0.5)


def test_swapped_tokens_have_a_score_gap():
    want = torch.arange(20, 0, -1.0)[None]
    got = want.clone()
    got[0, 4], got[0, 12] = 0.0, 17.5
    shared, gap = top_agreement(got, want, 5)
    assert (int(shared), float(gap)) == (4, 16.0 - 8.0)
