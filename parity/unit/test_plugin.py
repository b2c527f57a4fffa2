"""The audit installed into another repository: its own tests run as ever, and `pytest --parity` audits there.

The project is built and installed into a folder of its own, once, without an index; the other repository is hostile on purpose.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from probes.core.records import Header, State, Summary, Verdict, read_run

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("--layers", "0", "--steps", "2", "--prompt", "medium.txt:0:20")
POINTS = ("-k", "test_point and attn and prefill")

OWN_INI = """
[tool.pytest.ini_options]
addopts = "--steps 9 --strict-markers --own-switch"
testpaths = ["tests"]
python_files = "*_spec.py"
python_functions = "check_*"
norecursedirs = ["parity", "site-packages", ".*"]
filterwarnings = ["error"]
usefixtures = ["boom"]
python_classes = "*"
xfail_strict = true
empty_parameter_set_mark = "fail_at_collect"
"""
# Options of the same names, a fixture for everything, and a hook that skips what it does not know.
OWN_CONFTEST = """
import pathlib, pytest

def pytest_addoption(parser):
    for name in ("--layers", "--device", "--prompt", "--report", "--checkpoint", "--phase"):
        parser.addoption(name, default="own")
    parser.addoption("--steps", type=int)
    parser.addoption("--own-switch", action="store_true")

@pytest.fixture
def boom():
    return 1  # every test of this repository has it; the audit knows no such fixture

@pytest.fixture(autouse=True)
def tamper():
    pathlib.Path("tampered").touch()

def pytest_collection_modifyitems(items):
    for item in items:
        if "own" not in item.nodeid:
            item.add_marker(pytest.mark.skip(reason="not ours"))
"""
OWN_TEST = """
import sys, warnings
import pytest

