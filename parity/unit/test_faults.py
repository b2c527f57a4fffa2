"""Planted faults are data: exact-once edits on a copy, a stale one is an error, and the whole catalogue is accounted for."""

from __future__ import annotations

import ast
import re
import shutil

import pytest

from parity.planted import FAULTS, LAYER_KINDS, Edit, Fault, find_fault, plant, read_faults, read_list
from reference.config import InputError

LIST = read_list()
COMPONENTS = (
    "compressor", "indexer", "visibility mask", "SWA ring", "rope", "sink", "mHC", "MoE router", "experts quant", "KV quant", "checkpoint loading",
    "memory", "graph capture", "batching",
)  # fmt: skip
OTHER_WORDS = ("attention core", "attention projections", "norm", "head")  # of operations that the catalogue has no component for
EDIT = "[[fault.edit]]\nfile = 'production/x.py'\nfind = 'a'\nreplace = 'b'\n"


def entry_of(fault_id: str) -> str:
    """The catalogue's id behind a planted one: B096c is a variant of B096."""
    return re.sub(r"(?<=\d)[a-z]$", "", fault_id)


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "production").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "production" / "model.py").write_text("a = 1\nb = 2\nb = 2\n")
    return tmp_path


# ---- planting ----


def test_planting_changes_the_copy_and_not_the_source(tree):
    copy = plant(Fault("X1", "", (Edit("production/model.py", "a = 1", "a = 3"),)), root=tree)
    assert (copy / "production" / "model.py").read_text().startswith("a = 3")
    assert (tree / "production" / "model.py").read_text().startswith("a = 1")
    shutil.rmtree(copy)


@pytest.mark.parametrize(("find", "times"), [("a = 9", 0), ("b = 2", 2)])
def test_a_stale_fault_is_an_error(tree, find, times):
    with pytest.raises(InputError, match=f"stands {times} times"):
        plant(Fault("X1", "", (Edit("production/model.py", find, "c"),)), root=tree)


@pytest.mark.parametrize("fault", LIST.faults.values(), ids=lambda fault: fault.id)
def test_every_listed_fault_still_applies(fault):
    """Its text stands exactly once, and what it makes of Python is Python."""
    copy = plant(fault)
    for edit in fault.edits:
        if edit.file.endswith(".py"):
            ast.parse((copy / edit.file).read_text())
    shutil.rmtree(copy)


# ---- reading ----


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no .*fault.* entries"),
        ("[[fault]]\nid = 'A'", "at least one"),
        ("[[fault]]\nid = '../A'\n" + EDIT, "an id has letters"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = '../x.py'\nfind = 'a'\nreplace = 'b'", "does not lie below"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = 'reference/x.py'\nfind = 'a'\nreplace = 'b'", "does not lie below"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = 'production/x.py'\nfind = 'a'\nreplace = 'a'", "changes nothing"),
        ("[[fault]]\nid = 'A'\n" + EDIT + "[[fault]]\nid = 'A'\n" + EDIT, "stands twice"),
        ("[[fault]]\nid = 'A'\nexpect = { phase = 'both' }\n" + EDIT, "expect.phase 'both'"),
        ("[[fault]]\nid = 'A'\nexpect = { layer_kinds = ['swa'] }\n" + EDIT, "expect.layer_kinds: 'swa'"),
        ("[[fault]]\nid = 'A'\nexpect = { components = 'sink' }\n" + EDIT, "expect.components is a list"),
        ("[[fault]]\nid = 'A'\nprompts = [1]\n" + EDIT, "prompts is a list of strings"),
        ("[[fault]]\nid = 'A'\ndecode = 'graph'\n" + EDIT, "decode 'graph', expected eager or replay"),
        ("[[fault]]\nid = 'A'\nvariants = 'slow'\n" + EDIT, "variants 'slow', expected portable or fast"),
        ("[[fault]]\nid = 'A'\n" + EDIT + "[[left_out]]\nid = 'B'", "needs the strings id and reason"),
        ("[[fault", "broken TOML"),
    ],
)
def test_a_bad_list_is_explained(tmp_path, text, said):
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_faults(path)


def test_a_folder_is_the_sum_of_its_files(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text(f"component = 'c{name}'\n[[fault]]\nid = '{name}'\n{EDIT}")
    assert {fault.id: fault.component for fault in read_faults(tmp_path).values()} == {"a": "ca", "b": "cb"}
    (tmp_path / "c.toml").write_text("[[fault]]\nid = 'a'\n" + EDIT)
    with pytest.raises(InputError, match="a stands in another file too"):
        read_faults(tmp_path)


def test_a_folder_without_lists_and_a_missing_one_are_errors(tmp_path):
    with pytest.raises(InputError, match=r"no \.toml file"):
        read_faults(tmp_path)
    with pytest.raises(InputError, match="cannot be read"):
        read_faults(tmp_path / "nothing")


def test_a_fault_says_how_production_runs_and_a_run_without_it_runs_alike(tmp_path):
    path = tmp_path / "list.toml"
    path.write_text("[[fault]]\nid = 'A'\ndecode = 'replay'\nvariants = 'fast'\n" + EDIT + "[[fault]]\nid = 'B'\n" + EDIT)
    faults = read_faults(path)
    assert faults["A"].options == ("--decode", "replay", "--variants", "fast")
    assert faults["B"].options == ()


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(InputError, match="nearest is 'B060'"):
        find_fault("B060x")


# ---- the project's own list ----


def test_every_entry_of_the_catalogue_is_planted_or_left_out_with_a_reason():
    planted = {entry_of(fault_id) for fault_id in LIST.faults}
    assert len(LIST.catalogue) == 96
    assert set(LIST.catalogue) == (planted & set(LIST.catalogue)) | set(LIST.left_out)
    assert not planted & set(LIST.left_out)
    assert len(planted & set(LIST.catalogue)) >= 60
    assert all(len(reason) > 15 for reason in LIST.left_out.values())


def test_every_component_has_a_file_and_at_least_four_faults():
    assert {path.stem for path in FAULTS.glob("*.toml")} == {component.lower().replace(" ", "_") for component in COMPONENTS}
    for component in COMPONENTS:
        assert len([fault for fault in LIST.faults.values() if fault.component == component]) >= 4, component


@pytest.mark.parametrize("fault", LIST.faults.values(), ids=lambda fault: fault.id)
def test_every_fault_says_what_a_right_report_names(fault):
    """Its own component first or, where another operation's output is wrong first, that one's too; kinds and phase."""
    expect = fault.expect
    assert fault.title
    assert fault.component == LIST.catalogue.get(entry_of(fault.id), fault.component)
    assert fault.component in expect["components"]
    assert set(expect["components"]) <= {*COMPONENTS, *OTHER_WORDS}
    assert expect["phase"] in ("prefill", "decode", "any")
    assert set(expect.get("layer_kinds", LAYER_KINDS)) <= set(LAYER_KINDS)
    assert "layer_kinds" not in expect or expect["layer_kinds"]
