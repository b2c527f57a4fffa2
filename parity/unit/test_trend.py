"""Two runs: what became red or green, crept or changed is said once each; runs that cannot be compared, or hold nothing, are."""

import dataclasses
import random
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parity.unit.synthetic_run import HOSTILE, cut_off, synthetic_run, wild_run
from parity.unit.test_records import HEADER, INF, NAN, WAIVER
from probes.core.records import Kernel, Ledger, Measurement, State, Verdict, from_line, read_run, summarise, to_line
from reports.__main__ import main
from reports.compare import ALIKE, compare, crept, text
from reports.render import report_html

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "parity" / "golden" / "run-1.jsonl"
FAIL, PASS, NOT_RUN = State.FAIL, State.PASS, State.NOT_RUN


def gate(point="layers.0.attn.q", state=PASS, spent=0.2, limit=0.1, **facts):
    value = None if spent is None else spent * limit
    found = [] if spent is None else [{"number": "worst row", "smallest_limit": value, "limit": limit, "spent": spent}]
    values = {"mode": "free", "phase": "decode", "layer": 0, "step_first": 0, "step_last": 15, "metric": "worst row", "k": 2.0, "eps": 0.01, "floor": 0.045, "why": "measured", "rows": 9, "test_id": f"t[{point}]", "numbers": found, **facts}
    return Verdict(gate="attn.q", point=point, state=state, value=value, limit=limit, spent=spent, **values)


def run(*records, **header):
    body = [dataclasses.replace(HEADER, **header), *records]
    return [*body, summarise(body, seconds=10.0)]


def groups(before, after):
    return {name: len(changes) for name, _, changes in compare(before, after).groups if changes}


# ---- gates ----


def test_a_run_beside_itself_has_no_difference_and_says_what_was_compared():
    one = run(gate(), gate("layers.0.attn.kv"), Kernel("topk", "radix", "cpu", "0", 3))
    c = compare(one, one)
    assert c.sentence == "no difference; 2 gates and 2 numbers compared"
    assert groups(one, one) == {}
    assert c.surroundings == c.kernels == c.tolerances == []


@pytest.mark.parametrize("found", [synthetic_run(seed=1), wild_run(), read_run(GOLDEN)], ids=["failed", "wild", "version 1"])
def test_no_run_differs_from_itself(found):
    c = compare(found, [from_line(to_line(record)) for record in found])
    judged = [v for v in found if isinstance(v, Verdict) and v.state is not NOT_RUN]
    assert (c.gates, len(c.still_red)) == (len(judged), sum(v.state is FAIL for v in judged))
    assert set(groups(found, found)) <= {"still-red"}
    assert c.tolerances == c.kernels == c.surroundings == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (PASS, FAIL, {"red": 1}), (FAIL, PASS, {"mended": 1}), (FAIL, FAIL, {"still-red": 1}), (PASS, NOT_RUN, {"unjudged": 1}), (FAIL, NOT_RUN, {"unjudged": 1}),
        (NOT_RUN, PASS, {"judged": 1}), (NOT_RUN, FAIL, {"red": 1, "judged": 1}), (NOT_RUN, NOT_RUN, {}), (None, PASS, {"added": 1}), (PASS, None, {"gone": 1}),
    ],
)  # fmt: skip
def test_what_happened_to_a_gate(before, after, expected):
    sides = [run(gate("layers.1.attn.q"), *([] if state is None else [gate(state=state)])) for state in (before, after)]
    assert groups(*sides) == expected
    c = compare(*sides)
    assert c.gates == (2 if None not in (before, after) and NOT_RUN not in (before, after) else 1)
    assert all(name in c.sentence for name in [{"red": "1 new red", "still-red": "1 red in both", "unjudged": "no longer judged", "judged": "newly judged", "added": "1 new", "gone": "1 gone", "mended": "1 mended"}[key] for key in expected])


@pytest.mark.parametrize("changed", [{"phase": "prefill"}, {"mode": "isolated"}, {"layer": 1}, {"step_last": 31}, {"step_first": 1}])
def test_a_gate_elsewhere_is_another_gate(changed):
    assert groups(run(gate()), run(gate(**changed))) == {"gone": 1, "added": 1}


