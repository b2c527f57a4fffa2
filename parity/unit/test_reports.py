"""The report says what the records say: totals counted again from the pages, hostile names, cut-off and dishonest runs."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import math
import random
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parity.unit.synthetic_run import HOSTILE, cut_off, header, synthetic_run, verdict
from probes.core.records import (
    Coverage,
    Divergence,
    Header,
    Kernel,
    Measurement,
    Mechanism,
    Record,
    RecordError,
    State,
    Summary,
    Verdict,
    read_run,
    summarise,
    to_line,
)
from reports import heat, names, render, words
from reports.__main__ import main
from reports.render import render_run, report_html

ROOT = Path(__file__).resolve().parents[2]
RUNS: dict[str, list[Record]] = {
    "fail": synthetic_run(seed=1),
    "pass": synthetic_run(seed=2, fails=0, not_run=0, missing=0, nan=False, hostile=False),
    "not run": synthetic_run(seed=3, fails=0, not_run=9, missing=0),
    "missing": synthetic_run(seed=4, fails=0, not_run=0, missing=5),
    "cut off": cut_off(synthetic_run(seed=5)),
    "empty": [header(), Summary("incomplete", 0, 0, 0, None, 0, reasons=["nothing was compared"])],
    "61 layers": synthetic_run(seed=6, layers=61, fails=40),
}


class Page(HTMLParser):
    """What a reader of the page can count: tags, attributes, text, rows per state (the packed ones unpacked), big numbers."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.rows: list[dict[str, str]] = []
        self.counts: dict[str, str] = {}
        self.text: list[str] = []
        self._count = ""
        self._packed = False
        self.packed = ""
        self.feed(html)
        if self.packed:
            self.rows += Page(zlib.decompress(base64.b64decode(self.packed)).decode("utf-8")).rows

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.tags.append((tag, values))
        if tag == "tr" and "data-state" in values:
            self.rows.append(values)
        self._count = values.get("data-count", "")
        self._packed = values.get("id") == "packed"

    def handle_data(self, data: str) -> None:
        if self._packed:
            self.packed, self._packed = data, False
            return
        if self._count:
            self.counts[self._count] = data.strip()
            self._count = ""
        self.text.append(data)

    @property
    def words(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.text))


def states(records: list[Record]) -> dict[str, int]:
    """Counted without the project's own arithmetic."""
    out = {"pass": 0, "fail": 0, "not_run": 0}
    for record in records:
        if isinstance(record, Verdict):
            out[record.state.value] += 1
    return out


def test_a_pass_shows_the_smallest_limit_it_needs_of_every_number():
    numbers = [{"number": "typical row", "smallest_limit": 0.00123, "limit": 0.00246, "spent": 0.5}, {"number": "norm ratio", "smallest_limit": 0.0451, "limit": 0.451, "spent": 0.1}]
    judged = Verdict("attn.q", "layers.0.attn.q", "free", State.PASS, "worst row", layer=0, phase="prefill", value=0.5, limit=9.0, spent=0.5, rows=9, numbers=numbers)
    page = Page(report_html([header(), judged, Summary("pass", 1, 0, 0, None, 1)])).words
    assert "attn.q typical row 0.00123 0.00246 50 %" in page
    assert "norm ratio 0.0451 of 0.451 (10 %)" in page


@pytest.mark.parametrize("name", RUNS)
def test_totals_agree_in_records_page_and_junit(name, tmp_path):
    records = RUNS[name]
    counted = states(records)
    page = Page(render_run(records, tmp_path).read_text(encoding="utf-8"))
    assert [page.counts[key] for key in ("passed", "failed", "not_run")] == [str(counted[key]) for key in ("pass", "fail", "not_run")]
    assert page.counts["total"] == str(sum(counted.values()))
    shown = [row["data-state"].replace(" ", "_") for row in page.rows]
    left_out = sum(int(values["data-left-out"]) for _, values in page.tags if "data-left-out" in values)
    assert [shown.count("fail"), shown.count("not_run"), shown.count("pass") + left_out] == [counted["fail"], counted["not_run"], counted["pass"]]

    root = ElementTree.parse(tmp_path / "junit.xml").getroot()
    gates = next(suite for suite in root if suite.get("name") == "gates")
    cases = gates.findall("testcase")
    assert len(cases) == int(gates.get("tests", "")) == sum(counted.values())
    for tag, attribute, state in (("failure", "failures", "fail"), ("skipped", "skipped", "not_run")):
        assert len(gates.findall(f"testcase/{tag}")) == int(gates.get(attribute, "")) == int(root.get(attribute, "")) == counted[state]
    assert int(root.get("tests", "")) == len(list(root.iter("testcase")))
    assert int(root.get("errors", "")) == len(list(root.iter("error")))


