"""--redact: a red audit of a distinctive prompt, and every file of its report searched for the text, its ids and the file's name."""

import json
import re
from dataclasses import replace

import pytest
from tokenizers import Tokenizer

from parity.foreign import LEFT_OUT
from parity.redact import HIDDEN, SHORTEST_IDS, Redactor, prompt_hash
from parity.unit.test_session import CHECKPOINT, SMALL, Shell, last_lines
from parity.unit.test_waivers import FAULT
from probes.core.inputs import Prompt
from probes.core.records import Coverage, Divergence, Measurement, State, Summary, Verdict, read_run

WORDS = ("Quetzalcoatl", "xylophone", "Wolfenbuettel", "zugzwang")
TEXT = "Quetzalcoatl bought a xylophone in Wolfenbuettel and fell into zugzwang; " * 4
NAME = "board-minutes.txt"


def spoken_in(text: str, ids: list[int]) -> list[str]:
    """What of the prompt a text gives away: words of it, the file's name, three of its ids in a row that are no small numbers."""
    found = [word for word in (*WORDS, NAME, NAME.removesuffix(".txt")) if word.lower() in text.lower()]
    for run in re.findall(r"\d+(?:\D{1,4}\d+){2,}", text):
        numbers = [int(n) for n in re.findall(r"\d+", run) if len(n) < 6]
        told = {tuple(numbers[i : i + 3]) for i in range(len(numbers) - 2)} & {tuple(ids[i : i + 3]) for i in range(len(ids) - 2)}
        found += [str(three) for three in told if min(three) > 99]
    return found


@pytest.fixture(scope="module")
def ids():
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(TEXT, add_special_tokens=False).ids


def test_no_file_of_a_redacted_report_and_no_line_of_its_log_tells_the_prompt(tmp_path, ids):
    shell = Shell(tmp_path)
    (tmp_path / NAME).write_text(TEXT)
    asked = [a for a in SMALL if a not in ("--prompt", "medium.txt:0:20")]
    code, out, err = shell(
        "parity/test_layers.py", "parity/test_logits.py", "parity/test_text.py", *asked, "--prompt", f"{tmp_path / NAME}:0:40", "--redact", *shell.fault(*FAULT), "--profile", "full",
    )  # fmt: skip
    assert code == 1, out + err
    assert last_lines(out)[0] == "fail"
    files = sorted(path.name for path in shell.report.iterdir())
    assert files == ["junit.xml", "report.html", "run.jsonl"]  # no repro
    for name in files:
        assert spoken_in((shell.report / name).read_text(), ids) == [], name
    assert spoken_in(out + err, ids) == []
    header, _, summary = shell.records()
    assert header.redacted
    assert header.prompts == [f"row 0 {HIDDEN}: sha256 {prompt_hash(ids[:40], header.checkpoint_hash)}"]
    assert header.tokens == [40]
    assert f"--prompt '{HIDDEN}'" in header.command
    assert summary.first_divergence is not None
    assert summary.first_divergence.point == "layers.0.attn.core"
    assert "--redact" in summary.first_divergence.no_repro
    greedy = [r for r in read_run(shell.report / "run.jsonl") if isinstance(r, Measurement) and r.name == "greedy"]
    assert [one.values["reference_text"] for one in greedy] == [HIDDEN]
    assert greedy[0].values["tokens"] > 0


def test_the_search_finds_what_is_there(ids):
    assert len(ids) > 80
    assert spoken_in("in wolfenbuettel", ids) == ["Wolfenbuettel"]
    assert spoken_in(f"prompt {NAME}:0:40", ids)
    at = next(i for i in range(len(ids)) if min(ids[i : i + 3]) > 99)
    assert spoken_in(json.dumps({"ids": ids[at : at + 3]}), ids)
    assert spoken_in("layers 0, 1, 2, 3", ids) == []


@pytest.fixture
def redactor(ids):
    return Redactor([Prompt(f"/home/somebody/{NAME}:0:60", tuple(ids[:60]), tuple(ids[60:]))], "salt", lambda _: TEXT, (f"/home/somebody/{NAME}:0:60",), steps=4)


RED = Verdict("attn.core", "layers.0.attn.core", "free", State.FAIL, "worst row", where=[0, 1], element=[0, 1, 5], reason="over", rows=3)


