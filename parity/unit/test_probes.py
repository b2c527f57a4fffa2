"""The probes as typed: help with an example, a table and one strict JSON line, and exit codes without tracebacks."""

import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from parity.unit.worlds import write_checkpoint
from probes.core.cli import Table, json_line, number, parse_layers
from reference.checkpoint import INDEX_NAME
from reference.config import InputError

MODEL_PROBES = ("layers", "sinkhorn", "residual", "visible_kv", "sink", "text", "drift", "record")
PROBES = (*MODEL_PROBES, "diff")
TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"


def call(probe, *arguments):
    """Exit code of a probe's command line."""
    try:
        return importlib.import_module(f"probes.{probe}").main([str(a) for a in arguments])
    except SystemExit as stop:  # argparse
        return stop.code


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A two-layer checkpoint (window, CSA) and a prompt of token ids."""
    directory = write_checkpoint(
        tmp_path_factory.mktemp("probes") / "world", seed=5, num_hidden_layers=2, compress_ratios=[0, 4]
    )
    (directory / "prompts").mkdir()
    (directory / "prompts" / "ids.json").write_text(json.dumps([(7 * i * i + i) % 128 for i in range(60)]))
    return directory


def last_line(capsys):
    """The JSON line and everything before it."""

    def forbidden(constant):
        raise AssertionError(f"{constant} is not strict JSON")

    *table, line = capsys.readouterr().out.rstrip("\n").split("\n")
    return json.loads(line, parse_constant=forbidden), "\n".join(table)


def measured(world, capsys, probe, *arguments):
    code = call(probe, "--checkpoint", world, "--prompt", "ids.json:0:21", "--steps", 3, *arguments)
    assert code == 0, capsys.readouterr().err
    values, table = last_line(capsys)
    assert (values["probe"], values["measured"]) == (probe, True)
    assert table.strip()
    return values, table


# ---- | head ----


def unread(*command):
    """Exit code and stderr of a program whose stdout nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run([sys.executable, *command], stdout=writer, stderr=subprocess.PIPE, text=True, cwd=TINY.parents[1], timeout=120)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("command", [
    ("-m", "probes.memory", "--preset", "flash"), ("-m", "reports", "--schema"), ("-m", "reports.ci", "parity/golden/run-1.jsonl"),
    ("-c", "from probes.core.pipe import piped; import sys; sys.exit(piped(lambda: print('x' * 10**6) or 0))"),
], ids=lambda c: " ".join(c)[:30])  # fmt: skip
def test_a_reader_that_leaves_ends_a_program_quietly(command):
    assert unread(*command) == (141, "")


def test_every_program_with_an_answer_is_covered_by_that():
    root = TINY.parents[1]
    programs = [path for room in ("probes", "reports") for path in (root / room).glob("*.py") if '__name__ == "__main__"' in path.read_text(encoding="utf-8")]
    assert len(programs) > 20
    assert [path.name for path in programs if not any(through in path.read_text(encoding="utf-8") for through in ("return answer(", "sys.exit(piped(main))"))] == []


# ---- help ----


def test_the_readme_names_every_probe():
    root = Path(__file__).resolve().parents[2]
    table = (root / "README.md").read_text(encoding="utf-8")
    probes = {path.stem for path in (root / "probes").glob("*.py") if "def main(" in path.read_text(encoding="utf-8")}
    assert len(probes) >= 18
    assert {name for name in probes if f"`{name}`" not in table} == set()


@pytest.mark.parametrize("probe", PROBES)
def test_help_has_an_example_and_the_exit_codes(probe, capsys):
    assert call(probe, "--help") == 0
    text = capsys.readouterr().out
    assert f"example:\n  python -m probes.{probe} " in text
    assert "2 bad input" in text


# ---- measuring ----


def test_layers_compares_every_point(world, capsys):
    values, table = measured(world, capsys, "layers")
    found = {(one["phase"], one["point"]): one for one in values["points"]}
    assert {phase for phase, _ in found} == {"prefill", "decode"}
    assert found["prefill", "layers.0.attn.q"]["rows"] == 21 * 4
    assert found["decode", "layers.1.hc_ffn.X"]["rows"] == 3
    assert found["decode", "layers.1.attn.selected"]["kind"] == "sets"
    assert all(one["error"] < 0.3 for one in found.values() if one["kind"] == "values" and one["rows"])
    assert "hc_attn.comb" in table


def test_layers_shows_only_what_was_asked(world, capsys):
    values, _ = measured(world, capsys, "layers", "--layers", "1", "--phase", "decode")
    assert {one["layer"] for one in values["points"]} == {1, None}
    assert {one["phase"] for one in values["points"]} == {"decode"}


