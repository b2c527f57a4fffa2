"""Recall against oracles: the arithmetic of the measure, and planted kernel faults that its gate or an operation check sees."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from parity import gates, planted
from parity.audit import Floor
from parity.recall import judge, judge_run, judge_set
from parity.unit.test_session import Shell
from probes.core.recall import (
    KINDS,
    best,
    either_way,
    hadamard,
    make_case,
    material_of,
    measure_case,
    oracle,
    random_material,
    recall,
    rotate,
    same_format,
    score_noise,
)
from probes.core.records import Mechanism, State, Verdict, read_run
from probes.recall import select
from production.launch import open_device
from production.variants import FAST
from reference import ops as ref
from reference.formats import round_bf16, round_e2m1_blocks

FREQ = ref.yarn_frequencies(64, 160000.0, 16.0, 65536, 32.0, 1.0)
NAN, INF = math.nan, math.inf
BASE = Verdict("recall", "recall[test]", "operation", State.NOT_RUN, "1 - recall@k, worst query")


@pytest.fixture(scope="module")
def device():
    return open_device("cpu")


def scores(*rows):
    return torch.tensor(rows, dtype=torch.float64)


# ---- the measure ----

ROW = scores([0.9, 0.8, 0.5, 0.499, 0.1, -INF])


def test_the_best_entries_are_chosen_ties_to_the_lower():
    tied = scores([1, 2, 2, 2, 0, -INF], [0, 0, 0, 0, 0, 0])
    assert best(tied, 2).nonzero().tolist() == [[0, 1], [0, 2], [1, 0], [1, 1]]
    assert best(tied, 9).sum(1).tolist() == [5, 6]


def test_the_right_choice_recalls_everything():
    found = recall(torch.tensor([[0, 1, 2]]), ROW, 3, 0.0)
    assert (found.mean, found.p1, found.worst, found.lost, found.beyond) == (1, 1, 1, 0, 0)
    assert found.mass_lost == 0


def test_an_exchange_within_the_noise_is_a_near_tie_apart():
    found = recall(torch.tensor([[0, 1, 3]]), ROW, 3, 0.001)
    assert found.worst == pytest.approx(2 / 3)
    assert (found.near_ties, found.beyond, found.lost) == (1, 0, 0)
    assert recall(torch.tensor([[0, 1, 3]]), ROW, 3, 0.0004).beyond == 1


def test_noise_may_differ_from_score_to_score():
    noise = torch.tensor([[0.0, 0.0, 0.0, 0.001, 0.0, 0.0]])
    assert recall(torch.tensor([[0, 1, 3]]), ROW, 3, noise).near_ties == 1
    assert recall(torch.tensor([[0, 1, 4]]), ROW, 3, noise).near_ties == 0


def test_the_mass_lost_is_what_the_softmax_of_the_scores_gives():
    p = torch.softmax(ROW[0, :5], 0)
    found = recall(torch.tensor([[1, 2, 4]]), ROW, 3, 0.0)
    assert found.mass_lost == pytest.approx(float(p[0] - p[4]))
    assert found.largest_gap == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("chosen", "what"),
    [([0, 1, 5], "not_allowed"), ([0, 1, 6], "not_allowed"), ([0, 1, 1], "not_allowed"), ([0, 1, -7], "not_allowed"), ([0, 1, -1], "beyond"), ([-1, -1, -1], "beyond")],
    ids=["not complete", "out of range", "twice", "garbage", "one missing", "none"],
)
def test_what_no_noise_excuses(chosen, what):
    found = recall(torch.tensor([chosen]), ROW, 3, 9.0)
    assert getattr(found, what) > 0
    assert found.lost > 0.3
    assert judge(BASE, found, 1).state is State.FAIL


def test_a_query_that_discards_nothing_must_take_everything():
    few = scores([0.1, 0.2, -INF, -INF])
    assert recall(torch.tensor([[0, 1, -1]]), few, 3, 0.0).lost == 0
    found = recall(torch.tensor([[0, -1, -1]]), few, 3, 9.0)
    assert (found.incomplete, found.lost, found.discarding) == (1, 1.0, 0)


def test_nothing_compared_is_no_pass():
    assert judge(BASE, recall(torch.zeros(0, 3, dtype=torch.int64), torch.zeros(0, 4), 3, 0.0), 0).state is State.NOT_RUN


def test_the_worst_query_counts_not_the_mean():
    many = torch.arange(1000.0).flip(0).double().expand(400, -1)
    chosen = torch.arange(500).repeat(400, 1)
    chosen[7, :2] = torch.tensor([900, 901])
    found = recall(chosen, many, 500, 0.0)
    assert found.mean > 0.9999
    assert found.worst_query == 7
    assert judge(BASE, found, 400).state is State.FAIL


def over_one_step(kind, position=20, **values):
    """What is said of one decode step of which `values` were recorded; the twins' scores agree to 1e-7."""
    audit: Any = SimpleNamespace(
        config=SimpleNamespace(kind=lambda _: kind, ratio=lambda _: 8, index_topk=3, sliding_window=2), plan=SimpleNamespace(steps=1), crash=None, ensure=lambda _: None, fired=lambda *_: 1,
        values=lambda _, point, *__: values[point.rpartition(".")[2]], valid_over=lambda *_: torch.ones(1, 1, dtype=torch.bool),
        positions=lambda *_: torch.tensor([[position]]), floor=lambda *_: Floor(error=1e-7, absolute=1e-7, rows=9, unit=2.0),
    )  # fmt: skip
    never: Any = None
    return judge_run(audit, never, 2, "decode")


