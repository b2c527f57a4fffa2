"""`pytest parity/ --trace DIR` as typed: the verdict and the numbers of the live run, from another process's files.

Captured is this project's own production, as a foreign engine would be: its values go through probes/capture.py.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from probes.core.records import Header, Measurement, Verdict, read_run
from probes.outside.trace import Player, open_trace
from reference.config import ModelConfig

ROOT = Path(__file__).resolve().parents[2]
PROMPT, STEPS, LAYERS = "medium.txt:0:40", 3, "0-1"
CAPTURE = """
import sys, torch
from pathlib import Path
from probes import capture
from probes.core.inputs import read_prompt
from parity.outsider import open_production
out, steps, flat, points = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "flat", sys.argv[4]
checkpoint = Path("checkpoints/tiny-dsv4")
model = open_production("transformers", "fp32", checkpoint, range(2), 512, "cpu").production
prompt = read_prompt("medium.txt:0:40", checkpoint, 1 << 30)
assert capture.start(out, points=points)
capture.describe(engine="transformers", policy=sorted(model.policy), layers=[0, 1], prompts=["medium.txt:0:40"])
state = model.new_state(1, 512)
shown = (lambda point, value: capture.show(point, value.flatten(0, 1))) if flat else capture.show
with model.taps.observe(model.taps.points, shown):
    tokens = torch.tensor([prompt.ids])
    capture.begin("prefill", tokens=tokens[0] if flat else tokens, positions=torch.arange(40) if flat else torch.arange(40)[None])
    model.prefill(tokens, state)
    for step in range(steps):
        token = torch.tensor([prompt.continuation[step]])
        capture.begin("decode", step, tokens=token)
        model.decode(token, state)
