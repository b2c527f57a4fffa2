"""probes/capture.py alone: in a process that has nothing else of this project, off at no cost, on without harm to its engine."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from probes import capture
from probes.core.trace import Trace
from probes.outside.trace import open_trace, tokens_of
from reference.config import InputError

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
        ("prefill", None, "logits"): "shown as [1, 8] for 3 tokens in 1 row",
        ("prefill", None, "layers.0.ffn.experts"): "shown in float32, expected whole numbers",
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


# ---- nothing raises into the engine ----


class Raises(torch.nn.Module):
    """Puts out what a hook's default reading cannot take."""

    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, x):
        return self.output


def manifest_of(directory):
    return json.loads((directory / "manifest.json").read_text())


def boom(output):
    raise RuntimeError("boom")


def test_a_hook_that_cannot_read_is_trouble_and_the_forward_goes_on(tmp_path, capsys):
    assert capture.start(tmp_path / "t")
    layer, empty = torch.nn.Linear(3, 3), Raises(())
    capture.module(layer, {"embed": boom, "norm": None})
    capture.module(empty, {"logits": None})
    capture.begin("prefill", tokens=[[1, 2]])
    layer(torch.zeros(1, 2, 3))
    assert empty(0) == ()
    capture.stop()
    assert manifest_of(tmp_path / "t")["trouble"] == ["show: embed: RuntimeError: boom", "show: logits: IndexError: tuple index out of range"]
    trace = Trace.load(tmp_path / "t")
    assert trace.fired("norm")
    assert trace.gaps == {("prefill", None, "embed"): "RuntimeError: boom", ("prefill", None, "logits"): "IndexError: tuple index out of range"}
    assert capsys.readouterr().err.count("capture: ") == 2


WRONG: Any = capture  # what a type checker would refuse


@pytest.mark.parametrize(
    "call",
    [
        lambda: WRONG.module("no module", {"embed": None}),
        lambda: WRONG.module(torch.nn.Linear(1, 1), ["embed"]),
        lambda: WRONG.describe(policy={"bf16"}),
        lambda: WRONG.show(["embed"], torch.zeros(1, 2, 3)),
        lambda: WRONG.begin("decode", "0"),
        lambda: WRONG.begin("prefill", tokens=[[1.5, 2.0]]),
        lambda: WRONG.begin("prefill", tokens=[[1], [2, 3]]),
        lambda: WRONG.begin("prefill", tokens=[[1, 2]], valid=[[0.5, 1.0]]),
    ],
)
def test_a_wrong_call_is_trouble(tmp_path, call):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    call()
    capture.show("norm", torch.zeros(1, 2, 3))
    capture.stop()
    assert len(manifest_of(tmp_path / "t")["trouble"]) == 1
    assert Trace.load(tmp_path / "t").passes


@pytest.mark.parametrize("settings", [{"steps": None}, {"budget": None}, {"points": None}, {"rank": None}])
def test_a_setting_of_none_is_the_default(tmp_path, settings):
    assert capture.start(tmp_path / "t", **settings)


@pytest.mark.parametrize("settings", [{"steps": 3}, {"points": ["embed"]}, {"budget": [1]}, {"rank": 1}])
def test_a_setting_of_another_type_is_off_and_told(tmp_path, capsys, settings):
    assert not capture.start(tmp_path / "t", **settings)
    assert capsys.readouterr().err.startswith("capture: off: ")
    assert not WRONG.start(None)


@pytest.mark.parametrize(("experts", "kept"), [(range(2), [0, 1]), ({1, 0}, [0, 1]), ((1, 0), [1, 0]), (torch.tensor([0, 1]), [0, 1])])
def test_experts_are_kept_as_a_list(tmp_path, experts, kept):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", torch.zeros(1, 2, 3), shard={"kind": "expert", "experts": experts, "dtype": torch.float32})
    capture.begin("decode", 0, tokens=[1])
    capture.stop()
    manifest = manifest_of(tmp_path / "t")
    assert manifest["passes"][0]["tensors"]["embed"]["shard"] == {"kind": "expert", "experts": kept, "dtype": "float32"}
    assert len(manifest["passes"]) == 2
    assert manifest["trouble"] == []


@pytest.mark.parametrize("shard", ["head", {"kind": "expert", "experts": object()}, {"kind": "expert", "experts": ["a"]}, {"kind": "column", "index": "a"}, {"kind": "column", "index": 0.5}, {"kind": "column", "axis": 1}, {"kind": ["column"]}])
def test_a_description_that_is_none_is_trouble_and_no_value(tmp_path, shard):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", torch.zeros(1, 2, 3), shard=shard)
    capture.begin("decode", 0, tokens=[1])
    capture.show("embed", torch.zeros(1, 3))
    capture.stop()
    trace = Trace.load(tmp_path / "t")
    assert not trace.fired("embed")
    assert trace.fired("embed", "decode", 0)
    assert "shard" in trace.gaps["prefill", None, "embed"]
    assert len(manifest_of(tmp_path / "t")["trouble"]) == 1


