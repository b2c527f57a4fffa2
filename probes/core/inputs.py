"""What runs are fed: prompts of real text, lengths at the edges, and tensors that punish a kernel for looking too far.

    read_prompt("medium.txt:0:250", checkpoint_dir, vocab_size)   # names without a path lie in the checkpoint's prompts/

A prompt is FILE[:START:END], START and END in tokens. `.txt` goes through the checkpoint's tokenizer.json, without BOS;
`.json` is a list of token ids and needs no tokenizer. Tests: parity/unit/test_inputs.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.core.wording import plural
from reference.config import InputError

DEFAULT_PROMPT = "medium.txt:0:250"
PROMPTS_DIR = "prompts"


# ---- prompts ----


@dataclass(frozen=True)
class Prompt:
    """Tokens of one batch row.

    label         as given on the command line
    ids           the prompt, never empty
    continuation  the text's tokens after END: fed one by one in decode, so that decode runs on real text
    """

    label: str
    ids: tuple[int, ...]
    continuation: tuple[int, ...]


def read_prompt(given: str, checkpoint_dir: str | Path, vocab_size: int) -> Prompt:
    """Parse and read FILE[:START:END]. Raises InputError, one line."""
    path, start, end = _split(given, Path(checkpoint_dir))
    if path.suffix == ".json":
        ids = _json_ids(path)
    elif path.suffix == ".txt":
        ids = _text_ids(path, Path(checkpoint_dir))
    else:
        raise InputError(f"--prompt {given}: {path.name} is neither .txt (text) nor .json (token ids)")
    for at, token in enumerate(ids):
        if not 0 <= token < vocab_size:
            raise InputError(f"{path}: token id {token} at {at} is out of range 0..{vocab_size - 1}")
    if not ids:
        raise InputError(f"{path}: empty prompt")
    stop = len(ids) if end is None else end
    if stop > len(ids) or start >= len(ids):
        raise InputError(f"--prompt {given}: START {start}, END {stop} reach past the text's {len(ids)} tokens")
    if start >= stop:
        raise InputError(f"--prompt {given}: empty prompt: START {start} is not before END {stop}")
    return Prompt(given, tuple(ids[start:stop]), tuple(ids[stop:]))


def read_prompts(given: Sequence[str], checkpoint_dir: str | Path, vocab_size: int) -> tuple[Prompt, ...]:
    """One prompt per batch row; the default prompt when none is given."""
    return tuple(read_prompt(one, checkpoint_dir, vocab_size) for one in (given or (DEFAULT_PROMPT,)))


def check_context(prompts: Sequence[Prompt], steps: int, max_context: int) -> None:
    """Raises InputError that names `--max-context` when a prompt and its steps do not fit."""
    for prompt in prompts:
        if len(prompt.ids) + steps > max_context:
            raise InputError(
                f"--prompt {prompt.label}: {plural(len(prompt.ids), 'token')} and {plural(steps, 'step')} need --max-context "
                f"{len(prompt.ids) + steps}, got {max_context}"
            )


def batch_of(prompts: Sequence[Prompt]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [b, s] int64 and lengths [b] int64; pads repeat the row's last token."""
    lengths = torch.tensor([len(prompt.ids) for prompt in prompts])
    width = int(lengths.max())
    rows = [[*prompt.ids, *[prompt.ids[-1]] * (width - len(prompt.ids))] for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64), lengths


def forced_tokens(prompts: Sequence[Prompt], steps: int) -> Tensor:
    """[b, steps] int64: each row's continuation, -1 from where its text ends (there the caller chooses the token)."""
    rows = [[*prompt.continuation[:steps], *[-1] * (steps - len(prompt.continuation))] for prompt in prompts]
    return torch.tensor(rows, dtype=torch.int64).reshape(len(prompts), steps)


def _split(given: str, checkpoint: Path) -> tuple[Path, int, int | None]:
    """File, START and END of what was typed; a file whose whole name matches wins over a range."""
    whole = _find(given, checkpoint)
    if whole is not None:
        return whole, 0, None
    name, *numbers = given.rsplit(":", 2)
    if len(numbers) != 2:
        raise InputError(
            f"--prompt {given}: " + (_no_file(given, checkpoint) if ":" not in given else "expected FILE[:START:END]")
        )
    for number in numbers:
        if number and not (number.isascii() and number.isdigit() and len(number) < 16):
            raise InputError(f"--prompt {given}: expected FILE[:START:END] with token counts, got {number!r}")
    path = _find(name, checkpoint)
    if path is None:
        raise InputError(f"--prompt {given}: {_no_file(name, checkpoint)}")
    return path, int(numbers[0] or 0), int(numbers[1]) if numbers[1] else None


def _find(name: str, checkpoint: Path) -> Path | None:
    """The file of a name: in the checkpoint's prompts/ when it carries no path, else where it says."""
    candidates = [Path(name)]
    if name and Path(name).name == name:
        candidates.insert(0, checkpoint / PROMPTS_DIR / name)
    try:
        return next((path for path in candidates if path.is_file()), None)
    except (OSError, ValueError):  # a name no file can have
        return None


def _no_file(name: str, checkpoint: Path) -> str:
    prompts = checkpoint / PROMPTS_DIR
    there = sorted(path.name for path in prompts.glob("*") if path.is_file()) if prompts.is_dir() else []
    return f"no such file {name!r}" + (f"; {prompts} has {', '.join(there)}" if there else "")