capture.stop()
"""

pytest.importorskip("transformers", reason="transformers is not installed (development dependency)")


def run(*arguments):
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert "INTERNALERROR" not in done.stdout + done.stderr
    return done


def audit(report, *arguments):
    done = run("-m", "pytest", "parity/", "--layers", LAYERS, "--report", str(report), "-q", *arguments)
    assert done.returncode in (0, 1), done.stdout[-2000:] + done.stderr[-2000:]
    return done, read_run(report / "run.jsonl")


@pytest.fixture(scope="module")
def captured(tmp_path_factory):
    """The trace: flat tokens, as an inference engine holds them."""
    directory = tmp_path_factory.mktemp("door")
    done = run("-c", CAPTURE, str(directory / "trace"), str(STEPS), "flat", "*")
    assert done.returncode == 0, done.stderr
    return directory / "trace"


def told(records):
    return {(v.test_id, v.gate, v.point, v.mode): v for v in records if isinstance(v, Verdict)}


@pytest.mark.slow
def test_the_verdict_and_the_numbers_are_those_of_the_live_run(captured, tmp_path):
    done, offline = audit(tmp_path / "offline", "--trace", str(captured))
    assert done.returncode == 0
    _, live = audit(tmp_path / "live", "--production", "transformers", "--prompt", PROMPT, "--steps", str(STEPS))
    got, want = told(offline), told(live)
    assert len(got) > 300
    assert {key[1] for key in set(want) - set(got)} == {"greedy", "greedy.degeneration"}  # a trace cannot go on
    assert set(got) <= set(want)
    for key, verdict in got.items():
        other = want[key]
        assert (verdict.state, verdict.value, verdict.limit, verdict.floor, verdict.rows, verdict.where) == (other.state, other.value, other.limit, other.floor, other.rows, other.where), key
    assert (offline[-1].verdict, live[-1].verdict) == ("pass", "pass")
    header = offline[0]
    assert isinstance(header, Header)
    assert header.production == "trace trace of transformers"
    assert header.prompts == [PROMPT]
    assert header.tokens == [40]
    assert header.steps == STEPS


def broken(captured, to, change):
    """A copy of the trace whose manifest, or whose tensors, were changed."""
    shutil.copytree(captured, to)
    manifest = json.loads((to / "manifest.json").read_text())
    change(manifest, to)
    (to / "manifest.json").write_text(json.dumps(manifest))
    return to


def scaled(pass_number, point, by):
    def change(manifest, to):
        from safetensors.torch import load_file, save_file

        path = to / manifest["passes"][pass_number]["file"]
        held = load_file(path)
        held[point] = (held[point] * by).contiguous()
        save_file(held, path)

    return change


@pytest.mark.slow
def test_a_fault_in_the_trace_is_named_at_its_step(captured, tmp_path):
    trace = broken(captured, tmp_path / "t", scaled(2, "layers.1.attn.wo_a", 1.01))
    done, records = audit(tmp_path / "r", "--trace", str(trace))
    assert done.returncode == 1
    first = records[-1].first_divergence
    assert (first.point, first.phase, first.component, first.local) == ("layers.1.attn.wo_a", "decode", "attention projections", True)


def test_what_a_trace_does_not_hold_is_not_covered_and_no_pass(captured, tmp_path):
    """No prefill values, decode step 0 only in part: tokens are enough for the reference, and the rest is told."""

    def change(manifest, to):
        from safetensors.torch import load_file, save_file

        for number, keep in ((0, lambda name: False), (1, lambda name: name != "layers.0.attn.q"), (2, lambda name: name.startswith("layers.0"))):
            one = manifest["passes"][number]
            held = {name: value for name, value in load_file(to / one["file"]).items() if keep(name)}
            save_file(held, to / one["file"])
            one["tensors"] = {name: said for name, said in one["tensors"].items() if name in held}

    trace = broken(captured, tmp_path / "t", change)
    _, records = audit(tmp_path / "r", "--trace", str(trace))
    verdicts = [v for v in records if isinstance(v, Verdict)]
    judged = [v for v in verdicts if v.gate != "run"]
    assert not [v for v in judged if v.phase == "prefill"]
    assert not [v for v in judged if v.mode == "isolated" and v.layer is not None]  # a layer's state needs its inputs from the prompt on; the head has none
    assert {v.state.value for v in judged} == {"pass"}, [(v.test_id, v.reason) for v in judged if v.state.value != "pass"][:5]
    seen = {(v.point, v.step_first, v.step_last) for v in judged if v.point in ("layers.0.attn.q", "layers.0.attn.o", "layers.1.attn.o", "logits")}
    assert ("layers.0.attn.o", 0, 0) in seen
    assert ("layers.0.attn.q", 0, 0) not in seen  # missing at step 0
    assert ("layers.1.attn.o", 0, 0) in seen
    assert ("layers.1.attn.o", 1, 1) not in seen  # missing at step 1
    assert ("layers.1.attn.o", 2, 2) in seen  # and there at step 2
    missing = {m.point for m in records if isinstance(m, Measurement) and m.name == "not covered"}
    assert {"layers.0.attn.q", "layers.1.attn.o", "embed"} <= missing
    assert re.fullmatch(r"partial: 2\d to 5\d of 56 points in 3 decode steps; prefill not shown", records[-1].coverage), records[-1].coverage


def holding(passes, change=None):
    """A change that leaves the tensors of these passes only, and then another one."""

    def left(manifest, to):
        from safetensors.torch import save_file

        for number, one in enumerate(manifest["passes"]):
            if number not in passes:
                save_file({}, to / one["file"])
                one["tensors"] = {}
        if change is not None:
            change(manifest, to)

    return left


def test_the_steps_that_are_there_are_judged_whatever_the_others_hold(captured, tmp_path):
    """Steps 0 and 1 of 3 are there, and step 1 is wrong: a group of steps is no reason to look at step 0 only."""
    trace = broken(captured, tmp_path / "t", holding((0, 1, 2), scaled(2, "layers.1.attn.wo_a", 1.01)))
    done, records = audit(tmp_path / "r", "--trace", str(trace))
    assert done.returncode == 1
    assert records[-1].verdict == "fail"
    assert re.search(r"partial: (\d+) of 56 points in prefill; \1 of 56 in 2 of 3 decode steps", records[-1].coverage), records[-1].coverage
    first = records[-1].first_divergence
    assert (first.point, first.phase, first.step, first.local) == ("layers.1.attn.wo_a", "decode", 1, True)
    whole = {(v.gate, v.step_last) for v in records if isinstance(v, Verdict) and v.phase == "decode" and v.gate in ("core.witness", "visible.rule")}
    assert whole == {("core.witness", 1), ("visible.rule", 1)}  # gates over the whole of decode judge what is there too
    assert [v.rows for v in records if isinstance(v, Verdict) and (v.gate, v.phase) == ("logits.top1", "decode")] == [2]
    lacking = {m.point: m.values["where"] for m in records if isinstance(m, Measurement) and m.name == "not covered" and "where" in m.values}
    assert lacking["layers.1.attn.wo_a"] == "decode step 2"
    assert "production does not show attn.wo_a in layers 0-1, decode step 2: " in (tmp_path / "r" / "report.html").read_text()


def shown_otherwise(point, change_of):
    """Prefill's tensor of a point, stored in another way."""

    def change(manifest, to):
        from safetensors.torch import load_file, save_file

        one = manifest["passes"][0]
        held = load_file(to / one["file"])
        held[point] = change_of(held[point]).contiguous()
        one["tensors"][point] |= {"shape": list(held[point].shape), "dtype": str(held[point].dtype).removeprefix("torch.")}
        save_file(held, to / one["file"])

    return change


