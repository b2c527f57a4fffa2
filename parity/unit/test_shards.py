"""Shards of several ranks: what comes out is the unsharded tensor, and what is missing or differs is said."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from parity.outside import NotExposedError
from parity.ranks import judge_copies
from probes import capture, diff
from probes.core.records import State
from probes.core.trace import Trace
from probes.core.trace_files import Part, RawPass
from probes.outside.shards import Checked, Finding, IncompleteError, combine
from probes.outside.trace import Opened, open_trace
from reference.config import InputError

WHOLE = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
PASS = RawPass("prefill", None)


def join(parts, shards, size=None):
    checked = Checked()
    held = {rank: Part(part, shard) for rank, (part, shard) in enumerate(zip(parts, shards, strict=True)) if part is not None}
    return combine("layers.0.attn.q", held, size or len(parts), PASS, checked), checked


@pytest.mark.parametrize(
    ("parts", "shard"),
    [
        (WHOLE.split(3, -1), {"kind": "column"}),
        (WHOLE.split([1, 5], -1), {"kind": "column"}),
        (WHOLE.split(2, -2), {"kind": "head"}),
        (WHOLE.split(1, 0), {"kind": "row"}),
        (WHOLE.split(1, 1), {"kind": "concat", "dim": 1}),
        (WHOLE.split(1, 1), {"kind": "row", "dim": 1}),
        ([WHOLE, WHOLE], {"kind": "replicated"}),
        ([WHOLE, WHOLE], None),
        ([WHOLE - 1e3, torch.full_like(WHOLE, 1e3)], {"kind": "sum"}),
    ],
)
def test_parts_are_the_whole(parts, shard):
    assert torch.equal(join(parts, [shard] * len(parts))[0], WHOLE)


def test_partial_sums_are_added_in_fp64():
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8])]
    assert join(parts, [{"kind": "sum"}] * 3)[0].item() == 1.0  # FP32 would give 0
    narrow = [torch.tensor([256.0], dtype=torch.bfloat16), torch.tensor([1.0], dtype=torch.bfloat16)]
    assert join(narrow, [{"kind": "sum"}] * 2)[0].item() == 256.0  # as stored
    assert join(narrow, [{"kind": "sum", "dtype": "float32"}] * 2)[0].item() == 257.0


def test_ranks_of_the_same_index_are_copies_and_are_checked():
    a, b = WHOLE.split(2, -2)
    shards = [{"kind": "head", "index": i // 2, "count": 2} for i in range(4)]
    value, checked = join([a, a, b, b], shards)
    assert torch.equal(value, WHOLE)
    assert checked.copies == {("prefill", None, "layers.0.attn.q"): 2}
    assert not checked.findings
    bad = b.clone()
    bad[1, 2, 0, 5] = -0.0 if bad[1, 2, 0, 5] == 0 else bad[1, 2, 0, 5] + 1
    (finding,) = join([a, a, b, bad], shards)[1].findings
    assert (finding.rank, finding.other, finding.elements, finding.where) == (3, 2, 1, (1, 2, 0, 5))


def test_experts_lie_by_their_numbers_or_are_summed():
    shards = [{"kind": "expert", "experts": [3, 0], "dim": 2}, {"kind": "expert", "experts": [1, 2], "dim": 2}]
    assert torch.equal(join([WHOLE[:, :, [3, 0]], WHOLE[:, :, [1, 2]]], shards)[0], WHOLE)
    summed = [{"kind": "expert", "experts": [0, 1], "of": 4}, {"kind": "expert", "experts": [2, 3], "of": 4}]
    assert torch.equal(join([WHOLE, WHOLE], summed)[0], 2 * WHOLE)


@pytest.mark.parametrize(
    ("parts", "shards", "said"),
    [
        ([WHOLE, None], [{"kind": "column"}] * 2, "part 1 of 2 is on no rank"),
        ([WHOLE, None], [{"kind": "sum"}] * 2, "part 1 of 2 is on no rank"),
        ([WHOLE, WHOLE], [{"kind": "column"}, {"kind": "sum"}], "column and sum"),
        ([WHOLE, WHOLE], [{"kind": "concat"}] * 2, "names no dim"),
        ([WHOLE, WHOLE[:1]], [{"kind": "column"}] * 2, "do not fit"),
        ([WHOLE, WHOLE[:1]], [{"kind": "sum"}] * 2, "shapes"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [0]}, {"kind": "expert", "experts": [0]}], "summed twice"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [0], "of": 3}, {"kind": "expert", "experts": [2], "of": 3}], r"experts \[1\] are on no rank"),
        ([WHOLE], [{"kind": "expert", "experts": [0], "dim": 2}], "names 1 experts"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [0]}, {"kind": "expert"}], "rank 1 does not say which experts"),
        ([WHOLE, WHOLE], [{"kind": "column", "index": "a"}, {"kind": "column"}], "rank 0: shard of kind column: index 'a', expected a whole number from 0"),
        ([WHOLE, WHOLE], [{"kind": "column", "index": -1}] * 2, "index -1, expected a whole number from 0"),
        ([WHOLE, WHOLE], [{"kind": "column", "index": 2, "count": 2}] * 2, "index 2 of 2, expected 0 to 1"),
        ([WHOLE, WHOLE], [{"kind": "column", "count": "2"}] * 2, "count '2'"),
        ([WHOLE, WHOLE], [{"kind": "column", "count": 0}] * 2, "count 0"),
        ([WHOLE, WHOLE], [{"kind": "concat", "dim": "x"}] * 2, "dim 'x', expected a whole number"),
        ([WHOLE, WHOLE], [{"kind": "column", "dim": 9}] * 2, "do not fit"),
        ([WHOLE, WHOLE], [{"kind": ["column"]}] * 2, "shard kind"),
        ([WHOLE, WHOLE], [{"kind": "diagonal"}] * 2, "shard kind 'diagonal', expected one of replicated, column"),
        ([WHOLE, WHOLE], [{"kind": "column", "axis": 1}] * 2, "says axis, expected count, dim, index"),
        ([WHOLE, WHOLE], [{"kind": "sum", "dtype": 3}] * 2, "dtype 3"),
        ([WHOLE, WHOLE], [{"kind": "sum", "dtype": "Tensor"}] * 2, "dtype 'Tensor'"),
        ([WHOLE, WHOLE], [{"kind": "sum", "dtype": "int8"}] * 2, "dtype 'int8'"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": 3}] * 2, "experts 3"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": ["a"]}] * 2, "experts"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [0, 0]}] * 2, "expected different whole numbers"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [4], "of": 4}] * 2, "expected different whole numbers from 0 to 3"),
        ([WHOLE, WHOLE], [{"kind": "expert", "experts": [4], "of": "4"}] * 2, "of '4'"),
        ([WHOLE.to(torch.complex64)] * 2, [None] * 2, "complex64, expected real numbers"),
    ],
)
def test_what_cannot_be_put_together_is_a_reason_and_no_value(parts, shards, said):
    with pytest.raises(IncompleteError, match=said):
        join(parts, shards)


# ---- two processes ----


def rank_of(rank, directory, fault):
    """One of two ranks of a tensor-parallel attention output and feed-forward layer, and the same unsharded beside it."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(3)
    x, wq, wv, wo = (torch.randn(*shape, generator=generator) for shape in ((1, 5, 8), (8, 16), (8, 16), (16, 8)))
    gates, experts = torch.rand(1, 5, 4, generator=generator), torch.randn(4, 8, 8, generator=generator)
    assert capture.start(Path(directory) / "sharded")  # knows its rank from torch.distributed
    capture.begin("prefill", tokens=[[1, 2, 3, 4, 5]])
    half = slice(8 * rank, 8 * rank + 8)  # column-parallel: 4 heads of 4, 2 a rank
    q, v = (x @ w[:, half] for w in (wq, wv))
    heads = q.reshape(1, 5, 2, 4)
    a, c = (t.reshape(1, 5, 2, 4).transpose(1, 2) for t in (q, v))
    core = torch.nn.functional.scaled_dot_product_attention(a, a, c, is_causal=True).transpose(1, 2)
    capture.show("layers.0.attn.q", heads, shard={"kind": "head"})
    capture.show("layers.0.attn.core", core, shard={"kind": "head"})
    part = core.reshape(1, 5, 8) @ wo[half]  # row-parallel: partial sums
    capture.show("layers.0.attn.out", part, shard={"kind": "sum"})
    y = part.clone()
    torch.distributed.all_reduce(y)
    if fault == "copy" and rank == 1:
        y[0, 3, 2] += 1e-6
    capture.show("layers.0.ffn.norm", y, shard={"kind": "replicated"})
    mine = [2 * rank, 2 * rank + 1]
    each = torch.stack([y @ experts[e] for e in mine], 2)
    capture.show("layers.0.each_expert", each, shard={"kind": "expert", "experts": mine, "dim": 2})
    capture.show("layers.0.ffn.routed", (each * gates[..., mine, None]).sum(2), shard={"kind": "expert", "experts": mine, "of": 4})
    capture.stop()
    if rank == 0:
        assert capture.start(Path(directory) / "whole", rank="0/1")
        capture.begin("prefill", tokens=[[1, 2, 3, 4, 5]])
        q, v = (x @ w for w in (wq, wv))
        a, c = (t.reshape(1, 5, 4, 4).transpose(1, 2) for t in (q, v))
        core = torch.nn.functional.scaled_dot_product_attention(a, a, c, is_causal=True).transpose(1, 2)
        out = core.reshape(1, 5, 16) @ wo
        every = torch.stack([out @ expert for expert in experts], 2)
        for point, value in {"attn.q": q.reshape(1, 5, 4, 4), "attn.core": core, "attn.out": out, "ffn.norm": out, "each_expert": every, "ffn.routed": (every * gates[..., None]).sum(2)}.items():
            capture.show(f"layers.0.{point}", value)
        capture.stop()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=["", "copy"])
