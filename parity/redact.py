"""--redact: what a run says of a prompt without saying the prompt. Records in, records out; the report is made from those.

    redactor = Redactor(prompts, checkpoint_hash, decode); ledger.write(redactor(record))

Left out: names of files that prompts, a trace or logits come from, greedy text, coordinates in the vocabulary, messages of
exceptions whatever they say, and every run of the prompt's text or token ids that a message repeats; of a short prompt the whole. Kept: how many tokens, and a hash of the ids. The hash has no secret in it: the same prompt on the same checkpoint has
the same one, so runs can be compared, and who guesses the prompt can confirm the guess. No repro file is written: a layer's
input is enough to read the prompt back. Numbers about tokens (expert ids, positions, errors) stay. Tests: parity/unit/test_redact.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from parity.foreign import LEFT_OUT
from probes.core.inputs import Prompt
from probes.core.records import Header, Record, Verdict

HIDDEN = "(redacted)"
NO_REPRO = "--redact: a repro holds the layer's input, from which the prompt can be read back; next: run without --redact on your own machine"
SHORTEST_TEXT = 32  # characters of the prompt in a row that are no coincidence
SHORTEST_IDS = 6
LEAST_TEXT, LEAST_IDS = 4, 2  # of a whole prompt that is shorter than that
RAISED = re.compile(r"\b([A-Za-z_]\w*(?:Error|Exception)|SystemExit|Exit|Skipped): (?!%s).+" % re.escape(LEFT_OUT), re.DOTALL)  # noqa: UP031 (braces)
LISTED = re.compile(r"\d+(?:\D{1,4}\d+)+")
FILES = ("--prompt", "--logits", "--trace", "--trace-dir")  # options whose value is left out
ONE_ID = re.compile(r"(?i)(\btokens?(?: id|\[[\d, ]+\] =) )-?\d+")  # token id 17; tokens[0, 3] = 17
VOCABULARY = ("logits", "greedy")  # first words of gates whose last coordinate is a token id
TEXT = re.compile(r"(^|_)text(_|$)")  # keys of what a model or a tokenizer wrote


def prompt_hash(ids: Sequence[int], salt: str) -> str:
    """16 hex digits of SHA-256 over salt and ids. salt  the checkpoint's hash: nothing random, so that runs agree."""
    return hashlib.sha256(f"{salt}:{','.join(map(str, ids))}".encode()).hexdigest()[:16]