def check_own(pytestconfig):
    assert pytestconfig.getoption("--layers") == "own"
    assert pytestconfig.getoption("--steps") == 9
    assert "dsv4_parity" in sys.modules, "the entry point was not loaded: this test shows nothing"
    assert not {"torch", "numpy", "parity", "production", "reference", "probes", "reports"} & set(sys.modules)
    assert "gpu:" not in " ".join(pytestconfig.getini("markers"))
    with pytest.raises(UserWarning):
        warnings.warn("an error here")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed project."""
    folder = tmp_path_factory.mktemp("installed")
    source = folder / "source"
    source.mkdir()
    for name in ("reference", "production", "probes", "parity", "reports", "kernels", "checkpoints"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "runs"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "dsv4_parity.py"):
        shutil.copy2(ROOT / name, source / name)
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "--no-index", "--no-compile", "--disable-pip-version-check", "--target", str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(scope="module")
def editable(site: Path) -> Path:
    """The Python of a virtual environment with the project installed by `pip install -e`: a finder, which comes after sys.path."""
    source, home = site.with_name("source"), site.with_name("venv")
    venv.create(home, symlinks=True, with_pip=False)
    python = home / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "-e", str(source)]
    (library,) = (home / "lib").glob("python*/site-packages")
    (library / "theirs.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")  # torch, pytest, setuptools; its own .pth files are not read
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(library.glob("__editable__*finder.py")), "no finder: this shows nothing"
    return python


class Elsewhere:
    """Another repository, with a commit of its own."""

    def __init__(self, directory: Path, site: Path) -> None:
        self.directory, self.site = directory, site
        (directory / "tests").mkdir(parents=True)
        (directory / "pyproject.toml").write_text(OWN_INI)
        (directory / "conftest.py").write_text(OWN_CONFTEST)
        (directory / "tests" / "own_spec.py").write_text(OWN_TEST)
        (directory / ".gitignore").write_text("__pycache__/\n.pytest_cache/\ntampered\n")
        for words in (("init", "-q"), ("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "first")):
            subprocess.run(["git", *words], cwd=directory, check=True, capture_output=True)

    @property
    def commit(self) -> str:
        return subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=self.directory, check=True, capture_output=True, text=True).stdout.strip()

    def __call__(self, *arguments: str, program: tuple[str, ...] = ("-P", "-m", "pytest"), site: Path | None = None, python: Path | None = None) -> tuple[int, str]:
        """Exit code and output. -P: as the program `pytest`, which does not put the current directory on the path."""
        environment = os.environ | {"PYTHONPATH": "" if python else str(site or self.site), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for name in ("PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST", "PYTEST_PLUGINS"):
            environment.pop(name, None)
        done = subprocess.run([str(python or sys.executable), *program, *arguments], cwd=self.directory, env=environment, capture_output=True, text=True, timeout=300)
        assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
        return done.returncode, done.stdout + done.stderr

    def run(self) -> tuple[Path, Header, list[Verdict], Summary]:
        """The one run that was written, where it belongs."""
        (file,) = (self.directory / "parity-reports").glob("*/run.jsonl")
        records = read_run(file)
        header, summary = records[0], records[-1]
        assert isinstance(header, Header)
        assert isinstance(summary, Summary)
        return file.parent, header, [record for record in records if isinstance(record, Verdict)], summary


@pytest.fixture
def elsewhere(tmp_path: Path, site: Path) -> Elsewhere:
    return Elsewhere(tmp_path / "repository", site)


def test_everything_that_runs_is_installed(site):
    rooms = ("reference", "production", "probes", "parity", "reports", "kernels", "checkpoints")
    source = site.with_name("source")
    here = {path.relative_to(source) for room in rooms for path in (source / room).rglob("*") if path.is_file()}
    due = {path for path in here if path.suffix != ".pyc" and path.parts[:2] != ("parity", "unit")} | {Path("parity/unit/worlds.py"), Path("dsv4_parity.py")}
    assert len(due) > 200
    missing = sorted(str(path) for path in due if not (site / path).is_file())
    assert missing == []
    assert sorted(path.name for path in site.iterdir() if "dist-info" not in path.name) == sorted([*rooms, "dsv4_parity.py"])


def test_a_repository_that_does_not_ask_runs_its_own_tests_as_ever(elsewhere):
    code, out = elsewhere()
    assert code == 0, out
    assert "1 passed" in out
    assert "dsv4-parity-" in out
    assert not (elsewhere.directory / "parity-reports").exists()


def test_the_entry_point_costs_nothing_while_it_is_off(elsewhere):
    code, out = elsewhere("-c", "import pytest, dsv4_parity, sys; print(sorted({'torch', 'parity'} & set(sys.modules)))", program=("-X", "importtime"))
    assert code == 0
    (microseconds,) = re.findall(r"import time: +\d+ \| +(\d+) \| +dsv4_parity$", out, re.MULTILINE)
    assert int(microseconds) < 50_000
    assert out.splitlines()[-1] == "[]" or "\n[]\n" in out or out.startswith("[]\n")


@pytest.mark.slow
def test_the_audit_runs_there_on_its_own_terms(elsewhere):
    code, out = elsewhere("--parity", *SMALL, *POINTS)
    assert code == 0, out
    folder, header, verdicts, summary = elsewhere.run()
    assert (header.commit, header.dirty) == (elsewhere.commit, False)
    assert folder.name.endswith(header.commit)
    assert {path.name for path in folder.iterdir()} == {"run.jsonl", "report.html", "junit.xml"}
    assert (header.steps, header.layers, header.checkpoint) == (2, [0], "checkpoints/tiny-dsv4")
    assert header.environment["dsv4-parity"].startswith(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] + ", code ")
    assert summary.verdict == "incomplete", "it was narrowed, and says so"
    assert summary.passed == len(verdicts) > 10
    assert all(verdict.test_id.startswith("parity/test_layers.py::test_point[") for verdict in verdicts)
    assert not (elsewhere.directory / "tampered").exists(), "a fixture of the other repository touched the audit"
    assert out.rstrip().splitlines()[-1] == f"report: {folder.relative_to(elsewhere.directory) / 'report.html'}"
    again, out = elsewhere("--parity", *SMALL, "--report", "again", verdicts[0].test_id)
    assert again == 0, out
    (record,) = [record for record in read_run(elsewhere.directory / "again" / "run.jsonl") if isinstance(record, Verdict)]
    assert record.test_id == verdicts[0].test_id


@pytest.mark.slow
def test_a_fault_is_red_there_and_says_how_to_run_it_again(elsewhere):
    code, out = elsewhere("--parity", *SMALL, *POINTS, "--inject", "B077")
    assert code == 1, out
    _, _, verdicts, summary = elsewhere.run()
    assert summary.verdict == "fail"
    assert any(verdict.state is State.FAIL for verdict in verdicts)
    assert re.search(r"again: pytest 'parity/test_layers\.py::test_point\[.*\]' --parity ", out)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--parity", "tests/own_spec.py"), "tests/own_spec.py: with --parity only the audit's own tests run"),
        (("--parity", "/"), "with --parity only the audit's own tests run"),
        (("--parity", "parity/test_absent.py"), "parity/test_absent.py: no such file"),
        (("--parity", "--layers", "99"), "--layers 99"),
        (("--parity", "--ignore=parity/test_layers.py"), "--ignore parity/test_layers.py: not with --parity"),
        (("--parity", "--ignore-glob=*test_[!t]*"), "--ignore-glob *test_[!t]*: not with --parity"),
        (("--parity", "--layers", "0", "-n", "2"), "-n 2: an audit is one process"),
        (("--layers", "0", "--phase", "decode", "--max-context", "9"), "unrecognized arguments: --max-context"),
    ],
)
def test_bad_input_is_exit_4_and_writes_nothing(elsewhere, arguments, told):
    code, out = elsewhere(*arguments)
    assert code == 4, out
    assert told in out
    assert not (elsewhere.directory / "parity-reports").exists()


def test_a_name_that_is_taken_is_told_in_one_line(elsewhere):
    (elsewhere.directory / "reports").mkdir()
    (elsewhere.directory / "reports" / "__init__.py").touch()
    code, out = elsewhere("--parity", *SMALL, program=("-m", "pytest"))
    assert code == 4, out
    (line,) = filter(None, out.splitlines())
    assert line.startswith(f"ERROR: --parity: `import reports` finds {elsewhere.directory / 'reports'}, expected {elsewhere.site / 'reports'}; ")
    code, out = elsewhere(program=("-m", "pytest"))
    assert code == 0, out


@pytest.mark.parametrize("program", [("-m", "pytest"), ("-P", "-m", "pytest")], ids=["python -m pytest", "pytest"])
def test_a_folder_that_hides_a_package_of_an_editable_install_is_named(program, elsewhere, editable):
    """Python takes a folder without __init__.py on sys.path for a package before it asks an editable install's finder."""
    (elsewhere.directory / "probes").mkdir()
    code, out = elsewhere("--parity", *SMALL, "--collect-only", "-q", program=program, python=editable)
    if program[0] == "-P":
        assert code == 0, out
        return
    assert code == 4, out
    (line,) = filter(None, out.splitlines())
    source = elsewhere.site.with_name("source")
    assert line.startswith(f"ERROR: --parity: `import probes` finds {elsewhere.directory / 'probes'} (no __init__.py), expected {source / 'probes'}; ")