def misspelt(manifest, to):
    from safetensors.torch import load_file, save_file

    for one in manifest["passes"]:
        held = load_file(to / one["file"])
        held["layers.0.attn.cor"] = held.pop("layers.0.attn.core")
        one["tensors"]["layers.0.attn.cor"] = one["tensors"].pop("layers.0.attn.core") | {"point": "layers.0.attn.cor"}
        save_file(held, to / one["file"])


def twice(manifest, to):
    from safetensors.torch import load_file, save_file

    one = manifest["passes"][0]
    held = load_file(to / one["file"])
    held["layers.0.attn.q#1"] = held["layers.0.attn.q"].clone()
    one["tensors"]["layers.0.attn.q#1"] = one["tensors"]["layers.0.attn.q"]
    save_file(held, to / one["file"])


@pytest.mark.parametrize(
    ("change", "point", "said"),
    [
        (shown_otherwise("layers.0.attn.q", lambda q: q.transpose(0, 1)), "layers.0.attn.q", "shown as [8, 40, 128] for 40 tokens in 1 row, expected [1, 40, 8, 128]"),
        (shown_otherwise("layers.0.attn.q", lambda q: q.flatten(1).unflatten(1, (4, -1))), "layers.0.attn.q", "shown as [1, 40, 4, 256], expected [1, 40, 8, 128]"),
        (shown_otherwise("layers.0.ffn.experts", lambda e: e.float()), "layers.0.ffn.experts", "shown in float32, expected whole numbers"),
        (misspelt, "layers.0.attn.core", "shown as layers.0.attn.cor, which is no point"),
        (twice, "layers.0.attn.q", "shown twice in one pass, each time whole"),
        (lambda m, to: m["passes"][0].update(refused={"layers.0.attn.q": "shard kind 'heads'"}), "layers.0.attn.q", "shard kind 'heads'"),
    ],
    ids=["transposed", "heads split otherwise", "float ids", "misspelt", "twice", "refused by capture"],
)  # fmt: skip
def test_what_is_there_and_cannot_be_used_is_told_with_its_reason(captured, tmp_path, change, point, said):
    opened = open_trace(broken(captured, tmp_path / "t", change))
    player = Player(opened, ModelConfig.from_dir("checkpoints/tiny-dsv4"), range(2))
    assert {key[2] for key in player.unusable} == {point}
    assert player.unusable["prefill", None, point] == said
    assert not player.holds(point, "prefill", None)
    assert player.holds("layers.0.attn.kv", "prefill", None)
    assert any(note.startswith(f"not usable: {point} in prefill: {said}") for note in player.notes)


def test_what_was_never_there_is_no_reason_to_call_a_trace_incomplete(captured, tmp_path):
    change = lambda m, to: (shown_otherwise("layers.0.attn.q", lambda q: q)(m, to), m["passes"][1]["unseen"].update({"layers.9.attn.q": "captured in a CUDA graph that was not replayed in this pass"}))  # noqa: E731
    assert Player(open_trace(broken(captured, tmp_path / "t", change)), ModelConfig.from_dir("checkpoints/tiny-dsv4"), range(2)).unusable == {}


