"""A factory that changes torch for the whole process: its settings hold in its own calls, the reference keeps its own, the header says so."""

from __future__ import annotations

import ast
import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples import small_engine
from parity.unit.test_generic import Llama, pytest_parity
from parity.unit.test_session import Shell
from probes.core.records import State
from probes.outside.protocol import wrap
from probes.outside.settings import SETTINGS, SPACES, Settings

HERE = "parity.unit.test_settings"
SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20")
OTHER: dict[str, Any] = {  # a value that is not the one at the start
    "default dtype": torch.bfloat16, "default device": torch.device("meta"), "float32 matmul precision": "medium", "gradients": False, "threads": 3,
    "deterministic algorithms": 1, "cudnn TF32": False, "reduced precision sums of BF16": False, "reduced precision sums of FP16": False,
    **{name: "tf32" for name in SETTINGS if name.endswith("fp32_precision")}, "torch.backends.cudnn.conv.fp32_precision": "ieee", "torch.backends.cudnn.rnn.fp32_precision": "ieee",
}  # fmt: skip


def change() -> None:
    torch.backends.cudnn.allow_tf32 = False
    torch.set_num_threads(3)


def check() -> None:
    """Its own settings hold where its own code runs."""
    assert not torch.backends.cudnn.allow_tf32
    assert torch.get_num_threads() == 3


class Rude(small_engine.Adapter):
    def prefill(self, tokens, state):
        check()
        return super().prefill(tokens, state)

    def decode(self, tokens, state):
        check()
        return super().decode(tokens, state)


def rude(checkpoint_dir: Path, layers: range) -> Any:
    model = small_engine.open_engine(checkpoint_dir, layers)
    model.__class__ = Rude
    change()
    return model


def rude_llama() -> Llama:
    model = Llama()
    change()
    torch.set_default_dtype(torch.bfloat16)
    return model


def held() -> dict[str, Any]:
    found = {}
    for name, (get, _) in SETTINGS.items():
        with contextlib.suppress(RuntimeError):  # old and new names of a precision were mixed
            found[name] = get()
    return found


def softer(self: Any, dim: int) -> Any:
    return self * 0


def patching(checkpoint_dir: Path, layers: range) -> Any:
    """As a library of kernels does: its own functions where torch has one. With PATCH set; it is a right one without."""
    if os.environ.get("PATCH"):
        before = torch.nn.functional.softplus
        torch.nn.functional.softplus = lambda *args, **kwargs: before(*args, **kwargs) * 1.05
    return small_engine.open_engine(checkpoint_dir, layers)


def precise(checkpoint_dir: Path, layers: range) -> Any:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    torch.backends.mkldnn.rnn.fp32_precision = "bf16"  # type: ignore[attr-defined]  # its matmuls would be red here for what they compute
    return small_engine.open_engine(checkpoint_dir, layers)


@pytest.fixture(autouse=True)
def _back():
    before, functions = held(), {space: dict(vars(of)) for space, of in SPACES.items()}
    yield
    for _ in range(2):  # the first may have changed the second
        for name, value in before.items():
            if held().get(name) != value:
                SETTINGS[name][1](value)
    for space, names in functions.items():
        for name in set(names) ^ set(vars(SPACES[space])):
            if isinstance(SPACES[space], type):
                delattr(SPACES[space], name)
        for name, value in names.items():
            if vars(SPACES[space]).get(name) is not value:
                setattr(SPACES[space], name, value)


def test_every_setting_is_tried():
    assert set(OTHER) == set(SETTINGS)


@pytest.mark.parametrize("name", OTHER)
def test_what_is_set_inside_is_kept_for_inside(name):
    before, settings = held(), Settings()

    def fails() -> None:
        with settings.theirs():
            SETTINGS[name][1](OTHER[name])
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert held() == before
    (note,) = settings.notes()
    assert note.startswith("torch settings of its own, in its own calls only: ")
    assert f"{name} {OTHER[name]} (here {before[name]})" in note
    if "precision" not in name and "TF32" not in name:  # these have several names each
        assert note.count("(here") == 1
    SETTINGS[name][1](OTHER[name])
    theirs = held()
    for other, value in before.items():
        SETTINGS[other][1](value)
    assert held() == before
    for _ in range(2):
        with settings.theirs(), settings.theirs():
            assert held() == theirs
        assert held() == before
    with settings.theirs():
        for other, value in before.items():
            SETTINGS[other][1](value)
    assert settings.notes() == []


def test_old_and_new_names_of_a_precision_may_be_mixed():
    """torch then refuses to tell the old one: it is left out, and both are back behind the call."""
    before, settings = held(), Settings()
    for _ in range(2):
        with settings.theirs():
            torch.set_float32_matmul_precision("medium")
            torch.backends.mkldnn.matmul.fp32_precision = "tf32"  # type: ignore[attr-defined]
            torch.backends.cudnn.conv.fp32_precision = "ieee"  # type: ignore[attr-defined]
            assert "float32 matmul precision" not in held()
        assert held() == before
    (note,) = settings.notes()
    assert "torch.backends.mkldnn.matmul.fp32_precision tf32 (here " in note
    assert "float32 matmul precision medium" not in note
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # the audit's own may be unreadable too
    with settings.theirs():
        pass
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


