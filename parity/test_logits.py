"""The model's own points and what comes out at its end: logits, flips of the most likely token, greedy text."""

from __future__ import annotations

from parity import evaluate


def test_model_point(model_case, audit, record, request):
    """embed, hc_head, norm and logits are within their limits of the reference."""
    record(evaluate.judge_case(audit, model_case, request.node.nodeid))


def test_most_likely_token(phase, audit, record):
    """The most likely token differs only where the reference's margin is below twice the row's largest logit error."""
    record(evaluate.judge_flips(audit, phase))


def test_greedy_text(audit, record, pytestconfig):
    """Greedy continuations agree up to a near-tie of the reference."""
    record(evaluate.judge_greedy(audit))
