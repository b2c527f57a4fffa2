"""`--layers`, step groups and ids."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.selection import Case, parse_layers, step_groups
from reference.config import InputError


@pytest.mark.parametrize(("text", "layers"), [(None, (0, 1, 2, 3, 4, 5, 6, 7)), ("0-3,7", (0, 1, 2, 3, 7)), ("7,0", (0, 7)), (" 2 ", (2,)), ("1-1,1", (1,))])
def test_layers(text, layers):
    assert parse_layers(text, 8) == layers


@pytest.mark.parametrize(
    ("text", "said"), [("9", "layer 9 does not exist"), ("3-1", "runs backwards"), ("", "neither"), ("a", "neither"), ("1,,2", "neither"), ("-1", "neither"), ("0-99", "does not exist"), ("1-2-3", "neither")]
)
def test_bad_layers_are_explained(text, said):
    with pytest.raises(InputError, match=said):
        parse_layers(text, 8)


@given(st.integers(0, 400))
def test_step_groups_cover_every_step_once(steps):
    covered = [step for first, last in step_groups(steps) for step in range(first, last + 1)]
    assert covered == list(range(steps))


def test_the_first_step_is_a_group_of_its_own():
    assert step_groups(130)[0] == (0, 0)


def test_id_names_phase_layer_point_mode_and_steps():
    assert Case("decode", "layers.2.attn.q", "isolated", 2, (1, 32)).id == "decode-L2-attn.q-isolated-steps1to32"
    assert Case("prefill", "logits", "free").id == "prefill-logits-free"
