"""A model that is no DeepSeek-V4: a small Llama of transformers against itself, one layer perturbed, named in both phases; in decode only, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from parity import generic
from probes.core.records import State, Verdict
from reference.config import InputError

transformers = pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
PROMPT, STEPS = tuple(range(20, 50)), 5


class Llama:
    """transformers' Llama, random weights, its own cache; what is planted is said by the factory."""

    name = "tiny llama"
    points = {  # noqa: RUF012
        "embed": "model.embed_tokens",
        "layers.{layer}.attn": "model.layers.{layer}.self_attn",
        "layers.{layer}.mlp": "model.layers.{layer}.mlp",
        "layers.{layer}.out": "model.layers.{layer}",
        "final_norm": "model.norm",
    }

    def __init__(self, dtype: torch.dtype = torch.float32, late: int = 0) -> None:
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, attn_implementation="eager",
        )  # fmt: skip
        torch.manual_seed(7)
        self.root = transformers.LlamaForCausalLM(config).to(dtype).eval()
        self.late = late

    def new_state(self, batch: int, max_context: int) -> dict[str, Any]:
        return {"cache": transformers.DynamicCache(config=self.root.config), "length": 0}

    def prefill(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        first = state["length"] + (self.late if state["length"] else 0)
        state["length"] += tokens.shape[1]
        positions = torch.arange(first, first + tokens.shape[1])[None].expand(len(tokens), -1)
        logits: torch.Tensor = self.root(input_ids=tokens, past_key_values=state["cache"], position_ids=positions, use_cache=True).logits
        return logits

    def decode(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return self.prefill(tokens[:, None], state)[:, 0]


def plain() -> Llama:
    return Llama()


def perturbed() -> Llama:
    """One weight of layer 2 is 1 % off."""
    model = Llama()
    with torch.no_grad():
        model.root.model.layers[2].mlp.down_proj.weight.mul_(1.01)
    return model


def late() -> Llama:
    """Decode gets the position after its own."""
    return Llama(late=1)


def narrow() -> Llama:
    return Llama(torch.bfloat16)


ONE: list[Llama] = []


def one() -> Llama:
    """The same object each time."""
    if not ONE:
        ONE.append(Llama())
    return ONE[0]


def same_weights() -> Llama:
    model = Llama()
    for mine, its in zip(model.root.parameters(), one().root.parameters(), strict=True):
        mine.data = its.data
    return model


def headless() -> Llama:
    model = Llama()
    torch.nn.init.zeros_(model.root.lm_head.weight)
    return model


class Level(Llama):
    """Every token is as likely as another."""

    def prefill(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return torch.ones_like(super().prefill(tokens, state))


def stops() -> Llama:
    model = Llama()

    def decode(tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise RuntimeError("no kernel for one row")

    model.decode = decode  # type: ignore[method-assign]
    return model


class Holding(Llama):
    """An engine whose cache lives in the object: new_state empties it."""

    def new_state(self, batch: int, max_context: int) -> dict[str, Any]:
        self.held = super().new_state(batch, max_context)
        return {}

    def prefill(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return super().prefill(tokens, self.held)

    def decode(self, tokens: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return self.prefill(tokens[:, None], state)[:, 0]


class Engine:
    """A runner that holds model and cache for its adapter, out of a shallow copy's reach."""

    def __init__(self) -> None:
        self.llama = Holding()


class Adapter:
    name, points = "adapter of an engine", Llama.points

    def __init__(self) -> None:
        self.engine = Engine()
        self.root = self.engine.llama.root
        self.new_state, self.prefill, self.decode = self.engine.llama.new_state, self.engine.llama.prefill, self.engine.llama.decode


def same_module() -> Adapter:
    """Another adapter around it."""
    model = Adapter()
    model.root = one().root
    return model


def another_kind() -> Llama:
    """Another implementation of the same weights: a pair that is worth comparing."""
    model = same_weights()
    model.__class__ = Holding
    return model


class Pinned(Adapter):
    """It cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copy of a CUDA context")


class Closed(Adapter):
    """Its calls are closures, which no copy reaches."""

    def __init__(self) -> None:
        super().__init__()
        llama = self.engine.llama
        self.new_state = lambda batch, max_context: llama.new_state(batch, max_context)
        self.prefill = lambda tokens, state: llama.prefill(tokens, state)
        self.decode = lambda tokens, state: llama.decode(tokens, state)


def closed() -> Closed:
    return Closed()


def holding() -> Holding:
    return Holding()


def held_by_an_engine() -> Adapter:
    return Adapter()


def pinned() -> Pinned:
    return Pinned()


HERE = "parity.unit.test_generic"


def audited(production: str, reference: str = "plain", layers: tuple[int, ...] | None = None) -> tuple[generic.GenericAudit, list[Verdict]]:
    plan = generic.GenericPlan([PROMPT], [(3, 4, 5)], ("prefill", "decode"), STEPS, 128)
    audit = generic.open_audit(f"{HERE}:{production}", f"{HERE}:{reference}", {"device": "cpu"}, plan, layers, lambda line: None)
    verdicts = [generic.judge(audit, case) for case in generic.cases(audit)] + [generic.judge_flips(audit, phase) for phase in plan.phases]
    return audit, verdicts


def red(verdicts: list[Verdict], phase: str) -> list[str]:
    return list(dict.fromkeys(v.point for v in verdicts if v.state is State.FAIL and v.phase == phase))


def test_the_same_model_is_green_at_every_point_in_the_order_of_the_dataflow():
    audit, verdicts = audited("plain")
    assert {v.state for v in verdicts} == {State.PASS}
    assert audit.points == ("embed", *(f"layers.{n}.{name}" for n in range(4) for name in ("attn", "mlp", "out")), "final_norm", "logits")
    assert audit.no_floor == ""
    assert all(0 < (v.floor or 0) < 1e-5 for v in verdicts if v.point == "layers.3.out")
    assert audit.decode_tokens[:3] == [[3], [4], [5]]


def test_one_weight_that_is_one_percent_off_is_named_in_both_phases():
    audit, verdicts = audited("perturbed")
    for phase in ("prefill", "decode"):
        assert red(verdicts, phase)[0] == "layers.2.mlp"
        assert not any(point.startswith(("embed", "layers.0", "layers.1")) or point == "layers.2.attn" for point in red(verdicts, phase))
    first = generic.divergence_of(audit, verdicts)
    assert first is not None
    assert (first.point, first.layer, first.phase, first.component, first.local) == ("layers.2.mlp", 2, "prefill", "mlp", None)
    assert first.because == "everything up to layers.2.attn is within its limit in this pass"


def test_a_wrong_position_in_decode_is_named_in_decode_only():
    audit, verdicts = audited("late")
    assert red(verdicts, "prefill") == []
    first = generic.divergence_of(audit, verdicts)
    assert first is not None
    assert (first.point, first.layer, first.phase, first.step) == ("layers.0.attn", 0, "decode", 0)


def test_bf16_against_fp32_is_measured_by_a_bf16_limit():
    _, verdicts = audited("narrow")
    assert {v.eps for v in verdicts if v.gate == "generic"} == {3e-2}
    assert all(v.state is State.PASS for v in verdicts)
    _, verdicts = audited("narrow", "narrow")
    assert all(v.state is State.PASS for v in verdicts)


def test_without_a_copy_in_fp64_there_is_no_floor_and_that_is_said(monkeypatch):
    monkeypatch.setattr(generic, "in_fp64", lambda model: None)
    audit, verdicts = audited("perturbed")
    assert "no parameters of its own" in audit.no_floor
    assert {v.floor for v in verdicts if v.gate == "generic"} == {0.0}
    assert red(verdicts, "prefill")[0] == "layers.2.mlp"
    (said,) = audit.measurements()
    assert said.values == {"parts": ["mHC", "indexer", "compressor"], "why": "another model stands for the reference", "reference": f"{HERE}:plain", "floor": audit.no_floor}


def test_a_production_that_stops_is_not_run_and_never_a_pass():
    audit, verdicts = audited("stops")
    assert audit.crash is not None
    assert (audit.crash.phase, audit.crash.step, audit.crash.message) == ("decode", 0, "RuntimeError: no kernel for one row")
    assert {v.state for v in verdicts if v.phase == "decode"} == {State.NOT_RUN}


@pytest.mark.parametrize("reference", ["holding", "held_by_an_engine"])
def test_a_cache_inside_of_the_reference_is_its_copys_own_in_fp64(reference):
    audit, verdicts = audited("plain", reference)
    assert audit.no_floor == ""
    assert [(v.point, v.reason) for v in verdicts if v.state is not State.PASS] == []
    assert all(0 < (v.floor or 0) < 1e-5 for v in verdicts if v.point == "layers.3.out")


def test_a_copy_that_still_runs_the_reference_is_no_floor_and_leaves_its_cache_alone():
    audit, verdicts = audited("plain", "closed")
    assert audit.no_floor == "the reference cannot be copied to FP64: its calls still run the model that was copied"
    assert {v.state for v in verdicts} == {State.PASS}


def test_a_reference_that_cannot_be_copied_has_no_floor_and_stays_whole():
    audit, verdicts = audited("plain", "pinned")
    assert audit.no_floor == "the reference cannot be copied to FP64: TypeError"
    assert {v.state for v in verdicts} == {State.PASS}


def test_tables_without_a_common_point_are_refused(monkeypatch):
    monkeypatch.setattr(Llama, "points", {})
    with pytest.raises(InputError, match="their tables name no common point but logits"):
        audited("plain")


@pytest.mark.parametrize(("production", "reference", "what"), [("one", "one", "object"), ("same_module", "one", "module"), ("same_weights", "one", "set of parameters")])
def test_a_model_against_itself_is_refused(production, reference, what):
    with pytest.raises(InputError, match=f"both factories return the same {what}, so anything would pass"):
        audited(production, reference)


def test_two_implementations_may_share_their_weights():
    _, verdicts = audited("another_kind", "one")
    assert {v.state for v in verdicts} == {State.PASS}


@pytest.mark.parametrize(("name", "said"), [("headless", "logits is zero everywhere in both models: nothing was compared"), ("Level", "logits are the same for every token, in both models: nothing was compared")])
def test_constants_are_not_run_and_never_a_pass(name, said):
    _, verdicts = audited(name, name)
    of_logits = [v for v in verdicts if v.point == "logits"]
    assert {(v.gate, v.state, v.reason) for v in of_logits} == {(gate, State.NOT_RUN, said) for gate in ("generic", "logits.top1")}
    assert {v.state for v in verdicts if v.point != "logits"} == {State.PASS}
    _, verdicts = audited("plain", name)
    assert {v.state for v in verdicts if v.point == "logits" and v.gate == "generic"} == {State.FAIL}


def test_layers_are_those_that_the_table_finds_or_those_that_are_asked_for():
    assert audited("plain")[0].layers == (0, 1, 2, 3)
    assert audited("plain", layers=(1, 2))[0].layers == (1, 2)


# ---- the command line ----


def pytest_parity(tmp_path: Path, production: str, *args: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    (tmp_path / "tokens.json").write_text(json.dumps(PROMPT), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "parity/", "--production", f"{HERE}:{production}", "--reference", f"{HERE}:plain", "--prompt", str(tmp_path / "tokens.json"), "--steps", "3"]
    done = subprocess.run([*command, "--checkpoint", str(tmp_path / "none"), "--report", str(tmp_path / "out"), *args], cwd=ROOT, capture_output=True, text=True, timeout=600)
    run = tmp_path / "out" / "run.jsonl"
    return done, [json.loads(line) for line in run.read_text().splitlines()] if run.is_file() else []


def test_the_door_needs_no_checkpoint_and_names_its_coverage(tmp_path):
    done, records = pytest_parity(tmp_path, "plain")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "verdict: pass (generic: 15 points of 4 layers and logits; not applicable: mHC, indexer, compressor)" in done.stdout
    header, summary = records[0], records[-1]
    assert summary["verdict"] == "pass"
    assert summary["coverage"] == "generic: 15 points of 4 layers and logits; not applicable: mHC, indexer, compressor"
    assert header["production"] == "tiny llama"
    assert header["checkpoint"] == ""
    assert "not applicable: mHC, indexer, compressor" in header["notes"]
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "final_norm" in page
    assert f"<h1>Parity: tiny llama against {HERE}:plain</h1>" in page
    assert "<title>pass: parity</title>" in page
    assert "FP32 reference</h1>" not in page
    assert page.count("<dt>fault score</dt>") == 1, "in the glossary only"
    for gone in ("sinkhorn", "residual", "recall", "memory", "kernels", "mechanisms"):
        assert f'id="{gone}"' not in page
        assert f'href="#{gone}"' not in page
    assert "left out of this page, as nothing of this production is in it: drift, |X|, Sinkhorn" in page
    assert "not applicable: mHC, indexer, compressor" in page


def test_a_perturbed_layer_ends_with_one_and_its_name(tmp_path):
    done, records = pytest_parity(tmp_path, "perturbed")
    assert done.returncode == 1
    assert "first divergence: layers.2.mlp, prefill" in done.stdout
    assert records[-1]["first_divergence"]["layer"] == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--production", "transformers"], "--production transformers with --reference: that name is transformers' DeepSeek-V4, whose reference is the project's own"),
        (["--policy", "exact"], "--policy with --reference: the other model rounds as it does"),
        (["--reference", "parity.unit.test_generic:nothing"], "--reference parity.unit.test_generic:nothing: parity.unit.test_generic has no nothing"),
    ],
)
def test_bad_input_is_one_line(tmp_path, args, said):
    done, _ = pytest_parity(tmp_path, "plain", *args)
    assert done.returncode == 4
    assert said in done.stderr
    assert not (tmp_path / "out").exists()
