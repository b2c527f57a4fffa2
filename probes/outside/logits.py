"""What an inference server says of its next tokens: token ids and log-probabilities, one sequence a line of a JSON file.

    sequences = read_logits("answers.jsonl", "checkpoints/tiny-dsv4", vocab_size=2048)
    pytest parity/ --logits answers.jsonl

Three shapes of a line, told apart by their keys:

    {"tokens": [5, 9, 7], "prompt": 2, "logprobs": [null, {"7": -0.1, "12": -2.5}, null]}     plain; or "logits"
    an answer of /v1/completions       choices[].logprobs with tokens, token_logprobs, top_logprobs; prompt_logprobs
    an answer of /v1/chat/completions  choices[].logprobs.content

Row i says what comes after tokens 0 .. i: a list over the whole vocabulary, or id -> value; null where it is not known. An answer
needs its prompt: `prompt_token_ids` in it, or the request beside it, {"request": {"prompt": ...}, "response": {...}}. Tokens that
are strings are mapped with the checkpoint's tokenizer, `token_id:N` needs none; what could be two tokens is refused. Nothing is
judged here. Format: docs/your-stack.md. Tests: parity/unit/test_logits_door.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reference.config import InputError

IMPOSSIBLE = -9999.0  # how servers write a probability of zero in JSON
NEXT = "next: docs/your-stack.md has the shapes"


@dataclass(frozen=True)
class Row:
    """What is known of one next token.

    ids, logprobs  [k] int64 and float64, by falling log-probability; minus infinity where the server says: impossible
    numbers        [k] as they were given, for what their rounding costs
    full           the whole vocabulary was given
    """

    ids: Tensor
    logprobs: Tensor
    numbers: Tensor
    full: bool


@dataclass(frozen=True)
class Given:
    """One sequence: the prompt's tokens, those after it, and the rows that are known.

    rows  position -> Row: what comes after tokens 0 .. position
    """

    label: str
    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    rows: Mapping[int, Row]

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.completion)


# ---- strings to ids ----


def _unicode_of_bytes() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclass
class Words:
    """The checkpoint's tokenizer the other way round: which token ids a string, or bytes, may be. Read when first asked."""

    checkpoint: Path
    vocab_size: int
    _known: dict[tuple[str, tuple[int, ...] | None], int] = field(default_factory=dict)

    @cached_property
    def tokenizer(self) -> Any:
        file = self.checkpoint / "tokenizer.json"
        if not file.is_file():
            raise InputError(f"{self.checkpoint}: no tokenizer.json, and tokens are strings; next: ask the server for ids (vLLM: return_tokens_as_token_ids)")
        from tokenizers import Tokenizer  # only strings need it

        try:
            return Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{file}: no tokenizer: {str(error).splitlines()[0]}") from None

    @cached_property
    def by_text(self) -> dict[str, set[int]]:
        """Decoded text, and the vocabulary's own spelling, to ids."""
        found: dict[str, set[int]] = {}
        for name, number in self.tokenizer.get_vocab(with_added_tokens=True).items():
            for text in {name, self.tokenizer.decode([number], skip_special_tokens=False)}:
                found.setdefault(text, set()).add(number)
        return found

    @cached_property
    def by_bytes(self) -> dict[tuple[int, ...], set[int]]:
        found: dict[tuple[int, ...], set[int]] = {}
        byte_of = _unicode_of_bytes()
        for name, number in self.tokenizer.get_vocab(with_added_tokens=False).items():
            if all(char in byte_of for char in name):
                found.setdefault(tuple(byte_of[char] for char in name), set()).add(number)
        return found

    def id_of(self, text: Any, where: str, raw: Any = None) -> int:
        """The one token that a string is; raw: its bytes, where the server tells them. Raises InputError where it is none or several."""
        if not isinstance(text, str):
            raise InputError(f"{where}: expected a token as a string, got {str(text)[:40]!r}")
        if text.startswith("token_id:") and text[9:].isascii() and text[9:].isdigit():
            return self.checked(int(text[9:]), where)
        spelled = tuple(raw) if isinstance(raw, list) and raw and list(text.encode()) != raw else None
        known = self._known.get((text, spelled))
        if known is None:
            ids = self.by_bytes.get(spelled, set()) if spelled is not None else self.by_text.get(text, set())
            if len(ids) != 1:
                many = f"may be token {', '.join(map(str, sorted(ids)[:4]))}{' ..' if len(ids) > 4 else ''}" if ids else "is no token of the checkpoint's tokenizer"
                raise InputError(f"{where}: {text!r} {many}; next: ask the server for ids (vLLM: return_tokens_as_token_ids)")
            known = self._known[text, spelled] = next(iter(ids))
        return self.checked(known, where)

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def checked(self, token: Any, where: str) -> int:
        if not isinstance(token, int) or isinstance(token, bool):
            raise InputError(f"{where}: expected a token id, got {str(token)[:40]!r}")
        if not 0 <= token < self.vocab_size:
            raise InputError(f"{where}: token id {token} is out of range 0..{self.vocab_size - 1}")
        return token

    def ids(self, values: Any, where: str) -> list[int]:
        if not isinstance(values, list):
            raise InputError(f"{where}: expected a list of token ids, got {type(values).__name__}")
        return [self.checked(value, f"{where}[{at}]") for at, value in enumerate(values)]