def two_ranks(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    spawn(rank_of, (str(directory), request.param), nprocs=2)
    return directory, request.param


def test_two_processes_hold_the_numbers_of_one(two_ranks, capsys):
    directory, fault = two_ranks
    assert sorted(p.name for p in (directory / "sharded").iterdir()) == ["rank-0", "rank-1"]
    opened, whole = open_trace(directory / "sharded"), open_trace(directory / "whole").trace
    assert (opened.ranks, opened.size, opened.trace.gaps) == ((0, 1), 2, {})
    names = [*whole.points, *whole.other]
    assert len(names) == 6
    for name in names:
        got, want = opened.trace.get(name, "prefill"), whole.get(name, "prefill")
        assert got.shape == want.shape
        assert float((got - want).norm() / want.norm()) < 1e-6, name
    assert diff.main([str(directory / "sharded"), str(directory / "whole")]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert len(line["points"]) == 6
    assert max(one["error"] for one in line["points"]) < 1e-5
    assert line["copies_that_differ"] == {"got": int(fault == "copy"), "want": 0}


def test_copies_that_differ_turn_the_gate_red(two_ranks):
    directory, fault = two_ranks
    verdict = judge_copies(open_trace(directory / "sharded"), "prefill")
    assert verdict.rows == 1
    if not fault:
        assert verdict.state is State.PASS
        return
    assert verdict.state is State.FAIL
    assert (verdict.point, verdict.layer, verdict.component, verdict.where) == ("layers.0.ffn.norm", 0, "norm", [0, 3, 2])
    assert "1 of 40 elements differ between ranks 0 and 1" in verdict.reason
    assert verdict.details["because"].startswith("rank 0 and rank 1 hold different copies of layers.0.ffn.norm: 1 of 40 elements differ, first at [0, 3, 2]: ")
    assert verdict.details["because"].endswith(f"{verdict.want:.6g} on rank 0, {verdict.got:.6g} on rank 1; no copy of an earlier point was compared")
    with pytest.raises(NotExposedError):
        judge_copies(open_trace(directory / "sharded"), "decode")


def test_the_first_copy_that_differs_is_so_in_the_dataflow_and_what_agrees_before_it_is_named():
    def finding(point, step=None):
        return Finding(point, "prefill", step, 1, 0, 3, 9, (0, 1), 2.0, 1.0)

    names = ["logits", "layers.1.attn.core", "layers.1.attn.kv", "layers.1.attn.q", "layers.0.hc_ffn.X", "embed", "layers.1.mine"]
    wrong = ("logits", "layers.1.mine", "layers.1.attn.core", "layers.1.attn.kv")
    checked = Checked(findings=[finding(name) for name in wrong], copies={("prefill", None, name): 1 for name in names})
    verdict = judge_copies(Opened(Path("t"), Trace([]), checked), "prefill")
    assert (verdict.point, verdict.component) == ("layers.1.attn.kv", "KV quant")
    assert verdict.details["because"] == "rank 0 and rank 1 hold different copies of layers.1.attn.kv: 3 of 9 elements differ, first at [0, 1]: 1 on rank 0, 2 on rank 1; copies before it agree, the last of layers.1.attn.q"
    checked.findings.append(finding("embed"))
    assert judge_copies(Opened(Path("t"), Trace([]), checked), "prefill").details["agrees"] == ""


def test_a_missing_rank_leaves_gaps_and_what_the_others_hold_whole(two_ranks, tmp_path):
    directory, _ = two_ranks
    shutil.copytree(directory / "sharded" / "rank-0", tmp_path / "t" / "rank-0")
    opened = open_trace(tmp_path / "t")
    assert opened.trace.fired("layers.0.ffn.norm")
    assert opened.trace.gaps["prefill", None, "layers.0.attn.q"] == "part 1 of 2 is on no rank of this trace"
    assert not any(opened.trace.fired(f"layers.0.{name}") for name in ("attn.q", "attn.core", "attn.out", "ffn.routed"))
    assert opened.notes[0].startswith("rank 1 of 2 is missing")


def edit(path, change):
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: m["passes"][0].update(tokens=[[9, 2, 3, 4, 5]]), "fed different tokens"),
        (lambda m: m.update(size=3), "expected ranks of one run"),
        (lambda m: m.update(rank=0), "its manifest says rank 0"),
        (lambda m: m.update(schema=1), "ranks are of schema 2"),
    ],
)
def test_ranks_of_other_runs_are_refused(two_ranks, tmp_path, change, said):
    directory, _ = two_ranks
    shutil.copytree(directory / "sharded", tmp_path / "t")
    edit(tmp_path / "t" / "rank-1" / "manifest.json", change)
    with pytest.raises(InputError, match=said) as caught:
        open_trace(tmp_path / "t")
    assert "\n" not in str(caught.value)