def test_gates_of_one_name_are_matched_by_test_and_then_in_order():
    a, b, c = (gate(test_id=f"t[{name}]", spent=spent) for name, spent in (("a", 0.1), ("b", 0.5), ("c", 0.9)))
    assert groups(run(a, b, c), run(c, a, b)) == {}
    renamed = [dataclasses.replace(v, test_id=v.test_id + " renamed") for v in (a, b, c)]
    assert groups(run(a, b, c), run(*renamed)) == {}
    assert groups(run(a, b, c), run(a, c)) == {"gone": 1}
    assert compare(run(a, b, c), run(a, c)).gone[0].verdict == b


def test_a_waiver_that_came_or_went_is_a_change():
    with_one = run(gate(), gate("x", FAIL, 2.0, waiver=WAIVER))
    without = run(gate(), gate("x", FAIL, 2.0))
    assert groups(without, with_one) == groups(with_one, without) == {"waivers": 1, "still-red": 1}
    assert compare(without, with_one).still_red[0].now == "fail 200 % (waived)"


# ---- budgets ----


@pytest.mark.parametrize(
    ("before", "after", "grew"),
    [
        (0.04, 0.099, False), (0.04, 0.101, True), (0.06, 0.115, False), (0.5, 0.59, False), (0.5, 0.61, True), (0.0, 0.09, False), (0.0, 0.11, True),
        (0.2, NAN, True), (NAN, NAN, False), (NAN, 0.2, False), (0.2, INF, True), (INF, INF, False), (INF, 0.2, False), (0.4, 0.1, False),
    ],
)  # fmt: skip
def test_a_budget_creeps_by_more_than_noise(before, after, grew):
    assert crept(before, after) is grew
    c = compare(run(gate(spent=before)), run(gate(spent=after)))
    assert (len(c.crept), c.numbers) == (int(grew), 1)
    assert len(c.better) == int(crept(after, before))


@given(st.floats(0, 10), st.floats(0, 10))
def test_no_budget_creeps_and_recovers_at_once(a, b):
    assert not (crept(a, b) and crept(b, a))


def test_a_further_number_that_crept_is_found_by_its_name():
    def with_norm(spent):
        v = gate()
        return dataclasses.replace(v, numbers=[*v.numbers, {"number": "norm", "smallest_limit": spent / 10, "limit": 0.1, "spent": spent}])

    c = compare(run(with_norm(0.1)), run(with_norm(0.4)))
    assert [(x.number, x.was, x.now) for x in c.crept] == [("norm", "10 % (0.01 of 0.1)", "40 % (0.04 of 0.1)")]
    assert c.numbers == 2
    assert compare(run(gate()), run(with_norm(0.4))).numbers == 1  # a number without a counterpart is not compared


def test_the_order_of_a_gates_numbers_does_not_matter():
    a = [{"number": n, "smallest_limit": s, "limit": 1.0, "spent": s} for n, s in (("x", 0.1), ("y", 0.9))]
    assert compare(run(gate(numbers=a)), run(gate(numbers=a[::-1]))).sentence == "no difference; 1 gate and 2 numbers compared"


# ---- tolerances, kernels, machine, measurements ----


@pytest.mark.parametrize(
    ("changed", "was", "now", "note"),
    [
        ({"k": 3.0}, "k 2, eps 0.01", "k 3, eps 0.01", "looser, 1 gate"), ({"eps": 0.005}, "k 2, eps 0.01", "k 2, eps 0.005", "tighter, 1 gate"),
        ({"k": 3.0, "eps": 0.005}, "k 2, eps 0.01", "k 3, eps 0.005", "1 gate"),
        ({"why": "guessed"}, "k 2, eps 0.01: measured", "k 2, eps 0.01: guessed", "1 gate"),
        ({"k": None}, "k 2, eps 0.01", "k –, eps 0.01", "1 gate"),
    ],
)  # fmt: skip
def test_a_changed_row_of_the_tolerance_table_is_told_once(changed, was, now, note):
    c = compare(run(gate()), run(gate(**changed)))
    assert [(f.name, f.was, f.now, f.note) for f in c.tolerances] == [("attn.q", was, now, note)]
    assert "1 tolerance changed" in c.sentence
    plain, other = (run(*(gate(f"layers.{i}.attn.q", **values) for i in range(5))) for values in (dict[str, object](), changed))
    assert [f.note for f in compare(plain, other).tolerances] == [note.replace("1 gate", "5 gates")]


