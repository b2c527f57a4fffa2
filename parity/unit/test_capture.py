"""probes/capture.py alone: in a process that has nothing else of this project, off at no cost, on without harm to its engine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from probes import capture
from probes.core.trace import Trace

FILE = Path(capture.__file__)
SERVER = """
import sys, torch, capture
layer = torch.nn.Linear(4, 4)
capture.describe(engine="toy 1")
capture.module(layer, {"layers.0.attn.out": None})
for step in range(-1, 3):
    tokens = torch.tensor([[1, 2, 3]]) if step < 0 else torch.tensor([[5 + step]])
    capture.begin("prefill" if step < 0 else "decode", None if step < 0 else step, tokens=tokens)
    y = layer(torch.ones(1, tokens.shape[1], 4, dtype=torch.float32) * tokens[..., None])
    capture.show("layers.0.ffn.experts", tokens[..., None].int())
    capture.show("logits", y.to(torch.bfloat16))
    {last}
print(sorted(name for name in sys.modules if name.split(".")[0] in ("probes", "reference", "parity")))
"""


@pytest.fixture(autouse=True)
def _off():
    yield
    capture.stop()


def listed(value):
    assert value is not None
    return value.tolist()


def serve(tmp_path, last="pass", **environment):
    """A server process with that one file on its path, in a folder of its own."""
    shutil.copy(FILE, tmp_path / "capture.py")
    (tmp_path / "server.py").write_text(SERVER.replace("{last}", last))
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("DSV4_", "PYTHON"))} | environment
    return subprocess.run([sys.executable, "-P", "server.py"], cwd=tmp_path, env=variables | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120)


def test_one_file_alone_captures_a_server(tmp_path):
    done = serve(tmp_path, DSV4_CAPTURE="out", DSV4_CAPTURE_POINTS="layers.*,logits", DSV4_CAPTURE_STEPS="prefill,0-1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() == "[]"
    trace = Trace.load(tmp_path / "out")
    assert trace.description == {"engine": "toy 1"}
    assert trace.get("layers.0.attn.out", "prefill").shape == (1, 3, 4)
    assert trace.get("layers.0.ffn.experts", "decode", 1).tolist() == [[[6]]]
    assert trace.dtypes["prefill", None, "logits"] == "bfloat16"
    assert torch.equal(trace.get("logits", "decode", 0), trace.get("layers.0.attn.out", "decode", 0).bfloat16().float())
    assert listed(trace.passes["decode", 2].tokens) == [[7]]  # tokens of every pass, values of the asked ones
    assert not trace.fired("logits", "decode", 2)


def test_nothing_is_written_without_the_variable(tmp_path):
    assert serve(tmp_path).returncode == 0
    assert sorted(p.name for p in tmp_path.iterdir() if p.name != "__pycache__") == ["capture.py", "server.py"]


def test_a_server_that_dies_leaves_the_passes_before(tmp_path):
    done = serve(tmp_path, last="step == 1 and __import__('os')._exit(7)", DSV4_CAPTURE="out")
    assert done.returncode == 7
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["0000-prefill.safetensors", "0001-decode-0.safetensors", "manifest.json"]
    assert Trace.load(tmp_path / "out").steps() == (0,)


def test_a_bad_setting_turns_capture_off_and_not_the_server(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    for settings, said in (({"DSV4_CAPTURE": "full"}, "not empty"), ({"DSV4_CAPTURE": "o", "DSV4_CAPTURE_BYTES": "x"}, "DSV4_CAPTURE_BYTES"), ({"DSV4_CAPTURE": "o", "DSV4_CAPTURE_STEPS": "a"}, "DSV4_CAPTURE_STEPS")):
        done = serve(tmp_path, **settings)
        assert done.returncode == 0
        assert "capture: off" in done.stderr and said in done.stderr  # noqa: PT018
        assert done.stderr.count("\n") == 1


def test_off_a_call_costs_less_than_a_microsecond_and_reads_no_tensor():
    value = torch.zeros(2)

    def cost():
        start = time.perf_counter()
        for _ in range(20000):
            capture.show("layers.0.attn.out", value)
        return (time.perf_counter() - start) / 20000

    assert min(cost() for _ in range(7)) < 1e-6
    capture.show("layers.0.attn.out", object())  # on, it would be trouble
    layer = torch.nn.Linear(2, 2)
    capture.module(layer, {"layers.0.attn.out": None})
    assert not layer._forward_hooks
    assert not capture.capturing()


def test_the_budget_ends_a_capture_and_the_manifest_says_so(tmp_path, capsys):
    assert capture.start(tmp_path / "t", budget="1K")
    for step in range(3):
        capture.begin("decode", step, tokens=[1])
        capture.show("embed", torch.zeros(1, 100))
    capture.stop()
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["stopped"] == "byte budget: 800 of 1024 bytes are taken, embed of decode step 2 needs 400 more"
    assert manifest["bytes"] == 800
    assert "byte budget" in capsys.readouterr().err
    trace = Trace.load(tmp_path / "t")
    assert [trace.fired("embed", "decode", s) for s in range(3)] == [True, True, False]


def test_what_goes_wrong_is_told_and_the_engine_goes_on(tmp_path, capsys):
    assert capture.start(tmp_path / "t")
    capture.begin("decode", None)
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", "text")
    capture.show("embed", torch.zeros(1, 2, 3), shard={"kind": "colum"})
    capture.show("norm", torch.zeros(1, 2, 3))
    capture.stop()
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert [said.split(":")[0] for said in manifest["trouble"]] == ["begin", "show", "show"]
    assert capsys.readouterr().err.count("capture: ") == 3
    assert Trace.load(tmp_path / "t").fired("norm")


def test_what_is_shown_outside_of_a_pass_is_counted_and_not_kept(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.show("embed", torch.zeros(1, 2, 3))
    capture.begin("prefill", tokens=[[1, 2]])
    capture.stop()
    assert json.loads((tmp_path / "t" / "manifest.json").read_text())["outside"] == 1
    assert not Trace.load(tmp_path / "t").fired("embed")


def test_a_value_is_copied_when_it_is_shown(tmp_path):
    assert capture.start(tmp_path / "t")
    value = torch.ones(1, 2, 3)
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", value)
    value.zero_()
    capture.stop()
    assert Trace.load(tmp_path / "t").get("embed").sum() == 6


def test_flat_tokens_chunks_and_rows_of_other_lengths_come_back_as_rows(tmp_path):
    assert capture.start(tmp_path / "t")
    whole = torch.arange(12.0).reshape(6, 2)  # row 0 has 4 tokens, row 1 has 2
    capture.begin("prefill", tokens=[10, 11, 20], lengths=[2, 1])
    capture.show("embed", whole[[0, 1, 4]])
    capture.begin("prefill", tokens=[12, 13, 21], lengths=[2, 1])
    capture.show("embed", whole[[2]])
    capture.show("embed", whole[[3, 5]])  # the rest of the chunk
    capture.begin("decode", 0, tokens=[30, 31])
    capture.show("embed", torch.ones(2, 2))
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert listed(trace.passes["prefill", None].tokens) == [[10, 11, 12, 13], [20, 21, 0, 0]]
    assert listed(trace.passes["prefill", None].valid) == [[True] * 4, [True, True, False, False]]
    got = trace.get("embed", "prefill")
    assert torch.equal(got[0], whole[:4])
    assert torch.equal(got[1, :2], whole[4:])
    assert got[1, 2:].isnan().all()
    assert trace.get("embed", "decode", 0).shape == (2, 1, 2)


def test_a_value_of_other_tokens_is_a_gap_with_its_reason(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2, 3]])
    capture.show("logits", torch.zeros(1, 8))  # of the last token only
    capture.show("layers.0.ffn.experts", torch.zeros(1, 3, 2))
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert trace.gaps == {
        ("prefill", None, "logits"): "shown as [1, 8] for 3 tokens in 1 rows",
        ("prefill", None, "layers.0.ffn.experts"): "float32, expected whole numbers",
    }
    assert not trace.fired("logits")


def test_a_compiled_model_shows_its_values_in_a_full_graph(tmp_path):
    def model(x):
        y = x * 2
        capture.show("layers.0.attn.q", y, shard={"kind": "head", "index": 0, "count": 1})
        return y + 1

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.ones(1, 2, 3, 4)
    assert torch.equal(compiled(x), model(x))  # off
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    assert torch.equal(compiled(x), x * 2 + 1)
    capture.stop()
    manifest = json.loads((tmp_path / "t" / "manifest.json").read_text())
    assert manifest["passes"][0]["tensors"]["layers.0.attn.q"]["shard"] == {"kind": "head", "index": 0, "count": 1}
    assert torch.equal(Trace.load(tmp_path / "t").get("layers.0.attn.q"), x * 2)


def test_a_replayed_graph_is_read_at_the_end_and_one_that_was_not_is_told(tmp_path, monkeypatch):
    """As on a device: `show` runs while a graph is captured, and the replay writes its buffer. The device's own: below."""
    assert capture.start(tmp_path / "t")
    session = capture._session
    assert session is not None
    with monkeypatch.context() as recording:
        recording.setattr(capture, "in_graph", lambda tensor: True)
        capture.show("embed", torch.zeros(4, 3))  # a graph for 4 tokens
        capture.show("norm", torch.zeros(4, 3, dtype=torch.bfloat16))
    capture.begin("decode", 0, tokens=[1, 2])
    session.buffers["embed"][0].kept.copy_(torch.arange(12.0).reshape(4, 3))  # the replay
    capture.begin("decode", 1, tokens=[1, 2])
    capture.show("norm", torch.ones(2, 3))
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert trace.get("embed", "decode", 0)[:, 0].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]  # pads of the graph are cut
    assert not trace.fired("embed", "decode", 1)  # the old value does not come back
    assert trace.gaps["decode", 1, "embed"] == trace.gaps["decode", 0, "norm"] == "captured in a CUDA graph that was not replayed in this pass"
    assert trace.fired("norm", "decode", 1)


