"""The report of two stored runs against totals written by hand, and against the JSON lines counted again without the project.

    pytest parity/unit/test_report_golden.py

parity/golden/report/*.jsonl are small runs written for this test: failures with and without a waiver, one whose waiver had run
out, gates that were not run, near-ties, taps that did not fire, NaN and inf. Numbers are read from the page with the standard
library's parser alone. What a browser shows: test_report_browser.py.
"""

from __future__ import annotations

import collections
import json
import math
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from parity.unit.synthetic_run import wild_run
from probes.core.records import RecordError, Verdict, read_run
from reports.__main__ import main
from reports.render import render_run, report_html

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "report"
KNOWN: dict[str, dict[str, Any]] = {
    "fail": {"verdict": "fail", "passed": 7, "failed": 5, "waived": 1, "not_run": 2, "total": 14, "near_ties": 9, "missing": 2},
    "waived": {"verdict": "pass", "passed": 1, "failed": 1, "waived": 1, "not_run": 0, "total": 2, "near_ties": 2, "missing": 0},
}
STATES = {
    "fail": ["pass", "pass", "fail", "waived", "pass", "not run", "pass", "fail", "fail", "not run", "pass", "pass", "fail", "pass"],
    "waived": ["waived", "pass"],
}
HEAT = {  # of the failed run: phase, layer, point -> what its cell says
    ("prefill", "0", "attn.q"): "50%", ("prefill", "0", "attn.core"): "✗ 418%", ("prefill", "0", "ffn.out"): "97%", ("prefill", "1", "attn.core"): "not run",
    ("prefill", "1", "attn.q"): "·", ("decode", "0", "ffn.out"): "missing", ("decode", "1", "attn.q"): "13%", ("decode", "1", "attn.core"): "✗ NaN",
    ("decode", "1", "ffn.out"): "✗ inf",
}  # fmt: skip
COVERAGE = [["prefill", "isolated", "4", "4", "0"], ["prefill", "free", "2", "2", "0"], ["decode", "isolated", "3", "2", "1"], ["decode", "free", "1", "0", "1"]]
VOID = {"meta", "br", "input", "img", "hr", "link", "col"}


class Page(HTMLParser):
    """Elements with an attribute that says what they are, each with its text; tables as rows of cells, by section."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.closed: list[tuple[str, dict[str, str], str]] = []
        self.tables: list[tuple[str, dict[str, str], list[list[str]]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        if tag == "table":
            section = next((a["id"] for t, a, _ in reversed(self.open) if t == "section" and "id" in a), "")
            self.tables.append((section, values, []))
        if tag == "tr" and self.tables:
            self.tables[-1][2].append([])
        if tag not in VOID:
            self.open.append((tag, values, []))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """`<circle/>` holds no text."""

    def handle_endtag(self, tag: str) -> None:
        while tag in [name for name, _, _ in self.open]:
            name, values, text = self.open.pop()
            said = " ".join("".join(text).split())
            self.closed.append((name, values, said))
            if name in ("td", "th") and self.tables and self.tables[-1][2]:
                self.tables[-1][2][-1].append(said)
            if name == tag:
                return

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def with_attribute(self, name: str) -> dict[str, str]:
        """Value of the attribute -> text of its element."""
        return {values[name]: text for _, values, text in self.closed if name in values}

    def rows(self) -> dict[str, str]:
        """State of every gate drawn, by its id."""
        return {values["id"]: values["data-state"] for tag, values, _ in self.closed if tag == "tr" and "data-state" in values and "id" in values}

    def heat(self) -> dict[tuple[str, str, str], str]:
        cells = {}
        for _, values, rows in self.tables:
            if values.get("data-heat") in ("prefill", "decode"):
                for row in rows[1:]:
                    cells.update({(values["data-heat"], layer, row[0]): text for layer, text in zip(rows[0][1:], row[1:], strict=True)})
        return cells


def lines_of(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (GOLDEN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def counted(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Totals from the JSON lines alone: nothing of probes or reports takes part."""
    day = lines[0]["started"][:10]
    states = collections.Counter(line["state"] for line in lines if line["type"] == "verdict")
    waived = sum(line["type"] == "verdict" and line["state"] == "fail" and line.get("waiver", {}).get("until", "") >= day for line in lines)
    missing = sum(line["type"] == "coverage" and line["observed"] < line["expected"] for line in lines)
    verdict = "fail" if states["fail"] > waived else "incomplete" if states["not_run"] or missing or not states["pass"] else "pass"
    return {
        "verdict": verdict, "passed": states["pass"], "failed": states["fail"], "waived": waived, "not_run": states["not_run"], "total": sum(states.values()),
        "near_ties": sum(line.get("near_ties", 0) for line in lines if line["type"] == "verdict"), "missing": missing,
    }  # fmt: skip


def shown(html: str) -> dict[str, Any]:
    """Totals as the page shows them."""
    page = Page(html)
    counts = page.with_attribute("data-count")
    (verdict,) = page.with_attribute("data-verdict")
    return {"verdict": verdict, **{key: int(counts[key]) for key in ("passed", "failed", "waived", "not_run", "total", "near_ties", "missing")}}


@pytest.mark.parametrize("name", KNOWN)
def test_page_lines_and_hand_agree_on_every_total(name):
    html = report_html(read_run(GOLDEN / f"{name}.jsonl"))
    assert counted(lines_of(name)) == KNOWN[name]
    assert shown(html) == KNOWN[name]
    last = lines_of(name)[-1]
    assert {**{key: last[key] for key in ("verdict", "passed", "failed", "waived", "not_run", "total", "near_ties")}, "missing": last["coverage_missing"]} == KNOWN[name]


