"""Invented runs for the tests of the report: every record type, no model is run.

    records = synthetic_run(seed=1, fails=3)          eight layers, two phases; a run that failed
    records = cut_off(synthetic_run())                the same, killed before its last line
    records = wild_run()                              NaN, inf and nothing in every number, markup and long words in every text
    records = large_run(layers=61, steps=128)         the published model of 61 layers with the cases that an audit of it selects
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parity import selection
from probes.core.records import (
    Coverage,
    Divergence,
    Header,
    Kernel,
    Measurement,
    Mechanism,
    Record,
    State,
    Summary,
    Verdict,
    summarise,
)
from reference.config import ModelConfig

PUBLISHED = Path(__file__).resolve().parents[2] / "checkpoints" / "presets" / "pro"
HOSTILE = '<script>alert("x")</script>&\'"><img src=x onerror=alert(1)>\x1b[31m\x00 </pre>'
HALF = ("pre", "post", "comb", "a")
WINDOW = ("norm", "q", "kv", "visible", "core", "out")
COMPRESSED = ("norm", "q", "kv", "compressor", "visible", "core", "out")
CSA = ("norm", "q", "kv", "compressor", "indexer.q", "indexer.compressor", "indexer.score", "selected", "visible", "core", "out")
FFN = ("norm", "gate", "experts", "routed", "shared_experts", "out")
KINDS = (WINDOW, WINDOW, CSA, COMPRESSED, CSA, COMPRESSED, CSA, COMPRESSED)
SETS = ("selected", "visible", "experts")
STEP_GROUPS = ((0, 0), (1, 31), (32, 129))
WHY = "accumulation order of one linear; three orders measured, the worst row doubled"


def points(layer: int) -> list[str]:
    """The points of a layer in dataflow order."""
    attn = [f"attn.{name}" for name in KINDS[layer % len(KINDS)]]
    names = [*(f"hc_attn.{n}" for n in HALF), *attn, "hc_attn.X", *(f"hc_ffn.{n}" for n in HALF), *(f"ffn.{n}" for n in FFN), "hc_ffn.X"]
    return [f"layers.{layer}.{name}" for name in names]


def header(layers: int = 8, **changes: object) -> Header:
    """A header of an ordinary run on the CPU."""
    values: dict[str, object] = {
        "started": "2025-01-31T12:34:56+00:00", "command": "pytest parity/ --phase both --layers 0-7", "commit": "1a2b3c4d5e6f", "dirty": False,
        "environment": {"python": "3.11.7", "torch": "2.13.0+cpu", "platform": "Linux x86_64", "cpu": "two cores", "compiler": "g++ 12.2", "gpu": None, "cuda": None},
        "checkpoint": "checkpoints/tiny-dsv4", "checkpoint_hash": "sha256:8f14e45fceea167a", "device": "cpu",
        "model": {"layers": layers, "window": [0, 1], "csa": [2, 4, 6], "hca": [3, 5, 7], "hidden_size": 256, "compress_ratios": [0, 0, 4, 128, 4, 128, 4, 128]},
        "policy": ["bf16", "compressor.e4m3", "kv.e4m3", "linear_in.e4m3"], "phases": ["prefill", "decode"],
        "layers": list(range(layers)), "layers_run": list(range(layers)), "prompts": ["medium.txt:0:250"], "tokens": [250], "steps": 130, "max_context": 8192,
        "notes": ["tokenizer.json read from the checkpoint"],
    }  # fmt: skip
    return Header(**{**values, **changes})  # type: ignore[arg-type]


def verdict(rng: random.Random, point: str, mode: str, phase: str | None, layer: int | None, group: tuple[int, int] | None = None, **changes: object) -> Verdict:
    """A gate that passed."""
    spent = round(rng.betavariate(2, 4), 4)
    floor = 10 ** rng.uniform(-4, -2.5)
    limit = 2 * floor + 1e-6
    is_set = point.rsplit(".", 1)[-1] in SETS
    values: dict[str, object] = {
        "gate": "sets" if is_set else "values", "point": point, "mode": mode, "state": State.PASS, "metric": "differing" if is_set else "worst_row_rel_l2",
        "layer": layer, "phase": phase, "step_first": group[0] if group else None, "step_last": group[1] if group else None,
        "worst_step": group[0] if group else None, "value": 0.0 if is_set else spent * limit, "limit": 0.0 if is_set else limit, "spent": 0.0 if is_set else spent,
        "floor": None if is_set else floor, "k": None if is_set else 2.0, "eps": None if is_set else 1e-6, "why": "every key, exactly" if is_set else WHY,
        "where": [0, rng.randrange(250)], "element": [0, 3, 17], "got": rng.gauss(0, 1), "want": rng.gauss(0, 1),
        "norm_ratio": 1 + rng.gauss(0, 1e-3), "norm_ratio_limit": 0.01, "cosine": 0.99999, "rel_l2": spent * limit / 2, "rows": 250,
        "near_ties": rng.randrange(3) if is_set else 0, "component": "attention core", "local": True if mode == "isolated" else None,
        "test_id": f"parity/test_layers.py::test_point[{phase}-{point}-{mode}]",
    }  # fmt: skip
    return Verdict(**{**values, **changes})  # type: ignore[arg-type]


def synthetic_run(
    seed: int = 0, layers: int = 8, fails: int = 3, not_run: int = 4, missing: int = 2, nan: bool = True, hostile: bool = True
) -> list[Record]:
    """Records of a whole run; with no fails, nothing not run and nothing missing it is a pass."""
    rng = random.Random(seed)
    head = header(layers, checkpoint=f"models/{HOSTILE}", notes=[HOSTILE]) if hostile else header(layers)
    records: list[Record] = [head]
    verdicts: list[Verdict] = []
    coverage: list[Coverage] = []
    for phase in ("prefill", "decode"):
        for layer in range(layers):
            for point in points(layer):
                for mode in ("isolated", "free"):
                    coverage.append(Coverage(phase, layer, point, mode, 130 if phase == "decode" else 1, 130 if phase == "decode" else 1))
                    for group in (None,) if phase == "prefill" else STEP_GROUPS:
                        verdicts.append(verdict(rng, point, mode, phase, layer, group))
        for point in ("embed", "hc_head", "norm", "logits"):
            verdicts.append(verdict(rng, point, "free", phase, None))
    for operation in ("rms_norm", "rope", "linear_fp8", "sparse_attn", "hc_pre"):
        verdicts += [verdict(rng, operation, "operation", None, None, test_id=f"parity/test_operations.py::test_{operation}[{case}]") for case in range(3)]

    layered = [i for i, v in enumerate(verdicts) if v.layer is not None and v.gate == "values"]
    for n, i in enumerate(sorted(rng.sample(layered, fails + not_run))):
        old = verdicts[i]
        made: dict[str, object] = {"state": State.NOT_RUN, "reason": "no CUDA device", "value": None, "limit": None, "spent": None, "floor": None, "cosine": None, "rows": 0}
        if n < fails:
            spent = (4.18, 41.8, 1.0004)[n % 3]
            made = {"state": State.FAIL, "reason": "worst row over its limit", "value": spent * (old.limit or 1), "spent": spent}
            if n == 0 and nan:
                made |= {"value": math.nan, "spent": math.nan, "got": math.nan, "cosine": math.nan, "want": math.inf, "reason": "finite masks differ"}
        if hostile and n == fails - 1:
            made |= {"reason": HOSTILE, "gate": HOSTILE, "component": HOSTILE, "test_id": HOSTILE, "details": {HOSTILE: [HOSTILE]}}
        verdicts[i] = dataclasses.replace(old, **made)  # type: ignore[arg-type]
    for i in rng.sample(range(len(coverage)), missing):
        c = coverage[i]
        coverage[i] = Coverage(c.phase, c.layer, c.point, c.mode, c.expected, 0)

    records += [*coverage, *verdicts, *_measurements(rng, layers, nan, hostile)]
    for source, kernels in (("rms_norm", ("rms_norm",)), ("linear", ("linear_fp8_naive", "linear_fp8_mma")), ("sparse_attn", ("sparse_attn", "combine"))):
        records += [Kernel(source, k, "cpu-x86_64", "6f1c2b3a4d5e", rng.randrange(1, 5000)) for k in kernels]
    records += [
        Mechanism("window wrap", 122, "a token left the window"),
        Mechanism("HCA entry completed", 2, "a group of 128 tokens was pooled"),
        Mechanism("SwiGLU clamp", 0, "a gate or up value beyond swiglu_limit", "test_operations.py: swiglu"),
    ]
    first = next((v for v in verdicts if v.state is State.FAIL), None)
    divergence = Divergence(first.layer, first.point, first.phase, first.step_first, first.local, first.component) if first else None
    return [*records, summarise(records, seconds=123.4, divergence=divergence)]


def _measurements(rng: random.Random, layers: int, nan: bool, hostile: bool) -> list[Measurement]:
    out: list[Measurement] = []
    for phase in ("prefill", "decode"):
        size = 3.0
        for layer in range(layers):
            size *= rng.uniform(1.0, 1.9)
            for step in (None,) if phase == "prefill" else (0, 31, 129):
                ratio = 1 + rng.gauss(0, 2e-3)
                values = {"reference_absmax": size, "production_absmax": size * ratio, "reference_rms": size / 9, "production_rms": size / 9 * ratio, "ratio": ratio}
                if nan and phase == "decode" and layer == 5 and step == 129:
                    values |= {"production_absmax": math.nan, "production_rms": math.inf, "ratio": math.nan}
                out.append(Measurement("residual", layer, phase, step, None, dict(values)))
            for site in ("hc_attn", "hc_ffn"):
                out.append(
                    Measurement(
                        "sinkhorn", layer, phase, None, None,
                        {"site": site, "column_deviation": 10 ** rng.uniform(-6, -5), "row_deviation": 10 ** rng.uniform(-5, -3), "spectral_norm": 1 + rng.random() / 1e4,
                         "matrix_distance": 10 ** rng.uniform(-6, -4), "pre_min": 0.01, "pre_max": 0.98, "post_min": 0.1, "post_max": 1.9, "iterations_for_1e-6": rng.choice([7, 12, None])},
                    )
                )  # fmt: skip
            example = {"position": 260, "reference": list(range(133, 261)), "production": list(range(134, 261))} if layer == 2 else {}
            out.append(Measurement("visible", layer, phase, None, None, {"queries": 250, "different": int(layer == 2), "example": example}))
        logits = {"kl_mean": 1.2e-4, "kl_max": 3.4e-3, "top1_agreement": 0.996, "flips": 1, "flips_beyond_margin": 0}
        out.append(Measurement("logits", None, phase, None, None, logits))
    text = "def gettext(self, message):\n    return self._catalog.get(message)\n"
    greedy = {"reference_text": text + (HOSTILE if hostile else ""), "production_text": text, "first_difference": 29, "tokens": 32, "reference_margin": 0.01}
    out += [Measurement("greedy", None, "decode", None, None, greedy), Measurement("storage_bytes", None, None, None, None, {"kv cache": 123456})]
    return out


def cut_off(records: list[Record]) -> list[Record]:
    """The same run without its last line."""
    return [r for r in records if not isinstance(r, Summary)]


# ---- a run in which everything is odd ----

WILD_NUMBERS = (math.nan, math.inf, -math.inf, None, 0.0, -0.0, 1e-320, 1e308)
WILD_TEXTS = (
    HOSTILE, "</script><script>alert(1)</script>", "\"'`<>&amp;&#0;{{ 7 * 7 }}{% raw %}", "\u202eright to left\u2066\u05d0\u05d1\u05d2\u0627\u0644", "x" * 10_000,
    "<!-- <style>*{display:none}</style>", "a\nb\r\nc\td\u2028e", "\U0001f9ea\ud83d e\u0301" * 40, "",
)  # fmt: skip


def wild_run(seed: int = 11, layers: int = 3) -> list[Record]:
    """A failed run: no number is ordinary and no text is harmless, and the summary still adds up."""
    rng = random.Random(seed)
    numbers, texts = _turns(WILD_NUMBERS), _turns(WILD_TEXTS)

    def wild(plain: Verdict) -> Verdict:
        state = rng.choice(list(State))
        changes: dict[str, Any] = {field: next(numbers) for field in ("value", "limit", "spent", "floor", "k", "eps", "got", "want", "norm_ratio", "norm_ratio_limit", "cosine", "rel_l2")}
        changes |= {field: next(texts) for field in ("metric", "why", "reason", "component", "test_id")} | {"gate": next(texts) or "gate"}
        changes["numbers"] = [{"number": next(texts), "smallest_limit": next(numbers), "limit": next(numbers), "spent": next(numbers)} for _ in range(rng.randrange(4))]
        changes["details"] = {next(texts): [next(numbers), {next(texts): next(numbers)}], "x": next(texts)}
        return dataclasses.replace(plain, state=state, rows=rng.choice((0, 1, 10**12)), **changes)

    verdicts: list[Verdict] = []
    for phase in ("prefill", "decode"):
        for layer in range(layers):
            verdicts += [wild(verdict(rng, point, mode, phase, layer, None if phase == "prefill" else (0, 0))) for point in points(layer) for mode in ("isolated", "free")]
    verdicts += [wild(dataclasses.replace(verdict(rng, "logits", "free", "decode", None), point=text or "point", layer=layer)) for text in WILD_TEXTS for layer in (None, 0)]
    verdicts += [wild(verdict(rng, text or "operation", "operation", None, None)) for text in WILD_TEXTS]
    measured = [
        dataclasses.replace(m, values={key: value if key in ("site", "of") else next(texts) if isinstance(value, str) else next(numbers) for key, value in m.values.items()})
        for m in _measurements(rng, layers, nan=True, hostile=True)
    ]
    measured += [Measurement(text, None, None, None, None, {text: text, "n": number}) for text in WILD_TEXTS for number in WILD_NUMBERS[:2]]
    head = header(
        layers, command=f"pytest parity/ --prompt '{WILD_TEXTS[2]}", commit=HOSTILE, dirty=True, checkpoint=WILD_TEXTS[4], checkpoint_hash=WILD_TEXTS[3], device=WILD_TEXTS[1],
        policy=list(WILD_TEXTS), prompts=[*WILD_TEXTS], tokens=[1], notes=list(WILD_TEXTS), inject=WILD_TEXTS[3], fault_score=WILD_TEXTS[4], variants=HOSTILE,
        environment={text: number for text, number in zip(WILD_TEXTS, WILD_NUMBERS, strict=False)} | {"gpu": None, "cpu": HOSTILE},
        model={**{text: [text] for text in WILD_TEXTS}, "layers": layers, "window": [0, 1], "csa": [2], "hca": []},
    )  # fmt: skip
    records: list[Record] = [head, *(Coverage("decode", 0, text, "free", 1, n) for n, text in enumerate(WILD_TEXTS)), *verdicts, *measured]
    records += [Kernel(text, text, text, text, 1) for text in WILD_TEXTS]
    records += [Mechanism(text, n, text, text) for n, text in enumerate(WILD_TEXTS)]
    first = next(v for v in verdicts if v.state is State.FAIL)
    divergence = Divergence(first.layer, first.point, first.phase, first.step_first, None, HOSTILE, replay=WILD_TEXTS[2], because=WILD_TEXTS[4])
    return [*records, summarise(records, seconds=math.inf, divergence=divergence)]


def _turns(values: tuple[Any, ...]) -> Iterator[Any]:
    while True:
        yield from values


# ---- a run of the published size ----

METRIC = "worst row rel-L2"
OPERATIONS = 5300  # cases of operations judged alone, as an audit on a GPU records them


def large_run(layers: int = 61, steps: int = 128, seed: int = 6, fails: int = 40) -> list[Record]:
    """The cases that `pytest parity/ --steps N` selects for the published configuration, each with a verdict of the usual size."""
    rng = random.Random(seed)
    config = ModelConfig.from_dir(PUBLISHED)
    phases, asked = ("prefill", "decode"), range(layers)
    verdicts: list[Verdict] = []
    coverage: dict[tuple[Any, ...], Coverage] = {}
    for case in [*selection.layer_cases(config, asked, phases, steps), *selection.model_cases(phases, steps)]:
        test = f"parity/test_layers.py::test_point[{case.id}]"
        verdicts.append(_usual(rng, case.point, case.mode, case.phase, case.layer, case.steps, test))
        times = 1 if case.phase == "prefill" else steps
        coverage[case.phase, case.layer, case.point, case.mode] = Coverage(case.phase, case.layer, case.point, case.mode, times, times)
    for state in selection.state_cases(config, asked, phases, steps):
        point = f"layers.{state.layer}.state.{state.part}"
        verdicts.append(_usual(rng, point, "isolated", state.phase, state.layer, state.steps or (0, 0), f"parity/test_state.py::test_state[{state.id}]"))
    for n in range(OPERATIONS):
        name = f"linear_fp8[{n % 61} rows, {n % 7} columns, strided, NaN around it]"
        verdicts.append(_usual(rng, name, "operation", None, None, None, f"parity/test_operations_dense.py::test_linear_fp8[{n}]"))
    for i in rng.sample(range(len(verdicts)), fails):
        old, spent = verdicts[i], rng.uniform(1.001, 60)
        verdicts[i] = dataclasses.replace(old, state=State.FAIL, spent=spent, value=spent * (old.limit or 1), reason="worst row over its limit")
    records: list[Record] = [header(layers, steps=steps, command=f"pytest parity/ --checkpoint models/pro --steps {steps}"), *coverage.values(), *verdicts]
    records += [*_measurements(rng, layers, nan=False, hostile=False), *_large_measurements(rng, layers, steps)]
    records += [Kernel(f"linear_{n}", f"linear_fp8_variant{n}", "sm_90a", "6f1c2b3a4d5e", rng.randrange(1, 10**6)) for n in range(156)]
    first = next((v for v in verdicts if v.state is State.FAIL), None)
    divergence = Divergence(first.layer, first.point, first.phase, first.step_first, first.local, first.component) if first else None
    return [*records, summarise(records, seconds=7200.0, divergence=divergence)]


def _usual(rng: random.Random, point: str, mode: str, phase: str | None, layer: int | None, group: tuple[int, int] | None, test_id: str) -> Verdict:
    """A pass with three numbers and details, about as many bytes as an audit writes."""
    plain = verdict(rng, point, mode, phase, layer, group, test_id=test_id, metric=METRIC)
    if plain.limit is None or plain.spent is None or plain.floor is None:
        return plain
    numbers = [
        {"number": name, "smallest_limit": rng.random() * plain.limit, "limit": plain.limit, "spent": plain.spent / (n + 1)}
        for n, name in enumerate((METRIC, "norm ratio off 1 by", "typical row rel-L2"))
    ]
    details = {"median": plain.value, "median_floor": plain.floor, "median_limit": plain.limit}
    return dataclasses.replace(plain, numbers=numbers, details=details)


def _large_measurements(rng: random.Random, layers: int, steps: int) -> list[Measurement]:
    """What an audit measures per layer, and per step."""
    out: list[Measurement] = []
    for layer in range(layers):
        for phase in ("prefill", "decode"):
            for name, keys in (
                ("residual growth", ("growth_production", "growth_reference", "from_comb_production", "from_post_production", "remainder_production")),
                ("attention mass", ("window_reference", "window_production", "entries_reference", "entries_production", "sink_reference", "sink_production")),
                ("choices", ("experts_differing", "experts_near_ties", "error_own", "error_replayed", "choice_share")),
                ("recall", ("mean", "p1", "worst", "mass_lost")),
            ):
                out.append(Measurement(name, layer, phase, None, f"layers.{layer}.attn.core", {key: rng.random() for key in keys}))
        for step in range(steps):
            size = 10 ** rng.uniform(0, 3)
            out.append(Measurement("residual", layer, "decode", step, None, {"reference_absmax": size, "production_absmax": size * (1 + rng.gauss(0, 1e-3))}))
    for kind in ("window", "csa", "hca"):
        for mode in ("isolated", "free"):
            values = {"class": "attn.core", "layers": kind, "mode": mode, "steps": steps, "first": rng.random(), "last": rng.random(), "mod4": [rng.random() for _ in range(4)]}
            out.append(Measurement("drift", None, "decode", None, None, values))
    return out