def lost_in_the_run(gap):
    """A step that took the fourth best of five entries for the third."""
    return over_one_step("csa", selected=torch.tensor([[[1, 2, 3]]]), score=torch.tensor([[[1.0, 3.0, 2.0, 1.0 - gap, -2.0]]]))[0]


@pytest.mark.parametrize(("complete", "chosen", "state"), [
    ([1.0, 3.0], [0, 1], None), ([1.0, 3.0, 2.0], [0, 1, 2], None), ([-INF], [-1], None),
    ([1.0, 3.0], [0, -1], State.FAIL), ([1.0, 3.0, -INF], [0, 1, 2], State.FAIL), ([1.0, 3.0, 2.0, 0.5], [0, 1, 2], State.PASS),
], ids=["fewer than k", "just k", "none", "one left out", "one that is not complete", "one must be discarded"])  # fmt: skip
def test_where_no_query_can_lose_an_entry_recall_is_not_passed(complete, chosen, state):
    verdict, measured = over_one_step("csa", selected=torch.tensor([[chosen]]), score=torch.tensor([[complete]]))
    assert (None if verdict is None else verdict.state) is state
    assert [m.values["discarding"] for m in measured] == [int(len(complete) > 3)] * 2, "the report's table shows it all the same"
    if verdict is not None:
        assert verdict.rows == 1


@pytest.mark.parametrize(("position", "read", "state"), [(20, [0, 1], State.PASS), (20, [0, -1], State.FAIL), (6, [-1, -1], None), (6, [0, -1], State.FAIL)])
def test_a_layer_without_an_indexer_reads_every_entry_or_has_none_to_judge(position, read, state):
    verdict, measured = over_one_step("hca", position, visible=torch.tensor([[[5, 6, *read]]]))
    assert (None if verdict is None else (verdict.state, verdict.metric, verdict.rows)) == (None if state is None else (state, "every complete entry is due", 1))
    assert measured == []


def test_over_the_run_scores_within_their_own_gate_are_near_ties():
    gate = gates.GATES["attn.indexer.score"]
    near = lost_in_the_run(0.0043)
    assert (near.state, near.near_ties) == (State.PASS, 1)
    assert near.details["noise"] == pytest.approx(gate.k("isolated") * 1e-7 + gate.isolated * 2.0)
    assert lost_in_the_run(2.5 * near.details["noise"]).state is State.FAIL


