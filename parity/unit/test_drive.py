"""Driving a model: what it is fed, step by step, and what of another model's choices it replays."""

from typing import Any

import pytest
import torch

from probes.core.drive import choice_points, run_model
from probes.core.inputs import Prompt
from reference.config import InputError
from reference.points import Taps

POINTS = ("layers.2.attn.selected", "layers.2.ffn.experts", "logits")
VOCAB = 16


class Config:
    n_routed_experts = 4


class Model:
    """Says token + 1 next, remembers every call; shows fixed choices."""

    def __init__(self, selected=((0, -1),), experts=((0, 3),)):
        self.taps = Taps(POINTS)
        self.config: Any = Config()
        self.selected, self.experts = torch.tensor(selected), torch.tensor(experts)
        self.calls = []

    def new_state(self, batch, max_context=None):
        return {"batch": batch, "max_context": max_context}

    def prefill(self, tokens, state, lengths=None, choices=None):
        self.calls.append(("prefill", tokens, lengths, choices))
        return self._logits(tokens)

    def decode(self, tokens, state, choices=None):
        self.calls.append(("decode", tokens, None, choices))
        return self._logits(tokens[:, None])[:, 0]

    def _logits(self, tokens):
        shape = (*tokens.shape, self.selected.shape[-1])
        self.taps.emit("layers.2.attn.selected", self.selected.expand(shape))
        self.taps.emit("layers.2.ffn.experts", self.experts.expand(shape))
        logits = torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        self.taps.emit("logits", logits)
        return logits


class Failing(Model):
    def decode(self, tokens, state, choices=None):
        raise ZeroDivisionError


def prompt(ids, then=()):
    return Prompt("p", tuple(ids), tuple(then))


def test_the_text_goes_on_and_after_its_end_the_model_does():
    model = Model()
    run = run_model(model, [prompt([1, 2, 3], [7]), prompt([4])], ["logits"], steps=3, max_context=9)
    assert run.tokens.tolist() == [[7, 8, 9], [5, 6, 7]]
    _, tokens, lengths, _ = model.calls[0]
    assert tokens.tolist() == [[1, 2, 3], [4, 4, 4]]
    assert lengths.tolist() == [3, 1]
    assert [call[1].tolist() for call in model.calls[1:]] == [[7, 5], [8, 6], [9, 7]]


def test_passes_carry_positions_valid_and_tokens():
    run = run_model(Model(), [prompt([1, 2, 3]), prompt([4])], ["logits"], steps=2)
    first: Any = run.trace.passes["prefill", None]
    assert first.valid.tolist() == [[True, True, True], [True, False, False]]
    assert run.trace.stacked_positions().tolist() == [[3, 4], [1, 2]]
    second: Any = run.trace.passes["decode", 1]
    assert second.tokens.tolist() == [[5], [6]]
    assert run.trace.stack("logits").shape == (2, 2, VOCAB)


def test_given_tokens_are_fed_as_they_are():
    given = torch.tensor([[9, 0]])
    run = run_model(Model(), [prompt([1], [2, 3])], ["logits"], steps=2, tokens=given)
    assert run.tokens.tolist() == [[9, 0]]
    with pytest.raises(InputError, match=r"expected \[1, 3\]"):
        run_model(Model(), [prompt([1])], ["logits"], steps=3, tokens=given)


def test_nothing_is_replayed_unless_asked():
    model = Model()
    run_model(model, [prompt([1])], [], steps=1)
    assert [call[3] for call in model.calls] == [None, None]


def test_choices_of_another_model_are_replayed_pass_by_pass():
    first = run_model(Model(selected=((1, 0),)), [prompt(range(8))], POINTS, steps=1)
    model = Model()
    run_model(model, [prompt(range(8))], [], steps=1, replay=first.trace)
    prefill, decode = (call[3] for call in model.calls)
    assert set(prefill) == set(choice_points(POINTS)) == {"layers.2.attn.selected", "layers.2.ffn.experts"}
    assert prefill["layers.2.ffn.experts"].shape == (1, 8, 2)
    # entries that are not complete at their query cannot be used
    assert prefill["layers.2.attn.selected"][0].tolist() == [[-1, -1]] * 3 + [[-1, 0]] * 4 + [[1, 0]]
    assert decode["layers.2.attn.selected"].tolist() == [[[1, 0]]]


def test_choices_nobody_could_use_are_made_harmless():
    first = run_model(Model(selected=((5, -7),), experts=((9, -1),)), [prompt(range(4))], POINTS, steps=0)
    model = Model()
    run_model(model, [prompt(range(4))], [], steps=0, replay=first.trace)
    assert model.calls[0][3]["layers.2.attn.selected"].eq(-1).all()
    assert model.calls[0][3]["layers.2.ffn.experts"].eq(0).all()


def test_a_replay_of_what_was_not_recorded_is_an_error():
    first = run_model(Model(), [prompt([1])], ["logits"], steps=0)
    with pytest.raises(KeyError):
        run_model(Model(), [prompt([1])], [], steps=0, replay=first.trace)


def test_the_taps_are_free_afterwards_also_when_the_model_fails():
    model = Model()
    run_model(model, [prompt([1])], POINTS, steps=1)
    assert model.taps.observers == 0
    failing = Failing()
    with pytest.raises(ZeroDivisionError):
        run_model(failing, [prompt([1])], POINTS, steps=1)
    assert failing.taps.observers == 0


def test_only_asked_phases_are_recorded():
    run = run_model(Model(), [prompt([1])], ["logits"], steps=1, phases=["decode"])
    assert run.trace.keys() == (("decode", 0, "logits"),)
