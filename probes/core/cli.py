"""The command line that every probe shares: arguments, exit codes, a table for people and one JSON line last.

    parser = probe_parser("layers", DESCRIPTION, EXAMPLE); return answer("layers", parser, argv, measure)

Exit 0 measured, 2 bad input (one line, no traceback), 3 could not measure (one line, and a JSON line that says why), 141 the reader left (`| head`).
No model is named here: probes load them. Tests: parity/unit/test_probes.py.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn, TextIO

from probes.core.inputs import DEFAULT_PROMPT, Prompt, check_context, read_prompts
from probes.core.pipe import piped
from probes.core.records import to_wire
from reference.config import InputError, ModelConfig

MEASURED, BAD_INPUT, COULD_NOT_MEASURE = 0, 2, 3
DEFAULT_CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
DEFAULT_CONTEXT = 8192
PHASES = ("prefill", "decode")


class CannotMeasureError(RuntimeError):
    """The probe ran and has nothing to show, e.g. a tap that never fired. Exit code 3."""


# ---- arguments ----


class _Parser(argparse.ArgumentParser):
    """Usage errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def bare_parser(name: str, description: str, example: str) -> argparse.ArgumentParser:
    """A probe's parser without any option."""
    return _Parser(
        prog=f"python -m probes.{name}",
        description=description,
        epilog=f"example:\n  {example}\n\nexit codes: 0 measured, 2 bad input, 3 could not measure",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def probe_parser(name: str, description: str, example: str, steps: int = 8) -> argparse.ArgumentParser:
    """A parser with the options of a probe that runs models on prompts."""
    parser = bare_parser(name, description, example)
    parser.add_argument(
        "--checkpoint", metavar="DIR", default=str(DEFAULT_CHECKPOINT), help="checkpoint directory (default: the bundled one)"
    )
    parser.add_argument(
        "--prompt",
        metavar="FILE[:START:END]",
        action="append",
        help=f"one batch row each (default: {DEFAULT_PROMPT}); .txt, or .json of token ids",
    )
    parser.add_argument("--phase", choices=(*PHASES, "both"), default="both", help="what to show (default: both)")
    parser.add_argument("--steps", metavar="N", type=count, default=steps, help=f"decode steps (default: {steps})")
    parser.add_argument(
        "--layers", metavar="LIST", help="layers to show, e.g. 0-3,7 (default: all); all layers up to the highest run"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where production's kernels run (default: cpu)"
    )
    parser.add_argument("--decode", choices=("eager", "replay"), default="eager", help="launch by launch, or from a captured graph (default: eager)")
    parser.add_argument("--variants", choices=("portable", "fast"), help="kernel variants of production (default: fast on sm_90a, else portable)")
    parser.add_argument(
        "--max-context",
        metavar="N",
        type=positive,
        help=f"tokens a row may hold (default: {DEFAULT_CONTEXT}, or the model's own limit)",
    )
    return parser


def count(text: str) -> int:
    """An argument that is a whole number from 0 on."""
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"expected a count, got {text!r}")
    return int(text)


def positive(text: str) -> int:
    """An argument that is a whole number from 1 on."""
    if count(text) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {text!r}")
    return int(text)


