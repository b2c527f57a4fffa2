"""Which keys each query reads, by rule; attention on exactly those keys against plain FP64 softmax attention; the sink as part of its sum.

Red with B060 (edge: window 127), B057 (pad: the list's padding is read), B053 and B054 (edge), B083 (sinks read as bf16), B086 (core off plain
attention); shown by parity/unit/test_witness.py on the verdicts' own inputs.
"""

from __future__ import annotations

from parity import witness


def test_keys_follow_the_rule(layer, phase, audit, record):
    """No future, unfinished, stale or repeated key, no pad, no hole; the window's edge and the layer's ratio are right."""
    record(witness.judge_visible_rule(audit, layer, phase))


def test_attention_on_its_own_keys(layer, phase, audit, record):
    """attn.core is plain softmax attention over production's own q and its own stored, gathered keys."""
    record(witness.judge_core(audit, layer, phase))


def test_raw_and_pooled_copies_weigh_the_same(layer, phase, audit, record):
    """Shares of attention on raw copies, pooled copies, window, entries and sink are the reference's."""
    record(witness.judge_masses(audit, layer, phase))


def test_weights_sum_to_one_less_the_sink(layer, phase, audit, record):
    """The sum of the weights behind attn.core is 1 - the sink's share, per head and query."""
    record(witness.judge_sink(audit, layer, phase))
