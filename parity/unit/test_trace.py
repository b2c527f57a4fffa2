"""Saved traces: what comes back is what was recorded, and a damaged one is a clear error."""

import json

import pytest
import torch

from probes.core.trace import Trace
from reference.config import InputError

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def trace():
    t = Trace(
        ["embed", "layers.2.attn.selected", "layers.2.attn.indexer.score", "logits"], {"policy": ["bf16"], "layers": [0, 1, 2]}
    )
    t.begin(
        "prefill",
        positions=torch.tensor([[0, 1], [4, 5]]),
        valid=torch.tensor([[1, 1], [1, 0]]),
        tokens=torch.tensor([[7, 8], [9, 9]]),
    )
    t.add("embed", torch.tensor([[[1.0, NAN], [INF, -INF]], [[-0.0, 2.0], [3.0, 1e-42]]]))
    t.add("layers.2.attn.selected", torch.tensor([[[0, -1], [0, 1]], [[-1, -1], [1, 0]]]))
    t.add("layers.2.attn.indexer.score", torch.tensor([[[0.5, -INF]] * 2] * 2))
    for step in range(2):
        t.begin("decode", step, positions=torch.tensor([[2 + step], [6 + step]]))
        t.add("embed", torch.full((2, 1, 2), float(step)))
    return t


def bits(value):
    return value.view(torch.int32) if value.is_floating_point() else value


def test_a_saved_trace_comes_back_bit_for_bit(trace, tmp_path):
    back = Trace.load(trace.save(tmp_path / "a"))
    assert back.points == trace.points
    assert back.description == trace.description
    assert back.keys() == trace.keys()
    for phase, step, point in trace.keys():  # noqa: SIM118
        a, b = trace.get(point, phase, step), back.get(point, phase, step)
        assert a.dtype == b.dtype
        assert torch.equal(bits(a), bits(b))
    for key, one in trace.passes.items():
        for name in ("positions", "valid", "tokens"):
            a, b = getattr(one, name), getattr(back.passes[key], name)
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def test_a_trace_without_passes_round_trips(tmp_path):
    assert Trace.load(Trace(["embed"]).save(tmp_path / "a")).keys() == ()


def test_an_empty_axis_round_trips(tmp_path):
    t = Trace(["layers.2.attn.selected"])
    t.begin("decode", 0)
    t.add("layers.2.attn.selected", torch.zeros(2, 1, 0, dtype=torch.int64))
    assert Trace.load(t.save(tmp_path / "a")).get("layers.2.attn.selected", "decode", 0).shape == (2, 1, 0)


def test_the_manifest_carries_legends_and_is_strict_json(trace, tmp_path):
    manifest = json.loads((trace.save(tmp_path / "a") / "manifest.json").read_text())
    assert manifest["points"]["embed"]["shape"] == "[b, s, D]"
    assert manifest["passes"][0]["positions"] == [[0, 1], [4, 5]]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == [
        "0000-prefill.safetensors", "0001-decode-0.safetensors", "0002-decode-1.safetensors", "manifest.json"
    ]  # fmt: skip


def test_a_description_that_is_no_json_leaves_nothing_behind(trace, tmp_path):
    trace.description["bad"] = NAN
    with pytest.raises(ValueError, match="JSON"):
        trace.save(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_directory_in_use_is_not_overwritten(trace, tmp_path):
    (tmp_path / "kept.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        trace.save(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_a_path_below_a_file_cannot_be_written(trace, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="cannot be written"):
        trace.save(tmp_path / "file" / "trace")


def edit(directory, change):
    path = directory / "manifest.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def truncate(directory):
    file = directory / "0000-prefill.safetensors"
    file.write_bytes(file.read_bytes()[:-3])


DAMAGE = {
    "no manifest": (lambda d: (d / "manifest.json").unlink(), "not a saved trace"),
    "broken JSON": (lambda d: (d / "manifest.json").write_text("{"), "broken JSON"),
    "bare NaN": (lambda d: edit(d, lambda m: m["description"].update(x=NAN)), "strict JSON"),
    "a list": (lambda d: (d / "manifest.json").write_text("[]"), "kind"),
    "another kind": (lambda d: edit(d, lambda m: m.update(kind="x")), "kind"),
    "another schema": (lambda d: edit(d, lambda m: m.update(schema=99)), "schema 99"),
    "no passes": (lambda d: edit(d, lambda m: m.pop("passes")), "broken manifest"),
    "a pass without a file": (lambda d: edit(d, lambda m: m["passes"][0].pop("file")), "broken manifest"),
    "a missing file": (lambda d: (d / "0001-decode-0.safetensors").unlink(), "missing"),
    "a truncated file": (truncate, "truncated"),
    "an empty file": (lambda d: (d / "0000-prefill.safetensors").write_bytes(b""), "truncated"),
    "a pickle": (lambda d: torch.save({}, d / "0000-prefill.safetensors"), "truncated or broken"),
    "a file elsewhere": (
        lambda d: edit(d, lambda m: m["passes"][0].update(file="../x.safetensors")),
        "no .safetensors file of this",
    ),
    "a missing tensor": (
        lambda d: edit(d, lambda m: m["passes"][1]["tensors"].update({"logits": {"dtype": "float32", "shape": [2, 1, 2]}})),
        "'logits' is missing",
    ),
    "an unlisted tensor": (lambda d: edit(d, lambda m: m["passes"][0]["tensors"].pop("embed")), "does not list"),
    "a wrong shape": (lambda d: edit(d, lambda m: m["passes"][0]["tensors"]["embed"].update(shape=[2, 2, 3])), "expected"),
    "a wrong dtype": (lambda d: edit(d, lambda m: m["passes"][0]["tensors"]["embed"].update(dtype="bfloat16")), "expected bfloat16"),
    "positions of another length": (lambda d: edit(d, lambda m: m["passes"][0].update(positions=[[0], [1]])), "positions"),
    "ragged positions": (lambda d: edit(d, lambda m: m["passes"][0].update(positions=[[0], [1, 2]])), "broken manifest"),
    "an unknown phase": (lambda d: edit(d, lambda m: m["passes"][0].update(phase="x")), "unknown phase"),
    "the same pass twice": (lambda d: edit(d, lambda m: m["passes"][2].update(step=0)), "already"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_trace_is_one_clear_line(trace, tmp_path, damage):
    break_it, message = DAMAGE[damage]
    directory = trace.save(tmp_path / "a")
    break_it(directory)
    with pytest.raises(InputError) as caught:
        Trace.load(directory)
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)
