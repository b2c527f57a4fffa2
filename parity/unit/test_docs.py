"""README and docs say what the code does: their commands run, their tables are the code's, their links and pictures exist.

A page's shell and Python blocks are run in order, in one copy of the tree, so that a later one finds what an earlier one wrote.
A comment before a block, invisible on the page, may make its commands cheaper or say how they end:

    <!-- runs: --layers 0 --steps 1 -->        these options are added to every command of the block
    <!-- runs: -k visible; exit 1 -->          and the exit code is 1

    <!-- file: waivers.toml -->               the block is that file's text

With `--device cuda` a command is checked up to its options only. What is not run at all stands in NOT_RUN with its reason; any
other command that this file cannot run fails. `pytest parity/unit/test_docs.py -k red.md`
"""

from __future__ import annotations

import importlib
import inspect
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from parity import gates
from parity.planted import read_list
from parity.selection import GROUP_STEPS
from probes import record
from probes.core.records import READS, SCHEMA, TYPES
from production.variants import PLANS
from reference.points import LAYER_POINTS, MODEL_POINTS, STATE_LEGEND, STATE_POINTS, PointSpec

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = ("README.md", "CHANGELOG.md", *sorted(f"docs/{path.name}" for path in DOCS.glob("*.md")))
LANGUAGES = {"sh", "text", "python", "yaml", "toml", "json", "cpp", "diff"}
PICTURE_BYTES = 300_000
HOSTS = ("keepachangelog.com", "semver.org", "www.apache.org", "docs.pytest.org", "json-schema.org")

# Commands of the pages that no test runs as they stand.
NOT_RUN = {
    "make audit": "minutes; its piece is `pytest parity/`, run by parity/unit/test_session.py",
    "make test": "would run this test; its pieces are the tests",
    "make faults": "half an hour; its piece is `python -m parity.sweep`, run by parity/unit/test_sweep.py",
    ".venv/bin/pytest parity/ --report out": "minutes, and no environment of its own here; its piece is `pytest parity/`, run by parity/unit/test_session.py",
    "pip install -e path/to/dsv4-parity": "needs a package index; what it installs is built by parity/unit/test_plugin.py",
    "pytest --parity --phase decode --layers 0-3": "minutes, in another repository; its piece is run by parity/unit/test_plugin.py",
    "source .venv/bin/activate": "the environment is the one that runs this test",
}


# ---- pages ----


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, what the comment before it says of its commands or calls its file, its lines."""

    page: str
    line: int
    language: str
    runs: str
    file: str
    text: str


FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUNS, FILE = (re.compile(rf"<!-- {word}: (.*?) -->\n\Z") for word in ("runs", "file"))


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, text: str | None = None) -> list[Block]:
    text = read(page) if text is None else text
    found = []
    for match in FENCE.finditer(text):
        runs, file = (said[1] if (said := comment.search(text[: match.start()])) else "" for comment in (RUNS, FILE))
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, match[1], runs, file, match[2]))
    return found


def prose(text: str) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", text)


@dataclass(frozen=True)
class Command:
    """One line of a shell block with what the comment before it adds."""

    block: Block
    line: str
    words: tuple[str, ...]
    extra: tuple[str, ...]
    code: int


def commands_of(block: Block) -> Iterator[Command]:
    options, _, ending = block.runs.partition(";")
    code = int(ending.split()[1]) if ending else 0
    for line in block.text.replace("\\\n", " ").splitlines():
        words = tuple(shlex.split(line, comments=True))
        if words:
            yield Command(block, shlex.join(words), words, tuple(shlex.split(options)), code)


def commands(page: str, text: str | None = None) -> list[Command]:
    return [command for block in blocks(page, text) if block.language == "sh" for command in commands_of(block)]


# ---- running ----


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what is in the repository, without .git, and with nothing that a run left behind."""
    copy = tmp_path_factory.mktemp("docs") / "tree"
    listed = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("no git repository: nothing says which files belong to the tree")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


def outcome(function: Any, *arguments: Any) -> int:
    """The exit code of a program's main, called here: torch is imported once for all of them."""
    try:
        return int(function(*arguments) or 0)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)