# ---- rows ----


def _number(value: Any, where: str) -> float:
    if isinstance(value, dict):  # vLLM: {"logprob": .., "rank": .., "decoded_token": ..}
        value = value.get("logprob")
    if not isinstance(value, int | float) or isinstance(value, bool) or math.isnan(value) or value == math.inf:
        raise InputError(f"{where}: expected a number, got {str(value)[:40]!r}")
    return -math.inf if value <= IMPOSSIBLE else float(value)


def _row(values: Mapping[int, float], full: bool, are_logits: bool, where: str) -> Row:
    """By falling value; logits become log-probabilities. Raises InputError on what can be neither."""
    ids = torch.tensor(list(values), dtype=torch.int64)
    numbers = torch.tensor(list(values.values()), dtype=torch.float64)
    if not are_logits and float(numbers.max()) > 1e-3:
        raise InputError(f"{where}: log-probability {float(numbers.max()):.6g} is above 0; logits go under the key \"logits\"")
    if are_logits and not bool(numbers.isfinite().any()):
        raise InputError(f"{where}: no finite logit")
    order = numbers.argsort(descending=True, stable=True)
    ids, numbers = ids[order], numbers[order]
    return Row(ids, numbers.log_softmax(-1) if are_logits else numbers, numbers, full)


def _plain_row(value: Any, are_logits: bool, words: Words, where: str) -> Row | None:
    """A list over the vocabulary, id -> value, or null."""
    if value is None:
        return None
    if isinstance(value, list):
        if len(value) != words.vocab_size:
            raise InputError(f"{where}: {len(value)} values, the vocabulary has {words.vocab_size}; parts of it go as an object, id -> value")
        return _row({token: _number(one, f"{where}[{token}]") for token, one in enumerate(value)}, True, are_logits, where)
    if not isinstance(value, dict) or not value:
        raise InputError(f"{where}: expected a list of {words.vocab_size} numbers, an object id -> number, or null; got {str(value)[:40]!r}")
    if are_logits and len(value) < words.vocab_size:
        raise InputError(f"{where}: logits of {len(value)} of {words.vocab_size} tokens say no probability; next: give log-probabilities")
    return _row(_by_id(value, words, where), len(value) == words.vocab_size, are_logits, where)


def _by_id(values: Mapping[str, Any], words: Words, where: str) -> dict[int, float]:
    """Keys are ids in JSON's words, or `token_id:N`."""
    found = {}
    for key, value in values.items():
        text = key.removeprefix("token_id:")
        if not (text.isascii() and text.isdigit()):
            raise InputError(f"{where}: {key!r} is no token id")
        found[words.checked(int(text), where)] = _number(value, f"{where}[{key}]")
    return found


