"""The load audit judged: a clean load passes, and each way to hold something else than the checkpoint stores is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import production
from parity import load
from parity.test_load import awkward_checkpoint
from parity.unit.worlds import write_checkpoint
from probes import load as probe
from probes.core import loading
from probes.core.records import State
from production import weights as loader
from production.weights import LoadRecord
from reference import formats
from reference.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("load"), seed=7, num_hidden_layers=3, compress_ratios=[4, 0, 128])


@pytest.fixture(scope="module")
def model(directory):
    return production.load(directory, max_context=64)


@pytest.fixture
def checkpoint(directory):
    return Checkpoint(directory)


def judged(parameters, checkpoint):
    return load.judge_parameters(loading.compare(parameters, checkpoint), "model", None)[0]


def test_a_clean_load_passes(model, checkpoint) -> None:
    found = loading.compare(loading.all_parameters(model), checkpoint)
    assert found.differences == []
    assert found.tensors == len(checkpoint.specs)
    assert found.held_checksum == found.stored_checksum != 0
    verdict, _ = load.judge_books(model, checkpoint)
    assert (verdict.state, verdict.rows) == (State.PASS, len(checkpoint.specs))


def test_an_awkward_checkpoint_passes_and_is_awkward(tmp_path) -> None:
    path = awkward_checkpoint(tmp_path)
    made = production.load(path, max_context=64)
    found = loading.compare(loading.all_parameters(made), Checkpoint(path))
    assert found.differences == []
    raw = Checkpoint(path)
    assert not torch.equal(raw.raw("layers.0.ffn.gate.tid2eid").bfloat16().long(), raw.raw("layers.0.ffn.gate.tid2eid")), "B104 would show"
    assert len(raw.raw("layers.1.ffn.gate.bias").bfloat16().unique()) < 20, "B109 would show"
    norm = raw.raw("layers.0.attn_norm.weight").float()
    assert not torch.equal((norm - 1).bfloat16().float() + 1, norm), "B153 would show"


# Grid rationale: every catalogue fault of loading, each layout, and each way a value can be off by little.
def _half_seen(t: Tensor) -> Tensor:
    return t.view(torch.bfloat16)[: t.numel()].float()


FAULTS: list[tuple[str, str, Callable[[Tensor], Tensor], str]] = [
    ("B083", "layers.0.attn.attn_sink", _half_seen, "sink"),
    ("B094", "layers.1.hc_attn_fn", lambda t: t.bfloat16().float(), "mHC"),
    ("B104", "layers.0.ffn.gate.tid2eid", lambda t: t // 2 * 2, "MoE router"),
    ("B107", "layers.2.ffn.gate.weight", lambda t: formats.round_e2m1_blocks(t).bfloat16(), "MoE router"),
    ("B109", "layers.2.ffn.gate.bias", lambda t: (t + 8).bfloat16().float() - 8, "MoE router"),
    ("B124", "layers.0.ffn.experts.3.w2.scale", lambda t: t.float(), "experts quant"),
    ("B128", "layers.0.ffn.experts.3.w2.scale", lambda t: t // 2, "experts quant"),
    ("B151", "hc_head_fn", torch.zeros_like, "checkpoint loading"),
    ("B153", "layers.0.attn_norm.weight", lambda t: (t - 1).bfloat16().float() + 1.001, "checkpoint loading"),
    ("B154", "head.weight", lambda t: t.to(torch.float8_e4m3fn).bfloat16(), "checkpoint loading"),
    ("B156", "layers.1.attn.wq_b.scale", lambda t: t.roll(1, 0), "checkpoint loading"),
    ("B162", "layers.0.attn.wo_a.weight", lambda t: t.unflatten(1, (-1, 2, 16)).flip(2).flatten(1), "checkpoint loading"),
    ("B008", "layers.0.attn.compressor.ape", lambda t: t.roll(t.shape[1] // 2, 1), "compressor"),
    ("nibbles", "layers.2.ffn.experts.0.w1.weight", lambda t: t << 4 | t >> 4, "experts quant"),
    ("one bit", "layers.1.attn.wkv.weight", lambda t: torch.where(torch.arange(t.numel()).view_as(t) == 77, t ^ 1, t), "checkpoint loading"),
]


@pytest.mark.parametrize(("fault", "name", "change", "component"), FAULTS, ids=[f[0] for f in FAULTS])
def test_a_changed_parameter_is_named(fault, name, change, component, model, checkpoint) -> None:
    def changed(parameter: loading.Parameter) -> loading.Parameter:
        held = tuple(change(t) if n == name else t for n, t in zip(parameter.names, parameter.held, strict=True))
        return replace(parameter, held=held)

    found = loading.compare([changed(p) for p in loading.all_parameters(model)], checkpoint)
    verdict, _ = load.judge_parameters(found, "model", None)
    assert verdict.state is State.FAIL
    assert len(found.differences) == 1
    assert found.differences[0].name.rsplit(".", 1)[0] == name.rsplit(".", 1)[0]
    assert verdict.component == component
    assert name.rsplit(".", 1)[0] in verdict.reason


def test_a_parameter_in_another_format_is_no_match(model, checkpoint) -> None:
    parameters = [replace(p, held=(p.held[0].double(),)) if p.name == "norm.weight" else p for p in loading.all_parameters(model)]
    verdict = judged(parameters, checkpoint)
    assert "norm.weight: held as float64, kernels read float32" in verdict.reason


def test_nothing_compared_is_not_run(checkpoint) -> None:
    assert judged([], checkpoint).state is State.NOT_RUN


# ---- books ----


class Books:
    """A model whose parts can be exchanged."""

    def __init__(self, model: Any, **changes: Any) -> None:
        self.blocks, self.layers, self.weights, self.audit = model.blocks, model.layers, model.weights, model.audit
        self.__dict__.update(changes)


def test_books_see_a_tensor_that_was_taken_twice_or_never(model, checkpoint) -> None:
    audit = type(model.audit)()
    audit.records = [r for r in model.audit.records if r.name != "norm.weight"] + [LoadRecord("head.weight", "", "", 0)]
    verdict, _ = load.judge_books(Books(model, audit=audit), checkpoint)
    assert verdict.state is State.FAIL
    assert "norm.weight: not in the loader's list" in verdict.reason
    assert "head.weight: twice in the loader's list" in verdict.reason


def test_books_see_two_parameters_in_one_memory(model, checkpoint) -> None:
    weights = replace(model.weights, norm=model.weights.head.view(torch.float32)[0, : len(model.weights.norm)])
    verdict, _ = load.judge_books(Books(model, weights=weights), checkpoint)
    assert "lies in the memory of" in verdict.reason


def test_books_see_a_parameter_that_no_block_uses(model, checkpoint) -> None:
    layers = (replace(model.weights.layers[0], attn_norm=torch.ones(5)), *model.weights.layers[1:])
    verdict, _ = load.judge_books(Books(model, weights=replace(model.weights, layers=layers)), checkpoint)
    assert "that no block uses" in verdict.reason


# ---- a load that its own door refuses ----


def test_a_skipped_tensor_is_named_although_the_loader_refuses(directory, monkeypatch) -> None:
    """B151 as it would be planted: hc_head keeps its initial values; production's own door stops the load."""
    from parity.test_load import load_without_door

    taken = loader._Loader.hyper
    zeros = loader.HyperWeights(*(torch.zeros(shape) for shape in ((2, 192), (2,), (1,))))
    monkeypatch.setattr(loader._Loader, "hyper", lambda self, name: zeros if name == "hc_head" else taken(self, name))
    with pytest.raises(Exception, match="left unread"):
        production.load(directory)
    run = type("Run", (), {"checkpoint_dir": directory, "device": "cpu", "max_context": 64, "layers": (0, 2)})
    model = load_without_door(run)
    verdict = judged(loading.model_parameters(model), Checkpoint(directory))
    assert verdict.state is State.FAIL
    assert (verdict.component, verdict.point) == ("checkpoint loading", "load.hc_head_fn")
    assert "hc_head_fn: not in the loader's list" in load.judge_books(model, Checkpoint(directory))[0].reason