def options_only(module: ModuleType, patch: pytest.MonkeyPatch) -> None:
    """Let a probe's main stop once its options are read."""
    assert hasattr(module, "answer"), f"{module.__name__} has no parser that can be run alone: list its command in NOT_RUN"
    patch.setattr(module, "answer", lambda name, parser, argv, measure: parser.parse_args(argv) and 0)


def run(command: Command, tree: Path, patch: pytest.MonkeyPatch) -> int:
    """The exit code of one command; what is neither python -m nor pytest is no command that this file knows."""
    words = [*command.words, *command.extra]
    on_gpu = "--device cuda" in command.line
    if words[:2] == ["python", "-m"]:
        module = importlib.import_module(f"{words[2]}.__main__" if (ROOT / words[2]).is_dir() else words[2])
        with patch.context() as here:
            here.chdir(tree)
            if on_gpu:
                options_only(module, here)
            return outcome(module.main, words[3:])
    if words[0] == "pytest":
        words = [sys.executable, "-m", *words, *(["--collect-only", "-q"] if on_gpu else [])]
    elif words[0] == "make" and len(words) == 2:
        words = [*words, "--dry-run"]  # that the target is there: what it runs is run by other tests
    else:
        raise AssertionError(f"{command.block.page}:{command.block.line}: nothing here runs `{command.line}`: teach run() or list it in NOT_RUN with a reason")
    ran = subprocess.run(words, cwd=tree, capture_output=True, text=True, timeout=300)
    print(ran.stdout[-3000:], ran.stderr[-3000:])
    return ran.returncode