# ---- a line ----


def _plain(line: Mapping[str, Any], words: Words, where: str, label: str) -> Given:
    tokens = words.ids(line["tokens"], f"{where}: tokens")
    kinds = [key for key in ("logits", "logprobs") if key in line]
    if len(kinds) != 1:
        raise InputError(f"{where}: expected logits or logprobs beside tokens, got {' and '.join(kinds) or 'neither'}; {NEXT}")
    rows = line[kinds[0]]
    if not isinstance(rows, list) or len(rows) != len(tokens):
        got = f"{len(rows)} rows" if isinstance(rows, list) else type(rows).__name__
        raise InputError(f"{where}: {kinds[0]}: {got} for {len(tokens)} tokens; row i says what comes after tokens 0 .. i, null where it is not known")
    prompt = line.get("prompt", len(tokens))
    if not isinstance(prompt, int) or isinstance(prompt, bool) or not 1 <= prompt <= len(tokens):
        raise InputError(f"{where}: prompt is {str(prompt)[:40]}, expected how many of the {len(tokens)} tokens are the prompt")
    read = {at: _plain_row(row, kinds[0] == "logits", words, f"{where}: {kinds[0]}[{at}]") for at, row in enumerate(rows)}
    return Given(label, tuple(tokens[:prompt]), tuple(tokens[prompt:]), {at: row for at, row in read.items() if row is not None})


def _answers(line: Mapping[str, Any], words: Words, where: str, label: str) -> list[Given]:
    """The choices of an answer, with the request beside it where the line has both."""
    request, answer = line.get("request", {}), line.get("response", line)
    if not isinstance(request, dict) or not isinstance(answer, dict) or not isinstance(answer.get("choices"), list):
        raise InputError(f"{where}: expected tokens with logits or logprobs, or an answer with choices; {NEXT}")
    found = []
    for number, choice in enumerate(answer["choices"]):
        at = f"{where}: choices[{number}]"
        if not isinstance(choice, dict) or not isinstance(choice.get("logprobs"), dict):
            raise InputError(f"{at}: no logprobs; next: ask for them (completions: \"logprobs\": 20; chat: \"logprobs\": true, \"top_logprobs\": 20)")
        name = label if len(answer["choices"]) == 1 else f"{label}, choice {number}"
        found.append(_choice(choice, request, answer, words, at, name))
    return found


def _choice(choice: Mapping[str, Any], request: Mapping[str, Any], answer: Mapping[str, Any], words: Words, where: str, label: str) -> Given:
    said = choice["logprobs"]
    entries = _chat_entries(said, words, where) if "content" in said and said["content"] is not None else _completion_entries(said, words, where)
    if not entries:
        raise InputError(f"{where}: logprobs hold no token")
    tokens = [token for token, _ in entries]
    usage = answer.get("usage") if isinstance(answer.get("usage"), dict) else {}
    prompt = _prompt(choice, request, answer, words, where)
    echoed = entries[0][1] is None or bool(request.get("echo"))
    if echoed:  # the prompt stands before the answer
        counted = len(prompt) if prompt is not None else usage.get("prompt_tokens") if isinstance(usage, dict) else None
        if not isinstance(counted, int) or not 1 <= counted <= len(tokens):
            raise InputError(f"{where}: the prompt is echoed, and nothing says where it ends; next: keep usage.prompt_tokens in the line, or prompt_token_ids")
        if prompt is not None and tokens[:counted] != prompt:
            at = next(i for i, (a, b) in enumerate(zip(tokens, prompt, strict=False)) if a != b)
            raise InputError(f"{where}: echoed token {at} is {tokens[at]}, the prompt has {prompt[at]}")
        prompt, tokens = tokens[:counted], tokens[counted:]
        rows = {at - 1: row for at, (_, row) in enumerate(entries) if at and row is not None}
    else:
        if prompt is None:
            raise InputError(f"{where}: the prompt's tokens are not in the line; next: keep prompt_token_ids (vLLM: \"return_token_ids\": true), or {{\"request\": {{\"prompt\": ..}}, \"response\": ..}}")
        rows = {len(prompt) + at - 1: row for at, (_, row) in enumerate(entries) if row is not None}
    told = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    if isinstance(told, int) and told != len(prompt):
        raise InputError(f"{where}: the prompt is {len(prompt)} tokens here, usage.prompt_tokens says {told}; next: keep prompt_token_ids in the line")
    own = choice.get("token_ids")
    if own is not None and words.ids(own, f"{where}: token_ids") != tokens:
        raise InputError(f"{where}: token_ids are not the tokens of logprobs")
    for at, row in enumerate(_prompt_rows(choice, answer, words, where, len(prompt))):
        if row is not None:
            rows[at] = row
    return Given(label, tuple(prompt), tuple(tokens), rows)