@pytest.mark.parametrize(("space", "name"), [("torch", "einsum"), ("torch.nn.functional", "softplus"), ("torch.Tensor", "softmax"), ("torch.Tensor", "__matmul__"), ("torch.linalg", "vector_norm")])
def test_a_function_of_torch_that_is_replaced_stands_in_its_own_calls_only(space, name):
    of, settings = SPACES[space], Settings()
    had, before = name in vars(of), getattr(of, name)

    def fails() -> None:
        with settings.theirs():
            setattr(of, name, softer)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    for _ in range(2):
        assert getattr(of, name) is before or getattr(of, name) == before
        assert (name in vars(of)) == had
        assert settings.notes() == [f"functions of torch that it replaces, in its own calls only: {space}.{name}"]
        with settings.theirs():
            assert getattr(of, name) is softer
    with settings.theirs():
        if had:
            setattr(of, name, before)
        else:
            delattr(of, name)
    assert settings.notes() == []


def test_every_function_of_torch_that_the_reference_names_is_watched():
    """Names that reference/ calls, read from its source."""
    used = set()
    for file in (Path(__file__).parents[2] / "reference").glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("torch."):
                used |= set(re.findall(r"^(torch[.\w]*)\.\w+$", ast.unparse(node.func)))
    assert {"torch", "torch.nn.functional"} <= used <= set(SPACES)


def test_names_that_are_added_stay_and_a_call_costs_little():
    settings = Settings()
    try:
        with settings.theirs():
            torch.of_its_own = softer  # type: ignore[attr-defined]
        assert torch.of_its_own is softer  # type: ignore[attr-defined]
        assert settings.notes() == []
    finally:
        del torch.of_its_own  # type: ignore[attr-defined]

    def once() -> float:
        start = time.perf_counter()
        with settings.theirs():
            pass
        return time.perf_counter() - start

    assert min(once() for _ in range(50)) < 1e-3


def test_a_setting_of_ours_that_changes_between_calls_reaches_theirs():
    settings = Settings()
    with settings.theirs():
        torch.set_default_dtype(torch.bfloat16)
    torch.set_num_threads(3)
    with settings.theirs():
        assert torch.get_num_threads() == 3
        assert torch.get_default_dtype() is torch.bfloat16


def test_a_model_that_changes_nothing_has_no_note():
    model = wrap(Llama(), range(4), any_name=True)
    model.prefill(torch.tensor([[1, 2, 3]]), model.new_state(1, 16))
    assert model.notes == ()


def test_the_verdict_is_that_of_a_polite_one(tmp_path):
    numbers = []
    for name in (f"{HERE}:rude", "docs.examples.small_engine:open_engine"):
        (tmp_path / name).mkdir()
        shell = Shell(tmp_path / name)
        code, out, err = shell("parity/test_layers.py", "--production", name, *SMALL, "-q")
        assert code == 0, out + err
        header, verdicts, _ = shell.records()
        numbers.append([(v.gate, v.point, v.phase, v.state, v.limit) for v in verdicts])
        said = [note for note in header.notes if "torch settings of its own" in note]
        assert len(said) == (1 if "rude" in name else 0)
        if said:
            assert "cudnn TF32 False (here True)" in said[0]
            assert "threads 3" in said[0]
    assert numbers[0] == numbers[1]


def test_the_other_door_holds_them_apart_too(tmp_path):
    done, records = pytest_parity(tmp_path, "plain", "--production", f"{HERE}:rude_llama")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert any(note.startswith("torch settings of its own, in its own calls only: default dtype torch.bfloat16") for note in records[0]["notes"])
    assert records[-1]["verdict"] == "pass"


def test_a_wrong_function_that_the_reference_would_share_is_a_red_gate(tmp_path, monkeypatch):
    for patch in ("", "1"):
        monkeypatch.setenv("PATCH", patch)
        (tmp_path / f"run{patch}").mkdir()
        shell = Shell(tmp_path / f"run{patch}")
        code, out, err = shell("parity/test_layers.py", "--production", f"{HERE}:patching", *SMALL, "-q")
        header, verdicts, _ = shell.records()
        noted = [note for note in header.notes if "functions of torch that it replaces" in note]
        assert code == (1 if patch else 0), out + err
        assert bool(noted) == bool(patch)
        if patch:
            assert "torch.nn.functional.softplus" in noted[0]
            assert {v.point for v in verdicts if v.state is State.FAIL} & {"layers.0.ffn.weights", "layers.0.ffn.gate"}


def test_precisions_by_their_new_names_are_no_error(tmp_path):
    shell = Shell(tmp_path)
    code, out, err = shell("parity/test_layers.py", "--production", f"{HERE}:precise", *SMALL, "-q")
    assert code == 0, out + err
    header, _, _ = shell.records()
    assert any("torch.backends.cuda.matmul.fp32_precision tf32 (here none)" in note for note in header.notes)
