"""docs/examples/small_engine.py is a second implementation: green under what it declares, and a fault planted in its ring is named.

Also the protocol that it is opened through (probes/outside/protocol.py): what is no model, no point, no module is refused in one line.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import reference
from docs.examples import small_engine
from parity import evaluate, selection
from parity.attribution import first_divergence
from parity.audit import TWIN_ORDERS, Plan
from parity.outside import NotExposedError, OutsideAudit
from parity.unit.test_session import Shell, last_lines
from probes.core.inputs import read_prompt
from probes.core.records import Measurement, State, Verdict, read_run
from probes.outside.protocol import accepts, load_factory, wrap
from reference.config import InputError
from reference.points import places_of_model

ROOT = Path(__file__).resolve().parents[2]
CHECKPOINT = ROOT / "checkpoints" / "tiny-dsv4"
LAYERS, STEPS = (0, 1), 4
NAME = "docs.examples.small_engine:open_engine"


def audited() -> tuple[OutsideAudit, list[Verdict], set[str]]:
    """The engine's audit at the edge of its ring (126 tokens and 4 steps, W is 128): audit, verdicts, points that it does not show."""
    factory = load_factory(NAME)
    production = wrap(factory(CHECKPOINT, **accepts(factory, {"layers": LAYERS, "max_context": 512, "device": "cpu"})), LAYERS)
    model = reference.load(CHECKPOINT, policy=production.policy, layers=LAYERS, max_context=512)
    prompt = read_prompt("medium.txt:0:126", CHECKPOINT, model.config.vocab_size)
    plan = Plan(rows=[prompt.ids], continuation=[prompt.continuation], phases=("prefill", "decode"), layers=LAYERS, steps=STEPS, max_context=512)
    audit = OutsideAudit(model, production, [model.twin(order) for order in TWIN_ORDERS], plan, say=lambda line: None)
    verdicts, hidden = [], set()
    for case in selection.layer_cases(model.config, LAYERS, plan.phases, STEPS) + selection.model_cases(plan.phases, STEPS, alone=True):
        try:
            verdicts.append(evaluate.judge_case(audit, case, case.id))
        except NotExposedError as error:
            hidden.add(error.point)
    return audit, verdicts, hidden


def test_the_example_engine_is_green_in_prefill_and_over_the_edge_of_its_ring():
    audit, verdicts, hidden = audited()
    assert audit.crash is None
    assert [(v.point, v.reason) for v in verdicts if v.state is not State.PASS] == []
    for phase in ("prefill", "decode"):
        for mode in ("free", "isolated"):
            assert {v.layer for v in verdicts if (v.phase, v.mode) == (phase, mode)} >= {0, 1}
    assert hidden == {f"layers.{n}.{name}" for n in LAYERS for name in ("attn.wo_a", "ffn.routed", "ffn.shared_experts")} == set(audit.free_points) - audit.exposed


def test_a_ring_index_that_is_off_by_one_is_found_in_decode_at_the_first_layer_and_named(monkeypatch):
    monkeypatch.setattr(small_engine.Ring, "slot", lambda self, position: (position + 1) % self.W)
    audit, verdicts, _ = audited()
    assert all(v.state is State.PASS for v in verdicts if v.phase == "prefill")
    first = first_divergence(verdicts, places_of_model(audit.config, audit.layers_run))
    assert first is not None
    assert (first.layer, first.point, first.phase, first.step, first.local, first.component) == (0, "layers.0.attn.visible", "decode", 0, True, "SWA ring")


def test_an_undeclared_rounding_is_red(monkeypatch):
    monkeypatch.setattr(small_engine.Adapter, "policy", ())
    _, verdicts, _ = audited()
    red = {v.point for v in verdicts if v.state is State.FAIL and v.mode == "isolated"}
    assert {"layers.0.attn.kv", "layers.1.attn.kv"} <= red


@pytest.mark.parametrize("change", [lambda x: x * 1.02, lambda x: 30 * torch.tanh(x / 30), lambda x: x + torch.nn.functional.one_hot(torch.tensor(777), x.shape[-1])], ids=["2 % too large", "capped", "one token raised"])
def test_a_head_that_is_a_little_wrong_is_found_in_both_phases_and_named(change, monkeypatch):
    """Free-running logits may differ by what layers hand down; the head on production's own last streams may not."""
    plain = small_engine.SmallEngine.forward
    monkeypatch.setattr(small_engine.SmallEngine, "forward", lambda self, tokens, cache: change(plain(self, tokens, cache)))
    audit, verdicts, _ = audited()
    red = {(v.point, v.mode, v.phase) for v in verdicts if v.state is State.FAIL}
    assert red >= {("logits", "isolated", "prefill"), ("logits", "isolated", "decode")}
    assert {point for point, _, _ in red} == {"logits"}
    first = first_divergence(verdicts, places_of_model(audit.config, audit.layers_run))
    assert first is not None
    assert (first.point, first.phase, first.local, first.component) == ("logits", "prefill", True, "head")