@pytest.mark.slow
def test_what_is_there_and_cannot_be_used_is_never_a_pass(captured, tmp_path):
    trace = broken(captured, tmp_path / "t", shown_otherwise("layers.0.attn.q", lambda q: q.transpose(0, 1)))
    done, records = audit(tmp_path / "r", "--trace", str(trace))
    assert done.returncode == 1
    assert records[-1].verdict == "incomplete"
    assert "layers.0.attn.q: shown as [8, 40, 128] for 40 tokens in 1 row, expected [1, 40, 8, 128]: not judged" in done.stdout.splitlines()[-2]


@pytest.mark.parametrize(
    ("change", "options", "said"),
    [
        (lambda m, to: m["passes"][0].update(tokens=None), (), 'prefill has no token ids: the reference needs the prompt\'s tokens; next: capture.begin("prefill", tokens=...)'),
        (lambda m, to: m["passes"].pop(0), (), "no prefill is listed"),
        (lambda m, to: m["passes"].pop(2), (), "decode step 1 is missing, and step 2 is there"),
        (lambda m, to: m["passes"][1].update(tokens=None, positions=None), (), "decode step 0 has no token ids"),
        (lambda m, to: m["passes"][0]["tokens"].__setitem__(3, 10**6), (), "token id 1000000 is out of range"),
        (lambda m, to: m["passes"][0].update(positions=list(range(64, 104))), (), "next: capture with prefix caching off"),
        (lambda m, to: (to / m["passes"][1]["file"]).write_bytes(b"x" * 20), (), "truncated or broken"),
        (lambda m, to: (to / m["passes"][1]["file"]).unlink(), (), "missing; the manifest lists it"),
        (lambda m, to: m.update(size=2), (), "rank 0 of 2 alone"),
        (lambda m, to: m["description"].update(layers=[7]), (), "its manifest says layers [7], and it holds tensors of layers [0, 1]"),
        (lambda m, to: m["description"].update(policy=["bf17"]), (), "bf17"),
        (lambda m, to: None, ("--steps", "4"), "--steps 4 with --trace: the trace holds 3"),
        (lambda m, to: None, ("--prompt", "medium.txt:0:39"), "--prompt with --trace: row 0 differs"),
        (lambda m, to: None, ("--production", "transformers"), "one of them"),
    ],
)
def test_a_trace_that_cannot_be_audited_is_one_line(captured, tmp_path, change, options, said):
    trace = broken(captured, tmp_path / "t", change)
    done = run("-m", "pytest", "parity/", "--layers", LAYERS, "--report", str(tmp_path / "r"), "--trace", str(trace), *options)
    assert done.returncode == 4
    (line,) = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith("ERROR")]
    assert said in line
    assert not (tmp_path / "r").exists()


def test_pytests_own_option_has_another_name_here():
    done = run("-m", "pytest", "--help", "parity/")
    assert "--pdb-trace" in done.stdout
    assert "--trace=DIR, --trace-dir=DIR" in done.stdout or "--trace DIR, --trace-dir DIR" in done.stdout or "--trace, --trace-dir" in done.stdout


def test_a_trace_needs_no_device(captured, tmp_path):
    """Nothing of production is imported: no kernels are compiled on a machine without a compiler."""
    code = "import sys; from probes.outside.trace import open_trace; open_trace(sys.argv[1]); print([m for m in sys.modules if m.split('.')[0] in ('production', 'kernels', 'cupy')])"
    assert run("-c", code, str(captured)).stdout.strip() == "[]"


def test_a_folder_with_a_kv_cache_names_the_probe_that_reads_it(tmp_path):
    (tmp_path / "cache.json").write_text("{}")
    done = run("-m", "pytest", "parity/", "--layers", "0", "--report", str(tmp_path / "r"), "--trace", str(tmp_path))
    assert done.returncode == 4
    assert f"it holds a KV cache (cache.json) and no trace; next: python -m probes.kv_cache {tmp_path}" in done.stderr