def test_a_limit_that_moved_on_the_same_floor_is_a_changed_tolerance_and_one_that_followed_its_floor_is_none():
    assert [(f.name, f.was, f.now, f.note) for f in compare(run(gate()), run(gate(limit=0.2))).tolerances] == [("attn.q: worst row", "limit 0.1", "limit 0.2", "looser, 1 gate")]
    assert compare(run(gate()), run(gate(limit=0.2, floor=0.095))).tolerances == []
    assert compare(run(gate(floor=NAN, limit=NAN)), run(gate(floor=NAN, limit=NAN))).tolerances == []


def test_kernels_that_came_went_or_were_built_anew():
    def kernels(*found):
        return run(gate(), *(Kernel(source, kernel, arch, build, 3) for source, kernel, arch, build in found))

    before = kernels(("topk", "naive", "sm_90a", "aa"), ("rope", "rope", "sm_90a", "bb"), ("moe", "moe", "sm_90a", "cc"))
    after = kernels(("topk", "radix", "sm_90a", "aa"), ("rope", "rope", "sm_90a", "b2"), ("moe", "moe", "sm_90a", "cc"))
    assert [(f.name, f.was, f.now, f.note) for f in compare(before, after).kernels] == [
        ("topk, naive on sm_90a", "build aa", "–", "no longer run"), ("rope, rope on sm_90a", "build bb", "build b2", "another build"), ("topk, radix on sm_90a", "–", "build aa", "new"),
    ]  # fmt: skip
    assert [(f.was, f.now) for f in compare(before, run(gate())).kernels] == [("3 kernels", "none recorded")]


def test_the_machine_and_what_else_was_asked_are_listed_and_compared_over():
    c = compare(run(gate()), run(gate(), environment={"torch": "3", "gpu": "H200"}, commit="def", variants="fast", inject="B060"))
    assert {(f.name, f.was, f.now) for f in c.surroundings} == {("commit", "abc", "def"), ("kernel variants", "none", "fast"), ("planted fault", "none", "B060"), ("torch", "2", "3"), ("gpu", "none", "H200")}
    assert (c.comparable, c.gates) == (True, 1)


def test_times_are_told_and_memory_where_it_moved():
    def with_memory(seconds, kept, grown, kl):
        return run(
            gate(), Measurement("seconds", phase="decode", values={"seconds": seconds}), Measurement("memory.footprint", values={"of": "pro", "kv_gb": kept, "buffers_gb": grown}),
            Measurement("logits", phase="decode", values={"kl_mean": kl}),
        )  # fmt: skip

    facts = compare(with_memory(2.0, 5.0, 1.0, 0.1), with_memory(3.0, 5.04, 1.02, "nan")).measured
    assert [(f.name, f.was, f.now, f.note) for f in facts] == [
        ("the whole run, seconds", "10", "10", "× 1"), ("seconds, decode", "2", "3", "× 1.5"), ("memory.footprint, buffers gb, pro", "1", "1.02", "× 1.02"), ("logits, kl mean, decode", "0.1", "NaN", ""),
    ]  # fmt: skip


# ---- what cannot be compared ----

OTHER = {"checkpoint_hash": "1", "prompts": ["b.txt"], "tokens": [9], "steps": 4, "layers": [0, 1], "phases": ["prefill", "decode"], "device": "cuda", "seed": 1}


@pytest.mark.parametrize("name", ALIKE)
def test_runs_of_something_else_are_not_compared(name):
    c = compare(run(gate()), run(gate(state=FAIL, spent=9.0), **{name: OTHER[name]}))
    assert not c.comparable
    assert c.sentence.startswith(f"not comparable, for other {ALIKE[name]} (")
    assert (c.gates, c.numbers, [g for _, _, g in c.groups if g], c.measured) == (0, 0, [], [])


def test_a_checkpoint_of_which_other_layers_were_read_is_not_called_another():
    c = compare(run(gate()), run(gate(), layers=[0, 1], layers_run=[0, 1], checkpoint_hash="1"))
    assert c.sentence == "not comparable, for other layers judged (0 → 0-1): no gate was compared"


