"""Runs a repro again without the model: the recorded launches on the recorded memory, or today's code of that one layer.

    python -m probes.replay reports/runs/RUN/repro.safetensors                      kernels as they ran (text in the file)
    python -m probes.replay reports/runs/RUN/repro.safetensors --kernels current    does the present tree still have it?
    python -m probes.replay reports/runs/RUN/repro.safetensors --kernels DIR        the recorded launches with kernels of DIR

`recorded` and DIR launch what production launched. `current` builds the layer from the present production/ and kernels/ with
the file's weights, input and state, so that a fault of the Python side shows too (a fault of loading weights does not).
The reference's value comes from the file. Measures, judges nothing. Tests: parity/unit/test_repro.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from probes.core.cli import Answer, CannotMeasureError, Table, answer, bare_parser, number
from probes.core.repro import Memory, Repro, View, bytes_of, compare
from probes.core.trace import join
from production.cache import decode_entries, decode_index_keys
from production.launch import Device, open_device
from production.model import Transformer
from production.variants import plan_of
from production.weights import (
    AttentionWeights,
    CompressorWeights,
    ExpertWeights,
    GateWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    Linear8,
    LoadAudit,
    ModelWeights,
    SharedExpertWeights,
)
from reference.config import InputError, ModelConfig

DESCRIPTION = "Run the operation of a repro file again and compare it with the run and with the reference's value."
EXAMPLE = "python -m probes.replay repro.safetensors --kernels current"


def main(argv: Sequence[str] | None = None) -> int:
    parser = bare_parser("replay", DESCRIPTION, EXAMPLE)
    parser.add_argument("repro", metavar="REPRO", help="repro.safetensors of a report directory")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the kernels run (default: cpu)")
    parser.add_argument("--checked", action="store_true", help="the CPU build that reports out-of-bounds accesses, races and unwritten memory")
    parser.add_argument("--kernels", metavar="recorded|current|DIR", default="recorded", help="kernels as they ran (default), the present tree's code of the layer, or the .cu files of a folder")
    return answer("replay", parser, argv, _measure)


def _measure(args: argparse.Namespace) -> Answer:
    if args.checked and args.device != "cpu":
        raise InputError("--checked: the checked build runs on the CPU; the GPU has compute-sanitizer")
    repro = Repro.load(Path(args.repro))
    with tempfile.TemporaryDirectory(prefix="repro-kernels-") as folder:
        if args.kernels == "current":
            return _show(repro, args, *_current(repro, open_device(args.device, checked=args.checked)))
        if args.kernels == "recorded":
            directory = Path(folder)
            for name, text in repro.sources.items():
                (directory / Path(name).name).write_text(text, encoding="utf-8")
        else:
            directory = Path(args.kernels)
            if not directory.is_dir():
                raise InputError(f"--kernels {args.kernels}: expected recorded, current, or a folder of .cu files")
        return _show(repro, args, *_launch_all(repro, open_device(args.device, checked=args.checked, kernels_dir=directory)))


# ---- the recorded launches ----


def _launch_all(repro: Repro, device: Device) -> tuple[Tensor, list[dict[str, Any]]]:
    """The point's value after all launches, and how each launch's outputs compare with the recorded ones."""
    memory = Memory(repro.regions, device.torch_device)
    found = []
    for j, step in enumerate(repro.launches):
        for k, arg in enumerate(step.args):
            raw = repro.tensors.get(f"set|{j}|{k}")
            if raw is not None and isinstance(arg, View):
                memory.put(arg, raw)
        args = [memory.tensor(arg) if isinstance(arg, View) else arg for arg in step.args]
        device.launch(step.source, step.kernel, step.grid, step.block, args, step.shared_bytes)
        device.synchronize()
        outputs: dict[str, dict[str, int]] = {}
        for k in step.writes:
            expected, written = repro.tensors.get(f"after|{j}|{k}"), args[k]
            if expected is not None and isinstance(written, Tensor):
                outputs[step.names[k]] = {"bytes": expected.numel(), "different": int((bytes_of(written) != expected).sum())}
        build = next(b for s, n, _, b, _ in device.ran if (s, n) == (step.source, step.kernel))
        found.append({"source": step.source, "kernel": step.kernel, "grid": list(step.grid), "block": list(step.block), "outputs": outputs, "build": build, "same_build": build == step.build})
    return _value(repro, memory), found


def _value(repro: Repro, memory: Memory) -> Tensor:
    """The point's value out of the memory, decoded where the model reads it back from its cache."""
    views = {name: memory.tensor(view).cpu() for name, view in repro.value["views"].items()}
    how, got = repro.value["how"], repro.tensors["got"]
    if how == "direct":
        value = views["value"]
        return value.float() if value.is_floating_point() else value.long()
    config, ratio = _config(repro), int(repro.facts["ratio"])
    position = torch.where(repro.tensors["valid"], repro.tensors["positions"], -1)
    row = torch.arange(position.shape[0])[:, None]
    if how == "window":
        slot = position.clamp(min=0) % views["ring"].shape[1]
        held = (views["ring_position"][row, slot] == position) & (position >= 0)
        return decode_entries(views["ring"][row, slot], config).masked_fill(~held[..., None], torch.nan)
    entry = torch.where((position >= 0) & ((position + 1) % ratio == 0), (position + 1) // ratio - 1, -1)
    safe = entry.clamp(min=0)
    if how == "entries":
        rows = decode_entries(views["entries"][row, safe], config)
    elif how == "index_keys":
        rows = decode_index_keys(views["keys"][row, safe], views["scales"][row, safe])
    else:
        raise InputError(f"the file's value is made in an unknown way: {how!r}")
    return rows.masked_fill((entry < 0)[..., None], torch.nan).reshape(got.shape)


def _config(repro: Repro) -> ModelConfig:
    known = {f.name for f in dataclasses.fields(ModelConfig)}
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in repro.facts["config"].items()}
    if known != set(values):
        raise CannotMeasureError(f"the file's config has other fields than this version's: {', '.join(sorted(known ^ set(values)))}")
    return ModelConfig(**values)


