"""The place and the cause class of the first failed gate, from synthetic verdicts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from parity.attribution import MADE_BY, first_divergence, operations_behind
from parity.gates import OPERATIONS
from parity.unit.worlds import config_dict
from probes.core.records import Divergence, State, Verdict
from reference.config import ModelConfig
from reference.points import LAYER_POINTS, MODEL_POINTS, places_of_model, spec_of

CONFIG = ModelConfig.from_dict(config_dict())
PLACES = places_of_model(CONFIG)


def red(point, phase="prefill", mode="isolated", steps=(None, None), component="", state=State.FAIL, **details: Any) -> Verdict:
    known = not point.startswith("layers.") or ".state." not in point
    component = component or (spec_of(point).component if known else "compressor")
    layer = int(point.split(".")[1]) if point.startswith("layers.") else None
    return Verdict(
        gate="g", point=point, mode=mode, state=state, metric="m", layer=layer, phase=phase, step_first=steps[0], step_last=steps[1],
        component=component, local=mode == "isolated" or None, details=details,
    )  # fmt: skip


def operation(name, component="") -> Verdict:
    return Verdict(f"operation.{name}", f"{name}[case]", "operation", State.FAIL, "m", component=component or (OPERATIONS[name].component if name in OPERATIONS else ""), local=True, reason="differs")


def parameter(layer, component, name="x") -> Verdict:
    return Verdict("load", f"load.{name}", "model", State.FAIL, "m", layer, component=component)


def found(*records: Any) -> Divergence:
    divergence = first_divergence(records, PLACES)
    assert divergence is not None
    return divergence


# ---- where ----


def test_phase_step_dataflow_mode_decide_in_this_order():
    late = red("layers.0.attn.norm", "decode", steps=(1, 32), first_step=9)
    early = red("layers.1.ffn.out", "decode", steps=(1, 32), first_step=3)
    prefill = red("logits", "prefill", "free")
    free = red("layers.1.ffn.out", "decode", "free", steps=(1, 32), first_step=3)
    assert (found(late, free, early).point, found(late, free, early).step, found(late, free, early).local) == ("layers.1.ffn.out", 3, True)
    assert found(late, early, prefill).phase == "prefill"


def test_a_gate_over_a_whole_phase_comes_after_those_that_can_say_when():
    whole = red("layers.0.attn.core", "decode", steps=(0, 23))
    at = red("layers.2.attn.compressor", "decode", steps=(1, 23), first_step=1)
    assert found(whole, at).point == "layers.2.attn.compressor"
    assert found(whole).step is None
    assert found(red("layers.0.attn.core", "decode", steps=(0, 0))).step == 0


def test_what_a_prefill_hands_over_precedes_the_first_step():
    handed = red("layers.2.state.compressor.kv", "decode", steps=(0, 0), left_by="prefill", because="rows are missing")
    first = red("layers.0.attn.norm", "decode", steps=(0, 0))
    assert (found(first, handed).point, found(first, handed).phase, found(first, handed).step) == ("layers.2.state.compressor.kv", "decode", 0)
    assert found(first, handed).because == "rows are missing"
    assert found(red("layers.0.attn.norm"), handed).phase == "prefill"


def test_inherited_where_the_layer_alone_passed():
    free = red("layers.1.attn.q", mode="free")
    assert found(free, red("layers.1.attn.q", state=State.PASS)).local is False
    assert found(free, red("layers.1.attn.q")).local is True
    assert found(free).local is None, "nothing was run on the right input, and the point before was not judged"
    assert found(free, red("layers.1.attn.q_norm", mode="free", state=State.PASS)).local is True
    assert found(red("embed", mode="free")).local is True, "its input are token ids"


def test_a_typical_row_that_is_red_behind_step_0_starts_there_if_step_0_is_over_its_limit_too():
    def group(first, last, value, state):
        one = red("layers.1.attn.o", "decode", state=state, steps=(first, last), median_limit=0.003, **({"first_step": 1} if first else {}))
        return replace(one, value=value, limit=0.04)

    later = red("layers.1.hc_ffn.pre", "decode", steps=(0, 0))
    assert found(later, group(0, 0, 0.02, State.PASS), group(1, 3, 0.02, State.FAIL)).point == "layers.1.attn.o"
    assert found(later, group(0, 0, 0.02, State.PASS), group(1, 3, 0.02, State.FAIL)).step == 0
    assert found(later, group(0, 0, 0.001, State.PASS), group(1, 3, 0.02, State.FAIL)).point == "layers.1.hc_ffn.pre", "step 0 was right there"
    assert found(later, group(0, 0, 0.02, State.PASS), group(1, 3, 0.5, State.FAIL)).point == "layers.1.hc_ffn.pre", "a row alone is over its limit and says when"


def test_outside_of_the_chain_parameters_then_operations_then_whole_runs_then_memory():
    memory = Verdict("memory.rate", "memory.rate[L2]", "operation", State.FAIL, "m", component="memory")
    way = Verdict("self.batched", "layers.0.attn.q", "model", State.FAIL, "m", 0, "prefill", component="attention projections")
    whole, single, load = operation("chunking", "SWA ring"), operation("rope"), parameter(None, "checkpoint loading")
    assert found(memory, way, whole, single, load).point == "load.x"
    assert found(memory, way, whole, single).point == "rope[case]"
    assert found(memory, way, whole).component == "SWA ring"
    assert found(memory, way).point == "layers.0.attn.q"
    assert found(memory).component == "memory"
    assert first_divergence([red("embed", mode="free", state=State.PASS)], PLACES) is None
    assert first_divergence([memory], PLACES, loaded=False) is None


# ---- why ----


def test_a_step_that_is_wrong_in_the_graph_alone_is_the_graphs():
    """Whatever else is red in decode; a prefill is not captured, and one that is wrong has its own cause."""
    gate = Verdict("self.replayed", "layers.0.attn.q", "model", State.FAIL, "m", 0, "decode", component="graph capture", reason="9 of 10 rows differ")
    turned = red("layers.0.attn.q", "decode", "free", steps=(1, 1))
    assert (found(turned, operation("rope")).component, found(turned, operation("rope"), gate).component) == ("rope", "graph capture")
    assert found(turned, gate).because == "right launch by launch, wrong when replayed from the graph: 9 of 10 rows differ"
    assert found(red("layers.0.attn.q"), operation("rope"), gate).component == "rope"
    assert (found(gate).component, found(gate).point) == ("graph capture", "layers.0.attn.q")


@pytest.mark.parametrize(
    ("point", "operations", "component"),
    [
        ("attn.q_norm", ["act_quant"], "experts quant"),
        ("attn.q_norm", ["act_quant", "store_window"], "KV quant"),
        ("attn.q_norm", ["linear_fp8"], "attention projections"),
        ("attn.q_norm", ["linear_fp8", "sparse_attn"], "experts quant"),
        ("attn.q", ["rope"], "rope"),
        ("attn.q", ["token_positions", "rope"], "batching"),
        ("attn.kv", ["store_window"], "KV quant"),
        ("attn.kv", ["rms_norm", "store_window"], "norm"),
        ("attn.compressor", ["store_entries"], "KV quant"),
        ("attn.compressor", ["linear_fp32"], "compressor"),
        ("attn.indexer.q", ["hadamard_e2m1"], "indexer"),
        ("attn.indexer.q", ["hadamard_e2m1", "store_index_keys"], "experts quant"),
        ("attn.indexer.compressor", ["store_index_keys"], "indexer"),
        ("attn.indexer.compressor", [], "indexer"),
        ("attn.indexer.compressor", ["compressor"], "compressor"),
        ("attn.visible", ["sparse_attn"], "visibility mask"),
        ("ffn.gate", ["linear_fp32"], "MoE router"),
        ("ffn.routed", ["experts_up", "experts_down"], "experts quant"),
        ("attn.q", ["topk", "hc_pre"], "attention projections"),  # neither makes it
    ],
)
def test_the_first_red_operation_that_makes_the_point_names_the_class(point, operations, component):
    assert found(red(f"layers.2.{point}"), *map(operation, operations)).component == component


def test_what_the_gate_itself_saw_stands_but_for_wrong_positions():
    q = red("layers.2.attn.q", component="rope", because="only the rotary dims are off")
    assert found(q, operation("linear_fp8")).component == "rope"
    assert found(q, operation("linear_fp8")).because == "only the rotary dims are off"
    assert found(q, operation("token_positions")).component == "batching"
    kv = red("layers.2.attn.kv", component="rope")
    assert found(kv, operation("store_window")).component == "KV quant"
    assert found(kv, operation("rope"), operation("store_window")).component == "rope"
    assert found(red("layers.2.attn.core", component="sink"), operation("sparse_attn")).component == "sink"


def test_a_wrong_parameter_of_the_same_layer_comes_before_all():
    q = red("layers.2.attn.q_norm")
    assert found(q, operation("act_quant"), parameter(2, "checkpoint loading", "layers.2.attn.wq_a.weight")).component == "checkpoint loading"
    assert found(q, parameter(3, "mHC")).component == "attention projections"
    assert found(q, parameter(2, "mHC", "layers.0.hc[awkward checkpoint]")).component == "attention projections"
    assert "layers.2.attn.wq_a.weight is not what the checkpoint stores" in found(q, parameter(2, "checkpoint loading", "layers.2.attn.wq_a.weight")).because


def test_a_state_that_does_not_come_back_explains_that_part_of_it():
    keys = red("layers.2.state.indexer.compressor.entries", "decode", steps=(0, 0))
    back = replace(operation("restore", "indexer"), reason="2 of 30 differ: state layers.2.indexer.compressor.entries, logits of the next step")
    assert found(keys, back).component == "indexer"
    assert found(red("layers.2.state.kv", "decode", steps=(0, 0), component="SWA ring"), back).component == "SWA ring"
    assert found(red("layers.2.state.length", "decode", steps=(0, 0), component="batching"), replace(back, reason="state layers.0.length")).component == "batching"
    assert found(red("layers.2.attn.core", "decode", steps=(0, 0)), back).component == "attention core"


def test_operations_behind_a_point_and_a_part_of_the_state():
    assert operations_behind("layers.2.attn.core") == {"sparse_attn", "linear_fp8"}
    assert {"store_window", "rope", "act_quant"} <= operations_behind("layers.2.state.kv")
    assert operations_behind("nonsense") == frozenset()


def test_only_later_rows_of_a_batch():
    assert found(red("layers.2.attn.core", batch_rows=[1, 2])).component == "batching"
    assert found(red("layers.2.attn.core", batch_rows=[0, 2])).component == "attention core"
    excluded = red("layers.2.attn.core", component="KV quant", by_exclusion=True, batch_rows=[1])
    assert found(excluded, operation("sparse_attn")).component == "batching"
    assert found(red("layers.2.attn.core", component="sink", batch_rows=[1])).component == "sink"
    assert found(red("layers.2.attn.compressor", batch_rows=[1])).component == "compressor"


def test_attention_alone_that_is_wrong_in_a_batch_only():
    assert found(operation("sparse_attn"), operation("batching")).component == "batching"
    assert found(operation("sparse_attn")).component == "attention core"
    assert found(operation("compressor"), operation("batching")).component == "compressor"


def test_a_token_that_differs_in_a_batch_outranks_what_a_wrong_row_is_not():
    company = replace(operation("sparse_attn"), point="sparse_attn[alone = in a batch, splits=3]")
    core = red("layers.0.attn.core", "decode", steps=(0, 0), component="KV quant", by_exclusion=True, because="no other")
    assert found(core).component == "KV quant"
    assert found(core, operation("sparse_attn")).component == "KV quant"
    assert found(core, operation("sparse_attn"), company).component == "batching"
    assert found(operation("sparse_attn"), company).component == "batching"


def declared(name: str, component: str, points: list[str], throughout: bool = True) -> Verdict:
    because = f"{name} is declared and 0 of 11264 values lie on its grid (attn.norm)"
    return Verdict("policy", f"policy.{name}", "model", State.FAIL, "m", component=component, details={"points": points, "because": because, "throughout": throughout})


BF16, KV = declared("bf16", "model", ["hc_attn.a", "attn.norm"]), declared("kv.e4m3", "KV quant", ["attn.kv"])


def test_a_policy_that_is_not_what_production_does_comes_first():
    q = red("layers.0.attn.q", because="only the rotary dims are off")
    both = found(q, KV, BF16)
    assert both.because == (
        "the declared policy is not what it does: bf16 is declared and 0 of 11264 values lie on its grid (attn.norm); "
        "kv.e4m3 is declared and 0 of 11264 values lie on its grid (attn.norm); only the rotary dims are off"
    )
    assert (both.point, both.component) == ("layers.0.attn.q", "declared policy")
    kv = found(red("layers.0.attn.kv"), KV)
    assert kv.because.startswith("the declared policy is not what it does: kv.e4m3 is declared")
    assert kv.component == "KV quant"


def test_a_policy_explains_nothing_before_it_shows_and_nothing_that_is_off_at_one_point_only():
    q = red("layers.0.attn.q", because="only the rotary dims are off")
    before = found(q, KV)
    assert before.because == "only the rotary dims are off; the policy: kv.e4m3 is declared and 0 of 11264 values lie on its grid (attn.norm)"
    assert before.component == "attention projections"
    partly = found(q, declared("bf16", "model", ["attn.norm"], throughout=False))
    assert (partly.because.split(";")[0], partly.component) == ("only the rotary dims are off", "attention projections")


def copies(point: str, agrees: str = "layers.0.hc_ffn.X") -> Verdict:
    return replace(red(point, mode="free", because="rank 0 and rank 1 hold different copies", agrees=agrees), gate="ranks.copies")


def test_copies_that_differ_are_named_and_not_inherited():
    kv = copies("layers.1.attn.kv")
    right = red("layers.1.attn.kv", state=State.PASS)
    assert found(kv, right, red("layers.1.attn.core", mode="free")).because == "rank 0 and rank 1 hold different copies"
    assert (found(kv, right).point, found(kv, right).local, found(kv, right).component) == ("layers.1.attn.kv", True, "KV quant")
    assert found(copies("layers.1.attn.kv", agrees=""), right).local is None, "no copy before it was compared"
    assert found(kv, red("layers.1.attn.kv")).because == "rank 0 and rank 1 hold different copies", "the rank whose value was compared is the wrong one"
    assert found(kv, red("layers.1.attn.q")).because == "", "what comes before has another reason"


def test_what_was_done_to_all_logits_alike_is_the_reason():
    def of(gate: str, phase: str, because: str) -> Verdict:
        return replace(red("logits", phase, "free", because=because), gate=gate)

    row = of("logprobs", "prefill", "")
    scale, offset = of("logprobs.scale", "prefill", "a temperature of 0.8 would do that"), of("logprobs.offset", "prefill", "probabilities are 0.8 times")
    assert found(row, offset, scale).because == "a temperature of 0.8 would do that (logprobs.scale)"
    assert found(row, offset).because == "probabilities are 0.8 times (logprobs.offset)"
    assert found(row, of("logprobs.scale", "prefill", "")).because == ""


def test_every_operation_of_the_table_exists_and_every_value_has_one():
    assert {op for made in MADE_BY.values() for op in made} <= set(OPERATIONS)
    assert {spec.name for spec in (*LAYER_POINTS, *MODEL_POINTS)} == set(MADE_BY)