def test_comparing_nothing_is_said_to_be_nothing():
    for before, after in ((run(), run()), (run(gate()), run()), (run(gate()), run(gate("other"))), (run(gate(state=NOT_RUN)), run(gate()))):
        assert compare(before, after).sentence.startswith("nothing was compared: no gate was judged in both runs")
        assert compare(before, after).gates == 0


def test_a_run_that_was_cut_off_is_compared_as_far_as_it_came_and_says_so():
    whole = run(gate(), gate("layers.0.attn.kv"))
    c = compare(whole, whole[:-2])
    assert c.sentence == "1 gone; 1 gate and 1 number compared; this run was cut off"
    assert "the baseline was cut off" in compare(whole[:-1], whole).sentence


def test_random_changes_are_counted_by_another_hand():
    """States and shares drawn at random; the counts are made here from the draws."""
    rng = random.Random(7)
    drawn = [[(rng.choice([PASS, FAIL, NOT_RUN, None]), rng.choice([0.0, 0.05, 0.3, 0.9, 2.0])) for _ in range(2)] for _ in range(400)]
    sides = [run(*(gate(f"layers.{i}.attn.q", *pair[side]) for i, pair in enumerate(drawn) if pair[side][0] is not None)) for side in (0, 1)]
    c = compare(*sides)
    both = [p for p in drawn if p[0][0] in (PASS, FAIL) and p[1][0] in (PASS, FAIL)]
    assert c.gates == c.numbers == len(both)
    assert len(c.mended) == sum(p[0][0] is FAIL and p[1][0] is PASS for p in both)
    assert len(c.red) == sum(p[0][0] in (PASS, NOT_RUN) and p[1][0] is FAIL for p in drawn)
    assert len(c.still_red) == sum(p[0][0] is p[1][0] is FAIL for p in both)
    assert len(c.gone) == sum(p[1][0] is None and p[0][0] is not None for p in drawn)
    assert len(c.added) == sum(p[0][0] is None and p[1][0] is not None for p in drawn)
    assert len(c.unjudged) == sum(p[0][0] in (PASS, FAIL) and p[1][0] is NOT_RUN for p in drawn)
    assert len(c.crept) == sum(p[1][1] > p[0][1] + 0.1 for p in both)


# ---- in words ----


def store(path, records):
    with Ledger(path) as ledger:
        for record in records:
            ledger.write(record)
    return path


@pytest.fixture
def files(tmp_path):
    for name, records in (("a", run(gate(), gate("x", FAIL, 3.0))), ("b", run(gate(spent=0.9), gate("x", PASS, 0.5)))):
        (tmp_path / name).mkdir()
        store(tmp_path / name / "run.jsonl", records)
    return tmp_path / "a" / "run.jsonl", tmp_path / "b" / "run.jsonl"


def test_the_command_prints_a_short_table_and_the_sentence_last(files, capsys):
    assert main(["--compare", *map(str, files)]) == 0
    out = capsys.readouterr().out
    assert "budgets that crept: 1" in out
    assert "mended: 1" in out
    assert "20 % (0.02 of 0.1)" in out
    assert out.splitlines()[-1] == "trend: 1 mended, 1 budget crept, 1 budget recovered; 2 gates and 2 numbers compared"
    assert not files[1].with_name("report.html").exists()


def test_a_run_is_named_by_its_folder_too(files, capsys):
    assert main(["--compare", *(str(path.parent) for path in files)]) == 0
    assert main([str(files[1].parent), "--baseline", str(files[0].parent)]) == 0
    assert 'id="trend"' in files[1].with_name("report.html").read_text(encoding="utf-8")