def test_a_missing_device_is_not_run_and_a_broken_load_fails() -> None:
    assert load.not_loaded("production.load: RuntimeError: no device: --device cuda").state is State.NOT_RUN
    assert load.not_loaded("production.load: KeyError: 'x'").state is State.FAIL


# ---- decoding ----


def test_tables_are_the_formats() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(loading.E4M3_VALUES.nan_to_num(nan=1e9), codes.view(torch.float8_e4m3fn).float().nan_to_num(nan=1e9))
    assert torch.equal(loading.E8M0_VALUES[:255], formats.decode_e8m0(codes)[:255])
    assert torch.equal(loading.E2M1_PAIRS, formats.decode_e2m1(torch.arange(16, dtype=torch.uint8)).view(16, 2)[:, 0])


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("layers.3.attn.indexer.compressor.ape", "compressor"),
        ("layers.3.attn.indexer.wq_b.weight", "indexer"),
        ("layers.3.hc_ffn_scale", "mHC"),
        ("layers.3.ffn.shared_experts.w1.weight", "checkpoint loading"),
        ("embed.weight", "checkpoint loading"),
    ],
)
def test_components_are_in_the_catalogues_words(name, component) -> None:
    assert load.component_of(name) == component


# ---- the probe ----


def test_the_probe_prints_a_table_and_one_json_line(directory, capsys) -> None:
    assert probe.main(["--checkpoint", str(directory), "--layers", "0-1"]) == 0
    *table, line = capsys.readouterr().out.rstrip("\n").split("\n")
    values = json.loads(line)
    assert (values["probe"], values["measured"], values["books"]) == ("load", True, [])
    assert all(one["held_checksum"] == one["stored_checksum"] for one in values["of"].values())
    assert "checksum held" in "".join(table)
    assert probe.main(["--layers", "99"]) == 2
    assert "layer 99 does not exist" in capsys.readouterr().err