def test_messages_lose_file_names_text_and_ids(redactor, ids):
    listed = ", ".join(map(str, ids[3 : 3 + SHORTEST_IDS]))
    verdict = redactor(replace(RED, reason=f"{NAME}: ids [{listed}] and tokens[0, 3] = 1234: token ids run from 0", details={"said": TEXT[5:60], "ids": ids[:8], "steps": [1, 2, 3, 4, 5, 6]}))
    assert spoken_in(verdict.reason + json.dumps(verdict.details), ids) == []
    assert "1234" not in verdict.reason
    assert verdict.details["steps"] == [1, 2, 3, 4, 5, 6]
    assert (verdict.where, verdict.element) == (RED.where, RED.element)


def test_a_whole_prompt_that_is_shorter_than_what_is_no_coincidence_is_hidden_too():
    short = Redactor([Prompt("p.json", (49, 640), ()), Prompt("q.json", (7,), ())], "salt", lambda ids: "PIN 4711" if len(ids) > 1 else "a")
    assert short.text("the prompt is PIN  4711!") == HIDDEN
    assert short.text("a row of PIN 47112") == "a row of PIN 47112"
    assert "640" not in short.text("ids [3, 49, 640] were given")
    assert short.text("rows 49, 64, 640") == "rows 49, 64, 640"
    assert short(replace(RED, details={"ids": [49, 640], "steps": [7, 8]})).details == {"ids": f"{HIDDEN}: 2 numbers", "steps": [7, 8]}


def test_the_message_of_an_exception_goes_whatever_it_says(redactor):
    assert redactor.text("production stopped: KernelError: hello 12") == f"production stopped: KernelError: {LEFT_OUT}"
    said = f"stopped in decode, free: Oops: {LEFT_OUT} (raised at x.py:3 in f)"
    assert redactor.text(said) == said
    assert redactor.text(f"RuntimeError: {LEFT_OUT} (raised at x.py:3 in f)") == f"RuntimeError: {LEFT_OUT} (raised at x.py:3 in f)"


@pytest.mark.parametrize(("typed", "shown"), [("--logits board.jsonl", f"--logits '{HIDDEN}'"), ("--trace=t", f"'--trace={HIDDEN}'"), ("--trace-dir t", f"--trace-dir '{HIDDEN}'")])
def test_the_file_of_another_door_is_left_out_of_the_command(typed, shown, redactor):
    assert redactor.command(f"pytest parity/ {typed} --steps 4") == f"pytest parity/ {shown} --steps 4"


def test_a_coordinate_in_the_vocabulary_is_left_out(redactor):
    assert redactor(replace(RED, gate="logits", point="logits", element=[0, 3, 1777])).element == []


@pytest.mark.parametrize("key", ["reference_text", "production_text_parts", "text", "said_text"])
def test_whatever_is_called_text_is_left_out(key, redactor):
    values = redactor(Measurement("logits steps", values={"steps": 2, "first_flips": [{"step": 1, key: ["a", ""], "margin": 0.5}]})).values
    assert values == {"steps": 2, "first_flips": [{"step": 1, key: [HIDDEN, ""], "margin": 0.5}]}


def test_what_says_nothing_of_the_prompt_is_untouched(redactor):
    for record in (RED, Coverage("decode", 2, "layers.2.attn.o", "free", 4, 3), Measurement("sinkhorn", values={"iterations": 20, "residual": [1e-3, 1e-4]})):
        assert redactor(record) == record


def test_a_divergence_inside_the_summary_is_scrubbed_too(redactor):
    first = Divergence(0, "layers.0.attn.q", "decode", 3, True, "rope", because=f"seen with {NAME}")
    assert NAME not in redactor(Summary("fail", 1, 1, 0, first, 2, reasons=[f"{NAME} is short"])).first_divergence.because


def test_the_hash_depends_on_ids_and_checkpoint_only(ids):
    assert prompt_hash(ids, "a") == prompt_hash(tuple(ids), "a")
    assert len({prompt_hash(ids, "a"), prompt_hash(ids, "b"), prompt_hash(ids[:-1], "a")}) == 3


@pytest.mark.parametrize("typed", [f"pytest parity/ --prompt {NAME}:0:40 --steps 4", f"pytest parity/ --prompt={NAME} --steps 4"])
def test_a_command_line_keeps_its_other_options(typed, redactor):
    assert NAME not in redactor.command(typed)
    assert redactor.command(typed).endswith("--steps 4")
