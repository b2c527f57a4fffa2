"""transformers' deepseek_v4 as somebody else's production: green as it is, and faults planted in it from outside are named.

A planted fault is a change of the loaded model or of its module's functions, for one test; the kinds are the catalogue's, one a
component where this model has the component. Each must be found, in the right layer, phase and component. Not to be found here:
a missing SwiGLU clamp, which the bundled texts never reach (the verdict says so under "not exercised").
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import reference
from parity import evaluate, policy, selection, witness
from parity.attribution import first_divergence
from parity.audit import Plan
from parity.outside import NotExposedError, OutsideAudit
from probes.core.inputs import read_prompt
from probes.core.records import Divergence, State, Verdict
from reference.config import InputError
from reference.points import places_of_model

pytest.importorskip("transformers", reason="transformers is not installed (extra: transformers)")

from probes.outside import deepseek_v4_transformers as adapter

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
LAYERS, STEPS = range(4), 4  # two window layers, one CSA, one HCA; the third step ends a group of 4
PROMPT = "medium.txt:0:130"
Change = Callable[[Any, Any, pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def exact() -> Any:
    torch.set_num_threads(1)
    return reference.load(TINY, policy="exact", layers=LAYERS, max_context=256)


@pytest.fixture(scope="module")
def windows(exact: Any) -> Any:
    """The two window layers alone: enough for what is planted there."""
    return reference.load(TINY, policy="exact", layers=range(2), max_context=256)


def run(production: Any, model: Any, prompts: Sequence[str] = (PROMPT,), steps: int = STEPS) -> tuple[list[Verdict], OutsideAudit]:
    """The gates that an outside audit has, judged without pytest's session. One twin: limits are no wider than with three."""
    read = [read_prompt(prompt, TINY, model.config.vocab_size) for prompt in prompts]
    phases, layers = ("prefill", "decode"), tuple(model.layers)
    plan = Plan([p.ids for p in read], [p.continuation for p in read], phases, layers, steps, 256)
    audit = OutsideAudit(model, production, [model.twin(1)], plan, say=lambda line: None)
    asked: list[Callable[[], Verdict]] = []
    for case in selection.layer_cases(model.config, layers, phases, steps) + selection.model_cases(phases, steps, alone=True):
        asked.append(partial(judge_point, audit, case))
    for phase in phases:
        for layer in layers:
            asked += [partial(judge, audit, layer, phase) for judge in (witness.judge_visible_rule, witness.judge_core, witness.judge_sink)]
    asked += [partial(policy.judge_policy, audit, name) for name in policy.SEEN]
    verdicts: list[Verdict] = []
    hidden: set[str] = set()
    for judge in asked:
        try:
            verdicts.append(judge())
        except NotExposedError as error:
            hidden.add(error.point.rsplit(".", 1)[1])
    assert hidden == {"pre"}
    assert audit.crash is None, audit.crash
    return verdicts, audit


def judge_point(audit: OutsideAudit, case: selection.Case) -> Verdict:
    return witness.explained_core(audit, evaluate.judge_case(audit, case, case.id))


def first(verdicts: list[Verdict], model: Any) -> Divergence | None:
    return first_divergence(verdicts, places_of_model(model.config, model.layers))


# ---- as it is ----


def test_fp32_is_green_far_below_limits_of_fp32_noise(exact: Any) -> None:
    verdicts, audit = run(adapter.load(TINY, layers=LAYERS, max_context=256), exact)
    assert len(verdicts) > 500
    assert [f"{v.point} {v.reason}" for v in verdicts if v.state is not State.PASS] == []
    assert max(v.spent or 0.0 for v in verdicts) < 0.25
    limits = [v.limit or 0.0 for v in verdicts if v.mode == "isolated" and v.metric == "worst row rel-L2"]
    assert max(limits) < 1e-4
    said = [m.values["otherwise"] for m in policy.measurements(audit) if m.name == "policy"]
    assert sum("e4m3" in line and " 0 % of " in line for line in said) == 2
    assert sum("e2m1" in line and " 0 % of " in line for line in said) == 2
    assert any("Hadamard" in line for line in said)