@pytest.mark.slow
@pytest.mark.parametrize("program", [("-m", "pytest"), ("-P", "-m", "pytest")], ids=["python -m pytest", "pytest"])
def test_it_runs_twice_in_a_row_from_an_editable_install(program, elsewhere, editable):
    """What the first run leaves behind hides no package from the second, and leaves the working tree as it was."""
    for number in (1, 2):
        code, out = elsewhere("--parity", *SMALL, *POINTS, program=program, python=editable)
        assert code == 0, out
        files = sorted((elsewhere.directory / "parity-reports").glob("*/run.jsonl"))
        assert len(files) == number
        header, *_, summary = read_run(files[-1])
        assert isinstance(header, Header)
        assert isinstance(summary, Summary)
        assert (summary.passed > 10, summary.failed, summary.not_run, header.dirty) == (True, 0, 0, False)
    assert not (elsewhere.directory / "reports").exists()


def test_it_is_collected_from_a_virtual_environment_inside_beside_folders_of_the_same_names(elsewhere, site):
    for name in ("reports/runs", "kernels", "checkpoints"):  # without __init__.py they hide nothing
        (elsewhere.directory / name).mkdir(parents=True)
    inside = elsewhere.directory / ".venv" / "lib" / "site-packages"
    shutil.copytree(site, inside)
    (elsewhere.directory / ".venv" / "pyvenv.cfg").touch()
    code, out = elsewhere("--parity", *SMALL, "--collect-only", "-q", site=inside, program=("-m", "pytest"))
    assert code == 0, out
    ids = [line for line in out.splitlines() if "::" in line]
    assert len(ids) > 1000
    assert all(line.startswith("parity/test_") for line in ids)


def test_help_lists_the_options_only_with_parity(elsewhere):
    assert "--max-context" in elsewhere("--parity", "--help")[1]
    without = elsewhere("--help")[1]
    assert "--parity" in without
    assert "--max-context" not in without


@pytest.mark.parametrize("options", [("-p", "dsv4_parity"), ("-p", "dsv4_parity", "--parity"), ("-p", "parity.plugin")])
def test_the_source_tree_needs_no_entry_point_and_bears_one(options):
    command = [sys.executable, "-m", "pytest", *options, "parity/test_layers.py", "--layers", "0", "--steps", "2", "--collect-only", "-q"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "parity/test_layers.py::test_point[" in done.stdout