def test_a_points_table_may_name_the_logits_too(monkeypatch):
    monkeypatch.setattr(small_engine.Adapter, "points", {**small_engine.POINTS, "logits": "to_vocab"})
    _, verdicts, _ = audited()
    assert [(v.point, v.reason) for v in verdicts if v.state is not State.PASS] == []


def test_the_example_engine_imports_nothing_from_this_project():
    tree = ast.parse((ROOT / "docs" / "examples" / "small_engine.py").read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"json", "pathlib", "torch", "torch.nn", "safetensors"}


# ---- the protocol ----


class Model(torch.nn.Module):
    """The least that the protocol takes: one module, two layers, logits of a constant width."""

    points = {"layers.{layer}.attn.out": "stack.{layer}"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.stack = torch.nn.ModuleList([torch.nn.Identity(), torch.nn.Identity()])

    def new_state(self, batch, max_context):
        return {}

    def prefill(self, tokens, state):
        x = tokens[..., None].float()
        for layer in self.stack:
            x = layer(x) + 1
        return x.expand(-1, -1, 5)

    def decode(self, tokens, state):
        return self.prefill(tokens[:, None], state)[:, 0]


def changed(**attributes):
    model = Model()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (SimpleNamespace(decode=1, points={}), "it has no prefill()"),
        (changed(points=["embed"]), "points is list, expected a mapping from point names to module names"),
        (changed(points={"layers.{layer}.attn.ouput": "stack.{layer}"}), "nearest is 'layers.0.attn.out'"),
        (changed(points={"embed": "table"}), "points: 'embed': the model has no module 'table'"),
        (changed(policy=("kv.e4m4",)), "unknown rounding point 'kv.e4m4'; nearest is 'kv.e4m3'"),
    ],
    ids=["no prefill", "points no mapping", "no point", "no module", "no rounding"],
)
def test_what_the_protocol_cannot_take_is_refused_in_one_line(model, said):
    with pytest.raises(InputError) as caught:
        wrap(model, LAYERS)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nothing", "expected transformers or package.module:factory"),
        ("no_such_package.x:f", "no_such_package.x cannot be imported"),
        ("docs.examples.small_engine:no", "docs.examples.small_engine has no no"),
        ("docs.examples.small_engine:POINTS", "POINTS is no function"),
    ],
)
def test_a_factory_that_is_not_there_is_refused_in_one_line(name, said):
    with pytest.raises(InputError, match=said.replace(".", r"\.")):
        load_factory(name)


def test_hooks_are_borrowed_for_a_call_and_returned():
    model = wrap(Model(), LAYERS)
    seen = []

    def hooks():
        return [len(layer._forward_hooks) for layer in model.root.stack]

    with model.taps.observe(["layers.1.attn.out"], lambda point, value: seen.append((point, value.flatten().tolist(), hooks()))):
        state = model.new_state(1)
        model.prefill(torch.tensor([[3, 4]]), state)
        model.decode(torch.tensor([7]), state)
    model.decode(torch.tensor([9]), state)
    assert seen == [("layers.1.attn.out", [4.0, 5.0], [0, 1]), ("layers.1.attn.out", [8.0], [0, 1])]
    assert hooks() == [0, 0]
    assert state.length.tolist() == [4]


def test_a_model_without_submodules_shows_by_hand():
    class ByHand:
        show: Callable[[str, torch.Tensor], None]
        points = {"layers.{layer}.attn.out": ""}  # noqa: RUF012

        def new_state(self, batch, max_context):
            return None

        def prefill(self, tokens, state):
            for n in LAYERS:
                self.show(f"layers.{n}.attn.out", tokens[..., None] * float(n + 1))
            return torch.zeros(*tokens.shape, 5)

        def decode(self, tokens, state):
            return self.prefill(tokens[:, None], state)[:, 0]

    inner = ByHand()
    model = wrap(inner, LAYERS)
    seen = {}
    with model.taps.observe(["layers.0.attn.out", "layers.1.attn.out", "logits"], lambda point, value: seen.update({point: value.flatten().tolist()})):
        model.decode(torch.tensor([3]), model.new_state(1))
    assert seen == {"layers.0.attn.out": [3.0], "layers.1.attn.out": [6.0], "logits": [0.0] * 5}
    assert not hasattr(inner, "show")