def test_bf16_is_green_under_the_policy_that_it_declares() -> None:
    production = adapter.load(TINY, layers=LAYERS, max_context=256, dtype="bf16")
    model = reference.load(TINY, policy=production.policy, layers=LAYERS, max_context=256)
    verdicts, audit = run(production, model)
    assert [f"{v.point} {v.reason}" for v in verdicts if v.state is not State.PASS] == []
    otherwise = {m.values["rounding"]: m.values["otherwise"] for m in policy.measurements(audit) if m.values.get("otherwise")}
    assert otherwise.keys() >= {"comb.bf16", "post.bf16", "gate.bf16", "softmax.bf16", "kv.e4m3", "indexer.q.e2m1"}
    assert "100 %" in otherwise["gate.bf16"]


@pytest.mark.parametrize("fault", [False, True], ids=["right", "planted"])
def test_one_key_of_the_cache_that_is_anothers_is_seen_in_bf16(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer 1's cached key 10 becomes a copy of key 11 behind prefill: below what BF16 costs attn.core, not below what it costs its own keys."""
    production = adapter.load(TINY, layers=range(2), max_context=256, dtype="bf16")
    make = production.model.new_state

    def new_state(batch: int, max_context: int) -> Any:
        state = make(batch, max_context)
        held = state["cache"].layers[1]
        update = held.update

        def spoil(k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
            found = update(k, v, *args, **kwargs)
            if k.shape[2] > 1:
                held.keys = held.keys.clone()
                held.keys[:, :, 10] = held.keys[:, :, 11]
                held.values = held.keys
            return found

        held.update = spoil
        return state

    if fault:
        monkeypatch.setattr(production.model, "new_state", new_state)
    model = reference.load(TINY, policy=production.policy, layers=range(2), max_context=256)
    verdicts, _ = run(production, model, ["medium.txt:0:150"])
    red = {(v.gate, v.point, v.phase) for v in verdicts if v.state is State.FAIL}
    assert red == ({("core.witness", "layers.1.attn.core", "decode")} if fault else set())
    if not fault:
        worst = {v.gate: max(w.value or 0.0 for w in verdicts if w.gate == v.gate) for v in verdicts if v.gate in ("core.witness", "sink.sum")}
        assert worst["core.witness"] < 4e-3
        assert worst["sink.sum"] < 2e-3


def test_two_rows_of_equal_lengths_are_green(exact: Any) -> None:
    verdicts, audit = run(adapter.load(TINY, layers=LAYERS, max_context=256), exact, (PROMPT, "long.txt:7:137"), steps=2)
    assert audit.batch == 2
    assert [f"{v.point} {v.reason}" for v in verdicts if v.state is not State.PASS] == []


def test_rows_of_unequal_lengths_are_refused(exact: Any) -> None:
    production = adapter.load(TINY, layers=range(1), max_context=64)
    with pytest.raises(InputError, match="one length"):
        production.prefill(torch.zeros(2, 5, dtype=torch.int64), production.new_state(2, 64), torch.tensor([5, 3]))


def test_unequal_prompts_are_bad_input_in_one_line(tmp_path: Path) -> None:
    words = ["--production", "transformers", "--layers", "0", "--prompt", "medium.txt:0:9", "--prompt", "medium.txt:0:5", "--report", str(tmp_path / "r")]
    done = subprocess.run([sys.executable, "-m", "pytest", "parity/", "-p", "no:cacheprovider", *words], cwd=TINY.parents[1], capture_output=True, text=True, check=False)
    assert done.returncode == 4
    lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    assert len(lines) == 1
    assert "rows of 9, 5 tokens" in lines[0]
    assert "its cache has one length" in lines[0]
    assert not (tmp_path / "r").exists()


def test_left_padding_changes_its_logits() -> None:
    production = adapter.load(TINY, layers=LAYERS, max_context=256)
    difference = adapter.left_padding(production.root, list(range(7, 60)), 9)
    assert production.measured(torch.arange(7, 60)[None])["outside.left_padding"]["largest_logit_difference"] > 1e-2
    print(f"largest logit difference of a row left-padded by 9 tokens: {difference:.3g}")
    assert difference > 1e-2


# ---- faults ----


def layers_of(root: Any) -> Any:
    return root.model.layers


def _transposed(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4HyperConnection.forward

    def forward(self: Any, streams: Any) -> Any:
        post, comb, collapsed = plain(self, streams)
        return post, comb.transpose(-1, -2), collapsed

    patch.setattr(theirs.DeepseekV4HyperConnection, "forward", forward)


def _fewer_iterations(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    layers_of(root)[1].ffn_hc.hc_sinkhorn_iters = 4


def _overlap_lost(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4CSACache.update_overlap_state

    def update(self: Any, name: str, kv: Any, gate: Any, head_dim: int) -> Any:
        plain(self, name, kv, gate, head_dim)
        return None, None

    patch.setattr(theirs.DeepseekV4CSACache, "update_overlap_state", update)


def _no_relu(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(theirs.F, "relu", lambda x: x)


def _one_entry_fewer(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    layers_of(root)[2].self_attn.compressor.indexer.index_topk -= 1


def _entry_seen_late(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4HCACompressor.forward

    def forward(self: Any, hidden: Any, q: Any, position_ids: Any, cache: Any, layer: int) -> Any:
        return plain(self, hidden, q, position_ids - 1 if position_ids.shape[1] > 1 else position_ids, cache, layer)

    patch.setattr(theirs.DeepseekV4HCACompressor, "forward", forward)


def _ring_too_short(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4HCACache.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        full = plain(self, *args, **kwargs)
        return tuple(keys[:, :, 1:] for keys in full) if args[0].shape[-2] == 1 else full

    patch.setattr(theirs.DeepseekV4HCACache, "update", update)
    eager = theirs.eager_attention_forward
    patch.setattr(theirs, "eager_attention_forward", lambda m, q, k, v, mask, **kw: eager(m, q, k, v, None if mask is None else mask[..., -k.shape[2] :], **kw))


def _slot_of_another_token(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4HCACache.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        full = plain(self, *args, **kwargs)
        if args[0].shape[-2] == 1:
            full[0][:, :, 0] = full[0][:, :, -2]
        return full

    patch.setattr(theirs.DeepseekV4HCACache, "update", update)


def _wrong_base(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    layers_of(root)[0].self_attn.rope_layer_type = "compress"


def _entries_not_rotated(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    rotary = layers_of(root)[2].self_attn.compressor.rotary_emb
    plain = rotary.forward
    patch.setattr(rotary, "forward", lambda x, position_ids, layer_type=None: plain(x, position_ids=position_ids * 0, layer_type=layer_type))


def _not_rotated_back(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.apply_rotary_pos_emb

    def apply(x: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        back = sin.shape[1] > 1 and float(sin[0, 1, 0]) < 0  # sin(1) is positive
        return x if back else plain(x, cos, sin, unsqueeze_dim)

    patch.setattr(theirs, "apply_rotary_pos_emb", apply)


def _sinks_of_others(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    sinks = layers_of(root)[1].self_attn.sinks
    sinks.data = sinks.data.flip(0).contiguous()


def _bias_in_weights(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, hidden: Any) -> Any:
        logits = theirs.F.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
        biased = self.score_fn(logits) + self.e_score_correction_bias
        indices = biased.topk(self.top_k, dim=-1, sorted=False).indices
        weights = biased.gather(1, indices)
        return logits, weights / weights.sum(-1, keepdim=True) * self.routed_scaling_factor, indices

    patch.setattr(theirs.DeepseekV4TopKRouter, "forward", forward)


def _table_shifted(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    gate = layers_of(root)[1].mlp.gate
    gate.tid2eid.data = gate.tid2eid.data.roll(1, 0)


def _one_scale_for_both(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    experts = layers_of(root)[0].mlp.experts
    experts.gate_up_proj.data[3, : experts.intermediate_dim] *= 2


def _clamped_at_once(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    layers_of(root)[1].mlp.shared_experts.limit = 0.5


def _norm_of_the_other_half(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    layers_of(root)[2].input_layernorm.weight = layers_of(root)[2].post_attention_layernorm.weight


def _slot_zero_overwritten(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    plain = theirs.DeepseekV4HCACache.update_compressor_states

    def update(self: Any, name: str, compressed: Any) -> Any:
        entries = plain(self, name, compressed)
        if name == "compressor" and not compressed.shape[1] and entries.shape[1]:
            entries[:, 0] = entries[:, -1] * 0.5
        return entries

    patch.setattr(theirs.DeepseekV4HCACache, "update_compressor_states", update)


def _head_in_fp8(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    root.lm_head.weight.data = root.lm_head.weight.data.to(torch.float8_e4m3fn).float()


def _head_base_dropped(root: Any, theirs: Any, patch: pytest.MonkeyPatch) -> None:
    root.model.hc_head.hc_base.data.zero_()


@dataclass(frozen=True)
class Fault:
    """One planted fault: its kind in the catalogue, and what a right report names."""

    id: str
    title: str
    change: Change
    layer: int | None
    phase: str
    point: str
    components: tuple[str, ...]


FAULTS = (
    Fault("B090", "mixing matrix transposed", _transposed, 0, "prefill", "hc_attn.comb", ("mHC",)),
    Fault("B096", "4 Sinkhorn iterations", _fewer_iterations, 1, "prefill", "hc_ffn.comb", ("mHC",)),
    Fault("B001", "decode loses the previous window of the overlap", _overlap_lost, 2, "decode", "attn.compressor", ("compressor",)),
    Fault("indexer relu", "no relu in the index score", _no_relu, 2, "prefill", "attn.indexer.score", ("indexer",)),
    Fault("top-k - 1", "one entry too few is chosen", _one_entry_fewer, 2, "prefill", "attn.selected", ("indexer",)),
    Fault("B050", "the query that ends a group does not see its entry", _entry_seen_late, 3, "prefill", "attn.visible", ("visibility mask",)),
    Fault("B060", "decode sees 127 of 128 keys", _ring_too_short, 2, "decode", "attn.visible", ("SWA ring",)),
    Fault("ring slot", "the oldest slot of the ring holds another token's key", _slot_of_another_token, 2, "decode", "attn.core", ("SWA ring", "KV quant")),
    Fault("B067", "a window layer rotates by the compressed layers' base", _wrong_base, 0, "prefill", "attn.q", ("rope",)),
    Fault("B073", "compressed keys never rotated", _entries_not_rotated, 2, "prefill", "attn.compressor", ("rope",)),
    Fault("B074", "the output is not rotated back", _not_rotated_back, 0, "prefill", "attn.o", ("rope",)),
    Fault("B084", "sinks of other heads", _sinks_of_others, 1, "prefill", "attn.core", ("sink",)),
    Fault("B108", "biased scores as mixing weights", _bias_in_weights, 2, "prefill", "ffn.weights", ("MoE router",)),
    Fault("B116", "hash table shifted by one token", _table_shifted, 1, "prefill", "ffn.experts", ("MoE router",)),
    Fault("B127", "one scale for gate and up of one expert", _one_scale_for_both, 0, "prefill", "ffn.routed", ("experts quant",)),
    Fault("B118", "shared expert clamped at 0.5", _clamped_at_once, 1, "prefill", "ffn.shared_experts", ("experts quant",)),
    Fault("norm", "a norm takes the weights of the other half's", _norm_of_the_other_half, 2, "prefill", "attn.norm", ("norm",)),
    Fault("B003", "steps that end no group overwrite entry 0", _slot_zero_overwritten, 2, "decode", "attn.core", ("compressor", "KV quant")),
    Fault("B154", "head in FP8", _head_in_fp8, None, "prefill", "logits", ("head",)),
    Fault("B151", "a tensor of the head's mixing is dropped", _head_base_dropped, None, "prefill", "hc_head", ("mHC",)),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.id.replace(" ", "-") for fault in FAULTS])
def test_a_planted_fault_is_named(fault: Fault, exact: Any, windows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    model = windows if fault.layer in (None, 0, 1) else exact
    production = adapter.load(TINY, layers=model.layers, max_context=256)
    fault.change(production.root, theirs, monkeypatch)
    verdicts, _ = run(production, model)
    found = first(verdicts, model)
    assert found is not None, "every gate is green"
    at = [v for v in verdicts if v.point == found.point and v.phase == found.phase and v.state is State.FAIL]
    print(f"{fault.id} | {fault.title} | {found.phase}{'' if found.step is None else f' step {found.step}'}, {found.point} | {found.component} | {max(v.spent or 0.0 for v in at):.3g} | {found.because}")
    assert (found.layer, found.phase, found.local) == (fault.layer, fault.phase, True if fault.layer is not None else found.local)
    assert found.point == fault.point if fault.layer is None else found.point == f"layers.{fault.layer}.{fault.point}"
    assert found.component in fault.components
