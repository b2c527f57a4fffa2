"""Format 2 beside format 1: an old trace is still read, names that are no points are listed, and both writers agree."""

import json

import pytest
import torch
from safetensors.torch import save_file

from probes import capture, diff
from probes.core.trace import Trace
from probes.core.trace_files import dims_of
from probes.outside.trace import Player, open_trace
from reference.config import InputError, ModelConfig


@pytest.fixture(autouse=True)
def _off():
    yield
    capture.stop()


def first_format(to):
    """A trace as the first version wrote it."""
    to.mkdir()
    save_file({"embed": torch.ones(1, 2, 3), "logits": torch.zeros(1, 2, 4)}, to / "0000-prefill.safetensors")
    one = {"phase": "prefill", "step": None, "file": "0000-prefill.safetensors", "positions": [[0, 1]], "valid": None, "tokens": [[5, 6]], "tensors": {"embed": [1, 2, 3], "logits": [1, 2, 4]}}
    manifest = {"kind": "dsv4-trace", "schema": 1, "description": {"model": "old"}, "points": {"embed": {}, "logits": {}}, "passes": [one]}
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def captured(to, scale=1.0, names=("embed", "logits"), widths=(3, 4)):
    assert capture.start(to)
    capture.begin("prefill", tokens=[[5, 6]])
    for name, width in zip(names, widths, strict=True):
        capture.show(name, torch.full((1, 2, width), float(width == widths[0])) * scale)
    capture.stop()
    return to


def test_a_trace_of_the_first_format_is_read_and_compared(tmp_path, capsys):
    old, new = first_format(tmp_path / "old"), captured(tmp_path / "new")
    assert torch.equal(Trace.load(old).get("embed"), torch.ones(1, 2, 3))
    assert diff.main([str(old), str(new)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [one["error"] for one in line["points"]] == [0.0, 0.0]
    assert line["first"] is None


def test_what_is_written_from_memory_and_by_capture_is_read_alike(tmp_path):
    trace = Trace(["embed", "logits"])
    trace.begin("prefill", tokens=torch.tensor([[5, 6]]))
    trace.add("embed", torch.ones(1, 2, 3))
    trace.add("logits", torch.zeros(1, 2, 4))
    a, b = Trace.load(trace.save(tmp_path / "a")), Trace.load(captured(tmp_path / "b"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a.get(p, "prefill"), b.get(p, "prefill")) for p in ("embed", "logits"))
    assert json.loads((tmp_path / "a" / "manifest.json").read_text())["schema"] == json.loads((tmp_path / "b" / "manifest.json").read_text())["schema"] == 2


def test_names_that_are_no_points_are_told_and_compared_by_diff_only(tmp_path, capsys):
    names = ("layers.3.out", "model.lm_head")
    a, b = captured(tmp_path / "a", 1.0, names), captured(tmp_path / "b", 1.01, names)
    opened = open_trace(a)
    assert opened.trace.points == ()
    assert opened.notes == ("2 names are no points and not compared: layers.3.out, model.lm_head",)
    assert diff.main([str(a), str(b)]) == 0
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {one["point"]: one for one in line["points"]}
    assert found["layers.3.out"]["error"] == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert found["layers.3.out"]["layer"] == 3
    assert found["model.lm_head"]["layer"] is None
    assert line["first"] == {"point": "layers.3.out", "phase": "prefill"}
    config = ModelConfig.from_dir("checkpoints/tiny-dsv4")
    with pytest.raises(InputError, match=r"holds no point of layers 0 to 7.*it holds layers\.3\.out"):
        Player(opened, config, range(8))


def test_a_model_of_other_depth_is_not_compared_behind_its_layers(tmp_path):
    config = ModelConfig.from_dir("checkpoints/tiny-dsv4")
    player = Player(open_trace(captured(tmp_path / "a", widths=(config.hidden_size, config.vocab_size))), config, range(2))
    assert player.taps.points == ("embed",)
    assert "logits are not compared: its model has 8 layers, here 2 are run" in player.notes
    assert Player(open_trace(tmp_path / "a"), config, range(8)).taps.points == ("embed", "logits")
    assert any("declares no policy" in note for note in player.notes)


def test_left_pads_are_refused_by_the_player_and_compared_by_diff(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[0, 5], [5, 6]], valid=[[False, True], [True, True]])
    capture.show("embed", torch.ones(2, 2, 3))
    capture.stop()
    with pytest.raises(InputError, match="pads before or between tokens"):
        Player(open_trace(tmp_path / "t"), ModelConfig.from_dir("checkpoints/tiny-dsv4"), range(8))
    assert diff.main([str(tmp_path / "t"), str(tmp_path / "t")]) == 0


def test_axes_are_counted_in_the_legend():
    assert [dims_of(f"layers.0.{name}") for name in ("attn.q", "hc_attn.comb", "ffn.experts", "attn.indexer.score", "hc_ffn.X")] == [4, 4, 3, 3, 4]
    assert dims_of("logits") == 3