def _prompt(choice: Mapping[str, Any], request: Mapping[str, Any], answer: Mapping[str, Any], words: Words, where: str) -> list[int] | None:
    """Token ids of the prompt, from wherever the line has them; None: nowhere."""
    for holder in (choice, answer, request):
        if holder.get("prompt_token_ids") is not None:
            return words.ids(holder["prompt_token_ids"], f"{where}: prompt_token_ids")
    given = request.get("prompt", answer.get("prompt"))
    if isinstance(given, str):
        return words.encode(given)
    return None if given is None else words.ids(given, f"{where}: prompt")


def _prompt_rows(choice: Mapping[str, Any], answer: Mapping[str, Any], words: Words, where: str, count: int) -> list[Row | None]:
    """vLLM's prompt_logprobs: entry i is of token i, so it is row i - 1."""
    found = choice.get("prompt_logprobs", answer.get("prompt_logprobs"))
    if found is None:
        return []
    if not isinstance(found, list) or len(found) != count:
        got = f"{len(found)} entries" if isinstance(found, list) else type(found).__name__
        raise InputError(f"{where}: prompt_logprobs: {got}, expected one for each of the {count} tokens of the prompt")
    rows: list[Row | None] = []
    for at, entry in enumerate(found[1:], 1):
        if entry is not None and not isinstance(entry, dict):
            raise InputError(f"{where}: prompt_logprobs[{at}]: expected an object id -> log-probability, or null")
        spot = f"{where}: prompt_logprobs[{at}]"
        rows.append(None if not entry else _row(_by_id(entry, words, spot), len(entry) == words.vocab_size, False, spot))
    return rows


Entries = list[tuple[int, Row | None]]  # a token, and the row that it was taken from


def _completion_entries(said: Mapping[str, Any], words: Words, where: str) -> Entries:
    tokens, own, top = (said.get(key) for key in ("tokens", "token_logprobs", "top_logprobs"))
    if not isinstance(tokens, list) or not isinstance(own, list) or len(own) != len(tokens):
        raise InputError(f"{where}: logprobs need tokens and token_logprobs of one length")
    if top is not None and (not isinstance(top, list) or len(top) != len(tokens)):
        raise InputError(f"{where}: logprobs.top_logprobs: expected {len(tokens)} entries")
    entries: Entries = []
    for at, (text, value) in enumerate(zip(tokens, own, strict=True)):
        spot = f"{where}: logprobs.tokens[{at}]"
        token = words.id_of(text, spot)
        if value is None:
            entries.append((token, None))
            continue
        values = {words.id_of(word, f"{where}: logprobs.top_logprobs[{at}]"): _number(one, spot) for word, one in ((top[at] if top else None) or {}).items()}
        values[token] = _number(value, spot)
        entries.append((token, _row(values, len(values) == words.vocab_size, False, spot)))
    return entries