class Redactor:
    """decode  token ids -> text, where the checkpoint has a tokenizer; files  prompts as given on the command line."""

    def __init__(self, prompts: Sequence[Prompt], salt: str, decode: Callable[[list[int]], str] | None = None, files: Sequence[str] = (), steps: int = 0, door: str = "") -> None:
        self.salt, self.door = salt, door
        self.labels = [f"row {row} {HIDDEN}: sha256 {prompt_hash(p.ids, salt)}" for row, p in enumerate(prompts)]
        self.names = _names([*files, *(p.label for p in prompts)])
        fed = [[*p.ids, *p.continuation[: steps + SHORTEST_IDS]] for p in prompts]
        self.ids = {tuple(ids[i : i + SHORTEST_IDS]) for ids in fed for i in range(len(ids) - SHORTEST_IDS + 1)}
        texts = [" ".join(decode(ids).split()) for ids in fed] if decode is not None else []
        self.short_ids = {tuple(p.ids) for p in prompts if LEAST_IDS <= len(p.ids) < SHORTEST_IDS}
        whole = [" ".join(decode(list(p.ids)).split()) for p in prompts] if decode is not None else []
        self.short_texts = [re.compile(rf"(?<!\w){re.escape(text)}(?!\w)") for text in whole if LEAST_TEXT <= len(text) < SHORTEST_TEXT]
        self.pieces = {text[i : i + SHORTEST_TEXT] for text in texts for i in range(len(text) - SHORTEST_TEXT + 1)}

    def __call__(self, record: Record) -> Any:
        """The record without the prompt."""
        if isinstance(record, Header):
            production = f"{self.door} {HIDDEN}" if self.door else self.text(record.production)
            notes = [self.text(note.replace(f"{record.production}: ", f"{production}: ")) for note in record.notes]
            return replace(self._scrubbed(record), prompts=self.labels, command=self.command(record.command), production=production, notes=notes, redacted=True)
        if isinstance(record, Verdict) and record.gate.split(".")[0] in VOCABULARY:
            record = replace(record, element=[])
        return self._scrubbed(record)

    def command(self, line: str) -> str:
        """What was typed, without the prompts."""
        words: list[str] = []
        for word in shlex.split(line):
            if words and words[-1] in FILES:
                word = HIDDEN
            elif word.split("=")[0] in FILES and "=" in word:
                word = f"{word.split('=')[0]}={HIDDEN}"
            words.append(word)
        return self.text(shlex.join(words))

    def text(self, said: str) -> str:
        """A message without file names, stretches of the prompt, lists of its ids, or what an exception says."""
        said = RAISED.sub(rf"\1: {LEFT_OUT}", said)
        for name in self.names:
            said = said.replace(name, HIDDEN)
        said = LISTED.sub(self._numbers, said)
        said = ONE_ID.sub(rf"\1{HIDDEN}", said)
        return HIDDEN if self._repeats(said) else said

    def _numbers(self, match: re.Match[str]) -> str:
        return self._ids([int(n) for n in re.findall(r"\d+", match[0])]) or match[0]

    def _ids(self, numbers: list[int]) -> str:
        """A list that repeats the prompt's ids, as a hash; empty where it does not."""
        if any(tuple(numbers[i : i + SHORTEST_IDS]) in self.ids for i in range(len(numbers) - SHORTEST_IDS + 1)) or any(
            tuple(numbers[i : i + len(ids)]) == ids for ids in self.short_ids for i in range(len(numbers) - len(ids) + 1)
        ):
            return f"{HIDDEN}: {len(numbers)} numbers"
        return ""

    def _repeats(self, said: str) -> bool:
        flat = " ".join(said.split())
        if any(text.search(flat) for text in self.short_texts):
            return True
        return bool(self.pieces) and any(flat[i : i + SHORTEST_TEXT] in self.pieces for i in range(len(flat) - SHORTEST_TEXT + 1))

    def _value(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {self.text(str(k)): hidden(v) if TEXT.search(str(k)) else self._value(v) for k, v in value.items()}
        if isinstance(value, list | tuple):
            if len(value) >= LEAST_IDS and all(type(v) is int for v in value):
                return self._ids(list(value)) or value
            return [self._value(v) for v in value]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return self._scrubbed(value)
        return value

    def _scrubbed(self, record: Any) -> Any:
        """A record with its words and free-form values scrubbed; lists that are numbers by type are coordinates and counts."""
        changed: dict[str, Any] = {}
        for one in dataclasses.fields(record):
            old = getattr(record, one.name)
            if type(old) in (str, dict) or dataclasses.is_dataclass(old) or (isinstance(old, list) and not all(type(v) is int for v in old)):
                new = self._value(old)
                if new != old:
                    changed[one.name] = new
        return replace(record, **changed) if changed else record


def decoder_of(checkpoint: Path) -> Callable[[list[int]], str] | None:
    """Token ids -> text by the checkpoint's tokenizer; None where it has none: then no text can be known either."""
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False))


def hidden(value: Any) -> Any:
    """Text in any shape, without its letters; an empty one stays empty."""
    if isinstance(value, str):
        return HIDDEN if value else value
    if isinstance(value, list):
        return [hidden(v) for v in value]
    if isinstance(value, dict):
        return {k: hidden(v) for k, v in value.items()}
    return value


def _names(given: Sequence[str]) -> list[str]:
    """Every way a prompt's file may be named in a message, the longest first."""
    names: set[str] = set()
    for one in given:
        name = one.rsplit(":", 2)[0] if one.count(":") >= 2 else one
        names |= {one, name, Path(name).name}
    return sorted((n for n in names if len(n) > 3), key=len, reverse=True)