@pytest.mark.parametrize("name", KNOWN)
def test_every_gate_is_drawn_once_with_its_state(name):
    rows = Page(report_html(read_run(GOLDEN / f"{name}.jsonl"))).rows()
    assert {int(place[1:]): state for place, state in rows.items()} == dict(enumerate(STATES[name]))


def test_a_pass_with_a_waiver_says_so_beside_the_verdict():
    html = report_html(read_run(GOLDEN / "waived.jsonl"))
    (word,) = Page(html).with_attribute("data-verdict").values()
    assert "1 waiver" in word
    for said in ("a rounding that the vendor's matmul adds", "2027-01-31", "A. Reader"):
        assert said in Page(html).closed[-1][2], said


def test_heat_map_and_coverage_say_what_the_lines_say():
    page = Page(report_html(read_run(GOLDEN / "fail.jsonl")))
    heat = page.heat()
    assert {cell: heat.get(cell) for cell in HEAT} == HEAT
    asked = [rows[1:] for section, _, rows in page.tables if section == "coverage"]
    assert asked[0] == COVERAGE
    asked_by_hand = sum(int(row[2]) for row in COVERAGE)
    assert asked_by_hand == sum(line["type"] == "coverage" for line in lines_of("fail"))


def test_non_finite_numbers_stay_words():
    page = Page(report_html(read_run(GOLDEN / "fail.jsonl")))
    row = next(text for tag, values, text in page.closed if tag == "tr" and values.get("id") == "v7")
    assert row.count("NaN") >= 3, "value, share, cosine"
    assert "got NaN want -inf" in row
    assert " 0 %" not in row


def test_junit_has_the_same_totals(tmp_path):
    render_run(read_run(GOLDEN / "fail.jsonl"), tmp_path)
    suite = next(s for s in ElementTree.parse(tmp_path / "junit.xml").getroot() if s.get("name") == "gates")
    known = KNOWN["fail"]
    assert int(suite.get("tests", "")) == known["total"] == len(suite.findall("testcase"))
    waived = len([case for case in suite.findall("testcase") if case.find("skipped") is not None]) - known["not_run"]
    assert len(suite.findall("testcase/failure")) + waived == known["failed"]
    assert waived in (0, known["waived"]), "a waived failure is a failure or a skip there, never a plain pass"


# ---- what turns it red ----


@pytest.mark.parametrize(
    ("place", "change"),
    [(0, {"state": "fail"}), (2, {"state": "pass"}), (3, {"waiver": None}), (5, {"state": "pass"}), (7, {"waiver": {"reason": "r", "until": "2030-01-31", "by": "b"}}), (13, {"near_ties": 5})],
    ids=["pass to fail", "fail to pass", "waiver gone", "not run to pass", "waiver prolonged", "one near-tie more"],
)
def test_a_changed_line_changes_the_page(place, change, tmp_path):
    lines = lines_of("fail")
    at = [i for i, line in enumerate(lines) if line["type"] == "verdict"][place]
    lines[at] |= change
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if v is not None or k != "waiver"}) + "\n" for line in lines), encoding="utf-8")
    now = shown(report_html(read_run(path)))
    expected = counted([{k: v for k, v in line.items() if v is not None or k != "waiver"} for line in lines])
    assert {key: now[key] for key in now if key != "verdict"} == {key: expected[key] for key in now if key != "verdict"}
    assert now != KNOWN["fail"]
    if "near_ties" not in change:
        assert now["verdict"] == "incomplete", "the last line no longer adds up, so it is not believed"


def test_a_run_without_its_last_line_is_partial_and_counts_what_it_has(tmp_path):
    whole = (GOLDEN / "fail.jsonl").read_bytes()
    path = tmp_path / "run.jsonl"
    path.write_bytes(whole[: whole.rindex(b'{"type": "summary"') + 30])
    assert main([str(path)]) == 0
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert {**shown(html), "verdict": "fail"} == KNOWN["fail"]
    assert shown(html)["verdict"] == "incomplete"
    assert "cut off" in Page(html).closed[-1][2]


def test_a_line_that_does_not_parse_is_refused(tmp_path):
    lines = (GOLDEN / "fail.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    path = tmp_path / "run.jsonl"
    path.write_text("".join([*lines[:3], "{broken\n", *lines[3:]]), encoding="utf-8")
    with pytest.raises(RecordError, match=":4: "):
        read_run(path)


def test_odd_numbers_and_texts_draw_and_none_of_them_becomes_markup_or_zero():
    records = wild_run()
    page = Page(report_html(records))
    assert [tag for tag, _, _ in page.closed if tag in ("script", "img", "iframe")] == ["script"]
    text = page.closed[-1][2]
    for word in ("Traceback", "None", "jinja2", "Undefined"):
        assert word not in text.replace("'None'", ""), word
    numbers = [v for v in text.split() if v in ("NaN", "inf", "-inf")]
    assert len(numbers) > 200
    rows = {values["id"]: said for tag, values, said in page.closed if tag == "tr" and "data-state" in values}
    odd = {i: v for i, v in enumerate(r for r in records if isinstance(r, Verdict)) if v.cosine is not None and not math.isfinite(v.cosine)}
    drawn = [(rows[f"v{i}"], "NaN" if math.isnan(v.cosine or 0) else "inf") for i, v in odd.items() if f"v{i}" in rows]
    assert len(drawn) > 20
    assert all(word in said for said, word in drawn)