def examples(page: str) -> list[Block]:
    """Blocks that do something: commands, Python, and files that commands read."""
    return [block for block in blocks(page) if block.file or block.language in ("sh", "python")]


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)])
def test_every_command_of_the_page_runs(page: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in examples(page):
        if block.file:
            (tree / block.file).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            with monkeypatch.context() as here:
                here.chdir(tree)
                exec(compile(block.text, f"{page}:{block.line}", "exec"), {})
        else:
            for command in commands_of(block):
                if command.line not in NOT_RUN:
                    code = run(command, tree, monkeypatch)
                    assert code == command.code, f"{page}:{block.line}: `{shlex.join([*command.words, *command.extra])}` ended with {code}, expected {command.code}"


def test_what_is_not_run_still_stands_on_a_page() -> None:
    everywhere = {command.line for page in PAGES for command in commands(page)} | {shlex.join(words) for page in PAGES for words in mentioned(read(page))}
    assert set(NOT_RUN) <= everywhere, f"no page has {sorted(set(NOT_RUN) - everywhere)} any more"


@pytest.mark.parametrize(
    "line",
    ["make no-such-target", "python -m probes.layers --no-such-option", "python -m probes.layers --device cuda --no-such-option", "pytest parity/ --phase sideways"],
)  # fmt: skip
def test_a_command_that_does_not_run_is_found(line: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands("a page", f"```sh\n{line}\n```\n")
    assert run(command, tree, monkeypatch) != 0


def test_a_command_that_nothing_runs_is_found(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (command,) = commands("a page", "```sh\nfrobnicate --all\n```\n")
    with pytest.raises(AssertionError, match="NOT_RUN"):
        run(command, tree, monkeypatch)


# ---- what stands in the text: each check gives its findings, so that DEFECTS can show that it finds some ----

SHARED = {"probes": "probes/core/cli.py", "bench": "bench/harness.py"}  # options that a room's programs share
PYTEST_OWN = {"-k", "-m", "-n", "-q", "--help", "--collect-only"}
PLACES = ("README.md", "Makefile", "docs/", "reference/", "kernels/", "production/", "probes/", "parity/", "reports/", "bench/", "checkpoints/", ".github/")
PROGRAM = r"(?:pytest|python|make|pip) .*$"
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def hidden_commands(page: str, text: str) -> list[str]:
    """Commands outside of sh blocks, which no test would run."""
    found = [f"line {block.line}: language {block.language or 'none'!r}, known: {sorted(LANGUAGES)}" for block in blocks(page, text) if block.language not in LANGUAGES]
    others = "".join(block.text for block in blocks(page, text) if block.language != "sh")
    return found + re.findall(r"^\s*" + PROGRAM, others, re.MULTILINE) + re.findall(r"^(?:    |\t)\s*" + PROGRAM, prose(text), re.MULTILINE)


def sources(words: Sequence[str]) -> str:
    """The text that must know a command's options; empty where there is no such module."""
    if words[0] == "pytest":
        return "\n".join((ROOT / name).read_text(encoding="utf-8") for name in ("parity/session.py", "parity/outsider.py", "dsv4_parity.py"))
    path = ROOT / words[2].replace(".", "/")
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    shared = SHARED.get(words[2].split(".")[0])
    return path.read_text(encoding="utf-8") + ((ROOT / shared).read_text(encoding="utf-8") if shared else "") if path.is_file() else ""


def mentioned(text: str) -> Iterator[list[str]]:
    """Commands in `code` within the text; NAME, ID and DIR stand for something."""
    for span in re.findall(r"`((?:pytest|python -m|make)\s[^`]*)`", prose(text)):
        yield [word.replace("\\|", "|") for word in shlex.split(span.replace("\n", " "))]


def unknown_commands(page: str, text: str) -> list[str]:
    """Commands within sentences and tables: targets, modules, options and paths that do not exist."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    found = []
    for words in mentioned(text):
        if words[0] == "make":
            found += [f"no target {words[1]}"] if words[1] not in targets else []
            continue
        if words[0] == "python" and "NAME" in words[2]:
            continue
        known = sources(words)
        if not known:
            found.append(f"no module {words[2]}")
        for option in (word.split("=")[0] for word in words if word.startswith("-") and word not in ("-m", "--help")):
            if known and f'"{option}"' not in known and not (words[0] == "pytest" and option in PYTEST_OWN):
                found.append(f"{shlex.join(words)}: nothing takes {option}")
        if words[0] == "pytest":
            paths = [word.split("::")[0] for word in words[1:] if "/" in word and not word.startswith("-") and "[" not in word]
            found += [f"no {path}" for path in paths if not (ROOT / path).exists() and not path.endswith("DIR")]
    return found


def slugs(text: str) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)}


def broken_links(page: str, text: str) -> list[str]:
    found = []
    for target in LINK.findall(prose(text)):
        if target.startswith("https://"):
            found += [f"{target}: an outside page that nobody listed in HOSTS"] if target.split("/")[2] not in HOSTS else []
            continue
        path, _, anchor = target.partition("#")
        there = ((ROOT / page).parent / path).resolve()
        if path and not there.is_file():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in slugs(there.read_text(encoding="utf-8") if path else text):
            found.append(f"{target}: no such heading")
    return found


def missing_files(page: str, text: str) -> list[str]:
    """Paths of the tree in `code` that are not there."""
    named = [span for span in re.findall(r"`([\w./*-]+)`", prose(text)) if span.startswith(PLACES) and not re.search("reports/runs|NAME", span)]
    return [span for span in named if not (list(ROOT.glob(span.rstrip("/"))) if "*" in span else (ROOT / span).exists())]


def paths_of_a_machine(page: str, text: str) -> list[str]:
    return re.findall(r"(?<![\w.~>])/(?:home|root|work|tmp|mnt|data|Users|opt)\b[^\s`]*", text)


CHECKS = (hidden_commands, unknown_commands, broken_links, missing_files, paths_of_a_machine)
DEFECTS = {
    hidden_commands: ("    pytest parity/ --phase decode\n", "```text\npython -m probes.layers\n```\n", "```\nls\n```\n"),
    unknown_commands: ("`make nonsense`", "`python -m probes.nonsense`", "`python -m probes.layers --nonsense`", "`pytest parity/ --nonsense`", "`pytest parity/nonsense.py`"),
    broken_links: ("[a](nonsense.md)", "[a](gates.md#nonsense)", "[a](#nonsense)", "![a](pictures/nonsense.png)", "[a](https://nonsense.example/page)"),
    missing_files: ("`parity/nonsense.py`", "`kernels/nonsense_*.cu`"),
    paths_of_a_machine: ("see /home/me/run", "`/tmp/x`"),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("page", PAGES)
def test_nothing_on_a_page_leads_nowhere(page: str, check: Callable[[str, str], list[str]]) -> None:
    found = check(page, read(page))
    assert not found, f"{page}: {found}"


@pytest.mark.parametrize(("check", "text"), [(check, text) for check, texts in DEFECTS.items() for text in texts], ids=lambda value: getattr(value, "__name__", "text"))
def test_each_check_finds_what_is_wrong(check: Callable[[str, str], list[str]], text: str) -> None:
    assert len(check("docs/gates.md", f"# A page\n\n{text}\n")) == 1


def test_every_page_is_in_the_index() -> None:
    listed = {target.partition("#")[0] for target in LINK.findall(read("docs/README.md"))}
    assert {path.name for path in DOCS.glob("*.md")} - {"README.md"} <= listed


def test_pictures_are_shown_and_small() -> None:
    shown = {target for page in PAGES for target in re.findall(r"!\[[^\]]+\]\(([^)\s]+\.png)\)", read(page))}
    held = {f"pictures/{path.name}" for path in (DOCS / "pictures").glob("*")}
    assert shown == held
    for name in held:
        data = (DOCS / name).read_bytes()
        assert data.startswith(b"\x89PNG\r\n"), name
        assert len(data) <= PICTURE_BYTES, f"{name}: {len(data)} bytes"


# ---- tables that the code has too ----


def rows(page: str, head: str) -> list[list[str]]:
    """Cells of the table whose first line starts with head."""
    lines = read(page).split(head, 1)[1].splitlines()[2:]
    cells = []
    for line in lines:
        if not line.startswith("|"):
            break
        cells.append([cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return cells


def point_row(spec: PointSpec) -> list[str]:
    kinds = "model" if spec in MODEL_POINTS else "all" if len(spec.layer_kinds) == 3 else ", ".join(spec.layer_kinds)
    compared = spec.kind + (", sparse" if spec.sparse else "") + (f", {spec.row_dims} axes a row" if spec.row_dims != 1 else "")
    return [f"`{spec.name}`", spec.shape, compared, kinds, spec.component, spec.meaning]


def test_the_page_of_points_is_the_vocabulary() -> None:
    of_layer, of_model = read("docs/points.md").split("## Of the model")
    head = "| point | shape |"
    assert rows("docs/points.md", head) == [point_row(spec) for spec in LAYER_POINTS]
    assert head in of_layer
    assert all("| " + " | ".join(cell.replace("|", "\\|") for cell in point_row(spec)) + " |" in of_model for spec in MODEL_POINTS)
    assert of_model.count("| model |") == len(MODEL_POINTS)
    assert rows("docs/points.md", "| part | behind |") == [[f"`{part}`", f"`{STATE_POINTS[part]}`", STATE_LEGEND[part]] for part in STATE_POINTS]


def test_the_readme_lists_every_option_of_the_audit() -> None:
    taken = {option for path in (ROOT / "parity").glob("*.py") for option in re.findall(r'addoption\("(--[\w-]+)"', path.read_text(encoding="utf-8"))}
    listed = {option for row in rows("README.md", "| option | meaning |") for option in re.findall(r"--[\w-]+", row[0])}
    assert len(taken) > 12
    assert listed == taken


def test_the_readme_lists_every_probe() -> None:
    with_main = {path.stem for path in (ROOT / "probes").glob("*.py") if "def main(" in path.read_text(encoding="utf-8")}
    listed = {name for row in rows("README.md", "| probe | answers |") for name in re.findall(r"`(\w+)`", row[0])}
    assert len(with_main) > 15
    assert listed == with_main


def test_what_is_out_of_scope_is_what_reports_say() -> None:
    from reports.render import OUT_OF_SCOPE

    page = read("docs/scope.md")
    assert all(f"* {line}" in page for line in OUT_OF_SCOPE)


def test_faults_are_counted() -> None:
    listed = read_list()
    planted = len(listed.catalogue) - len(listed.left_out)
    assert f"holds {len(listed.faults)} faults as data" in read("docs/gates.md")
    assert f"{planted} of the catalogue's {len(listed.catalogue)} entries are planted, {len(listed.left_out)} are left out" in read("docs/gates.md")
    assert f"{len(listed.faults)} planted faults as data, {planted} of the public catalogue's {len(listed.catalogue)}" in read("CHANGELOG.md")


def test_limits_of_the_page_are_the_table_s() -> None:
    page = " ".join(read("docs/method.md").split())
    assert f"`k` is {gates.K_ISOLATED:g} isolated and {gates.K_FREE:g} free. No limit exceeds {gates.MAX_LIMIT:g}" in page
    assert f"come within {gates.HEADROOM:g} of that" in page
    assert f"group of at least {gates.TYPICAL_ROWS}" in page
    assert f"groups of {GROUP_STEPS}" in page


def test_the_page_of_traces_names_the_facts_of_a_run() -> None:
    facts = re.findall(r'^        "(\w+)":', inspect.getsource(record._description), re.MULTILINE)
    (row,) = [row for row in rows("docs/trace.md", "| key | holds |") if row[0] == "`description`"]
    assert len(facts) > 8
    assert re.findall(r"`(\w+)`", row[1]) == facts


def test_the_page_of_records_names_the_schema() -> None:
    page = read("docs/records.md")
    assert f"This version writes {SCHEMA} and reads {' and '.join(map(str, READS))}" in page
    assert f"`reports/schema/run-{SCHEMA}.schema.json`" in page
    assert {row[0].strip("`") for row in rows("docs/records.md", "| `type` | holds |")} == set(TYPES)


def test_versions_of_the_page_are_those_that_install() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    page = read("docs/scope.md")
    torch_least = next(d for d in project["dependencies"] if d.startswith("torch>=")).removeprefix("torch>=")
    assert f"| torch | {torch_least} or newer" in page
    assert f"| Python | {project['requires-python'].removeprefix('>=')} or newer" in page
    assert re.search(r"^torch==(.+)$", constraints, re.MULTILINE)[1] + " (`constraints.txt`)" in page  # type: ignore[index]
    assert f"## [{project['version']}]" in read("CHANGELOG.md")
    assert project["license"] == "Apache-2.0"
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


# ---- docs/kernels.md ----

# What a wrapper takes where the plan names nothing.
OWN = {"indexer_score": "entries", "topk": "radix", "sparse_attn": "mma or tile", "hyper_connection": "block"}


@pytest.mark.parametrize("operation", ["linear", "experts", "indexer_score", "topk", "sparse_attn", "hyper_connection", "at_once"])
def test_the_page_names_what_the_plans_run(operation: str) -> None:
    phases = [getattr(plan, phase) for plan in (PLANS["portable"], PLANS["fast"]) for phase in ("prefill", "decode")]
    named = [getattr(variants, operation) for variants in phases]
    table = {row[0].strip("`"): row[1:] for row in rows("docs/kernels.md", "| operation | portable, prefill |")}
    assert table[operation] == [("yes" if name else "no") if isinstance(name, bool) else name or OWN[operation] for name in named]


# ---- docstrings ----


def missing_tests(root: Path) -> list[str]:
    """`file: test` for every parity/**/test_*.py that a source file's text names and that is not there."""
    found = []
    for room in ("reference", "production", "kernels", "probes", "parity", "reports", "bench"):
        for path in sorted((root / room).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".toml") and not {"runs", "unit"} & set(path.parts):
                named = set(re.findall(r"parity/(?:unit/(?:cpu_device/)?)?test_[a-z0-9_]+\.py", path.read_text(encoding="utf-8")))
                found += [f"{path.relative_to(root)}: {test}" for test in sorted(named) if not (root / test).is_file()]
    return found


def test_tests_that_a_source_file_names_are_there(tmp_path: Path) -> None:
    assert missing_tests(ROOT) == []
    (tmp_path / "probes").mkdir()
    (tmp_path / "probes" / "x.py").write_text('"""Tests: parity/' + 'unit/test_gone.py."""\n')
    assert missing_tests(tmp_path) == ["probes/x.py: parity/" + "unit/test_gone.py"]