def described(directory, rank, size, shard, policy=None):
    assert capture.start(directory, rank=f"{rank}/{size}" if size > 1 else "")
    if policy is not None:
        capture.describe(policy=policy)
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", torch.ones(1, 2, 4), shard={"kind": "replicated"})
    capture.show("norm", torch.ones(1, 2, 4))
    capture.stop()
    edit((directory / f"rank-{rank}" if size > 1 else directory) / "manifest.json", lambda m: m["passes"][0]["tensors"]["embed"].update(shard=shard))


@pytest.mark.parametrize(
    ("shard", "said"),
    [
        ({"kind": "diagonal"}, "shard kind 'diagonal', expected one of "),
        ({"kind": "column", "index": 0, "count": 2}, "part 1 of 2 is on no rank of this trace"),
        ({"kind": "column", "index": "a"}, "shard of kind column: index 'a', expected a whole number from 0"),
        ({"kind": "expert", "experts": [0], "of": 4}, "experts [1, 2, 3] are on no rank"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_a_wrong_description_in_a_folder_is_a_gap_with_its_reason(tmp_path, size, shard, said):
    for rank in range(size):
        described(tmp_path / "t", rank, size, shard)
    trace = open_trace(tmp_path / "t").trace
    assert trace.fired("norm")
    assert not trace.fired("embed")
    assert said in trace.gaps["prefill", None, "embed"] or (size == 2 and "experts [0] are summed twice" in trace.gaps["prefill", None, "embed"])
    if size == 1 and "expected" in said:
        assert said in Trace.load(tmp_path / "t").gaps["prefill", None, "embed"]


@pytest.mark.parametrize("shard", [{"kind": "column"}, {"kind": "sum"}, {"kind": "head", "index": 0, "count": 1}])
def test_the_only_part_of_one_rank_is_the_whole(tmp_path, shard):
    described(tmp_path / "t", 0, 1, shard)
    assert torch.equal(open_trace(tmp_path / "t").trace.get("embed"), torch.ones(1, 2, 4))


def test_ranks_declare_one_policy(tmp_path):
    for name, policies in (("a", (["bf16"], ["kv.e4m3"])), ("b", (["kv.e4m3", "bf16"], ["bf16", "kv.e4m3"])), ("c", (None, ["bf16"]))):
        for rank, policy in enumerate(policies):
            described(tmp_path / name, rank, 2, None, policy)
    with pytest.raises(InputError, match=r"its ranks declare different policies: rank 0 bf16, rank 1 kv\.e4m3; next: ") as caught:
        open_trace(tmp_path / "a")
    assert "\n" not in str(caught.value)
    assert open_trace(tmp_path / "b").trace.description["policy"] == ["kv.e4m3", "bf16"]
    assert open_trace(tmp_path / "c").trace.description["policy"] == ["bf16"]
