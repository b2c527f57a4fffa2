"""`--logits`: what a server said is read in every shape it comes in, an honest server is green, planted faults are red in the gate that means them."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import reference
from parity import logits, selection
from parity.attribution import first_divergence
from parity.audit import TWIN_ORDERS, Plan
from parity.outside import NotExposedError
from parity.outsider import open_logits
from probes.core.inputs import read_prompt
from probes.core.records import State, Verdict
from probes.outside.logits import Given, read_logits, rounding_of, steps_of
from reference.config import InputError

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsv4"
LAYERS, PROMPT, STEPS, VOCAB = range(4), 60, 12, 2048


@cache
def text(first: int = 0) -> tuple[int, ...]:
    prompt = read_prompt(f"medium.txt:{first}:{first + PROMPT}", CHECKPOINT, VOCAB)
    return prompt.ids + prompt.continuation[:STEPS]


@cache
def server(first: int = 0, wrong: int | None = None) -> Tensor:
    """Logits [tokens, vocab] of another implementation with arithmetic of its own: transformers in BF16. wrong: it took another token there."""
    from probes.outside import deepseek_v4_transformers

    model = deepseek_v4_transformers.load(CHECKPOINT, layers=LAYERS, max_context=256, dtype="bf16")
    tokens = torch.tensor([text(first)])
    if wrong is not None:
        tokens[0, wrong] = (tokens[0, wrong] + 700) % VOCAB
    state = model.new_state(1, 256)
    rows = [model.prefill(tokens[:, :PROMPT], state)[0], *(model.decode(tokens[:, at], state) for at in range(PROMPT, PROMPT + STEPS))]
    return torch.cat(rows).double().log_softmax(-1)


def plain(logprobs: Tensor, most: int | None = 20, digits: int = 6, tokens: tuple[int, ...] = (), prompt: int = PROMPT) -> dict[str, Any]:
    """The plain shape: the likeliest tokens of every row, rounded as servers round; most None: the whole vocabulary."""
    if most is None:
        rows: list[Any] = [[round(float(x), digits) for x in row] for row in logprobs]
    else:
        rows = [{str(int(i)): round(float(x), digits) for x, i in zip(*row.topk(most), strict=True)} for row in logprobs]
    return {"tokens": list(tokens or text()), "prompt": prompt, "logprobs": rows}


def read(tmp_path: Path, *lines: Any) -> list[Given]:
    file = tmp_path / "answers.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return read_logits(file, CHECKPOINT, VOCAB)


@cache
def models(policy: str) -> tuple[Any, list[Any]]:
    model = reference.load(CHECKPOINT, policy=policy, layers=LAYERS, max_context=256)
    return model, [model.twin(order) for order in TWIN_ORDERS]


def judged(given: list[Given], policy: str = "published") -> tuple[dict[tuple[str, str], list[Verdict]], set[str]]:
    """Verdicts by gate and phase, and what was not covered."""
    model, twins = models(policy)
    production = open_logits("answers.jsonl", given).production
    steps = steps_of(given)
    phases = ("prefill", "decode") if steps else ("prefill",)
    plan = Plan(rows=[one.prompt for one in given], continuation=[one.completion for one in given], phases=phases, layers=tuple(LAYERS), steps=steps, max_context=256)
    audit = logits.LogitsAudit(model, production, twins, plan, say=lambda line: None)
    verdicts: dict[tuple[str, str], list[Verdict]] = {}
    missing = set()

    def take(judge: Any, *given: Any) -> None:
        try:
            verdict = judge(audit, *given)
            verdicts.setdefault((verdict.gate, verdict.phase), []).append(verdict)
        except NotExposedError as error:
            missing.add(error.point)

    for case in selection.model_cases(phases, steps):
        if case.point == "logits":
            take(logits.judge_rows, case)
    for phase in phases:
        for judge in logits.JUDGES.values():
            take(judge, phase)
    assert audit.crash is None
    return verdicts, missing


def red(verdicts: dict[tuple[str, str], list[Verdict]]) -> set[tuple[str, str]]:
    return {gate for gate, each in verdicts.items() if any(v.state is State.FAIL for v in each)}


GATES = {(gate, phase) for gate in ("logprobs", "logprobs.scale", "logprobs.offset", "logprobs.sum", "logits.top1", "logits.topk") for phase in ("prefill", "decode")}


# ---- an honest server ----


@pytest.mark.parametrize(("most", "digits"), [(20, 6), (20, 2), (5, 6), (None, 6)], ids=["top 20", "two decimals", "top 5", "whole vocabulary"])
def test_an_honest_server_is_green_however_it_rounds(tmp_path, most, digits):
    verdicts, missing = judged(read(tmp_path, plain(server(), most, digits)))
    assert [(gate, v.reason) for gate, each in verdicts.items() for v in each if v.state is not State.PASS] == []
    assert set(verdicts) == GATES
    assert missing == set()
    assert sum(v.rows for v in verdicts["logprobs", "prefill"]) == PROMPT
    assert sum(v.rows for v in verdicts["logprobs", "decode"]) == STEPS


def test_its_own_policy_leaves_less_noise(tmp_path):
    given = read(tmp_path, plain(server()))
    own, published = (judged(given, policy)[0] for policy in ("eager.bf16", "published"))
    assert red(own) == set()

    def typical(found: dict[tuple[str, str], list[Verdict]]) -> float:
        return float(next(n["smallest_limit"] for n in found["logprobs", "prefill"][0].numbers if n["number"].startswith("typical")))

    assert typical(own) < typical(published) / 2


def test_what_rounding_costs_is_measured_and_in_the_limit(tmp_path):
    exact, coarse = (judged(read(tmp_path, plain(server(), 20, digits)))[0]["logprobs", "prefill"][0] for digits in (12, 1))
    assert exact.details["rounding_costs"] < 1e-9
    assert coarse.details["written"] == "1 decimals"
    assert 1e-3 < coarse.details["rounding_costs"] < 2e-2
    assert coarse.eps == pytest.approx((exact.eps or 0) + coarse.details["rounding_costs"], rel=1e-6)


def slower(p: Tensor) -> Tensor:
    return (p / 0.97).log_softmax(-1)


@pytest.mark.parametrize("digits", [1, 2])
def test_a_temperature_is_seen_through_the_rounding_of_a_file(tmp_path, digits):
    assert ("logprobs.scale", "prefill") not in red(judged(read(tmp_path, plain(server(), digits=digits)), "eager.bf16")[0])
    assert ("logprobs.scale", "prefill") in red(judged(read(tmp_path, plain(slower(server()), digits=digits)), "eager.bf16")[0])


def test_numbers_too_coarse_for_a_slope_or_an_offset_leave_these_gates_unrun(tmp_path):
    for p in (server(), slower(server())):
        verdicts, _ = judged(read(tmp_path, plain(p, digits=0)), "eager.bf16")
        assert red(verdicts) == set()
        for gate, phase in (("logprobs.scale", "prefill"), ("logprobs.scale", "decode"), ("logprobs.offset", "decode")):
            (verdict,) = verdicts[gate, phase]
            assert verdict.state is State.NOT_RUN, (gate, phase)
            assert verdict.reason.startswith("numbers are written with 0 decimals: on the reference's own values that alone is worth ")
        assert {v.state for v in verdicts["logprobs", "prefill"]} == {State.PASS}


def test_only_the_taken_token_is_enough_for_rows_and_offset(tmp_path):
    """Without top_logprobs nothing says which token is likeliest: those gates are not covered, and not passed."""
    line = plain(server())
    line["logprobs"] = [{str(after): round(float(row[after]), 6)} for row, after in zip(server(), text()[1:], strict=False)] + [None]
    verdicts, missing = judged(read(tmp_path, line))
    assert red(verdicts) == set()
    assert {gate for gate, _ in verdicts} == {"logprobs", "logprobs.offset", "logprobs.sum"}
    assert missing == {f"{what} {phase}{rest}" for phase in ("prefill", "decode") for what, rest in (("likeliest tokens of", ""), ("likeliest tokens of", ", more than one of a row"))} | {
        f"log-probabilities of two tokens of a row in {phase}" for phase in ("prefill", "decode")
    }


# ---- planted ----


def shifted(p: Tensor) -> Tensor:
    return p.roll(1, 0)


def warmer(p: Tensor) -> Tensor:
    return (p / 0.9).log_softmax(-1)


def over_a_part(p: Tensor) -> Tensor:
    """The softmax sees the first half of its tokens."""
    return torch.cat((p[:, : VOCAB // 2].log_softmax(-1), torch.full((len(p), VOCAB // 2), -math.inf)), 1)


def over_the_top(p: Tensor) -> Tensor:
    """Normalised again after a top-20 filter."""
    kept = p.topk(20).indices
    return torch.full_like(p, -math.inf).scatter(-1, kept, p.gather(-1, kept).log_softmax(-1))


@pytest.mark.parametrize(
    ("fault", "gates"),
    [
        (shifted, {"logprobs", "logits.top1", "logits.topk"}),
        (warmer, {"logprobs.scale", "logprobs.offset"}),
        (over_a_part, {"logits.topk"}),
        (over_the_top, {"logprobs.sum"}),
    ],
    ids=["shifted by one step", "temperature 0.9", "part of the vocabulary", "top 20 normalised again"],
)
def test_a_fault_of_every_row_is_red_in_both_phases(tmp_path, fault, gates):
    verdicts, _ = judged(read(tmp_path, plain(fault(server()))))
    assert red(verdicts) >= {(gate, phase) for gate in gates for phase in ("prefill", "decode")}


def test_a_temperature_is_told(tmp_path):
    verdicts, _ = judged(read(tmp_path, plain(warmer(server()))))
    assert "a temperature of 0.9" in verdicts["logprobs.scale", "prefill"][0].reason


@pytest.mark.parametrize(("fault", "said"), [(warmer, "a temperature of 0.9"), (over_the_top, "another vocabulary was normalised over"), (shifted, "")], ids=["temperature", "filter", "shifted"])
def test_the_headline_says_what_was_done_to_every_row_and_nothing_that_explains_none(tmp_path, fault, said):
    verdicts, _ = judged(read(tmp_path, plain(fault(server()))))
    found = first_divergence([v for each in verdicts.values() for v in each], ["logits"])
    assert found is not None
    assert said in found.because
    assert bool(found.because) is bool(said)


def test_a_vocabulary_that_is_cut_is_red_where_all_of_it_is_given(tmp_path):
    line = plain(over_a_part(server()).clamp_min(-9999), None)
    verdicts, _ = judged(read(tmp_path, line))
    assert "finite masks differ" in verdicts["logprobs", "prefill"][0].reason


def test_one_row_that_belongs_elsewhere_is_red_at_its_place(tmp_path):
    p = server().clone()
    p[PROMPT + 4] = server()[20]
    verdicts, _ = judged(read(tmp_path, plain(p)))
    assert red(verdicts) >= {("logprobs", "decode")}
    worst = next(v for v in verdicts["logprobs", "decode"] if v.state is State.FAIL)
    assert (worst.worst_step, worst.details["rows_over"]) == (4, 1)
    assert not any(phase == "prefill" for _, phase in red(verdicts))


def test_answers_that_are_swapped_in_a_batch_are_red(tmp_path):
    other = text(300)
    lines = [plain(server(300)), plain(server(), tokens=other)]
    verdicts, _ = judged(read(tmp_path, *lines))
    assert red(verdicts) >= {("logprobs", "prefill"), ("logprobs", "decode"), ("logits.top1", "prefill")}
    verdicts, _ = judged(read(tmp_path, plain(server()), plain(server(300), tokens=other)))
    assert red(verdicts) == set()


def test_one_token_that_is_not_what_the_server_computed_on_is_red_from_there_on(tmp_path):
    verdicts, _ = judged(read(tmp_path, plain(server(wrong=PROMPT + 3))))
    assert not any(phase == "prefill" for _, phase in red(verdicts))
    first = next(v for v in verdicts["logprobs", "decode"] if v.state is State.FAIL)
    assert first.details["first_step"] == 3


# ---- shapes ----


def words() -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


def spelled(token: int) -> str:
    return str(words().decode([token]))


def completion(rows: dict[int, dict[int, float]], tokens: list[int], count: int, echo: bool = False, name: Any = spelled) -> dict[str, Any]:
    """An answer of /v1/completions: entry j is of token j."""
    first = 0 if echo else count
    entries = [rows.get(at - 1) for at in range(first, len(tokens))]
    return {
        "object": "text_completion", "usage": {"prompt_tokens": count},
        "choices": [{"logprobs": {
            "tokens": [name(token) for token in tokens[first:]],
            "token_logprobs": [None if row is None else row[token] for row, token in zip(entries, tokens[first:], strict=True)],
            "top_logprobs": [None if row is None else {name(i): x for i, x in row.items()} for row in entries],
        }}],
    }  # fmt: skip


TOKENS = [300, 301, 302, 303, 304]
ROWS = {at: {TOKENS[at + 1]: -0.5, 400 + at: -1.5, 500 + at: -2.5} for at in range(4)}


def known(given: list[Given]) -> tuple[tuple[int, ...], tuple[int, ...], dict[int, dict[int, float]]]:
    (one,) = given
    return one.prompt, one.completion, {at: dict(zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)) for at, row in one.rows.items()}


def test_an_answer_of_completions_has_rows_one_before_its_tokens(tmp_path):
    line = completion(ROWS, TOKENS, 2) | {"prompt_token_ids": TOKENS[:2]}
    assert known(read(tmp_path, line)) == ((300, 301), (302, 303, 304), {at: ROWS[at] for at in (1, 2, 3)})


def test_the_prompt_may_be_text_of_the_request(tmp_path):
    prompt = " ".join(["value", "of", "the", "file"])
    ids = words().encode(prompt, add_special_tokens=False).ids
    line = {"request": {"prompt": prompt}, "response": completion({len(ids) - 1: {300: -0.5}}, [*ids, 300], len(ids))}
    assert known(read(tmp_path, line)) == (tuple(ids), (300,), {len(ids) - 1: {300: -0.5}})


def test_an_echoed_prompt_has_rows_of_its_own(tmp_path):
    assert known(read(tmp_path, completion(ROWS, TOKENS, 2, echo=True))) == ((300, 301), (302, 303, 304), ROWS)


def test_prompt_logprobs_are_one_behind(tmp_path):
    line = completion(ROWS, TOKENS, 3) | {"prompt_token_ids": TOKENS[:3]}
    line["choices"][0]["prompt_logprobs"] = [None, *({str(i): {"logprob": x, "rank": 1, "decoded_token": "?"} for i, x in ROWS[at].items()} for at in (0, 1))]
    assert known(read(tmp_path, line)) == ((300, 301, 302), (303, 304), ROWS)


def test_an_answer_of_chat_with_ids_or_bytes(tmp_path):
    def entry(token: int, value: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": value}

    content = [entry(TOKENS[at + 1], -0.5) | {"top_logprobs": [entry(i, x) for i, x in ROWS[at].items()]} for at in (1, 2, 3)]
    line = {"choices": [{"logprobs": {"content": content}}], "prompt_token_ids": TOKENS[:2]}
    assert known(read(tmp_path, line)) == ((300, 301), (302, 303, 304), {at: ROWS[at] for at in (1, 2, 3)})
    half = words().token_to_id("Ð")  # one byte of a letter: its text alone says nothing
    content = [{"token": "\ufffd", "bytes": [0xD0], "logprob": -0.5, "top_logprobs": []}]
    assert half is not None
    assert known(read(tmp_path, {"choices": [{"logprobs": {"content": content}}], "prompt_token_ids": [5]}))[1] == (half,)


def test_logits_become_log_probabilities_and_minus_9999_is_impossible(tmp_path):
    raw = torch.linspace(-3, 4, VOCAB).tolist()
    (one,) = read(tmp_path, {"tokens": [5], "logits": [raw]})
    assert one.rows[0].full
    assert float(one.rows[0].logprobs.exp().sum()) == pytest.approx(1)
    assert int(one.rows[0].ids[0]) == VOCAB - 1
    (one,) = read(tmp_path, {"tokens": [5], "logprobs": [{"7": -0.1, "8": -9999.0}]})
    assert one.rows[0].logprobs.tolist() == [-0.1, -math.inf]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ([1, 2], "expected an object, got list"),
        ({"tokens": [1, 2]}, "expected logits or logprobs beside tokens, got neither"),
        ({"tokens": [1, 2], "logprobs": [None]}, "1 rows for 2 tokens; row i says what comes after tokens 0 .. i"),
        ({"tokens": [1, 5000], "logprobs": [None, None]}, "token id 5000 is out of range 0..2047"),
        ({"tokens": [1], "logprobs": [[-1.0, -2.0]]}, "2 values, the vocabulary has 2048"),
        ({"tokens": [1], "logprobs": [{"7": 2.5}]}, 'log-probability 2.5 is above 0; logits go under the key "logits"'),
        ({"tokens": [1], "logits": [{"7": 2.5}]}, "logits of 1 of 2048 tokens say no probability"),
        ({"tokens": [1], "logprobs": [{"seven": -1}]}, "'seven' is no token id"),
        ({"tokens": [1], "logprobs": [{"7": "x"}]}, "expected a number, got 'x'"),
        ({"tokens": [1], "logprobs": [None]}, "no row holds a number"),
        ({"tokens": [1, 2], "prompt": 3, "logprobs": [None, None]}, "prompt is 3, expected how many of the 2 tokens"),
        ({"choices": [{"text": "x"}]}, "no logprobs; next: ask for them"),
        ({"x": 1}, "expected tokens with logits or logprobs, or an answer with choices"),
        (completion(ROWS, TOKENS, 2), "the prompt's tokens are not in the line; next: keep prompt_token_ids"),
        (completion(ROWS, TOKENS, 2) | {"prompt_token_ids": [300]}, "the prompt is 1 tokens here, usage.prompt_tokens says 2"),
        (completion(ROWS, TOKENS, 2, echo=True) | {"prompt_token_ids": [300, 309]}, "echoed token 1 is 301, the prompt has 309"),
        (completion(ROWS, TOKENS, 2, name=lambda token: "\ufffd") | {"prompt_token_ids": TOKENS[:2]}, "may be token"),
        (completion(ROWS, TOKENS, 2, name=lambda token: "no such word") | {"prompt_token_ids": TOKENS[:2]}, "'no such word' is no token of the checkpoint's tokenizer"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, line, said):
    with pytest.raises(InputError) as caught:
        read(tmp_path, line)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "answers.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said", "half"),
    [
        ([-0.25, -1.5], "2 decimals", 0.005),
        ([-0.123457, -12.5], "6 decimals", 5e-7),
        ([-0.0123456, -12.3456789], "7 decimals", 5e-8),
        ([float(torch.tensor(-1.2345).bfloat16()), float(torch.tensor(-0.0123).bfloat16())], "bf16", 2.0**-8),
        ([-1.23457e-5, -12.3457], "6 significant digits", 5e-11),
        ([-1.0 / 3, -2.0 / 3], "as given", 0.0),
    ],
)
def test_how_finely_numbers_are_written_is_read_from_them(values, said, half):
    numbers = torch.tensor(values, dtype=torch.float64)
    found = rounding_of(numbers)
    assert found.words == said
    assert float(found.half_step(numbers)[0]) == pytest.approx(half)


def test_a_probability_of_zero_widens_no_limit():
    numbers = torch.tensor([-1.2345, -0.0123, -math.inf]).bfloat16().double()
    half = rounding_of(numbers).half_step(numbers)
    assert rounding_of(numbers).words == "bf16"
    assert half[0] == 2.0**-8
    assert half[2] < 1e-30


# ---- how much was shown ----


def of_rows(tmp_path: Path, rows: list[int], prompt: int = 32, count: int = 40, steps: int | None = None, phases: tuple[str, ...] = ("prefill", "decode")) -> tuple[Any, Any]:
    """A door and an audit of a file that holds these rows; no model runs."""
    given = read(tmp_path, {"tokens": list(text()[:count]), "prompt": prompt, "logprobs": [{"7": -0.5} if at in rows else None for at in range(count)]})
    door = open_logits("answers.jsonl", given)
    audit: Any = object.__new__(logits.LogitsAudit)
    held = steps_of(given) if steps is None else steps
    audit.production, audit.asked_points = door.production, tuple(map(str, range(10)))
    audit.plan = Plan([one.prompt for one in given], [one.completion for one in given], phases, tuple(LAYERS), held, 256)
    return door, audit


@pytest.mark.parametrize(
    ("rows", "said", "percent"),
    [
        (range(40), "", 10.0),
        (range(39), "", 10.0),  # a server never says what comes after its last token
        ([35], "; prefill not shown; 1 of 7 decode rows", 10 * (1 / 7) / 2),
        ([39], "; prefill not shown; 1 of 8 decode rows", 10 * (1 / 8) / 2),
        (range(31, 39), "; 1 of 32 prefill rows", 10 * (1 / 32 + 1) / 2),
        ([*range(30), 33], "; 30 of 32 prefill rows; 1 of 7 decode rows", 10 * (30 / 32 + 1 / 7) / 2),
    ],
    ids=["all", "all but the last", "one of decode", "the last", "no prompt_logprobs", "some"],
)
def test_rows_that_are_not_given_stand_in_the_verdict_and_count_as_nothing(tmp_path, rows, said, percent):
    door, audit = of_rows(tmp_path, list(rows))
    assert door.words(audit) == "logits only" + said
    assert door.percent(audit) == pytest.approx(percent)


def test_rows_of_phases_and_steps_that_nobody_asked_for_are_not_missed(tmp_path):
    door, audit = of_rows(tmp_path, list(range(32, 39)), steps=3, phases=("decode",))
    assert (door.words(audit), audit.rows_shown("decode")) == ("logits only", (3, 3))
    door, audit = of_rows(tmp_path, list(range(32)), phases=("prefill",))
    assert door.words(audit, ("decode",)) == "logits only; decode not shown"
    assert door.percent(audit, ("decode",)) == pytest.approx(5.0)


# ---- the command line ----


def pytest_parity(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pytest", "parity/", *args], cwd=ROOT, capture_output=True, text=True, timeout=600)


def test_the_door_names_its_coverage_and_its_policy(tmp_path):
    line = plain(server())
    line["logprobs"][: PROMPT - 1] = [None] * (PROMPT - 1)  # a server that was not asked for prompt_logprobs
    (tmp_path / "answers.jsonl").write_text(json.dumps(line), encoding="utf-8")
    done = pytest_parity("--logits", str(tmp_path / "answers.jsonl"), "--layers", "0-3", "--policy", "eager.bf16", "--report", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    records = [json.loads(line) for line in (tmp_path / "out" / "run.jsonl").read_text().splitlines()]
    assert f"verdict: pass (logits only; 1 of {PROMPT} prefill rows)" in done.stdout
    header, summary = records[0], records[-1]
    assert (summary["verdict"], summary["coverage"]) == ("pass", f"logits only; 1 of {PROMPT} prefill rows")
    assert header["production"] == "logits of answers.jsonl"
    assert "score.bf16" in header["policy"]
    assert any("6 decimals" in note for note in header["notes"])
    missing = {record["point"] for record in records if record.get("name") == "not covered"}
    assert {"layers.0.attn.core", "layers.3.attn.compressor", "hc_head"} <= missing
    assert not any(record["type"] == "verdict" and record["layer"] is not None for record in records)
    cells = [(v["gate"], v["phase"], v["step_first"], v["value"]) for v in records if v["type"] == "verdict"]
    assert len(cells) == len(set(cells)), "a gate is judged once"


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--logits", "no.jsonl"], "no.jsonl: No such file or directory; expected JSON lines"),
        (["--logits", "a", "--production", "transformers"], "--production and --logits: one of them"),
        (["--policy", "exact"], "--policy: it needs one of --production"),
        (["--logits", "a", "--prompt", "short.txt"], "--prompt with --logits: the file holds its own tokens"),
    ],
)
def test_bad_input_is_one_line_and_nothing_is_written(tmp_path, args, said):
    done = pytest_parity(*args, "--report", str(tmp_path / "out"))
    assert done.returncode == 4
    assert said in done.stderr
    assert not (tmp_path / "out").exists()
