"""The probe names the first point of a layer whose input agrees, and nothing in a healthy run."""

from __future__ import annotations

import json
from math import inf

import pytest
import torch

import production
from probes import first_divergence
from probes.first_divergence import other_sets, worst_row
from production.attention import MainCompressor

SMALL = ["--prompt", "short.txt:0:22", "--prompt", "medium.txt:0:9", "--layers", "0-2", "--steps", "3"]
ALL = torch.ones(1, 2, dtype=torch.bool)


def measured(capsys, *arguments):
    torch.set_num_threads(1)
    code = first_divergence.main([*SMALL, *arguments])
    out = capsys.readouterr().out
    return code, out, json.loads(out.splitlines()[-1])


def test_a_healthy_model_has_no_first_divergence(capsys):
    code, out, found = measured(capsys)
    assert code == 0
    assert (found["first_local"], found["first_free"], found["over_count"]) == (None, None, 0)
    assert found["checked"] > 600
    assert found["points_not_looked_at"] == 0
    assert "no layer alone is above" in out
    assert {(row["layer"], row["phase"]) for row in found["layers"]} == {(n, p) for n in range(3) for p in ("prefill", "decode")}


def test_unrotated_entries_start_at_the_compressor_and_show_behind_it(capsys, monkeypatch):
    def unrotated(self, x, cache, step):  # B073
        buf = step.call.pool[f"compressor.{self.ratio}"]
        self.pool(x, buf, cache.state.kv, cache.state.gate, step)
        production.ops.store_entries(self.dev, buf.rows, buf.entry, cache.entries)

    monkeypatch.setattr(MainCompressor, "__call__", unrotated)
    code, out, found = measured(capsys)
    first = found["first_local"]
    assert code == 0  # measured; what passes is decided elsewhere
    assert (first["point"], first["phase"], first["component"]) == ("layers.2.attn.compressor", "prefill", "compressor")
    assert first["ratio"] > 10
    assert found["first_free"]["point"] == "layers.2.attn.compressor"
    assert found["checked_before"] > 100
    assert "starts at: layers.2.attn.compressor, prefill" in out


def test_a_decode_fault_is_named_at_its_step(capsys, monkeypatch):
    plain = MainCompressor.__call__

    def late(self, x, cache, step):
        plain(self, x, cache, step)
        if step.decode:  # an entry is stored at a wrong number
            buf = step.call.pool[f"compressor.{self.ratio}"]
            production.ops.store_entries(self.dev, -buf.rows, buf.entry, cache.entries)

    monkeypatch.setattr(MainCompressor, "__call__", late)
    first = measured(capsys)[2]["first_local"]
    assert (first["point"], first["phase"], first["step"]) == ("layers.2.attn.compressor", "decode", 1)  # token 23 ends a group


@pytest.mark.parametrize("arguments", [["--k", "0"], ["--k", "x"], ["--layers", "9"], ["--k", "nan"]])
def test_bad_input_is_one_line(capsys, arguments):
    try:
        code: object = first_divergence.main([*SMALL, *arguments])
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    assert capsys.readouterr().err.strip().count("\n") == 0


# ---- parts ----


def test_a_worst_row_and_masks():
    want = torch.ones(1, 2, 4)
    got = want.clone()
    got[0, 1] *= 1.5
    assert worst_row("layers.0.attn.norm", "isolated", got, want, ALL) == (0.5, [0, 1], 2)
    assert worst_row("layers.0.attn.norm", "isolated", got, want, torch.tensor([[True, False]]))[0] == 0.0
    got[0, 0, 2] = inf
    assert worst_row("layers.0.attn.norm", "isolated", got, want, ALL)[0] == inf
    assert worst_row("layers.0.attn.norm", "isolated", got[..., :2], want, ALL)[0] == inf


@pytest.mark.parametrize(("got", "tie", "different", "near"), [([0, 1], 0.0, 0, 0), ([1, 0], 0.0, 0, 0), ([0, 2], 0.15, 0, 1), ([0, 2], 0.05, 1, 0), ([0, -1], 9.0, 1, 0), ([0, 7], 9.0, 1, 0), ([0, 0], 9.0, 1, 0)])
def test_another_set_counts_unless_it_is_a_tie(got, tie, different, near):
    scores, want = torch.tensor([[[0.9, 0.5, 0.4]]]), torch.tensor([[[0, 1]]])
    found, ties = other_sets(torch.tensor([[got]]), want, torch.ones(1, 1, dtype=torch.bool), scores, tie)
    assert (int(found.sum()), ties) == (different, near)
    exact, _ = other_sets(torch.tensor([[got]]), want, torch.ones(1, 1, dtype=torch.bool), None, tie)
    assert int(exact.sum()) == int(sorted(got) != [0, 1])