def test_rows_of_two_gates_at_one_point_can_be_told_apart():
    mass = dict(gate="attn.mass")
    before, after = (run(*(dataclasses.replace(gate("layers.5.attn.core", state, spent), **more) for more in ({}, mass))) for state, spent in ((PASS, 0.1), (FAIL, 2.0)))
    out = text(compare(before, after), ("a", "b"))
    red = out[out.index("new red: 2") :]
    assert "attn.mass" in red
    assert "attn.q " in red
    page = report_html(after, before)
    assert len(set(re.findall(r"<tr>.*?</tr>", page.partition('id="trend-red"')[2].partition("</details>")[0]))) == 3
    ids = ("test_x[cpu]", "test_x[cpu-beside]")
    before, after = (run(*(gate("compressor[1]", state, spent, test_id=f"parity/t.py::{one}") for one in ids)) for state, spent in ((PASS, 0.1), (FAIL, 2.0)))
    assert [change.place.rpartition(", ")[2] for change in compare(before, after).red] == list(ids)
    before, after = (run(*(gate("compressor[1]", state, spent) for _ in ids)) for state, spent in ((PASS, 0.1), (FAIL, 2.0)))
    assert [change.place.rpartition(", ")[2] for change in compare(before, after).red] == ["number 1 of 2", "number 2 of 2"]


def test_the_table_stays_short(capsys):
    before, after = (run(*(gate(f"layers.{i}.attn.q", state, spent) for i in range(300))) for state, spent in ((PASS, 0.1), (FAIL, 2.0)))
    out = text(compare(before, after), ("a", "b"))
    assert len(out.splitlines()) < 60
    assert "and 288 more" in out


def test_hostile_records_cannot_write_to_the_terminal():
    out = text(compare(run(gate()), run(gate(HOSTILE, FAIL, 2.0), gate("[bold]x[/bold]", FAIL, 2.0), commit=HOSTILE)), ("a", "b"))
    assert "\x1b" not in out
    assert "[bold]x[/bold]" in out


@pytest.mark.parametrize("other", ["missing", "empty", "no run"])
def test_bad_input_is_one_line_and_2(files, tmp_path, other, capsys):
    bad = tmp_path / "bad.jsonl"
    if other != "missing":
        bad.write_text("" if other == "empty" else "{}\n{}\n")
    for arguments in (["--compare", str(files[0]), str(bad)], ["--compare", str(bad), str(files[0])], [str(files[0]), "--baseline", str(bad)]):
        assert main(arguments) == 2
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert str(bad) in err
        assert err.count("\n") == 1
    assert not files[0].with_name("report.html").exists()


def test_no_run_at_all_is_one_line_and_2(capsys):
    assert main([]) == 2
    assert capsys.readouterr().err.startswith("error: expected RUN.jsonl, --compare A B or --schema")


def test_html_writes_the_newer_runs_report_with_the_trend(files, tmp_path, capsys):
    assert main(["--compare", *map(str, files), "--html", str(tmp_path / "out")]) == 0
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert 'id="trend"' in page
    assert "1 mended, 1 budget crept, 1 budget recovered; 2 gates and 2 numbers compared" in page
    assert (tmp_path / "out" / "junit.xml").exists()


# ---- in the report ----


@pytest.mark.parametrize("before", [synthetic_run(seed=1), wild_run(), cut_off(synthetic_run(seed=5)), read_run(GOLDEN)], ids=["failed", "wild", "cut off", "version 1"])
def test_any_two_runs_are_drawn(before):
    page = report_html(synthetic_run(seed=2), before)
    assert page.count('<section id="trend">') == 1
    assert "Traceback" not in page


def test_a_report_without_a_baseline_has_no_trend_and_one_whose_run_had_one_says_how_to_draw_it():
    assert 'id="trend"' not in report_html(run(gate()))
    assert "--baseline old/run.jsonl" in report_html(run(gate(), baseline="old/run.jsonl"))


def test_hostile_text_is_escaped_in_the_trend():
    page = report_html(run(gate(HOSTILE, FAIL, 2.0, why=HOSTILE)), run(gate(HOSTILE, PASS, 0.1)))
    assert "<script>alert" not in page
    assert "new red" in page


def test_what_is_no_number_is_never_drawn_as_zero():
    page = report_html(run(gate(spent=NAN, state=FAIL)), run(gate(spent=0.2)))
    trend = page[page.index('<section id="trend">') :]
    trend = trend[: trend.index("</section>")]
    assert "NaN (NaN of 0.1)" in trend


def test_the_command_runs_without_torch(files):
    code = f"import sys; sys.modules['torch'] = None; from reports.__main__ import main; sys.exit(main(['--compare', {str(files[0])!r}, {str(files[1])!r}]))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