@pytest.mark.parametrize(
    ("name", "verdict", "because"),
    [
        ("fail", "fail", "3 of"),
        ("pass", "pass", "nothing that was asked for was left out"),
        ("not run", "incomplete", "9 gates were not run"),
        ("missing", "incomplete", "5 taps did not fire"),
        ("cut off", "incomplete", "incomplete: the run was cut off"),
        ("empty", "incomplete", "nothing was compared"),
    ],
)
def test_verdict_in_words_with_its_reason(name, verdict, because, tmp_path):
    page = Page(render_run(RUNS[name], tmp_path).read_text(encoding="utf-8"))
    assert next(values["data-verdict"] for _, values in page.tags if "data-verdict" in values) == verdict
    assert because in page.words
    errors = list(ElementTree.parse(tmp_path / "junit.xml").iter("error"))
    assert bool(errors) == (verdict == "incomplete"), "a run that is not whole must not look green to a CI page"


def test_a_narrowed_run_is_not_a_pass_and_not_a_lie():
    *records, summary = RUNS["pass"]
    assert isinstance(summary, Summary)
    narrowed = dataclasses.replace(summary, verdict="incomplete", reasons=["only 4 tests were selected"])
    text = Page(report_html([*records, narrowed])).words
    assert "incomplete: nothing failed, but not everything was looked at. Not decided: a run that left out what was asked for is no pass. only 4 tests were selected" in text


def test_a_gate_runs_again_with_the_options_of_its_run():
    typed = "pytest parity/ --phase decode --prompt 'a b.txt' -k core --report out --steps 9"
    assert words.command("parity/t.py::t[x-1]", typed) == "pytest 'parity/t.py::t[x-1]' --phase decode --prompt 'a b.txt' --steps 9"
    assert words.command("", typed) == ""


@pytest.mark.parametrize(
    "lie",
    [{"failed": 0, "passed": 9999}, {"verdict": "pass"}, {"verdict": "incomplete"}, {"total": 1}, {"near_ties": 0, "not_run": 0}],
    ids=lambda lie: next(iter(lie)),
)
def test_a_summary_that_the_records_contradict_is_not_believed(lie):
    records = synthetic_run(seed=7)
    summary = records[-1]
    assert isinstance(summary, Summary)
    html = report_html([*records[:-1], dataclasses.replace(summary, **lie)])
    assert 'data-verdict="incomplete"' in html
    assert "contradicts its records" in html


