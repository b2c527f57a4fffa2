"""What every benchmark shares: arguments, ceilings of the same run, a check before and after the time, a table and a JSON file.

    bench = Bench("indexer_decode")                       # --device cuda|cpu --out DIR --only TEXT ...
    with bench.section("b 8"):                            # an error inside loses this section only
        bench.case(kernel="indexer_score", variant="fp4", shape="b 8, 262,144 keys", run=run, check=check, bytes=..., flops=...)
    bench.finish()                                        # table, OUT/indexer_decode.json, exit code 1 when something failed

`run` allocates nothing and can be captured in a CUDA graph. `check` poisons the outputs, runs, and returns (error, limit);
right is error <= limit, so that NaN is wrong. On the CPU only the checks run, on shapes that a script picks by `bench.small`.
`python -m bench.results FILE.json` appends the numbers to bench/RESULTS.md. Tests: parity/unit/test_bench.py.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.timing import Ceilings, Timer
from probes.core.records import to_wire
from production import cubins
from production.launch import CudaDevice, Device, open_device

ROOT = Path(__file__).resolve().parents[1]
Check = Callable[[], tuple[float, float]]


@dataclass
class Row:
    """One case. state: "ok", "wrong" (check), "failed" (raised), "not run"; message says why.

    us, spread, warm_us   L2-cold time of a call, what two measurements differ by, warm time
    floor_us              given, or max(bytes at the copy rate, flops at the MMA rate); share: computed floor / us
    public_us, predicted_us   for comparison, given
    error, limit          worst of the two checks
    value, of, predicted  something else that was measured, its unit, and what was expected of it
    launches              of this project's kernels in one call; kernels: which, with build and compiler's report
    """

    kernel: str
    variant: str
    shape: str
    state: str = "not run"
    message: str = ""
    us: float | None = None
    spread: float | None = None
    warm_us: float | None = None
    bytes: float = 0.0
    flops: float = 0.0
    unit: str = "bf16"
    floor_us: float | None = None
    share: float | None = None
    public_us: float | None = None
    predicted_us: float | None = None
    error: float | None = None
    limit: float | None = None
    value: float | None = None
    of: str = ""
    predicted: float | None = None
    launches: int = 0
    kernels: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Column:
    title: str
    cell: Callable[[Row], str]


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if abs(value) < 1e4 else f"{value:,.0f}"


def ratio(a: float | None, b: float | None) -> str:
    return f"{a / b:.2f}" if a is not None and b else "-"


def _resources(row: Row) -> str:
    return " ".join(f"{k['kernel']}:{k['registers']}r{'+' + str(k['spill_bytes']) + 's' if k['spill_bytes'] else ''}@{k['build'][:6]}" for k in row.kernels if "registers" in k) or "-"


COLUMNS = (
    Column("kernel", lambda r: r.kernel),
    Column("variant", lambda r: r.variant),
    Column("shape", lambda r: r.shape),
    Column("measured", lambda r: "-" if r.value is None else f"{number(r.value)} {r.of}".rstrip()),
    Column("us", lambda r: number(r.us)),
    Column("+-%", lambda r: "-" if r.spread is None else f"{100 * r.spread:.1f}"),
    Column("floor us", lambda r: number(r.floor_us, 3)),
    Column("x floor", lambda r: ratio(r.us, r.floor_us)),
    Column("public us", lambda r: number(r.public_us)),
    Column("x public", lambda r: ratio(r.us, r.public_us)),
    Column("% ceiling", lambda r: "-" if r.share is None else f"{100 * r.share:.1f}"),
    Column("predicted", lambda r: number(r.predicted_us if r.value is None else r.predicted)),
    Column("warm us", lambda r: number(r.warm_us)),
    Column("error / limit", lambda r: ("not checked" if r.value is None else "-") if r.error is None else f"{number(r.error, 3)} / {number(r.limit, 3)}"),
    Column("launches", lambda r: str(r.launches)),
    Column("state", lambda r: r.state),
    Column("registers @ build", _resources),
)

ALWAYS = ("kernel", "variant", "shape", "error / limit", "state")


def shown(rows: Sequence[Row]) -> list[Column]:
    """The columns that say something of these rows."""
    return [c for c in COLUMNS if c.title in ALWAYS or any(c.cell(row) not in ("-", "0") for row in rows)]


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Aligned columns, for a terminal."""
    widths = [max(len(line[i]) for line in (titles, *rows)) for i in range(len(titles))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in (titles, *rows))