def test_a_pass_that_cannot_be_written_does_not_keep_the_next_from_it(tmp_path, monkeypatch):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    with monkeypatch.context() as full:
        full.setattr(capture, "save_file", lambda held, path: boom(held))
        capture.begin("decode", 0, tokens=[1])
    capture.begin("decode", 0, tokens=[1])
    capture.begin("decode", 1, tokens=[1])
    capture.stop()
    assert [one["step"] for one in manifest_of(tmp_path / "t")["passes"]] == [0, 1]
    assert manifest_of(tmp_path / "t")["trouble"] == ["begin: RuntimeError: boom"]


def test_a_compiled_model_keeps_what_nothing_else_reads_and_goes_on_after_a_wrong_show(tmp_path):
    layer = torch.nn.Linear(3, 3)

    def model(x):
        capture.show("embed", x * 2 - 3, shard={"kind": "sum", "dtype": "float32"})
        capture.show("norm", x * 5, shard={"kind": "expert", "experts": range(2), "of": 2})
        capture.show("hc_head", {"a": 1})
        return layer(x) + 1

    assert capture.start(tmp_path / "t")
    capture.module(layer, {"logits": boom, "layers.0.attn.out": None})
    x = torch.ones(1, 2, 3)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    capture.begin("prefill", tokens=[[1, 2]])
    got = compiled(x)
    capture.stop()
    assert torch.equal(got, layer(x) + 1)
    trace, manifest = Trace.load(tmp_path / "t"), manifest_of(tmp_path / "t")
    assert torch.equal(trace.get("embed"), x * 2 - 3)
    assert torch.equal(trace.get("norm"), x * 5)
    assert torch.equal(trace.get("layers.0.attn.out"), layer(x))
    shards = {name: one["shard"] for name, one in manifest["passes"][0]["tensors"].items()}
    assert shards == {"embed": {"kind": "sum", "dtype": "float32"}, "norm": {"kind": "expert", "experts": [0, 1], "of": 2}, "layers.0.attn.out": None}
    assert manifest["trouble"] == ["show: hc_head: ValueError: no tensor: dict is none", "show: logits: ValueError: no tensor: its function raised RuntimeError"]


def test_stop_takes_the_hooks_off_and_a_second_capture_shows_each_point_once(tmp_path):
    layer, reads = torch.nn.Linear(3, 3), []

    def read(output):
        reads.append(1)
        return output

    for name in "ab":
        assert capture.start(tmp_path / name)
        capture.module(layer, {"embed": read})
        assert len(layer._forward_hooks) == 1
        capture.begin("prefill", tokens=[[1, 2]])
        layer(torch.zeros(1, 2, 3))
    assert list(manifest_of(tmp_path / "a")["passes"][0]["tensors"]) == ["embed"]
    capture.stop()
    assert not layer._forward_hooks
    layer(torch.zeros(1, 2, 3))
    assert len(reads) == 2
    assert list(manifest_of(tmp_path / "b")["passes"][0]["tensors"]) == ["embed"]


def test_a_hook_is_made_for_wanted_points_only_and_goes_when_the_budget_is_spent(tmp_path):
    layer, other = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
    assert capture.start(tmp_path / "t", points="embed", budget=30)
    capture.module(layer, {"embed": None})
    capture.module(other, {"norm": None})
    assert (len(layer._forward_hooks), len(other._forward_hooks)) == (1, 0)
    capture.begin("prefill", tokens=[[1, 2, 3]])
    layer(torch.zeros(1, 3, 3))
    assert not layer._forward_hooks


