"""A factory that changes torch for the whole process: its settings hold in its own calls, the reference keeps its own, the header says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from docs.examples import small_engine
from parity.unit.test_generic import Llama, pytest_parity
from parity.unit.test_session import Shell
from probes.outside.protocol import wrap
from probes.outside.settings import SETTINGS, Settings

HERE = "parity.unit.test_settings"
SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20")
OTHER: dict[str, Any] = {  # a value that is not the one at the start
    "default dtype": torch.bfloat16, "default device": torch.device("meta"), "float32 matmul precision": "medium", "gradients": False, "threads": 3,
    "deterministic algorithms": 1, "cudnn TF32": False, "reduced precision sums of BF16": False, "reduced precision sums of FP16": False,
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
    return {name: get() for name, (get, _) in SETTINGS.items()}


@pytest.fixture(autouse=True)
def _back():
    before = held()
    yield
    now = held()
    for name, value in before.items():
        if now[name] != value:
            SETTINGS[name][1](value)


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
    assert settings.notes() == [f"torch settings of its own, in its own calls only: {name} {OTHER[name]} (here {before[name]})"]
    for _ in range(2):
        with settings.theirs(), settings.theirs():
            assert held() == before | {name: OTHER[name]}
        assert held() == before
    with settings.theirs():
        SETTINGS[name][1](before[name])
    assert settings.notes() == []


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