def test_a_short_prompt_leaves_the_gate_of_the_run_unexercised_and_says_so(tmp_path):
    """Twelve tokens have three entries of 32 that may be chosen: no verdict, not red, and in the report's list of what was not checked."""
    shell = Shell(tmp_path)
    code, out, _ = shell("parity/test_recall.py", "--layers", "0-2", "--phase", "prefill", "--prompt", "short.txt:0:12", "-k", "over_the_run or ties", "-rs", "-v")
    assert code == 0, out
    assert re.findall(r"::(test_recall_over_the_run\[.*?\]) (\w+)", out) == [("test_recall_over_the_run[prefill-L2]", "SKIPPED")], "window layers are not asked"
    assert "not exercised: no query of layer 2 had to leave out an entry" in out
    _, verdicts, summary = shell.records()
    assert {v.gate for v in verdicts if "over_the_run" in v.test_id} == set()
    assert (summary.not_run, summary.failed) == (0, 0)
    told = [(m.name, m.count, m.covered_by) for m in read_run(shell.report / "run.jsonl") if isinstance(m, Mechanism) and "discards" in m.name]
    assert told == [(f"indexer discards entries, {phase}", 0, "recall (k=512: 1 check)") for phase in ("prefill", "decode")]


# ---- oracles ----


def test_oracles_agree_with_the_reference():
    case = make_case("real", random_material(3, 64, seed=1), 300, 20, 5)
    freq = ref.rope_frequencies(32, 10000.0)

    def turned(x, angle):
        cos, sin = ref.rope_angles(angle, freq)
        shape = (len(angle), *[1] * (x.dim() - 2), -1)
        return ref.rope(x, cos.view(shape), sin.view(shape))

    exact = ref.indexer_score(turned(case.q, case.q_angle)[None], turned(case.keys, case.key_angle)[None], case.weights[None], case.complete[None], ref.Sums())[0]
    assert torch.allclose(oracle(case, freq, None).float(), exact, atol=2e-4)

    def stored(x, angle):
        return round_e2m1_blocks(round_bf16(ref.hadamard(round_bf16(turned(round_bf16(x), angle)), ref.Sums())))

    same = ref.indexer_score(stored(case.q, case.q_angle)[None], stored(case.keys, case.key_angle)[None], case.weights[None], case.complete[None], ref.Sums())[0]
    assert torch.equal(oracle(case, freq, same_format(case, freq)).float() == -INF, same == -INF)
    off = (oracle(case, freq, same_format(case, freq)).float() - same).abs()[same.isfinite()]
    assert float(off.median()) < 1e-6  # a rounding that falls the other way may move single keys


def test_hadamard_is_the_published_matrix_and_its_own_inverse():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).double()
    H = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(64)] for i in range(64)]).double() / 8
    assert torch.allclose(hadamard(x), x @ H)
    assert torch.allclose(hadamard(hadamard(x)), x)