def test_sinkhorn_measures_both_models(world, capsys):
    values, _ = measured(world, capsys, "sinkhorn", "--layers", "0", "--history", "2")
    assert len(values["sites"]) == 4  # two halves, two phases
    for site in values["sites"]:
        assert site["production"]["column_deviation"] < 1e-5
        assert site["matrix"]["relative"] < 0.05
        assert len(site["reference"]["residuals"]) == 3
        trail = site["production_trail"]
        assert len(trail["residuals"]) == 3  # hc_sinkhorn_iters
        assert (trail["nearest"], trail["distance"] < 1e-5) == ("3 columns", True)


def test_residual_measures_growth_and_steps(world, capsys):
    values, _ = measured(world, capsys, "residual")
    decode = [site for site in values["sites"] if site["phase"] == "decode"]
    assert len(decode) == 4
    for site in values["sites"]:
        assert site["ratio"] == pytest.approx(1, abs=0.05)
        assert site["production"]["growth"] > 0
    assert all(len(site["production"]["rms_per_step"]) == 3 for site in decode)
    assert all(abs(site["drift"]) < 0.1 for site in decode)
    for site in values["sites"]:
        assert site["production"]["comb_bound"] <= 1.001
        assert site["production"]["remainder"] < 4e-3


def test_sink_counts_it_once_and_measures_shares(world, capsys):
    values, table = measured(world, capsys, "sink")
    assert [one["production_uses"] for one in values["merge"]] == ["one softmax", *["per segment, merged, the sink once"] * 2]
    assert all(one["production_to_global"] < 4e-3 for one in values["merge"])
    assert all(one["finite"] for one in values["extremes"])
    assert len(values["layers_found"]) == 4
    for one in values["layers_found"]:
        assert one["unstored"] == 0
        assert one["sum_off"] < 2e-3
        for window, entries, sink in zip(one["window"], one["entries"], one["sink"], strict=True):
            assert window + entries + sink == pytest.approx(1)
    assert "raw copies" in table


def test_sink_alone_runs_no_model(capsys):
    assert call("sink", "--alone") == 0
    values, _ = last_line(capsys)
    assert {one["splits"] for one in values["merge"]} == {1, 2, 7}
    assert "layers_found" not in values


def test_text_measures_logits_and_both_texts(world, capsys):
    values, table = measured(world, capsys, "text", "--greedy", "20")
    assert {one["phase"] for one in values["logits"]} == {"prefill", "decode"}
    for one in values["logits"]:
        assert 0 <= one["kl_mean"] <= one["kl_max"]
        assert 0 <= one["top5_agreement"] <= 1
    for who in ("production", "reference"):
        assert values["texts"][0][who]["tokens"] == 20
        assert values["texts"][0][who]["degenerate"] in (True, False)
    assert "greedy text" in table


def test_drift_follows_the_error_over_steps(world, capsys):
    values, _ = measured(world, capsys, "drift", "--phase", "decode", "--steps", "4")
    found = {(one["class"], one["layers"]): one for one in values["classes"]}
    assert found["attn.core", "csa"]["steps"] == 4
    assert ("attn.compressor", "window") not in found
    assert found["attn.compressor", "csa"]["mod4"][:3] == [None] * 3  # entries are completed at positions 3 mod 4 only
    assert len(values["points"]) == 5 + 6 + 1


def test_visible_kv_names_ranges_and_rules(world, capsys):
    values, table = measured(world, capsys, "visible_kv", "--step", "1", "--against-prefill")
    for one in values["layers_found"]:
        assert one["window"]["different"] == 0
        assert one["production"]["wrong"] == one["reference"]["wrong"] == 0
    shown = {(one["layer"], one["phase"]): one for one in values["ranges"]}
    assert shown[0, "decode"]["position"] == 22
    assert shown[0, "decode"]["production"]["window"] == [[7, 22]]  # a window of 16
    assert "7-22" in table
    assert [one["window"]["different"] for one in values["against_prefill"]] == [0, 0]


def test_recorded_traces_are_compared_offline(world, capsys, tmp_path):
    for model in ("production", "reference"):
        values, _ = measured(
            world,
            capsys,
            "record",
            "--model",
            model,
            "--out",
            tmp_path / model,
            *(["--policy", "published"] if model == "reference" else []),
        )
        assert values["fired"]["decode"] == 3 * values["fired"]["prefill"]
    assert call("diff", tmp_path / "production", tmp_path / "reference") == 0
    values, _ = last_line(capsys)
    assert values["keys"]["got_only"] == values["keys"]["want_only"] == []
    found = {(one["phase"], one["point"]): one for one in values["points"]}
    assert found["decode", "layers.0.attn.visible"]["different"] == 0
    assert found["decode", "layers.0.attn.q"]["rows"] == 12
    assert found["prefill", "logits"]["error"] < 0.3
    assert max(one["error"] for one in found.values() if one["kind"] == "values" and one["rows"]) > 0
    assert call("diff", tmp_path / "production", tmp_path / "production") == 0
    values, _ = last_line(capsys)
    assert all(one["error"] == 0 for one in values["points"] if one["kind"] == "values" and one["rows"])


