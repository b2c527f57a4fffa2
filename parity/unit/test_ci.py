"""What GitHub Actions shows of a run says what the records say, whatever their texts hold; the workflow's commands exist.

The summary is read back with a Markdown parser, annotations as the runner reads them.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from markdown_it import MarkdownIt

from parity import planted
from parity.gates import OPERATIONS
from parity.session import divergence_lines
from parity.unit.synthetic_run import HOSTILE, cut_off, header, large_run, synthetic_run, verdict, wild_run
from probes.core.records import Coverage, Divergence, Record, State, Summary, Verdict, summarise, to_line
from reference.points import LAYER_POINTS, LAYER_ROWS, MODEL_POINTS
from reports import ci, words
from reports.annotations import FILES, MOST, Annotation, annotate
from reports.behind import FROM, READS, Behind
from reports.render import report_html, split
from reports.summary import job_summary, text

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW = ROOT / ".github" / "workflows" / "audit.yml"
MIB = 1 << 20
RUNS: dict[str, list[Record]] = {
    "fail": synthetic_run(seed=1),
    "pass": synthetic_run(seed=2, fails=0, not_run=0, missing=0, nan=False, hostile=False),
    "not run": synthetic_run(seed=3, fails=0, not_run=9, missing=0),
    "missing": synthetic_run(seed=4, fails=0, not_run=0, missing=5),
    "cut off": cut_off(synthetic_run(seed=5)),
    "empty": [header(), Summary("incomplete", 0, 0, 0, None, 0, reasons=["nothing was compared"])],
    "wild": wild_run(),
    "large": large_run(),
}
WAIVER = {"reason": "sums in bf16 until the merge kernel is replaced", "until": "2025-06-30", "by": "kernel team"}


def whole(*records: Record) -> list[Record]:
    """A header that asks for these and no more, the taps of what they judge, these, and the summary that they add up to."""
    judged = [record for record in records if isinstance(record, Verdict) and record.layer is not None and record.phase is not None]
    taps = [] if any(isinstance(record, Coverage) for record in records) else [Coverage(str(v.phase), v.layer, v.point, v.mode, 1, 1) for v in judged]
    layers = sorted({v.layer for v in judged if v.layer is not None})
    run: list[Record] = [dataclasses.replace(header(), layers=layers, phases=sorted({str(v.phase) for v in judged}), steps=1), *taps, *records]
    return [*run, summarise(run)]


def failing(number: int, **changes: Any) -> Verdict:
    point = f"layers.{number}.attn.p{number}"
    return dataclasses.replace(verdict(random.Random(number), point, "isolated", "prefill", number), **{"state": State.FAIL, "spent": 3.0 + number, "component": "rope", **changes})


# ---- summary ----


def markdown(page: str) -> tuple[list[Any], list[list[list[str]]]]:
    """Inline and block tokens, and every table as rows of cells."""
    tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(page)
    flat = [inner for token in tokens for inner in (token, *(token.children or []))]
    tables: list[list[list[str]]] = []
    for i, token in enumerate(tokens):
        if token.type == "table_open":
            tables.append([])
        elif token.type == "tr_open":
            tables[-1].append([])
        elif token.type in ("td_open", "th_open"):
            tables[-1][-1].append("".join(inner.content for inner in tokens[i + 1].children or [] if inner.type != "html_inline"))
    return flat, tables


@pytest.mark.parametrize("name", RUNS)
def test_counts_of_the_summary_are_those_of_the_records(name):
    records = RUNS[name]
    states = [record.state.value for record in records if isinstance(record, Verdict)]
    _, tables = markdown(job_summary(split(records)))
    rows = next(table for table in tables if table[0][0] == "judged")
    counted = [states.count("pass"), states.count("fail"), states.count("not_run"), len(states)]
    total = [int(cell) for cell in rows[-1][1:]]
    assert [total[0], total[1], total[3], total[4]] == counted
    for column in range(1, 6):
        assert sum(int(row[column]) for row in rows[1:-1]) == int(rows[-1][column]), rows[0][column]


@pytest.mark.parametrize("name", RUNS)
def test_no_text_of_a_record_becomes_markup(name):
    page = job_summary(split(RUNS[name]))
    assert len(page.encode()) < MIB / 16
    flat, tables = markdown(page)
    html = {token.content.strip() for token in flat if token.type.startswith("html")}
    assert html <= {"<details><summary>Environment</summary>", "</details>", "<!-- -->"}
    assert {token.type for token in flat} & {"link_open", "image", "em_open", "code_inline", "s_open", "blockquote_open", "ordered_list_open", "code_block", "hr"} == set()
    assert all(len(row) == len(table[0]) for table in tables for row in table)
    assert not re.search("[\x00-\x08\x0b\x0c\x0e-\x1f\u202a-\u202e\u2066-\u2069]", page)


@pytest.mark.parametrize(
    "value", [HOSTILE, "a|b", "`x` **y** _z_ ~~s~~", "[a](b) ![c](d)", "# 1", "- 1", "1. x", "+ x", "=== x", "a\nb\n\n| c |", "&amp; &#64;", "\\| \\`", "<!-- x", "$x$", "]: x"]
)  # fmt: skip
def test_a_cell_reads_back_as_its_text(value):
    flat, tables = markdown("| a |\n|---|\n| " + text(value) + " |\n\n" + text(value) + "\n")
    assert tables == [[["a"], [tables[0][1][0]]]]
    wanted = " ".join(value.replace("\x1b", "\ufffd").replace("\x00", "\ufffd").split())
    assert tables[0][1][0] == wanted
    assert [token.type for token in flat if token.type.endswith("_open")].count("paragraph_open") == 1
    assert not [token for token in flat if token.type in ("bullet_list_open", "ordered_list_open", "heading_open", "code_inline", "strong_open", "link_open", "image")]


@pytest.mark.parametrize("value", ["@maintainers", "http://example.com", "www.example.com", "GH-12", "#12"])
def test_a_text_neither_mentions_nor_links(value):
    source = text(value)
    assert value not in source
    assert value not in re.sub(r"&#(\d+);", lambda sign: chr(int(sign[1])), source) or value.startswith("#"), "an entity is a sign again before GitHub looks for mentions"


def test_a_command_with_backticks_stays_in_its_block():
    page = job_summary(split([header(command="pytest parity/ -k '```\n## x'"), *RUNS["pass"][1:]]))
    flat, _ = markdown(page)
    assert [token.content for token in flat if token.type == "fence"] == ["pytest parity/ -k '``` ## x'\n"]


def test_the_summary_says_verdict_divergence_closest_and_what_was_not_checked():
    page = job_summary(split(RUNS["fail"]), "GPU, replay")
    for said in ("## ❌ DeepSeek-V4 parity, GPU, replay: fail", "**First divergence: layer 5, attn.core, prefill**; local", "### Failures", "### What was not checked", "no CUDA device", "### Run it again at commit"):
        assert said in page, said
    assert "### Passes closest to their limit" in page
    assert "First divergence" not in job_summary(split(RUNS["pass"]))
    assert "## ⚠️ DeepSeek-V4 parity: incomplete" in job_summary(split(RUNS["cut off"]))


def test_a_waived_failure_stands_with_its_waiver_and_not_among_the_failures():
    page = job_summary(split(whole(failing(1, waiver=WAIVER), verdict_passing())))
    assert "with 1 waiver" in page
    assert "### Failures" not in page
    assert "waived until 2025-06-30 by kernel team" in page
    given = job_summary(split([header(waivers=[{"gate": "attn.core", **WAIVER}]), *whole(verdict_passing())[1:]]))
    assert "* given: gate attn.core, reason sums in bf16" in given
    late = job_summary(split(whole(failing(1, waiver={**WAIVER, "until": "2025-01-01"}), verdict_passing())))
    assert "### Failures" in late
    assert "does not count" in late


def verdict_passing() -> Verdict:
    return verdict(random.Random(0), "layers.0.attn.out", "free", "decode", 0, (0, 0))


# ---- annotations ----


def as_the_runner_reads(line: str) -> tuple[str, dict[str, str], str]:
    """Level, properties, message: split first, then unescaped, %25 last."""
    assert "\n" not in line
    assert "\r" not in line
    match = re.fullmatch(r"::(error|warning) (.*?)::(.*)", line)
    assert match is not None, line
    properties = dict(part.split("=", 1) for part in match[2].split(","))

    def plain(value: str, *more: tuple[str, str]) -> str:
        for code, sign in (("%0D", "\r"), ("%0A", "\n"), *more, ("%25", "%")):
            value = value.replace(code, sign)
        return value

    return match[1], {name: plain(value, ("%3A", ":"), ("%2C", ",")) for name, value in properties.items()}, plain(match[3])


@pytest.mark.parametrize("name", RUNS)
def test_at_most_ten_lines_that_the_runner_can_read(name):
    made = annotate(split(RUNS[name]))
    assert len(made) <= MOST == 10
    assert bool(made) == (name != "pass")
    for one in made:
        level, properties, message = as_the_runner_reads(one.command)
        assert level == one.level
        assert properties["title"]
        assert message
        assert "file" not in properties or (ROOT / properties["file"]).is_file()
    if name != "pass":
        assert any(one.level == "error" for one in made), "the job is red, and nothing says why"


def test_awkward_signs_come_back_as_they_were():
    message = "100% of a:b, c\r\nd ::error::x %0A"
    level, properties, said = as_the_runner_reads(Annotation("error", "a:b, 5%\n=x", message, "kernels/a,b:c.cu").command)
    assert (level, properties, said) == ("error", {"file": "kernels/a,b:c.cu", "line": "1", "title": "a:b, 5%\n=x"}, message)


def test_the_first_divergence_comes_first_and_the_tenth_line_counts_the_rest():
    first, *others = annotate(split(RUNS["fail"]))
    assert first.title == "first divergence: layer 5, attn.core, prefill"
    assert first.file == "kernels/sparse_attn.cu"
    assert [one.title for one in others[-2:]] == ["not judged: 4 gates", "coverage is missing: 2 taps"]
    for failures, lines, last in ((10, 10, "p9 prefill: 1 gate failed"), (11, 10, "2 more findings"), (40, 10, "31 more findings")):
        made = annotate(split(whole(*(failing(i) for i in range(failures)))))
        assert len(made) == lines
        assert made[-1].title.endswith(last)
        assert all(one.file == "kernels/rope.cu" for one in made[:9])


def test_failures_of_one_point_are_one_line_that_names_the_worst():
    many = [failing(layer, point=f"layers.{layer}.attn.q", spent=float(layer)) for layer in range(1, 8)]
    (one,) = annotate(split(whole(*many)))
    assert one.title == "attn.q prefill: 7 gates failed"
    assert "layers.7.attn.q" in one.message
    assert "again: pytest 'parity/" in one.message


def test_what_a_waiver_accepts_is_a_warning_behind_the_errors():
    made = annotate(split(whole(failing(1, waiver=WAIVER), failing(2), verdict_passing())))
    assert [(one.level, one.title.split(":")[0]) for one in made] == [("error", "attn.p2 prefill"), ("warning", "attn.p1 prefill")]
    assert [one.level for one in annotate(split(whole(failing(1, waiver=WAIVER), verdict_passing())))] == ["warning"]


def test_missing_coverage_alone_is_an_error():
    (one,) = annotate(split(whole(verdict_passing(), Coverage("decode", 0, "layers.0.attn.out", "free", 130, 129))))
    assert one.level == "error"
    assert "fired 129 of 130" in one.message


def test_a_run_of_another_repository_points_at_none_of_its_files():
    elsewhere = header(environment={"dsv4-parity": "0.1.0, code 0123456789ab"})
    assert {one.file for one in annotate(split([elsewhere, *RUNS["fail"][1:]]))} == {""}


def test_every_component_has_a_file_that_exists():
    named = {spec.component for spec in (*LAYER_POINTS, *MODEL_POINTS)} | {row.component for row in OPERATIONS.values()}
    named |= {tomllib.loads(path.read_text())["component"] for path in planted.FAULTS.glob("*.toml")}
    assert named - {""} == set(FILES)
    assert [file for file in FILES.values() if not (ROOT / file).is_file()] == []


# ---- since when, and how far ----

# A gate of steps 1 to 23: first over its limit at step 1, its worst row at step 9. The two have numbers of their own.
LATER = {"phase": "decode", "step_first": 1, "step_last": 23, "worst_step": 9, "spent": 28.6, "value": 28.6, "limit": 1.0, "local": True, "component": "compressor", "details": {"first_step": 1}}


def test_the_first_step_and_the_step_of_the_number_are_told_apart_everywhere():
    gate = failing(2, point="layers.2.attn.compressor", **LATER)
    free = dataclasses.replace(gate, mode="free", spent=6.6, local=None)
    run: list[Record] = [header(), free, gate]
    first = Divergence(2, gate.point, "decode", 1, True, "compressor", checked=5)
    run.append(summarise(run, divergence=first))
    said = "layer 2, attn.compressor, from decode step 1"
    page = " ".join(re.sub("<[^>]*>", " ", report_html(run)).split())
    for shown in (annotate(split(run))[0].message, page.partition("First divergence")[2][:300], " ".join(cell for cell in job_summary(split(run)).splitlines() if "First divergence" in cell)):
        assert said in shown
        assert "28.6 times its limit at step 9" in shown
    assert "first wrong step 1 " in page.partition("What failed")[2]
    assert divergence_lines(first, run)[0] == "first divergence: layers.2.attn.compressor, from decode step 1, 28.6 times its limit at step 9, compressor, local, first of 5 checked, 0 unobserved before it"
    alone = dataclasses.replace(gate, worst_step=1)  # the worst row is the first wrong one: one step, nothing to tell apart
    assert ", decode step 1, 28.6 times its limit, compressor" in divergence_lines(first, [alone])[0]


def test_the_first_divergence_stands_for_the_gate_that_starts_there():
    gate = failing(2, point="layers.2.attn.compressor", **LATER)
    other = dataclasses.replace(gate, details={"first_step": 5})
    waived = dataclasses.replace(gate, waiver=WAIVER)
    first = Divergence(2, gate.point, "decode", 1, True, "compressor")
    assert words.gate_of(first, [other, waived, dataclasses.replace(gate, mode="free"), gate]) == 3
    assert words.gate_of(first, [other]) == 0
    assert words.gate_of(first, [dataclasses.replace(gate, layer=3), dataclasses.replace(gate, state=State.PASS)]) is None


# ---- behind the first divergence ----


def test_what_a_point_is_computed_from_stands_before_it_and_every_row_has_an_answer():
    assert set(READS) == set(LAYER_ROWS)
    for name, reads in READS.items():
        assert all(LAYER_ROWS.index(one) < LAYER_ROWS.index(name) for one in reads), name
    assert "attn.compressor" in FROM["attn.core"]
    assert "attn.compressor" not in FROM["attn.indexer.score"]


def related(*found: tuple[str, dict[str, Any]], first: Verdict) -> list[str]:
    """What each of these failures (point, changes) has to do with the first divergence."""
    verdicts = [first, *(failing(2, **{**LATER, "component": "other", "point": point, **changes}) for point, changes in found)]
    divergence = Divergence(first.layer, first.point, first.phase, 1, True, first.component)
    behind = Behind(verdicts, divergence, first)
    return [behind.of(i)[0] for i in range(1, len(verdicts))]


def test_what_is_behind_the_first_divergence_is_what_the_records_support():
    first = failing(2, point="layers.2.attn.compressor", **LATER)
    four = {"layer": 4}
    assert related(("layers.2.attn.core", {}), ("layers.2.attn.core", {"details": {"first_step": 0}}), ("layers.2.attn.q", {}), ("layers.2.attn.indexer.score", {}), first=first) == ["behind", "", "", ""]
    assert related(("layers.2.attn.core", {"phase": "prefill"}), ("layers.4.attn.core", four), first=first) == ["", ""]  # another phase; another layer, on the reference's input
    assert related(("layers.4.attn.compressor", {**four, "component": "compressor"}), ("layers.4.attn.core", four), ("compressor[x]", {"mode": "operation", "component": "compressor", "phase": None, "layer": None}), ("rope[x]", {"mode": "operation", "phase": None, "layer": None}), first=first) == ["same", "behind", "same", ""]
    free = {"mode": "free", "local": None}
    assert related(("layers.3.attn.q", {**free, "layer": 3}), ("layers.1.attn.q", {**free, "layer": 1}), ("logits", {**free, "layer": None}), ("embed", {**free, "layer": None}), first=first) == ["behind", "", "behind", ""]
    alone = ("layers.3.attn.q", {"layer": 3, "state": State.PASS, "spent": 0.1})
    assert related(("layers.3.attn.q", {**free, "layer": 3}), alone, first=first)[0] == "behind"
    assert related(("layers.3.attn.q", {**free, "layer": 3}), ("layers.3.attn.q", {"layer": 3}), first=first) == ["", ""]  # red alone, too: a cause of its own
    assert related(("layers.3.attn.q", {**free, "layer": 3}), ("layers.3.attn.q", {"layer": 3, "state": State.NOT_RUN}), first=first)[0] == ""


def test_annotations_and_summary_mark_what_is_behind_the_first_divergence_and_it_points_at_no_file():
    first = failing(2, point="layers.2.attn.compressor", **LATER)
    core = failing(2, **{**LATER, "point": "layers.2.attn.core", "component": "attention core"})
    own = failing(2, **{**LATER, "point": "layers.2.attn.q", "component": "rope"})
    run: list[Record] = [header(), first, core, own]
    run.append(summarise(run, divergence=Divergence(2, first.point, "decode", 1, True, "compressor")))
    made = annotate(split(run))
    assert [(one.title, one.file) for one in made] == [
        ("first divergence: layer 2, attn.compressor, from decode step 1", "kernels/compressor.cu"),
        ("attn.core decode: 1 gate failed, behind the first divergence", ""),
        ("attn.q decode: 1 gate failed", "kernels/rope.cu"),
    ]
    assert "computed from layers.2.attn.compressor, which is red: probably its consequence" in made[1].message
    assert "isolated, from decode step 1); " in made[1].message
    assert "28.6 times its limit at step 9" in made[1].message
    rows = [line for line in job_summary(split(run)).splitlines() if line.startswith("| layers") and "isolated" in line]
    assert [("the first divergence |" in row, "probably its consequence" in row) for row in rows] == [(True, False), (False, True), (False, False)]


def test_a_run_is_named_by_its_folder_too(run_file, capsys):
    assert ci.main([str(run_file.parent)]) == 0
    assert capsys.readouterr().out == job_summary(split(RUNS["fail"]))


def test_the_summary_lists_layers_that_nobody_asked_for_and_says_that_a_part_is_no_answer():
    every = [(phase, layer) for phase in ("prefill", "decode") for layer in range(3)]
    part: list[Record] = [
        header(3, model={"layers": 8}, steps=1), *(Coverage(phase, layer, f"layers.{layer}.attn.out", "free", 1, 1) for phase, layer in every),
        *(verdict(random.Random(0), f"layers.{layer}.attn.out", "free", phase, layer, (0, 0) if phase == "decode" else None) for phase, layer in every),
    ]  # fmt: skip
    page = job_summary(split([*part, summarise(part)]))
    assert "* layers 3-7: not asked for, not run" in page
    assert "Not decided for the whole model: layers 3-7 were not asked for" in page


# ---- command line ----


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(to_line(record) + "\n" for record in RUNS["fail"]), encoding="utf-8")
    return path


def test_the_summary_is_appended_and_annotations_are_printed(run_file, tmp_path, capsys):
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    assert ci.main([str(run_file), "--summary", str(page), "--annotations", "--title", "CPU"]) == 0
    assert page.read_text(encoding="utf-8") == "before\n" + job_summary(split(RUNS["fail"]), "CPU")
    assert capsys.readouterr().out.splitlines() == [one.command for one in annotate(split(RUNS["fail"]))]
    assert ci.main([str(run_file)]) == 0
    assert capsys.readouterr().out == job_summary(split(RUNS["fail"]))


def test_no_readable_run_is_exit_2_and_an_error_on_the_page(tmp_path, capsys):
    bad = tmp_path / "bad.jsonl"
    bad.write_text("no run\n")
    for path in (tmp_path / "absent.jsonl", bad, tmp_path):
        assert ci.main([str(path), "--annotations"]) == 2
        said = capsys.readouterr()
        assert said.err.startswith("error: ")
        assert len(said.err.splitlines()) == 1
        assert as_the_runner_reads(said.out.strip())[1] == {"title": "no audit"}


def test_a_summary_that_cannot_be_written_is_exit_2(run_file, tmp_path, capsys):
    assert ci.main([str(run_file), "--summary", str(tmp_path)]) == 2
    assert "error: " in capsys.readouterr().err


def test_it_runs_without_torch(run_file):
    program = f"import sys; sys.modules['torch'] = None; from reports.ci import main; sys.exit(main([{str(run_file)!r}]))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, timeout=120).returncode == 0


# ---- the workflow ----

PINNED = re.compile(r"actions/(checkout|setup-python|cache|upload-artifact)@v\d+")


def problems(source: str) -> list[str]:
    """What is wrong with a workflow, in words."""
    flow = yaml.safe_load(source)
    triggers = flow.get("on", flow.get(True))  # YAML 1.1 reads `on` as a truth value
    found = []
    if flow.get("permissions") != {"contents": "read"}:
        found.append("permissions are not least")
    if not flow.get("concurrency", {}).get("group"):
        found.append("no concurrency group")
    if not {"push", "pull_request", "workflow_dispatch"} <= set(triggers):
        found.append("a trigger is missing")
    for name, job in flow["jobs"].items():
        if "timeout-minutes" not in job:
            found.append(f"{name}: no timeout")
        uses = [step["uses"] for step in job["steps"] if "uses" in step]
        found += [f"{name}: {used} is not pinned to a major version" for used in uses if not PINNED.fullmatch(used)]
        commands = [step for step in job["steps"] if "run" in step]
        audits = [i for i, step in enumerate(job["steps"]) if "-m pytest parity/" in step.get("run", "")]
        if len(audits) != 1:
            found.append(f"{name}: no audit")
            continue
        audit = job["steps"][audits[0]]
        folder = re.search(r"--report (.+)$", audit["run"].strip())
        if audit.get("continue-on-error") or "||" in audit["run"] or " -k" in audit["run"] or "if" in audit:
            found.append(f"{name}: a red audit does not fail the job")
        after = job["steps"][audits[0] + 1 :]
        told = [step for step in after if "reports.ci" in step.get("run", "")]
        kept = [step for step in after if step.get("uses", "").startswith("actions/upload-artifact")]
        drawn = [step for step in job["steps"][audits[0] + 1 : job["steps"].index(kept[0])] if "-m reports " in step.get("run", "")] if kept else []
        missing = drawn[0].get("if", "").split("&&") if len(drawn) == 1 else []
        ends = [("report.html", "== ''"), ("run.jsonl", "!= ''")]
        if folder is None or [part.strip() for part in missing[:1]] != ["always()"] or len(missing) != 3 or any(name not in part or not part.strip().endswith(end) for (name, end), part in zip(ends, missing[1:], strict=True)):
            found.append(f"{name}: a run that was killed has no report")
        elif drawn[0]["run"].split("-m reports ")[1].strip() != f"{folder[1]}/run.jsonl":
            found.append(f"{name}: the report is of another run")
        for what, steps in (("summary", told), ("artifacts", kept)):
            if len(steps) != 1 or steps[0].get("if") != "always()":
                found.append(f"{name}: {what} not always")
        if folder is None or not kept or kept[0]["with"]["path"] != folder[1] or kept[0]["with"].get("if-no-files-found") != "error":
            found.append(f"{name}: what is uploaded is not what was written")
        if folder is None or not told or f"{folder[1]}/run.jsonl" not in told[0]["run"] or "--annotations" not in told[0]["run"] or "GITHUB_STEP_SUMMARY" not in told[0]["run"]:
            found.append(f"{name}: the summary is of another run")
        found += [f"{name}: {problem}" for step in commands for line in step["run"].strip().splitlines() for problem in command_problems(line)]
    gpu = flow["jobs"].get("gpu", {})
    if "self-hosted" not in gpu.get("runs-on", []) or "vars.PARITY_GPU" not in gpu.get("if", "") or "head.repo.full_name == github.repository" not in gpu.get("if", ""):
        found.append("gpu: runs where nobody asked for it, or code of a fork")
    if gpu.get("strategy", {}).get("matrix", {}).get("decode") != ["eager", "replay"]:
        found.append("gpu: decode is not replayed")
    return found


@functools.cache
def help_of(module: str) -> str:
    paths = ("parity/",) if module == "pytest" else ()
    return subprocess.run([sys.executable, "-m", module, *paths, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=180).stdout


def command_problems(line: str) -> list[str]:
    """A command whose program, target, module or option does not exist."""
    line = re.sub(r"\$\{\{ matrix\.decode \}\}", "replay", line)
    words = shlex.split(line.replace("$PIP_ARGS", "").replace("$GITHUB_STEP_SUMMARY", "summary.md"))
    if words[:2] == ["make", "env"]:
        return [] if "\nenv:" in (ROOT / "Makefile").read_text() else ["no target env"]
    if words == ["g++", "--version"]:
        return []
    if words[:2] != [".venv/bin/python", "-m"]:
        return [f"unknown command {line}"]
    module, *arguments = words[2:]
    if module == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        return [] if arguments == ["install", "-c", "constraints.txt", "-e", ".[gpu]"] and "gpu" in extras and (ROOT / "constraints.txt").is_file() else [f"unknown command {line}"]
    told = help_of(module)
    known = set(re.findall(r"(?<![\w-])--[a-z-]+", told))
    return ([] if told else [f"no module {module}"]) + [f"{module} has no {word}" for word in arguments if word.startswith("--") and word not in known]


def test_the_workflow_is_sound_and_its_commands_exist():
    assert problems(WORKFLOW.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("find", "replace", "problem"),
    [
        ("contents: read", "contents: write", "permissions are not least"),
        ("actions/checkout@v4", "actions/checkout@main", "is not pinned"),
        ("        if: always()\n", "", "not always"),
        ("-m pytest parity/ --report", "-m pytest parity/ --raport", "no --raport"),
        ("parity/ --report reports/runs/cpu", "parity/ --report reports/runs/cpu || true", "does not fail the job"),
        ("path: reports/runs/cpu", "path: reports", "not what was written"),
        ("runs/cpu/run.jsonl", "runs/other/run.jsonl", "of another run"),
        ("-m reports.ci", "-m reports.cd", "not always"),
        ("-m reports reports/runs/cpu/run.jsonl", "-m reports reports/runs/another/run.jsonl", "the report is of another run"),
        ("always() && hashFiles('reports/runs/cpu/report.html')", "hashFiles('reports/runs/cpu/report.html')", "a run that was killed has no report"),
        ("cpu/run.jsonl') != ''", "cpu/run.jsonl') == ''", "a run that was killed has no report"),
        ("-m probes.doctor", "-m probes.physician", "no module probes.physician"),
        ("decode: [eager, replay]", "decode: [eager]", "not replayed"),
        ("vars.PARITY_GPU == 'true' || ", "", "nobody asked"),
        ("    timeout-minutes: 90\n", "", "no timeout"),
    ],
)
def test_a_workflow_that_is_not_sound_is_told(find, replace, problem):
    source = WORKFLOW.read_text(encoding="utf-8")
    assert find in source
    assert any(problem in found for found in problems(source.replace(find, replace)))
