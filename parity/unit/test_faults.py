"""Planted faults are data: exact-once edits on a copy, and a stale one is an error."""

from __future__ import annotations

import pytest

from parity.planted import OPEN_LIST, Edit, Fault, find_fault, plant, read_faults
from reference.config import InputError


@pytest.fixture
def tree(tmp_path):
    (tmp_path / "production").mkdir()
    (tmp_path / "kernels").mkdir()
    (tmp_path / "production" / "model.py").write_text("a = 1\nb = 2\nb = 2\n")
    return tmp_path


def test_planting_changes_the_copy_and_not_the_source(tree):
    copy = plant(Fault("X1", "", (Edit("production/model.py", "a = 1", "a = 3"),)), root=tree)
    assert (copy / "production" / "model.py").read_text().startswith("a = 3")
    assert (tree / "production" / "model.py").read_text().startswith("a = 1")


@pytest.mark.parametrize(("find", "times"), [("a = 9", 0), ("b = 2", 2)])
def test_a_stale_fault_is_an_error(tree, find, times):
    with pytest.raises(InputError, match=f"stands {times} times"):
        plant(Fault("X1", "", (Edit("production/model.py", find, "c"),)), root=tree)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no .*fault.* entries"),
        ("[[fault]]\nid = 'A'", "at least one"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = '../x.py'\nfind = 'a'\nreplace = 'b'", "does not lie below"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = 'reference/x.py'\nfind = 'a'\nreplace = 'b'", "does not lie below"),
        ("[[fault]]\nid = 'A'\n[[fault.edit]]\nfile = 'production/x.py'\nfind = 'a'\nreplace = 'a'", "changes nothing"),
        ("[[fault", "broken TOML"),
    ],
)
def test_a_bad_list_is_explained(tmp_path, text, said):
    path = tmp_path / "list.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=said):
        read_faults(path)


def test_an_unknown_id_names_the_nearest():
    with pytest.raises(InputError, match="nearest is 'B060'"):
        find_fault("B060x")


@pytest.mark.parametrize("fault", read_faults().values() if OPEN_LIST.exists() else [], ids=lambda fault: fault.id)
def test_every_listed_fault_still_applies(fault):
    import shutil

    shutil.rmtree(plant(fault))