class Bench:
    """A benchmark in progress; see the module's text.

    device, torch_device   where production's kernels run
    small                  True on the CPU: only checks, on small shapes
    args                   parsed arguments; more of them by `options`, a function that adds to the parser
    timed                  False: no ceilings and no `case`, only `judge`; takes no memory of the card
    ceilings               of the card, None on the CPU
    rows                   one per case so far
    """

    def __init__(
        self, name: str, argv: Sequence[str] | None = None, options: Callable[[argparse.ArgumentParser], None] | None = None, timed: bool = True
    ) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m bench.{name}")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: checks only, small shapes (default: cuda)")
        parser.add_argument("--out", metavar="DIR", type=Path, default=Path(os.environ.get("OUT", ROOT / "reports" / "runs" / "bench")), help="where NAME.json goes (default: $OUT, else reports/runs/bench)")
        parser.add_argument("--only", metavar="TEXT", action="append", default=[], help="cases whose 'kernel variant shape' holds this text; repeat for more")
        parser.add_argument("--seconds", metavar="N", type=float, default=float("inf"), help="start no case after this many seconds")
        parser.add_argument("--warm", action="store_true", help="also the time with a warm L2")
        parser.add_argument("--checked", action="store_true", help="CPU: the build that finds races and out-of-bounds accesses")
        parser.add_argument("--commit", metavar="ID", help="what the JSON file calls this source tree (default: git's HEAD)")
        if options is not None:
            options(parser)
        self.name, self.args = name, parser.parse_args(argv)
        self.began = time.perf_counter()
        self.device: Device = open_device(self.args.device, checked=self.args.checked and self.args.device == "cpu")
        self.torch_device = self.device.torch_device
        self.small = self.args.device == "cpu"
        self.rows: list[Row] = []
        self.errors: list[str] = []
        self.lost = False
        self.facts = facts(self.device, self.args.commit)
        self.timer = None if self.small or not timed else Timer(self.device)
        self.ceilings: Ceilings | None = None if self.timer is None else self.timer.ceilings()
        print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in self.facts.items()), flush=True)
        if self.ceilings is not None:
            print(f"ceilings of this run: {self.ceilings.line()}", flush=True)

    # ---- cases ----

    def wants(self, kernel: str, variant: str = "", shape: str = "") -> bool:
        """Whether --only takes this case: a script may spare itself the setup."""
        name = f"{kernel} {variant} {shape}"
        return not self.args.only or any(text in name for text in self.args.only)

    @contextmanager
    def section(self, label: str) -> Iterator[None]:
        """An error inside is printed in full and counted; what comes after the section still runs."""
        try:
            yield
        except Exception:
            self._record_error(label)

    def case(
        self, kernel: str, variant: str, shape: str, run: Callable[[], object], check: Check | None = None, *, bytes: float = 0.0, flops: float = 0.0,
        unit: str = "bf16", floor_us: float | None = None, public_us: float | None = None, predicted_us: float | None = None,
    ) -> Row | None:  # fmt: skip
        """Checks, times and checks again. bytes, flops: what the call must move and compute, for the floor; unit: bf16 or fp8.

        Returns the row, None where --only leaves the case out. An error is printed, counted, and does not raise.
        """
        if not self.wants(kernel, variant, shape):
            return None
        row = Row(kernel, variant, shape, bytes=float(bytes), flops=float(flops), unit=unit, floor_us=floor_us, public_us=public_us, predicted_us=predicted_us)
        self.rows.append(row)
        if self.lost:
            row.message = "the device was lost before"
        elif time.perf_counter() - self.began > self.args.seconds:
            row.message = "--seconds was over"
        else:
            try:
                self._measure(row, run, check)
            except Exception as error:
                row.state, row.message = "failed", f"{type(error).__name__}: {error}"
                self._record_error(f"{kernel} {variant} {shape}")
        print(f"  {row.kernel} {row.variant} | {row.shape} | {number(row.us)} us | {row.state}{': ' + row.message if row.message else ''}", flush=True)
        self.write()
        return row

    def judge(self, kernel: str, variant: str, shape: str, check: Check, **values: Any) -> Row | None:
        """A row for a check alone: right is error <= limit. values: further fields of the row, e.g. us measured elsewhere."""
        if not self.wants(kernel, variant, shape):
            return None
        row = Row(kernel, variant, shape, **values)
        self.rows.append(row)
        if self.lost:
            row.message = "the device was lost before"
        else:
            try:
                row.state = "ok"
                self._check(row, check, "")
            except Exception as error:
                row.state, row.message = "failed", f"{type(error).__name__}: {error}"
                self._record_error(f"{kernel} {variant} {shape}")
        print(f"  {kernel} {variant} | {shape} | error {number(row.error)}, limit {number(row.limit)} | {row.state}{': ' + row.message if row.message else ''}", flush=True)
        self.write()
        return row

    def record(self, kernel: str, variant: str, shape: str, value: float, of: str, predicted: float | None = None) -> Row | None:
        """A row for a number that nobody judges: a rate, a size. predicted: what was expected before the run."""
        if not self.wants(kernel, variant, shape):
            return None
        row = Row(kernel, variant, shape, state="ok", value=float(value), of=of, predicted=predicted)
        self.rows.append(row)
        print(f"  {kernel} {variant} | {shape} | {number(row.value)} {of}{'' if predicted is None else f', predicted {number(predicted)}'}", flush=True)
        self.write()
        return row

    def _measure(self, row: Row, run: Callable[[], object], check: Check | None) -> None:
        before = self._counts()
        run()
        after = self._counts()
        row.launches = sum(after.values()) - sum(before.values())
        row.kernels = [self._report(source, name) for source, name in after if after[source, name] != before.get((source, name), 0)]
        row.state = "ok"
        self._check(row, check, "before timing: ")
        if self.timer is not None and self.ceilings is not None:
            timing = self.timer.cold(run)
            row.us, row.spread = timing.us, timing.spread
            computed = self.ceilings.floor_us(row.bytes, row.flops, row.unit)
            if computed:
                row.floor_us = computed if row.floor_us is None else row.floor_us
                row.share = computed / row.us if row.us > 0 else None
            if self.args.warm:
                row.warm_us = self.timer.warm(run).us
            self._check(row, check, "after timing: ")

    def _check(self, row: Row, check: Check | None, when: str) -> None:
        """Right is error <= limit; the row keeps the worst check."""
        if check is None:
            return
        error, limit = (float(value) for value in check())
        self.device.synchronize()
        if row.error is None or not error <= row.error:
            row.error, row.limit = error, limit
        if not error <= limit:
            row.state = "wrong"
            row.message += f"{'; ' if row.message else ''}{when}error {error:.3g}, limit {limit:.3g}"

    def _counts(self) -> dict[tuple[str, str], int]:
        return {(source, kernel): launches for source, kernel, _, _, launches in self.device.ran}

    def _report(self, source: str, kernel: str) -> dict[str, Any]:
        """Build and, on the card, what the compiler says of a kernel."""
        build = next(b for s, k, _, b, _ in self.device.ran if (s, k) == (source, kernel))
        found: dict[str, Any] = {"source": source, "kernel": kernel, "build": build}
        if isinstance(self.device, CudaDevice):
            usage = cubins.build(self.device.source_path(source), self.device.arch).usage
            found |= next((asdict(u) for u in usage if u.kernel == kernel), {})
        return found

    def _record_error(self, label: str) -> None:
        text = traceback.format_exc()
        self.errors.append(f"{label}: {text.strip().splitlines()[-1]}")
        print(f"FAILED {label}\n{text}", flush=True)
        try:
            self.device.synchronize()
        except Exception as error:  # nothing more runs on a device whose context is broken
            self.lost = True
            print(f"the device is lost ({error}); cases that follow are not run", flush=True)

    # ---- results ----

    def note(self, **values: Any) -> None:
        """Facts of the run beside the rows, kept in the JSON file."""
        self.facts |= values

    def write(self) -> Path:
        """OUT/NAME.json as it stands: a run that is cut off has told what it knew."""
        self.args.out.mkdir(parents=True, exist_ok=True)
        path = Path(self.args.out) / f"{self.name}.json"
        content = {
            "bench": self.name, "facts": self.facts, "ceilings": None if self.ceilings is None else asdict(self.ceilings),
            "rows": [asdict(row) for row in self.rows], "errors": self.errors, "seconds": time.perf_counter() - self.began,
        }  # fmt: skip
        path.write_text(json.dumps(to_wire(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        return path

    def finish(self) -> None:
        """Prints the table, writes the file, and leaves with exit code 1 when something was wrong, failed or never ran."""
        columns = shown(self.rows)
        print("\n" + text_table([c.title for c in columns], [[c.cell(row) for c in columns] for row in self.rows]))
        if self.ceilings is not None:
            print(f"ceilings of this run: {self.ceilings.line()}")
        bad = [row for row in self.rows if row.state != "ok"]
        for row in bad:
            print(f"{row.state}: {row.kernel} {row.variant} {row.shape}: {row.message.splitlines()[0] if row.message else ''}")
        for error in self.errors:
            print(f"error: {error}")
        print(f"{len(self.rows) - len(bad)} of {len(self.rows)} cases ok, {time.perf_counter() - self.began:.0f} s, {self.write()}", flush=True)
        if bad or self.errors or not self.rows:
            sys.exit(1)


# ---- facts ----


def facts(device: Device, commit: str | None = None) -> dict[str, Any]:
    """What a number needs beside it: card, date, versions, source."""
    found: dict[str, Any] = {
        "card": torch.cuda.get_device_name(device.torch_device) if device.name == "cuda" else f"none ({device.arch})",
        "arch": device.arch, "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "driver": "-", "torch": torch.__version__, "cupy": "-", "nvrtc": "-", "commit": commit or _git_head(), "tree": tree_digest(),
    }  # fmt: skip
    if device.name == "cuda":
        import cupy

        found |= {"cupy": cupy.__version__, "nvrtc": cubins.nvrtc().version, "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")}
    return found


def _git_head() -> str:
    head = _output("git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD")
    return head + ("+" if head != "-" and _output("git", "-C", str(ROOT), "status", "--porcelain", "--untracked-files=no") not in ("", "-") else "")


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "-"
    return (done.stdout.strip().splitlines() or [""])[0]


def tree_digest() -> str:
    """10 hex digits over kernels/, production/ and bench/: names a tree that has no git."""
    digest = hashlib.sha256()
    for folder in ("kernels", "production", "bench"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"):
                digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:10]