def test_a_diff_lists_what_only_one_side_has(world, capsys, tmp_path):
    for name, points in (("a", ["logits", "embed"]), ("b", ["logits", "norm"])):
        measured(
            world, capsys, "record", "--model", "reference", "--out", tmp_path / name, "--phase", "prefill", "--points", *points
        )
    assert call("diff", tmp_path / "a", tmp_path / "b") == 0
    values, table = last_line(capsys)
    assert values["keys"]["got_only"] == ["prefill embed"]
    assert values["keys"]["want_only"] == ["prefill norm"]
    assert "only in" in table


def test_a_diff_of_nothing_in_common_is_not_measured(world, capsys, tmp_path):
    for name, points in (("a", ["embed"]), ("b", ["norm"])):
        measured(
            world, capsys, "record", "--model", "reference", "--out", tmp_path / name, "--phase", "prefill", "--points", *points
        )
    assert call("diff", tmp_path / "a", tmp_path / "b") == 3
    values, _ = last_line(capsys)
    assert values["measured"] is False


def test_a_diff_of_different_tokens_is_refused(world, capsys, tmp_path):
    for name, prompt in (("a", "ids.json:0:5"), ("b", "ids.json:1:6")):
        arguments = [
            "--checkpoint",
            world,
            "--prompt",
            prompt,
            "--phase",
            "prefill",
            "--points",
            "embed",
            "--out",
            tmp_path / name,
        ]
        assert call("record", "--model", "reference", *arguments) == 0
    assert call("diff", tmp_path / "a", tmp_path / "b") == 2
    assert "different tokens" in capsys.readouterr().err


# ---- bad input ----


def bad_checkpoint(change):
    """Arguments for a damaged copy of the world."""

    def make(world, tmp_path):
        copy = Path(shutil.copytree(world, tmp_path / "copy"))
        change(copy)
        return ["--checkpoint", copy, "--prompt", "ids.json"]

    return make


def given(*arguments):
    return lambda world, tmp_path: ["--checkpoint", world, *arguments]


def write_ids(directory, ids):
    (directory / "prompts" / "ids.json").write_text(json.dumps(ids))


def nan_in_an_expert_scale(directory):
    from safetensors.torch import load_file, save_file

    name = "layers.1.ffn.experts.3.w2.scale"
    file = directory / json.loads((directory / INDEX_NAME).read_text())["weight_map"][name]
    tensors = load_file(file)
    tensors[name] = torch.full_like(tensors[name].view(torch.uint8), 255).view(tensors[name].dtype)
    save_file(tensors, file)