# ---- today's code of the layer ----

_PARTS: dict[str, Any] = {
    "": LayerWeights, "hc_attn": HyperWeights, "hc_ffn": HyperWeights, "attn": AttentionWeights, "attn.compressor": CompressorWeights,
    "attn.indexer": IndexerWeights, "attn.indexer.compressor": CompressorWeights, "gate": GateWeights, "experts": ExpertWeights, "shared_experts": SharedExpertWeights,
}  # fmt: skip


class _Reached(Exception):  # noqa: N818 (no error: the point that was asked for)
    pass


def _current(repro: Repro, device: Device) -> tuple[Tensor, list[dict[str, Any]]]:
    """The point's value by the present production code: a model of this one layer, with the file's weights."""
    facts = repro.layer
    if not facts:
        raise CannotMeasureError("the file holds no weights of the layer (too large); --kernels kernels/ runs today's kernels on the recorded launches")
    layer, where = int(facts["layer"]), device.torch_device
    full = _config(repro)
    config = dataclasses.replace(full, num_hidden_layers=1, compress_ratios=(full.ratio(layer),), num_hash_layers=int(bool(facts["is_hash"])))
    weights = ModelWeights(_stand_in("bfloat16", [1, 1]), (_weights(repro, "", where),), HyperWeights(*(_stand_in("float32", [1]),) * 3), _stand_in("float32", [1]), _stand_in("bfloat16", [1, 1]))
    model = Transformer(config, weights, LoadAudit(), device, int(facts["max_context"]), int(facts["prefill_chunk"]), plan_of(facts.get("variants"), device))
    state = model.new_state(int(facts["batch"]), int(facts["max_context"]))
    state.import_layer(0, {name[6:]: value for name, value in repro.tensors.items() if name.startswith("state|")})
    choices = {f"layers.0.{name[7:]}": value for name, value in repro.tensors.items() if name.startswith("choice|")}
    point = "layers.0." + str(repro.facts["point"]).split(".", 2)[2]
    shown: list[Tensor] = []

    def take(_: str, value: Tensor) -> None:
        shown.append(value.detach().to("cpu", torch.float32 if value.is_floating_point() else torch.int64).clone())
        raise _Reached

    tensors = repro.tensors
    try:
        with model.taps.observe((point,), take):
            model.run_layer(0, tensors["layer|X"], tensors["layer|tokens"], state, tensors.get("layer|lengths"), choices or None, decode=bool(facts["decode"]))
    except _Reached:
        return join(str(repro.facts["point"]), shown), [{"source": s, "kernel": k, "launches": n, "build": b} for s, k, _, b, n in device.ran]
    raise CannotMeasureError(f"today's code of the layer does not show {point}")