def _chat_entries(said: Mapping[str, Any], words: Words, where: str) -> Entries:
    entries: Entries = []
    content = said["content"]
    for at, entry in enumerate(content if isinstance(content, list) else []):
        spot = f"{where}: logprobs.content[{at}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("top_logprobs", []), list):
            raise InputError(f"{spot}: expected an object with token, logprob and top_logprobs")
        token = words.id_of(entry.get("token"), spot, entry.get("bytes"))
        values = {words.id_of(one.get("token"), spot, one.get("bytes")): _number(one.get("logprob"), spot) for one in entry.get("top_logprobs") or [] if isinstance(one, dict)}
        values[token] = _number(entry.get("logprob"), spot)
        entries.append((token, _row(values, len(values) == words.vocab_size, False, spot)))
    return entries


def read_logits(path: str | Path, checkpoint_dir: str | Path, vocab_size: int) -> list[Given]:
    """Every sequence of a file. Raises InputError, one line: what, where, expected against got, what next."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--logits {path}: {getattr(error, 'strerror', None) or 'not UTF-8'}; expected JSON lines") from None
    words, found = Words(Path(checkpoint_dir), vocab_size), []
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        where, label = f"--logits {path}:{number}", f"{path.name}:{number}"
        try:
            line = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: not a JSON line: {error}") from None
        if not isinstance(line, dict):
            raise InputError(f"{where}: expected an object, got {type(line).__name__}; {NEXT}")
        found += [_plain(line, words, where, label)] if "tokens" in line else _answers(line, words, where, label)
    for one in found:
        if not one.rows:
            raise InputError(f"--logits {one.label}: no row holds a number")
    if not found:
        raise InputError(f"--logits {path}: no line")
    return found


def steps_of(given: Iterable[Given]) -> int:
    """Decode steps up to the last row that is known; a sequence's last token is fed only where it has a row."""
    return max(0, *(max(one.rows) + 1 - len(one.prompt) for one in given))


# ---- what rounding costs ----


@dataclass(frozen=True)
class Rounding:
    """How finely numbers are written: words for people, and half a step of each number."""

    words: str
    decimals: int | None = None
    digits: int | None = None
    bits: int | None = None

    def half_step(self, numbers: Tensor) -> Tensor:
        """The most that rounding moved each number; minus infinity is not rounded."""
        size = numbers.abs().where(numbers.isfinite(), 0.0).clamp_min(1e-30)
        if self.decimals is not None:
            return torch.full_like(numbers, 0.5 * 10.0**-self.decimals)
        if self.digits is not None:
            return 0.5 * 10.0 ** (size.log10().floor() - self.digits + 1)
        if self.bits is not None:
            return 0.5 * 2.0 ** (size.log2().floor() - self.bits)
        return torch.zeros_like(numbers)

    def rounded(self, numbers: Tensor, shift: float = 0.0) -> Tensor:
        """The numbers written so, on a grid that is shifted by this share of a step: another chance of what rounding does."""
        step = 2 * self.half_step(numbers)
        return torch.where(step > 0, ((numbers / step + shift).round() - shift) * step, numbers)


def rounding_of(numbers: Tensor) -> Rounding:
    """The coarsest way of writing that all of these finite numbers [n] fit: decimals, bf16, fp16, significant digits; else none."""
    numbers = numbers[numbers.isfinite() & (numbers != 0)]
    if not len(numbers):
        return Rounding("as given")
    for decimals in range(9):
        scaled = numbers * 10.0**decimals
        if bool(((scaled - scaled.round()).abs() <= 1e-9 * scaled.abs().clamp_min(1)).all()):
            return Rounding(f"{decimals} decimals", decimals=decimals)
    for name, dtype, bits in (("bf16", torch.bfloat16, 7), ("fp16", torch.float16, 10)):
        if torch.equal(numbers.to(dtype).double(), numbers):
            return Rounding(name, bits=bits)
    for digits in range(2, 7):
        if all(float(f"{x:.{digits}g}") == x for x in numbers[:4096].tolist()):
            return Rounding(f"{digits} significant digits", digits=digits)
    return Rounding("as given")