def test_positions_go_on_from_call_to_call_and_rows_of_other_lengths_are_refused():
    seen = []
    model = wrap(changed(points={"layers.{layer}.attn.out": ("stack.{layer}", lambda call: seen.append((call.layer, call.positions.tolist())))}), LAYERS)
    state = model.new_state(2)
    with model.taps.observe(["layers.1.attn.out"], lambda point, value: None):
        model.prefill(torch.tensor([[1, 2], [3, 4]]), state)
        model.decode(torch.tensor([5, 6]), state)
    assert seen == [(1, [[0, 1], [0, 1]]), (1, [[2], [2]])]
    with pytest.raises(InputError, match="rows of 2, 1 tokens: it takes rows of one length only"):
        model.prefill(torch.tensor([[1, 2], [3, 4]]), state, torch.tensor([2, 1]))


def test_logits_of_another_shape_are_refused():
    model = wrap(changed(prefill=lambda tokens, state: torch.zeros(1, 5), decode=lambda tokens, state: torch.zeros(1, 1, 5)), LAYERS)
    with pytest.raises(InputError, match=r"prefill: logits: got \[1, 5\], expected \[1, 2, vocab\]"):
        model.prefill(torch.tensor([[1, 2]]), model.new_state(1))
    with pytest.raises(InputError, match=r"decode: logits: got \[1, 1, 5\], expected \[1, vocab\]"):
        model.decode(torch.tensor([1]), model.new_state(1))


# ---- what is shown and cannot be used ----


class Careless(small_engine.Adapter):
    """The example engine by hand: layer 0's q in other axes, and in the prefill layer 1's kv twice and its experts as floats."""

    name, show = "careless engine", None
    points = small_engine.POINTS | dict.fromkeys(("layers.{layer}.attn.q", "layers.{layer}.attn.kv", "layers.{layer}.ffn.experts"), "")

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        for n, layer in enumerate(engine.stack):
            layer.attention.ring.register_forward_hook(lambda module, args, output, n=n: self.say(n, *args[:2]))
            layer.experts.router.register_forward_hook(lambda module, args, output, n=n: self.tell(f"layers.{n}.ffn.experts", output[1].float() if n == 1 and output[1].shape[1] > 1 else output[1]))

    def tell(self, point: str, value: torch.Tensor) -> None:
        assert self.show is not None
        self.show(point, value)

    def say(self, n: int, q: torch.Tensor, kv: torch.Tensor) -> None:
        self.tell(f"layers.{n}.attn.q", q.transpose(1, 2) if n == 0 else q)
        for _ in range(1 + (n == 1 and kv.shape[1] > 1)):
            self.tell(f"layers.{n}.attn.kv", kv)


def careless(checkpoint_dir, layers):
    return Careless(small_engine.SmallEngine(checkpoint_dir, list(layers)))


def test_what_is_shown_wrongly_is_refused_with_the_reason_and_the_rest_is_judged(tmp_path):
    shell = Shell(tmp_path)
    code, out, err = shell("parity/", "--production", "parity.unit.test_examples:careless", "--layers", "0-1", "--prompt", "short.txt:0:20", "--steps", "2")
    assert code == 1, out + err
    assert "Traceback" not in out + err
    verdict, report = last_lines(out)
    assert verdict.startswith("incomplete (partial: ")
    assert "layers.0.attn.q: shown as [1, 8, 20, 128], expected [1, 20, 8, 128]: not judged; nor 2 more points that cannot be used" in verdict
    assert (shell.report / "report.html").is_file()
    assert report == str(shell.report / "report.html") or report.endswith("report.html")
    _, verdicts, summary = shell.records()
    assert (summary.failed, summary.not_run) == (0, 0), [(v.point, v.reason) for v in verdicts if v.state is not State.PASS]
    judged = {(v.point, v.phase) for v in verdicts}
    assert {("layers.0.attn.core", "prefill"), ("layers.1.attn.kv", "decode"), ("layers.1.ffn.experts", "decode"), ("layers.1.hc_ffn.X", "decode")} <= judged
    assert not {("layers.0.attn.q", "prefill"), ("layers.0.attn.q", "decode"), ("layers.1.attn.kv", "prefill"), ("layers.1.ffn.experts", "prefill")} & judged
    why = {m.point: m.values.get("why") for m in read_run(shell.report / "run.jsonl") if isinstance(m, Measurement) and m.name == "not covered"}
    assert why["layers.1.attn.kv"] == "shown twice in one call"
    assert why["layers.1.ffn.experts"] == "shown in float32, expected whole numbers"
    assert "layers.1.attn.kv: shown twice in one call: not judged" in out