FORK = """
import os, sys, time, torch, capture
capture.start("t")
if {early}:
    if os.fork():
        os.wait()
        sys.exit(0)
capture.begin("prefill", tokens=[[1, 2]])
capture.show("embed", torch.zeros(1, 2, 3))
child = 0 if {early} else os.fork()
if not {early} and child == 0:
    assert not capture.capturing()
    capture.show("norm", torch.zeros(1, 2, 3))
    capture.begin("decode", 0, tokens=[9])
    time.sleep(1)
    sys.exit(0)
for step in range(3):
    capture.begin("decode", step, tokens=[1])
if not {early}:
    capture.stop()
    os.wait()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork on this platform")
@pytest.mark.parametrize("early", [False, True])
def test_a_fork_writes_nothing_and_a_worker_forked_before_the_first_pass_captures(tmp_path, early):
    shutil.copy(FILE, tmp_path / "capture.py")
    done = subprocess.run([sys.executable, "-c", FORK.replace("{early}", str(early))], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    manifest = manifest_of(tmp_path / "t")
    assert [(one["step"], one["tokens"]) for one in manifest["passes"]] == [(None, [[1, 2]]), (0, [1]), (1, [1]), (2, [1])]
    assert manifest["trouble"] == []
    assert not Trace.load(tmp_path / "t").fired("norm")


def test_two_processes_of_one_setting_do_not_write_over_each_other(tmp_path, monkeypatch, capsys):
    assert capture.start(tmp_path / "t")
    made = Path.mkdir

    def also_theirs(self, *args, **kwargs):
        made(self, *args, **kwargs)
        (self / "manifest.json").write_text("theirs")  # between the look and the claim

    with monkeypatch.context() as race:
        race.setattr(Path, "mkdir", also_theirs)
        capture.begin("prefill", tokens=[[1, 2]])
    capture.stop()
    assert (tmp_path / "t" / "manifest.json").read_text() == "theirs"
    assert "is another process's" in capsys.readouterr().err


# ---- what is read ----


def padded(to, width, rows=(3,)):
    """A prefill whose rows are all shorter than its width, and its pads hold large values."""
    assert capture.start(to)
    valid = torch.arange(width)[None] < torch.tensor(rows)[:, None]
    value = torch.arange(4.0 * len(rows) * width).reshape(len(rows), width, 4).masked_fill(~valid[..., None], 1e9)
    capture.begin("prefill", tokens=torch.where(valid, torch.arange(width)[None] + 5, 0), valid=valid, positions=torch.arange(width)[None].expand(len(rows), -1))
    capture.show("embed", value)
    capture.show("layers.0.ffn.experts", value[..., :2].long())
    capture.show("their.name", value)
    capture.begin("decode", 0, tokens=[1] * len(rows))
    capture.show("embed", torch.zeros(len(rows), 4))
    capture.stop()
    return open_trace(to), value


@pytest.mark.parametrize("rows", [(3,), (3, 2), (3, 3)])
def test_pads_behind_the_longest_row_are_cut_from_every_tensor(tmp_path, rows):
    opened, value = padded(tmp_path / "t", 8, rows)
    one = opened.trace.passes["prefill", None]
    for name in ("embed", "layers.0.ffn.experts", "their.name"):
        assert opened.trace.get(name, "prefill").shape[:2] == (len(rows), 3)
    assert torch.equal(opened.trace.get("embed", "prefill"), value[:, :3])
    assert one.tokens is not None
    assert one.positions is not None
    assert (one.tokens.shape, one.positions.shape) == ((len(rows), 3), (len(rows), 3))
    assert (one.valid is None) == (len(set(rows)) == 1)
    prompts, steps = tokens_of(opened, 100)
    assert prompts == [tuple(range(5, 5 + n)) for n in rows]
    assert steps == [[1] * len(rows)]


def test_pads_before_a_row_stay(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[0, 0, 5]], valid=[[False, False, True]])
    capture.show("embed", torch.zeros(1, 3, 4))
    capture.stop()
    assert open_trace(tmp_path / "t").trace.get("embed").shape == (1, 3, 4)


@pytest.mark.parametrize(("fact", "value", "said"), [("tokens", [[1, 475.7, 2]], r"tokens of prefill: 475\.7, expected whole numbers"), ("tokens", [[True, False, True]], "expected whole numbers"), ("positions", [[0, 1, 2.5]], r"positions of prefill: 2\.5, expected whole"), ("valid", [[0.5, 1, 1]], "expected true or false")])
def test_a_fact_that_is_no_whole_number_is_refused(tmp_path, fact, value, said):
    padded(tmp_path / "t", 3)
    manifest = manifest_of(tmp_path / "t")
    manifest["passes"][0][fact] = value
    (tmp_path / "t" / "manifest.json").write_text(json.dumps(manifest))
    for read in (open_trace, Trace.load):
        with pytest.raises(InputError, match=said) as caught:
            read(tmp_path / "t")
        assert "\n" not in str(caught.value)


def test_a_complex_value_is_told_where_it_is_shown_and_where_it_is_read(tmp_path):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[1, 2]])
    capture.show("embed", torch.zeros(1, 2, 3, dtype=torch.complex64))
    capture.show("norm", torch.zeros(1, 2, 3))
    capture.stop()
    assert open_trace(tmp_path / "t").trace.gaps["prefill", None, "embed"].startswith("torch.complex64, expected real numbers")
    manifest = manifest_of(tmp_path / "t")
    one = manifest["passes"][0]
    save_file({"norm": torch.ones(1, 2, 3, dtype=torch.complex64)}, tmp_path / "t" / one["file"])
    one["tensors"]["norm"]["dtype"] = "complex64"
    (tmp_path / "t" / "manifest.json").write_text(json.dumps(manifest))
    for trace in (open_trace(tmp_path / "t").trace, Trace.load(tmp_path / "t")):
        assert not trace.fired("norm")
        assert trace.gaps["prefill", None, "norm"] == "complex64, expected real numbers"


def test_what_capture_refuses_is_written_down_where_it_was_shown(tmp_path, capsys):
    assert capture.start(tmp_path / "t")
    capture.begin("prefill", tokens=[[5, 6]])
    capture.show("layers.0.attn.core", torch.ones(1, 2, 8, 128), shard={"kind": "heads"})
    capture.show("layers.0.attn.q", [1.0])
    capture.stop()
    assert set(manifest_of(tmp_path / "t")["passes"][0]["refused"]) == {"layers.0.attn.core", "layers.0.attn.q"}
    trace = open_trace(tmp_path / "t").trace
    assert "heads" in trace.gaps["prefill", None, "layers.0.attn.core"]
    assert "list" in trace.gaps["prefill", None, "layers.0.attn.q"]
    assert trace.unseen == set()
    assert "layers.0.attn.core" in capsys.readouterr().err