def _weights(repro: Repro, at: str, where: torch.device) -> Any:
    """The dataclass of weights at a dotted name; what the point does not need is a stand-in that no kernel takes."""
    kind, listed = _PARTS.get(at, Linear8), repro.layer["weights"]
    values: dict[str, Any] = {}
    for one in dataclasses.fields(kind):
        name = f"{at}.{one.name}" if at else one.name
        if name in listed:
            held = repro.tensors.get(f"weight|{name}")
            values[one.name] = _stand_in(*listed[name]) if held is None else held.to(where)
        else:
            values[one.name] = _weights(repro, name, where) if any(other.startswith(f"{name}.") for other in listed) else None
    return kind(**values)


def _stand_in(dtype: str, shape: Sequence[int]) -> Tensor:
    return torch.empty(list(shape), dtype=getattr(torch, dtype), device="meta")


# ---- answer ----


def _show(repro: Repro, args: argparse.Namespace, value: Tensor, launches: list[dict[str, Any]]) -> Answer:
    facts, tensors = repro.facts, repro.tensors
    want, got, valid = tensors["want"], tensors["got"], tensors["valid"]
    value = value.reshape(got.shape) if value.numel() == got.numel() else value
    now, then = (compare(facts["point"], facts["mode"], v, want, valid, facts["unit"]) for v in (value, got))
    same = value.shape == got.shape and bool(((value == got) | (value.isnan() & got.isnan()))[valid].all())
    gate = facts["gate"]
    limit = gate.get("limit")
    share = now["error"] / limit if isinstance(limit, int | float) and limit > 0 else None
    place = f"{facts['point']}   {facts['phase']}" + (f" step {facts['step']}" if facts["step"] is not None else "") + f"   {facts['mode']}   {facts['component']}"
    tables = [Table(f"{place}   kernels: {args.kernels}, on {args.device}", ["", "replay", "run"])]
    tables[0].add(now["what"], now["error"], then["error"])
    for key, words in (("norm", "worst norm ratio off 1"), ("median", "median row"), ("masks", "elements finite on one side only"), ("rows", "rows"), ("where", "worst row"), ("element", "worst element"), ("got", "production there"), ("want", "reference there"), ("missing", "missing"), ("extra", "extra")):
        if key in now or key in then:
            tables[0].add(words, *(_cell(side.get(key)) for side in (now, then)))
    if launches and "outputs" in launches[0]:
        table = Table("launches", ["kernel", "grid", "block", "outputs", "as in the run"])
        for one in launches:
            outputs = ", ".join(f"{name}: {'bit-equal' if not o['different'] else str(o['different']) + ' of ' + str(o['bytes']) + ' bytes differ'}" for name, o in one["outputs"].items())
            table.add(f"{one['source']}.cu {one['kernel']}", "x".join(map(str, one["grid"])), "x".join(map(str, one["block"])), outputs or "-", "same build" if one["same_build"] else "another build")
        tables.append(table)
    notes = [
        f"the gate said: {gate['reason'] or gate['state']}",
        f"limit of the worst row in the run: {number(limit)} (floor {number(gate.get('floor'))})" + (f"; the replay spends {100 * share:.0f} % of it" if share is not None else ""),
        "the value is what the run gave, bit for bit" if same else "the value is another than the run's",
        *facts["notes"],
    ]  # fmt: skip
    if facts["device"] != args.device:
        notes.append(f"recorded on {facts['device']} ({facts['arch']}): other bits are possible here")
    values = {
        "repro": str(args.repro), "point": facts["point"], "phase": facts["phase"], "step": facts["step"], "layer": facts["layer"], "mode": facts["mode"], "component": facts["component"],
        "kernels": args.kernels, "device": args.device, "checked": args.checked, "value_bit_equal": same, "replay": now, "recorded": then, "limit": limit, "floor": gate.get("floor"),
        "share_of_limit": share, "launches": launches,
    }  # fmt: skip
    return Answer(tables, values, notes)


def _cell(value: Any) -> str:
    return number(value) if isinstance(value, float) else "-" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