def test_material_takes_rotation_and_hadamard_back():
    generator = torch.Generator().manual_seed(3)
    q, keys = torch.randn(2, 9, 3, 64, generator=generator).double(), torch.randn(2, 9, 64, generator=generator).double()
    position = torch.arange(5, 14).expand(2, 9)
    valid = torch.ones(2, 9, dtype=torch.bool)
    valid[1, 6:] = False
    ended = (position + 1) % 4 == 0
    freq = ref.rope_frequencies(32, 10000.0)
    shown_q = hadamard(rotate(q.flatten(0, 1), position.flatten(), freq)).view(q.shape)
    shown = hadamard(rotate(keys.flatten(0, 1), position.flatten() // 4 * 4, freq)).view(keys.shape).masked_fill(~ended[..., None], NAN)
    made = material_of(shown_q, torch.ones(2, 9, 3), shown, position, valid, freq, "test")
    assert torch.allclose(made.q.double(), q[valid], atol=1e-5)
    assert torch.allclose(made.keys.double(), keys[valid & ended], atol=1e-5)


def test_a_giant_key_excuses_nothing_about_the_others():
    case = make_case("one giant key", random_material(64, 128, seed=5), 512, 16, 2)
    stored = same_format(case, FREQ)
    noise = score_noise(case, stored, oracle(case, FREQ, stored))
    giant = 512 // 3
    others = [e for e in range(300) if e != giant]
    assert float(noise[0, others].max()) < 1e-3 * float(noise[0, giant]) + 1e-12


# ---- production's kernels ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (3, 64), (5, 32)], ids=str)
def test_kernels_recall_what_the_oracle_chooses(kind, heads, dim, device):
    freq = ref.rope_frequencies(32, 10000.0)[: dim // 4]
    verdicts, measured = judge_set(device, make_case(kind, random_material(heads, dim, seed=2), 700, 64, 3), freq)
    for verdict in verdicts:
        assert verdict.state is State.PASS, verdict.reason
        assert verdict.rows == 3
    assert measured.values["discarding"] == 3
    assert measured.values["own_topk_wrong"] == 0


@pytest.mark.slow
def test_recall_over_the_longest_context(device):
    """262,144 keys of published width, k = 1024: the last entry is rotated at position 1,048,572."""
    verdicts, measured = judge_set(device, make_case("real", random_material(8, 128, seed=4), 262_144, 1024, 1), FREQ)
    assert [verdict.state for verdict in verdicts] == [State.PASS, State.PASS], verdicts
    assert measured.values["exact_mean"] < 1


# ---- planted faults ----


def edit(file, find, replace):
    return planted.Edit(file, find, replace)


HALF_SPLIT = edit(
    "kernels/rope.cu",
    """      __nv_bfloat16 *pair = x + blockIdx.x * token_stride + head * head_stride + (dim - 2 * half_r + 2 * i);
      const float a = from_bf16(pair[0]), b = from_bf16(pair[1]);
      pair[0] = to_bf16(a * c - b * s);
      pair[1] = to_bf16(a * s + b * c);""",
    """      __nv_bfloat16 *pair = x + blockIdx.x * token_stride + head * head_stride + (dim - 2 * half_r + i);
      const float a = from_bf16(pair[0]), b = from_bf16(pair[half_r]);
      pair[0] = to_bf16(a * c - b * s);
      pair[half_r] = to_bf16(a * s + b * c);""",
)
PLANTED = {
    "B022 half-split rotation": ("real", [HALF_SPLIT]),
    "B024 the scale of a block's first key": (
        "real",
        [edit(
            "kernels/indexer.cu",
            "const float scale = e8m0_decode(scales[batch * scales_row_stride + (first + k) * scales_entry_stride + block]);",
            "const float scale = e8m0_decode(scales[batch * scales_row_stride + (first + k) / 64 * 64 * scales_entry_stride + block]);",
        )],
    ),
    "B030 candidates of equal score dropped": ("ties", [edit("kernels/topk.cu", "(key == prefix && ties++ < rest)", "(key == prefix && ties++ < min(rest, 16))")]),
    "B032 length in raw tokens": (
        "real",
        [
            edit("kernels/indexer.cu", "{ return (p + 1) / ratio; }", "{ return p + 1; }"),
            edit("kernels/topk.cu", "{ return min((p + 1) / ratio, E); }", "{ return min(p + 1, E); }"),
        ],
    ),
    "B036 head weights in bf16": (
        "real",
        [edit(
            "kernels/indexer.cu",
            "((part[1] + part[5]) + (part[3] + part[7]));\n      total = fmaf(weights[token * weights_stride + h], ",
            "((part[1] + part[5]) + (part[3] + part[7]));\n      total = fmaf(from_bf16(to_bf16(weights[token * weights_stride + h])), ",
        )],
    ),
    "B038 e4m3 before the Hadamard step": (
        "real",
        [edit(
            "kernels/kv_store.cu",
            "for (int i = lane; i < di; i += WARP) key_values[i] = from_bf16(x[i]);",
            "for (int i = lane; i < di; i += WARP) key_values[i] = __uint_as_float((__float_as_uint(from_bf16(x[i])) + 0x80000u) & 0xFFF00000u);",
        )],
    ),
    "B042 top-k over 2048 entries": ("real", [edit("kernels/topk.cu", "const int seen = visible_entries(p, ratio, E);\n  if (seen <= k)", "const int seen = min(2048, visible_entries(p, ratio, E));\n  if (seen <= k)")]),
}  # fmt: skip

A_COSINE_ONE_ULP_OFF = edit("kernels/rope.cu", "const float c = cosf(angle), s =", "const float c = nextafterf(cosf(angle), 2.0f), s =")


def queries_at_a_tie(case, heads=64):
    """The case with queries that hold a pair of dims which an ulp of its cosine rounds the other way; the other dims are random."""
    generator = torch.Generator().manual_seed(0)
    pairs = torch.randn(20_000, 32, 2, generator=generator).bfloat16().float()
    angle = case.position[0].float() * FREQ
    c, s = angle.cos(), angle.sin()
    sides = [round_bf16(pairs[..., 0] * c - pairs[..., 1] * s) for c in (c, torch.nextafter(c, torch.tensor(2.0)))]
    rows, at = (sides[0] != sides[1]).nonzero()[:6].T.tolist()
    q = torch.randn(len(rows), heads, 128, generator=generator)
    for t, (row, pair) in enumerate(zip(rows, at, strict=True)):
        q[t, :, 64 + 2 * pair : 66 + 2 * pair] = pairs[row, pair]
    position = case.position[:1].expand(len(rows))
    return replace(case, q=q, weights=torch.full((len(rows), heads), 0.01), position=position, q_angle=position)


def test_a_query_rounded_the_other_way_at_a_tie_is_no_wrong_score():
    """All scores of the query move by 1e-4 and more; the sums over it are right."""
    case = queries_at_a_tie(make_case("real", random_material(8, 128, seed=6), 2048, 256, 1))
    copy = planted.plant(planted.Fault("ulp", "ulp", (A_COSINE_ONE_ULP_OFF,)))
    try:
        verdicts, measured = judge_set(open_device("cpu", kernels_dir=copy / "kernels"), case, FREQ)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    assert measured.values["either_way"] > 0
    assert measured.values["rounded_otherwise"] == 0
    assert [verdict.state for verdict in verdicts] == [State.PASS, State.PASS], verdicts


def test_a_rounding_that_no_tie_excuses_stays_as_it_is_meant(device):
    case = make_case("real", random_material(8, 128, seed=6), 512, 64, 2)
    made = select(device, case, FREQ)
    meant, _ = same_format(case, FREQ)
    assert torch.equal(made.q, meant)
    size = meant[0].abs().amax(-1) * case.weights[0].abs()
    head = int(size.argmax())
    at = int(meant[0, head].abs().argmax())
    q = meant.clone()
    q[0, head, at] *= 2 / 3  # a step of its format, or two
    assert torch.equal(either_way(case.q, case.q_angle, FREQ, meant, q), meant)
    wrong = oracle(case, FREQ, (q, made.keys)).float()
    facts = measure_case(case, FREQ, replace(made, q=q, scores=wrong))[2]
    assert (facts["either_way"], facts["rounded_otherwise"]) == (0, 1)
    assert facts["score_typical"] > 3 * facts["noise_typical"] + gates.OPERATIONS["indexer_score"].gate.isolated


# What recall alone lets pass, and what shows in the typical score: top-k leaves it right, a wrong scale is mostly the same one.
BELOW_THE_GATE = {"B036 head weights in bf16"}
WRONG_SCORES = {name for name in PLANTED if name[:4] in ("B022", "B036", "B038")}


@pytest.fixture(scope="module")
def material():
    """Keys of a few hundred tokens' worth, 8 heads of 128."""
    return random_material(8, 128, seed=6)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_turns_the_recall_gate_red(name, material):
    kind, edits = PLANTED[name]
    case = make_case(kind, material, 4096, 512, 2)
    copy = planted.plant(planted.Fault(name.split()[0], name, tuple(edits)))
    try:
        (chosen, scores), _ = judge_set(open_device("cpu", kernels_dir=copy / "kernels"), case, FREQ)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
    assert (chosen.state is State.FAIL) == (name not in BELOW_THE_GATE)
    assert (scores.state is State.FAIL) == (name in WRONG_SCORES)
    assert chosen.component == scores.component == "indexer"


def test_without_a_fault_the_same_sets_pass(material, device):
    for kind in {kind for kind, _ in PLANTED.values()}:
        case = make_case(kind, material, 4096, 512, 2)
        found, exact, facts = measure_case(case, FREQ, select(device, case, FREQ))
        assert found.lost == 0
        assert facts["own_topk_wrong"] == 0
        assert exact.worst < 1
        assert found.lost <= gates.GATES["recall"].isolated


def test_few_heads_are_scored_by_what_takes_them(material, device):
    """wgmma takes 17 heads and more; a plan that names it runs int8 for the 8 of the small model, in the probe and in the audit."""
    case = make_case("real", material, 512, 64, 2)
    made = select(device, case, FREQ, FAST.decode)
    assert torch.equal(made.selected, select(device, case, FREQ).selected)