def _json_ids(path: Path) -> list[int]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as error:
        raise InputError(f"{path}: broken JSON: {error}") from None
    if not isinstance(values, list):
        raise InputError(f"{path}: expected a list of token ids, got {type(values).__name__}")
    for at, token in enumerate(values):
        if not isinstance(token, int) or isinstance(token, bool):
            raise InputError(f"{path}: expected token ids, got {str(token)[:40]!r} at {at}")
    return values


def _text_ids(path: Path, checkpoint: Path) -> list[int]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: cannot be read as UTF-8 text: {error}") from None
    file = checkpoint / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{checkpoint}: no tokenizer.json for {path.name}; give token ids as a .json prompt instead")
    from tokenizers import Tokenizer  # only text needs it

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise InputError(f"{file}: no tokenizer: {str(error).splitlines()[0]}") from None
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


# ---- lengths ----


def edge_lengths(window: int, ratios: Iterable[int], most: int | None = None) -> tuple[int, ...]:
    """Token counts around everything that turns over: 1, and one below, at and above each ratio, the window and twice it."""
    edges = {1, 2}
    for turn in (*(r for r in ratios if r > 0), window, 2 * window):
        edges |= {turn - 1, turn, turn + 1}
    return tuple(sorted(n for n in edges if n > 0 and (most is None or n <= most)))


# ---- hostile tensors ----

GUARD = 64  # elements on either side of what a kernel may touch
ROW_PAD = 16  # elements between rows of a strided view


class Hostile:
    """Inputs inside NaN memory, and outputs that show what was not written or written too far.

    Everything follows from `seed`; nothing depends on the order of calls. Views keep their last axis contiguous and their
    rows (axis 0) apart; `packed` gives a contiguous tensor that still has NaN on both sides.
    """

    def __init__(self, seed: int = 0, device: str | torch.device = "cpu") -> None:
        self.seed = seed
        self.device = torch.device(device)
        self._outputs: list[tuple[str, Tensor, int]] = []  # name, whole memory, elements owned

    # inputs

    def bf16(
        self,
        shape: Sequence[int],
        seed: int,
        scale: float = 1.0,
        lo: float | None = None,
        hi: float | None = None,
        packed: bool = False,
    ) -> Tensor:
        """bf16 values inside NaN memory: normal times scale, or uniform between lo and hi."""
        return self._inside(self._random(shape, seed, scale, lo, hi).bfloat16(), packed)

    def f32(
        self,
        shape: Sequence[int],
        seed: int,
        scale: float = 1.0,
        lo: float | None = None,
        hi: float | None = None,
        packed: bool = False,
    ) -> Tensor:
        """fp32 values inside NaN memory: normal times scale, or uniform between lo and hi."""
        return self._inside(self._random(shape, seed, scale, lo, hi), packed)

    def strided(self, tensor: Tensor) -> Tensor:
        """The same values as a view whose rows lie apart in memory full of NaN (other types: -1 or 0xFF)."""
        return self._inside(tensor, packed=False)

    def packed(self, tensor: Tensor) -> Tensor:
        """The same values, contiguous, with NaN before and after."""
        return self._inside(tensor, packed=True)

    # outputs

    def poisoned(self, shape: Sequence[int], dtype: torch.dtype, device: str | torch.device | None = None) -> Tensor:
        """A contiguous output full of NaN (integers -1, bytes 0xFF) whose surroundings `check_guards` watches."""
        owned = math.prod(shape)
        memory = torch.empty(owned + 2 * GUARD, dtype=dtype, device=self.device if device is None else torch.device(device))
        _poison(memory)
        self._outputs.append((f"{dtype} {list(shape)}", memory, owned))
        return memory[GUARD : GUARD + owned].view(tuple(shape))

    def check_guards(self) -> None:
        """Raises AssertionError when something was written around a poisoned output."""
        for name, memory, owned in self._outputs:
            clean = torch.empty(GUARD, dtype=memory.dtype, device=memory.device)
            _poison(clean)
            for side, guard in (("before", memory[:GUARD]), ("after", memory[GUARD + owned :])):
                changed = (guard.view(torch.uint8) != clean.view(torch.uint8)).nonzero()
                if len(changed):
                    byte = int(changed[0])
                    raise AssertionError(f"output {name}: byte {byte} of the guard {side} it was written; nobody owns it")

    # making them

    def _random(self, shape: Sequence[int], seed: int, scale: float, lo: float | None, hi: float | None) -> Tensor:
        generator = torch.Generator().manual_seed((self.seed << 20) ^ seed)
        if lo is None and hi is None:
            return torch.randn(tuple(shape), generator=generator) * scale
        low, high = (-1.0 if lo is None else lo), (1.0 if hi is None else hi)
        return low + (high - low) * torch.rand(tuple(shape), generator=generator)

    def _inside(self, tensor: Tensor, packed: bool) -> Tensor:
        tensor = tensor.detach().to(self.device)
        rows = 1 if packed or tensor.dim() < 2 else tensor.shape[0]
        width = tensor.numel() // rows if rows else 0
        apart = width if rows <= 1 else width + ROW_PAD
        memory = torch.empty(2 * GUARD + rows * apart, dtype=tensor.dtype, device=self.device)
        _poison(memory)
        body = memory[GUARD : GUARD + rows * apart]
        view = body.view(rows, apart)[:, :width].view(tensor.shape)
        view.copy_(tensor)
        return view


def _poison(memory: Tensor) -> None:
    """NaN for floats, all bits set for everything else (-1, 0xFF, also NaN as e8m0 and e4m3)."""
    if memory.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        memory.fill_(math.nan)
    else:
        memory.view(torch.uint8).fill_(0xFF)