def parse_layers(text: str | None, layer_count: int) -> tuple[int, ...]:
    """The layers of a list such as `0-3,7`, ascending; None is all. Raises InputError that quotes the bad part."""
    if text is None:
        return tuple(range(layer_count))
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,6})(?:-(\d{1,6}))?\s*", part, re.ASCII)
        if match is None:
            raise InputError(f"--layers {text}: {part!r} is neither a layer nor a range such as 0-3")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise InputError(f"--layers {text}: range {part.strip()} runs backwards")
        if last >= layer_count:
            raise InputError(f"--layers {text}: layer {last} does not exist; the checkpoint has layers 0-{layer_count - 1}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


@dataclass(frozen=True)
class Ask:
    """What was asked, checked against the checkpoint's config.

    layers   to show; layers_run  None for all, else the prefix range up to the highest
    phases   to show; a decode needs its prefill run either way
    """

    checkpoint: str
    config: ModelConfig
    prompts: tuple[Prompt, ...]
    phases: tuple[str, ...]
    steps: int
    layers: tuple[int, ...]
    layers_run: range | None
    device: str
    max_context: int
    decode: str = "eager"
    variants: str | None = None

    def facts(self) -> dict[str, Any]:
        """For the JSON line: what this was measured on."""
        return {
            "checkpoint": self.checkpoint,
            "prompts": [prompt.label for prompt in self.prompts],
            "tokens": [len(prompt.ids) for prompt in self.prompts],
            "phases": list(self.phases),
            "steps": self.steps,
            "layers": list(self.layers),
            "device": self.device,
            "decode": self.decode,
            "variants": self.variants,
        }


def ask_of(args: argparse.Namespace) -> Ask:
    """Check the common options. Raises InputError before any weight is read."""
    config = ModelConfig.from_dir(args.checkpoint)
    phases = PHASES if args.phase == "both" else (args.phase,)
    steps = args.steps if "decode" in phases else 0
    if phases == ("decode",) and steps == 0:
        raise InputError("--phase decode --steps 0: nothing to show; give at least one step")
    layers = parse_layers(args.layers, config.num_hidden_layers)
    most = config.max_position_embeddings
    max_context = min(DEFAULT_CONTEXT, most) if args.max_context is None else args.max_context
    if max_context > most:
        raise InputError(f"--max-context {max_context}: expected at most max_position_embeddings = {most}")
    prompts = read_prompts(args.prompt or (), args.checkpoint, config.vocab_size)
    check_context(prompts, steps, max_context)
    highest = max(layers) + 1
    return Ask(
        checkpoint=str(args.checkpoint),
        config=config,
        prompts=prompts,
        phases=phases if steps else ("prefill",),
        steps=steps,
        layers=layers,
        layers_run=None if highest == config.num_hidden_layers else range(highest),
        device=args.device,
        max_context=max_context,
        decode=args.decode,
        variants=args.variants,
    )


# ---- answers ----


@dataclass
class Table:
    """For people. Cells are text; numbers go through `number`."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)

    def add(self, *cells: object) -> None:
        self.rows.append([number(c) if isinstance(c, float) else str(c) for c in cells])


def number(value: float | None) -> str:
    """Four significant digits, exponents for the very small and large."""
    if value is None:
        return "-"
    return f"{value:.4g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.2e}"


@dataclass
class Answer:
    """What a probe found: tables, lines under them, and the JSON line's content."""

    tables: list[Table]
    values: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def show(answered: Answer, out: TextIO) -> None:
    """Print tables and notes: drawn on a terminal, plain aligned text elsewhere."""
    if out.isatty():
        from rich.console import Console
        from rich.table import Table as Drawn
        from rich.text import Text

        console = Console(file=out)
        for table in answered.tables:
            drawn = Drawn(title=table.title, title_justify="left")
            for at, column in enumerate(table.columns):
                drawn.add_column(Text(column), justify="left" if at == 0 else "right", overflow="fold")
            for row in table.rows:
                drawn.add_row(*map(Text, row))
            console.print(drawn)
    else:
        for table in answered.tables:
            lines = [list(table.columns), *table.rows]
            widths = [max(len(row[i]) for row in lines) for i in range(len(table.columns))]
            print(table.title, file=out)
            for row in lines:
                cells = [
                    cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
                ]
                print("  " + "  ".join(cells).rstrip(), file=out)
            print(file=out)
    for note in answered.notes:
        print(note, file=out)


def json_line(values: dict[str, Any]) -> str:
    """Strict JSON on one line; non-finite numbers are the strings "nan", "inf", "-inf"."""
    return json.dumps(to_wire(values), allow_nan=False, ensure_ascii=True)


def say(text: str) -> None:
    """Progress, on stderr: stdout is the answer."""
    print(text, file=sys.stderr, flush=True)


def answer(
    name: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Callable[[argparse.Namespace], Answer]
) -> int:
    """Parse, measure, print; the exit code."""
    return piped(lambda: _answer(name, parser, argv, measure))


def _answer(
    name: str, parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Callable[[argparse.Namespace], Answer]
) -> int:
    args = parser.parse_args(argv)
    try:
        answered = measure(args)
    except InputError as error:
        say(f"{parser.prog}: {error}")
        return BAD_INPUT
    except (RuntimeError, ImportError, OSError, MemoryError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        say(f"{parser.prog}: could not measure: {reason}")
        print(json_line({"probe": name, "measured": False, "reason": reason}))
        return COULD_NOT_MEASURE
    show(answered, sys.stdout)
    print(json_line({"probe": name, "measured": True, **answered.values}))
    return MEASURED