BAD = {
    "no checkpoint": (lambda w, t: ["--checkpoint", t / "nothing"], "no such directory"),
    "an empty directory": (lambda w, t: ["--checkpoint", t], "not a checkpoint directory"),
    "a broken config": (bad_checkpoint(lambda d: (d / "config.json").write_text("{")), "broken JSON"),
    "a missing shard": (bad_checkpoint(lambda d: next(d.glob("*.safetensors")).unlink()), "shard is missing"),
    "NaN in an expert's scale": (bad_checkpoint(nan_in_an_expert_scale), "NaN scale"),
    "layer 9": (given("--prompt", "ids.json", "--layers", "9"), "layer 9 does not exist"),
    "layers 3-1": (given("--prompt", "ids.json", "--layers", "1-0"), "runs backwards"),
    "no layers": (given("--prompt", "ids.json", "--layers", ""), "neither a layer nor a range"),
    "no such prompt": (given("--prompt", "x.json"), "no such file"),
    "an empty prompt": (bad_checkpoint(lambda d: write_ids(d, [])), "empty prompt"),
    "a token id out of range": (bad_checkpoint(lambda d: write_ids(d, [1, 128])), "token id 128"),
    "text without a tokenizer": (given("--prompt", TINY / "prompts" / "short.txt"), "no tokenizer.json"),
    "a prompt longer than the context": (given("--prompt", "ids.json", "--max-context", "50"), "--max-context"),
    "more context than positions": (given("--prompt", "ids.json", "--max-context", "99999999"), "max_position_embeddings"),
    "no context": (given("--max-context", "0"), "at least 1"),
    "negative steps": (given("--steps", "-1"), "--steps"),
    "nothing to show": (given("--prompt", "ids.json", "--phase", "decode", "--steps", "0"), "at least one step"),
    "an unknown phase": (given("--phase", "prefil"), "invalid choice"),
    "an unknown device": (given("--device", "tpu"), "invalid choice"),
    "an unknown option": (given("--prompts", "x"), "unrecognized"),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("probe", ["layers", "record"])
def test_bad_input_is_one_line_and_exit_2(probe, case, world, tmp_path, capfd):
    make, message = BAD[case]
    extra = ["--model", "production", "--out", tmp_path / "out"] if probe == "record" else []
    assert call(probe, *make(world, tmp_path), *extra) == 2
    captured = capfd.readouterr()
    lines = [line for line in captured.err.splitlines() if not line.startswith("reference: ")]  # the memory estimate
    assert len(lines) == 1
    assert message in lines[0]
    assert captured.out == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("probe", "arguments", "message"),
    [
        ("visible_kv", ["--step", "3"], "--step 3: expected a decode step 0..2"),
        ("visible_kv", ["--step", "-1"], "expected a count"),
        ("visible_kv", ["--phase", "prefill", "--against-prefill"], "needs decode steps"),
        ("sinkhorn", ["--most", "-1"], "expected a count"),
        ("record", ["--model", "reference", "--out", TINY], "not empty"),
        ("record", ["--model", "reference", "--out", "OUT", "--policy", "publish"], "publish"),
        ("record", ["--model", "production", "--out", "OUT", "--policy", "exact"], "declares its own"),
        ("record", ["--model", "reference", "--out", "OUT", "--points", "layers.0.attn.qq"], "nearest is 'layers.0.attn.q'"),
        ("record", ["--model", "reference", "--out", "OUT", "--points", "layers.0.attn.selected"], "no such point among"),
        ("record", ["--model", "teacher", "--out", "OUT"], "invalid choice"),
        ("record", ["--out", "OUT"], "--model"),
    ],
)
def test_a_probe_checks_its_own_options(probe, arguments, message, world, tmp_path, capfd):
    arguments = [tmp_path / "out" if a == "OUT" else a for a in arguments]
    assert call(probe, "--checkpoint", world, "--prompt", "ids.json:0:5", "--steps", 3, *arguments) == 2
    err = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(("reference: ", "production: "))]
    assert len(err) == 1
    assert message in err[0]
    assert not (tmp_path / "out").exists()


def test_a_diff_of_no_trace_is_bad_input(tmp_path, capsys):
    assert call("diff", tmp_path, tmp_path) == 2
    assert "not a saved trace" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_without_a_device_nothing_is_measured_and_the_reason_is_said(world, capsys):
    assert call("layers", "--checkpoint", world, "--prompt", "ids.json:0:5", "--steps", 1, "--device", "cuda") == 3
    captured = capsys.readouterr()
    values = json.loads(captured.out)
    assert values["measured"] is False
    assert values["reason"]
    assert "could not measure" in captured.err
    assert "Traceback" not in captured.err


# ---- small parts ----


@pytest.mark.parametrize(("text", "layers"), [(None, (0, 1, 2, 3)), ("2", (2,)), ("0-2,1", (0, 1, 2)), ("3, 0", (0, 3))])
def test_layers_are_a_list_of_ranges(text, layers):
    assert parse_layers(text, 4) == layers


@pytest.mark.parametrize("text", ["", ",", "a", "1-", "-1", "1-2-3", "4", "0-4", "2-1", "1.5", "²", "9" * 50])
def test_bad_layer_lists_are_refused(text):
    with pytest.raises(InputError, match="--layers"):
        parse_layers(text, 4)


def test_json_is_strict_and_ascii():
    line = json_line({"a": float("nan"), "b": (1, float("-inf")), "c": "\u2028é\udcff"})
    assert json.loads(line) == {"a": "nan", "b": [1, "-inf"], "c": "\u2028é\udcff"}
    assert line.isascii()
    assert "\n" not in line


def test_numbers_are_short():
    assert [number(x) for x in (0.0, 1.0, 0.123456, 1.23456e-7, 123456.0, float("nan"), float("inf"), None)] == [
        "0", "1", "0.1235", "1.23e-07", "1.23e+05", "nan", "inf", "-"
    ]  # fmt: skip


def test_tables_are_drawn_on_a_terminal_and_plain_elsewhere(monkeypatch):
    import io

    from probes.core.cli import Answer, show

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    table = Table("title", ["name", "value"])
    table.add("[red]x[/red]", 1.5)  # a name is text, never markup
    plain, drawn = io.StringIO(), Terminal()
    show(Answer([table], {}), plain)
    monkeypatch.setenv("TERM", "xterm")
    show(Answer([table], {}), drawn)
    assert plain.getvalue() == "title\n  name          value\n  [red]x[/red]    1.5\n\n"
    assert "[red]x[/red]" in drawn.getvalue()
    assert "┃" in drawn.getvalue() or "│" in drawn.getvalue()