@pytest.mark.gpu
def test_a_cuda_graph_is_seen_at_every_replay(tmp_path):
    if not torch.cuda.is_available():
        pytest.skip("no device: torch sees no CUDA device here")
    assert capture.start(tmp_path / "t")
    x, graph = torch.zeros(4, 3, device="cuda"), torch.cuda.CUDAGraph()

    def model():
        y = x * 2
        capture.show("embed", y)
        z = y + 1  # may take y's memory, were it free
        capture.show("norm", z)
        return z * 3

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        model()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = model()
    for step in range(3):
        x.fill_(step)
        capture.begin("decode", step, tokens=[1, 2, 3, 4])
        if step != 1:
            graph.replay()
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert out.flatten()[0].item() == 15.0
    assert [trace.fired("embed", "decode", s) for s in range(3)] == [True, False, True]
    assert trace.get("embed", "decode", 2).unique().tolist() == [4.0]
    assert trace.get("norm", "decode", 2).unique().tolist() == [5.0]
    assert "not replayed" in trace.gaps["decode", 1, "norm"]


def test_two_threads_lose_nothing(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1]])

    def work(name):
        for i in range(50):
            capture.show(f"{name}.{i}", torch.full((1, 1, 2), float(i)))

    threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert len(trace.other) == 100
    assert not trace.points
    assert all(trace.get(f"{name}.{i}").unique().tolist() == [float(i)] for name in "ab" for i in range(50))