WITHOUT: dict[str, tuple[str, Callable[[Record], bool]]] = {
    "coverage": ("no tap is in its coverage", lambda r: not isinstance(r, Coverage)),
    "decode": ("decode is asked for, and no gate judged it", lambda r: getattr(r, "phase", None) != "decode"),
    "one layer": ("layer 3 is asked for, and no gate judged it", lambda r: getattr(r, "layer", None) != 3),
    "one gate": ("decode layers.2.attn.q (free) is in the coverage, and no gate judged all of it", lambda r: not isinstance(r, Verdict) or (r.point, r.mode, r.phase, r.step_first) != ("layers.2.attn.q", "free", "decode", 1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT)
def test_a_pass_that_leaves_out_what_its_header_asks_for_is_not_believed(name):
    said, kept = WITHOUT[name]
    records = [r for r in RUNS["pass"][:-1] if kept(r)]
    page = Page(report_html([*records, summarise(records)]))
    assert "the run's last line contradicts its records" in page.words
    assert said in page.words


HEAD, LAST = RUNS["pass"][0], summarise(RUNS["pass"])
FORGED: dict[str, tuple[str, list[Record]]] = {
    "a divergence": ("pass, with a first divergence at logits", [*RUNS["pass"][:-1], dataclasses.replace(LAST, first_divergence=Divergence(None, "logits", "prefill", None, True, "x"))]),
    "missing taps": ("taps missing 7", [*RUNS["pass"][:-1], dataclasses.replace(LAST, coverage_missing=7)]),
    "two headers": ("2 headers", [HEAD, *RUNS["pass"]]),
    "two summaries": ("2 summaries", [HEAD, LAST, *RUNS["pass"][1:]]),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_last_line_that_was_edited_is_not_believed(name):
    said, records = FORGED[name]
    page = Page(report_html(records))
    assert "the run's last line contradicts its records" in page.words
    assert said in page.words


def test_a_missing_tap_turns_a_claimed_pass_into_incomplete():
    records = RUNS["pass"]
    html = report_html([*records[:-1], Coverage("decode", 0, "layers.0.attn.q", "free", 130, 129), records[-1]])
    assert 'data-verdict="incomplete"' in html


@pytest.mark.parametrize("name", ["fail", "cut off"])
def test_text_from_records_never_becomes_markup(name):
    page = Page(report_html(RUNS[name]))
    scripts = [values for tag, values in page.tags if tag == "script"]
    assert scripts == [{}]
    assert not [tag for tag, _ in page.tags if tag in {"img", "iframe", "object", "embed", "link", "base", "form"}]
    assert not [values for _, values in page.tags if any(key.startswith("on") for key in values)]
    assert 'alert("x")' in page.words, "the name is shown as text"


@pytest.mark.parametrize("field", ["point", "gate", "mode", "phase", "metric", "why", "reason", "component", "test_id"])
def test_every_text_of_a_verdict_is_escaped(field, tmp_path):
    plain = verdict(random.Random(0), "logits", "free", "prefill", None, state=State.FAIL, spent=2.0)
    hostile = dataclasses.replace(plain, **{field: HOSTILE})  # type: ignore[arg-type]
    records: list[Record] = [header(), hostile]
    page = Page(render_run(records, tmp_path).read_text(encoding="utf-8"))
    assert [values for tag, values in page.tags if tag in {"script", "img"}] == [{}]
    ElementTree.parse(tmp_path / "junit.xml")


def test_an_outside_run_names_its_production_its_coverage_and_what_it_does_otherwise():
    one = verdict(random.Random(0), "logits", "free", "prefill", None, state=State.PASS, spent=0.5)
    said = "does not round index queries to e2m1: 0 % of 900 values lie on that grid"
    records: list[Record] = [
        dataclasses.replace(header(), production="somebody's engine", inject=None, phases=["prefill"]), Coverage("prefill", None, "logits", "free", 1, 1), one,
        Measurement("policy", values={"rounding": "indexer.q.e2m1", "otherwise": said}), Measurement("policy", values={"rounding": "bf16", "otherwise": ""}),
        *(Measurement("not covered", layer=n, point=f"layers.{n}.hc_attn.pre", values={"tests": 12, "first": "a test"}) for n in (0, 1)),
        *(Measurement("not covered", layer=0, point=f"layers.0.{name}", values={"tests": 0, "first": ""}) for name in ("attn.q", "attn.kv", "attn.core", "attn.o", "ffn.out")),
    ]  # fmt: skip
    records.append(dataclasses.replace(summarise(records, 1.0, None), coverage="partial: 37 of 41 points shown"))
    page = Page(report_html(records)).words
    assert "DeepSeek-V4 parity: somebody's engine against the FP32 reference" in page
    assert "pass, partial coverage: 37 of 41 points shown:" in page
    assert "nothing that was asked for was left out" not in page
    assert "production does not show hc_attn.pre in layers 0-1: 24 tests not covered" in page
    assert "production does not show attn.q, attn.kv, attn.core and 2 other kinds of points, and no test asked for them" in page
    assert "0 tests not covered" not in page
    assert report_html(records).count("<dt>fault score</dt>") == 1, "in the glossary only: it was measured with this project's own production"
    assert 'id="mechanisms"' not in report_html(records)
    assert 'id="mechanisms"' in report_html([*records[:-1], Mechanism("near-ties", 3, "choices", ""), records[-1]])
    assert "What this implementation does otherwise than the published one" in page
    assert said in page
    assert "recorded none, so it cannot say which code ran" not in page
    assert "No kernel was recorded" not in page
    ours: list[Record] = [dataclasses.replace(header(), phases=["prefill"], layers=[]), Coverage("prefill", None, "logits", "free", 1, 1), one]
    ours.append(summarise(ours, 1.0, None))
    page = Page(report_html(ours)).words
    assert "production on CUDA kernels against the FP32 reference" in page
    assert "nothing that was asked for was left out" in page
    assert "No kernel was recorded" in page


def test_every_measurement_of_the_audit_has_a_name_for_people():
    """Names and keys as the audit's code writes them; what has a section of its own needs no title."""
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "parity").glob("*.py"))
    written = set(re.findall(r'Measurement\(\s*"([^"]+)"', source))
    assert {"load", "memory.rate", "recall"} <= written
    sections = (ROOT / "reports" / "instruments.py").read_text(encoding="utf-8")
    assert {name for name in written if name not in names.TITLES and f'"{name}"' not in sections} == set()
    page = Page(report_html([header(), Measurement("memory.slope", layer=2, values={"of": "layer 2", "live_growth_bytes": 0})])).words
    assert "Memory over decode steps" in page
    assert "growth of all tensors, bytes" in page
    assert "memory.slope" not in page


def test_page_loads_nothing_and_its_policy_matches_its_script():
    html = report_html(RUNS["fail"])
    page = Page(html)
    for tag, values in page.tags:
        assert "src" not in values, tag
        assert values.get("href", "#").startswith("#"), values
    assert not re.search(r"https?:|@import|url\(", html)
    script = html.split("<script>")[1].split("</script>")[0]
    assert f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in html


def test_links_and_ids_meet():
    page = Page(report_html(RUNS["fail"]))
    ids = [values["id"] for _, values in page.tags if "id" in values]
    assert len(ids) == len(set(ids))
    assert {values["href"][1:] for tag, values in page.tags if tag == "a"} <= set(ids)


def test_non_finite_numbers_are_words():
    page = Page(report_html(RUNS["fail"]))
    row = next(row for row in page.rows if row["data-state"] == "fail")
    cells = Page(report_html(RUNS["fail"]).split(f'id="{row["id"]}"')[1].split("</tr>")[0]).text
    assert [cell.strip() for cell in cells].count("NaN") == 3, "value, share and cosine"
    assert "got NaN want inf" in " ".join(cells)
    assert "production, layer 5: NaN" in page.words, "a value without a place on the axis is named"


def test_the_page_is_the_same_from_memory_and_from_the_file(tmp_path):
    records = RUNS["fail"]
    path = tmp_path / "run.jsonl"
    path.write_text("".join(to_line(r) + "\n" for r in records), encoding="utf-8")
    assert report_html(read_run(path)) == report_html(records)


def test_heat_map_never_shows_a_pass_over_something_worse():
    rng = random.Random(0)
    point = "layers.0.attn.q"
    good = verdict(rng, point, "isolated", "prefill", 0, spent=0.5)
    fired = Coverage("prefill", 0, point, "isolated", 1, 1)
    cases = {
        "50%": ([good], [fired]),
        "✗ 200%": ([good, verdict(rng, point, "free", "prefill", 0, state=State.FAIL, spent=2.0)], [fired]),
        "✗ NaN": ([verdict(rng, point, "free", "prefill", 0, state=State.FAIL, spent=math.nan), good], [fired]),
        "not run": ([good, verdict(rng, point, "free", "prefill", 0, state=State.NOT_RUN, spent=None)], [fired]),
        "missing": ([good], [fired, Coverage("prefill", 0, point, "free", 2, 1)]),
        "no gate": ([], [fired]),
        "·": ([], []),
    }
    for text, (verdicts, coverage) in cases.items():
        blocks, _ = heat.heat_map([*verdicts, verdict(rng, point, "free", "decode", 0, spent=0.1)], coverage, [0])
        assert blocks[0].rows[0].groups[0][0].text == text
        assert blocks[0].rows[0].groups[1][0].text == "10%"


def test_heat_map_keeps_dataflow_order_across_layer_kinds():
    assert heat.merge_orders([["a", "q", "out"], ["a", "q", "compressor", "out"], ["a", "q", "score", "compressor", "out"]]) == [
        "a", "q", "score", "compressor", "out",
    ]  # fmt: skip
    blocks, model = heat.heat_map([r for r in RUNS["fail"] if isinstance(r, Verdict)], [], list(range(8)))
    names = [row.name for row in blocks[0].rows]
    assert names.index("attn.kv") < names.index("attn.compressor") < names.index("attn.indexer.score") < names.index("attn.core") < names.index("ffn.out")
    assert [row.name for row in model] == ["embed", "hc_head", "norm", "logits"]


def test_heat_map_puts_state_behind_the_point_that_writes_it_whatever_came_first():
    rng = random.Random(0)
    points = ["layers.2.state.compressor.kv", "layers.2.hc_ffn.X", "layers.2.state.kv", "layers.2.attn.compressor", "layers.2.attn.kv", "layers.2.attn.norm"]
    for order in (points, points[::-1]):
        blocks, _ = heat.heat_map([verdict(rng, point, "isolated", "decode", 2) for point in order], [], [2])
        assert [row.name for row in blocks[0].rows] == ["attn.norm", "attn.kv", "state.kv", "attn.compressor", "state.compressor.kv", "hc_ffn.X"]


@given(st.floats(min_value=0))
@example(math.nan)
@example(0.99999999)
@example(1.00000001)
@example(9.9951)
def test_share_never_rounds_onto_the_limit(spent):
    text = words.share(spent)
    if spent != 1:
        assert text != "100 %"
    if spent > 0:
        assert text != "0 %"


def test_thousands_of_gates_stay_below_five_megabytes_and_no_row_is_lost(tmp_path):
    rng = random.Random(0)
    many: list[Record] = [header(61)]
    for layer in range(61):
        for point in ("attn.q", "attn.core", "ffn.out"):
            many += [verdict(rng, f"layers.{layer}.{point}", "free", "decode", layer, (s, s), details={"note": "x" * 300}) for s in range(100)]
    many += [verdict(rng, "layers.60.ffn.out", "isolated", "prefill", 60, state=State.FAIL, spent=2.0) for _ in range(50)]
    report = render_run(many, tmp_path)
    page = Page(report.read_text(encoding="utf-8"))
    assert report.stat().st_size < 5_000_000
    assert sum(row["data-state"] == "fail" for row in page.rows) == 50
    assert sorted(int(row["id"][1:]) for row in page.rows) == list(range(len(many) - 1)), "each row once, written or packed"
    assert re.search(r"\d+ gates more are in this page in packed form", page.words)
    written = Page(re.sub(r"<template.*?</template>", "", report.read_text(encoding="utf-8"))).rows
    assert sum(row["data-state"] == "fail" for row in written) == 50, "a failure is readable without scripting"


def test_rows_beyond_any_size_are_left_out_the_best_behaved_first_and_counted(monkeypatch):
    monkeypatch.setattr(render, "ROWS_BYTES", 20_000)
    monkeypatch.setattr(render, "PACKED_BYTES", 8_000)
    page = Page(report_html(RUNS["fail"]))
    left_out = next(int(values["data-left-out"]) for _, values in page.tags if "data-left-out" in values)
    kept = {int(row["id"][1:]) for row in page.rows}
    judged = [r for r in RUNS["fail"] if isinstance(r, Verdict)]
    assert left_out == len(judged) - len(kept) > 0
    assert f"{left_out} gates more, the best-behaved ones, are in run.jsonl" in page.words
    assert {i for i, v in enumerate(judged) if v.state is not State.PASS} <= kept
    in_cells = {int(values["href"][2:]) for tag, values in page.tags if tag == "a" and re.fullmatch(r"#v\d+", values["href"])}
    assert in_cells <= kept


def test_a_planted_fault_and_what_was_not_checked_are_said():
    records = [dataclasses.replace(header(), inject="B001", layers=[2, 3], layers_run=[0, 1, 2, 3], phases=["decode"]), *RUNS["fail"][1:]]
    text = Page(report_html(records)).words
    for said in ("planted on purpose: B001", "prefill: not asked for", "layers 0-1: run", "ran on the CPU device", "not exercised: SwiGLU clamp", "4 gates not run: no CUDA device"):
        assert said in text, said


def part(layers: list[int], run: list[int], phases: tuple[str, ...] = ("prefill", "decode"), **changes: object) -> list[Record]:
    """A run of some layers and phases; one point of each was asked for, seen and judged."""
    places = [(phase, layer) for phase in phases for layer in layers]
    records: list[Record] = [dataclasses.replace(header(**changes), layers=layers, layers_run=run, phases=list(phases), steps=1)]  # type: ignore[arg-type]
    records += [Coverage(phase, layer, f"layers.{layer}.attn.q", "free", 1, 1) for phase, layer in places]
    records += [verdict(random.Random(0), f"layers.{layer}.attn.q", "free", phase, layer, (0, 0) if phase == "decode" else None, spent=0.5) for phase, layer in places]
    return [*records, summarise(records)]


def test_a_run_of_a_part_is_no_answer_for_the_whole_model_and_lists_what_nobody_asked_for():
    kinds = ["window", "window", "csa", "hca", "csa", "hca", "csa", "hca"]
    whole: dict[str, Any] = {"model": {"layers": 8, "kinds": kinds}, "device": "cuda"}
    page = report_html(part([0, 2], [0, 1, 2], **whole))
    for said in ("layer 1: run, because later layers need them, but not judged", "layers 3-7: not asked for, not run; every hca layer among them"):
        assert f"<li>{said}</li>" in page
    assert "Not decided for the whole model: layer 1 and layers 3-7 were not asked for. Nothing that was checked stands against shipping." in page
    assert "Not decided for the whole model: prefill was not asked for." in report_html(part(list(range(8)), list(range(8)), ("decode",), **whole))
    for model in (whole["model"], dict[str, Any]()):  # all of it; a record that does not know how many there are
        page = report_html(part(list(range(8)), list(range(8)), model=model, device="cuda"))
        assert "Nothing that was checked stands against shipping." in page
        assert "Not decided" not in page
        assert not any("not asked for" in line for line in re.findall("<li>(.*?)</li>", page))


def test_a_run_without_a_gpu_says_the_same_of_it_everywhere():
    page = report_html(judged_run(one()))
    assert page.count("<dd>none: the kernels ran on the CPU device</dd>") == 2
    assert page.count("<dd>not used</dd>") == 2
    assert "none: the kernels" not in report_html(judged_run(one(), device="cuda"))


def test_of_many_passes_of_one_operation_the_closest_stands_for_all():
    near = [dataclasses.replace(one(point=f"sparse_attn[{i}]"), mode="operation", phase=None, layer=None, spent=0.6 + i / 100) for i in range(12)]
    records = part([0], [0])
    run = [*records[:-1], *near]
    run.append(summarise(run))
    page = report_html(run)
    section = page.partition('<section id="closest">')[2].partition("</section>")[0]
    assert section.count("<tr>") == 1 + 2
    assert "sparse_attn[11]" in section
    assert "and 11 more of it" in section
    assert "Closest to its limit in the model layers.0.attn.q" in first_screen(run)


def test_an_early_end_is_said_in_place_of_what_it_left_out():
    ended = Measurement("early end", values={"reason": "the fault profile stops where a gate is red: prefill"})
    records = [RUNS["fail"][0], ended, *RUNS["fail"][1:]]
    text = Page(report_html(records)).words
    assert "Ended early on purpose: the fault profile stops where a gate is red: prefill." in text
    assert "Not complete either" not in text
    assert "Ended early" not in Page(report_html(RUNS["fail"])).words


def test_command_line_draws_beside_the_run_or_elsewhere(tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text("".join(to_line(r) + "\n" for r in RUNS["fail"]), encoding="utf-8")
    assert main([str(path)]) == 0
    assert main([str(path), "--out", str(tmp_path / "a" / "b")]) == 0
    assert (tmp_path / "report.html").read_bytes() == (tmp_path / "a" / "b" / "report.html").read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "junit.xml", "report.html", "run.jsonl"], "no temporary file stays"
    assert "report: " in capsys.readouterr().out


@pytest.mark.parametrize(
    "content",
    [
        b"", b"not json\n\n", b'{"type": "summary"}\n\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n\n", b'{"type": "header"}\n\n',
        (to_line(header()) + "\n" + json.dumps({"type": "verdict", "gate": "g", "point": "p", "mode": "free", "state": "fail", "metric": "m", "spent": "<b>"}) + "\n").encode(),
        (to_line(header()).replace('"environment": {', '"environment": [], "model": {', 1) + "\n\n").encode(),
        (to_line(header()).replace('"tokens": [250]', '"tokens": 250') + "\n\n").encode(),
    ],
    ids=["empty", "no json", "no header", "no text", "deep", "header without fields", "text for a number", "list for a dictionary", "number for a list"],
)  # fmt: skip
def test_bad_run_files_get_one_line_and_exit_2(content, tmp_path, capsys):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    assert main([str(path), "--out", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_missing_file_and_unwritable_directory_exit_2(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl")]) == 2
    path = tmp_path / "run.jsonl"
    path.write_text(to_line(header()) + "\n", encoding="utf-8")
    assert main([str(path), "--out", str(path / "below-a-file")]) == 2
    (tmp_path / "empty").mkdir()
    assert main([str(tmp_path / "empty")]) == 2  # a folder is read by its run.jsonl
    assert capsys.readouterr().err.count("\n") == 3
    assert main([]) == 2


def test_records_without_a_header_are_refused(tmp_path):
    with pytest.raises(RecordError, match="header"):
        render_run([r for r in RUNS["fail"] if not isinstance(r, Header)], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_reports_need_no_torch():
    code = "import sys, reports.render, reports.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


# ---- the first screen, waivers, gates ----


def judged_run(*verdicts: Verdict, **changes: object) -> list[Record]:
    of = {"layers": [0], "phases": ["prefill"], **changes}
    records: list[Record] = [dataclasses.replace(header(), **of), *(Coverage("prefill", 0, point, "free", 1, 1) for point in {v.point for v in verdicts}), *verdicts]  # type: ignore[arg-type]
    return [*records, summarise(records)]


def one(state: State = State.PASS, point: str = "layers.0.attn.q", **changes: object) -> Verdict:
    return verdict(random.Random(0), point, "free", "prefill", 0, state=state, spent=2.0 if state is State.FAIL else 0.5, **changes)  # type: ignore[arg-type]


WAIVER = {"reason": "a known rounding", "until": "2025-06-30", "by": "somebody"}


def test_a_waived_failure_is_never_a_plain_pass():
    html = report_html(judged_run(one(), one(State.FAIL, "layers.0.attn.kv", waiver=WAIVER)))
    page = Page(html)
    assert 'data-verdict="pass"' in html
    assert "✓ pass with 1 waiver" in page.words
    assert "Ship only if you accept what is waived, none of it later than 2025-06-30" in page.words
    assert page.counts["failed"] == page.counts["waived"] == "1"
    assert [row["data-state"] for row in page.rows] == ["waived", "pass"]
    assert "◇ 200%" in page.words, "the cell of the map"
    assert page.words.count("waived until 2025-06-30 by somebody: a known rounding") == 2, "its card and its row"


@pytest.mark.parametrize("waiver", [WAIVER | {"until": "2025-01-30"}, WAIVER | {"reason": ""}], ids=["run out", "without a reason"])
def test_a_waiver_that_does_not_count_leaves_a_failure(waiver):
    html = report_html(judged_run(one(), one(State.FAIL, "layers.0.attn.kv", waiver=waiver)))
    page = Page(html)
    assert 'data-verdict="fail"' in html
    assert "Do not ship." in page.words
    assert "with 1 waiver" not in page.words
    assert [row["data-state"] for row in page.rows] == ["fail", "pass"]
    assert "does not count (run out, or not whole)" in page.words


def test_a_gate_shows_the_planted_faults_that_turn_it_red_or_that_none_is_known():
    def reds(**changes: object) -> list[str]:
        html = report_html(judged_run(one(gate="attn.q"), one(gate="attn.kv"), **changes))
        return re.findall(r"<td data-reds>(.*?)</td>", html)

    assert reds(reds={"attn.q": ["B001", "B060"]}) == ["B001, B060", "none seen"]
    assert reds() == ["not recorded", "not recorded"]


def first_screen(records: list[Record]) -> str:
    return Page(report_html(records).split("<header>")[1].split("</header>")[0]).words


def test_the_first_screen_says_what_is_not_recorded_and_leaves_nothing_blank():
    html = report_html(judged_run(one(), device="cuda", environment={}, commit="", checkpoint_hash="", variants="", fault_score=""))
    facts = re.findall(r"<dt>([^<]*)</dt><dd[^>]*>(.*?)</dd>", html.split("<header>")[1].split("</header>")[0])
    assert all(value.strip() and "None" not in value for _, value in facts)
    missing = {name for name, value in facts if "not recorded" in value}
    assert missing == {"commit", "checkpoint", "kernels", "variants", "fault score", "GPU", "CUDA", "torch", "compiler", "platform"}


def test_the_first_screen_holds_the_line_that_matters():
    failed = one(State.FAIL, local=True, component="rope")
    records = judged_run(one(point="layers.0.attn.kv"), failed)
    divergence = Divergence(0, failed.point, "prefill", None, True, "rope", checked=7)
    text = first_screen([*records[:-1], summarise(records[:-1], divergence=divergence)])
    assert "layer 0, attn.q, prefill ; local: its inputs agree; component rope ; 2 times its limit ; first of 7 checked, 0 unobserved before it." in text
    assert "Closest to its limit in the model layers.0.attn.q, prefill" in first_screen(part([0], [0], ("prefill",)))


def test_kernels_that_ran_are_counted_per_architecture():
    ran = [Kernel("rope", name, arch, build, 9) for name, arch, build in (("a", "sm_90a", "x"), ("b", "sm_90a", "x"), ("c", "cpu-x86_64", "y"))]
    records = judged_run(one())
    assert "2 kernels in 1 build for sm_90a and 1 kernel in 1 build for cpu-x86_64" in first_screen([records[0], *ran, *records[1:]])


def test_a_cell_has_the_same_address_in_every_run_and_leads_to_its_worst_gate():
    for records in (judged_run(one(State.FAIL), one()), judged_run(one(point="layers.0.attn.kv"), one(), one(State.FAIL))):
        judged = [r for r in records if isinstance(r, Verdict)]
        worst = next(i for i, v in enumerate(judged) if v.state is State.FAIL)
        assert re.search(rf'id="cell-prefill-L0-attn.q"[^>]*><a href="#v{worst}">✗ 200%</a>', report_html(records))


def test_every_section_is_listed_in_the_contents_and_long_tables_are_folded():
    html = report_html(RUNS["fail"])
    listed = re.findall(r'<a href="#([a-z]+)">', html.split("<nav")[1].split("</nav>")[0])
    assert listed == re.findall(r'<section id="([a-z]+)"', html)
    written = {path.stem for path in (ROOT / "reports" / "page" / "sections").glob("*.html")} - {"first"}
    assert written == set(render.SECTIONS)
