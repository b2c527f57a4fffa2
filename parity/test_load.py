"""What production holds after loading, against the raw checkpoint: all tensors of all loaded layers, bit for bit.

Planted faults that turn these red: B083, B084, B094, B104, B107, B109, B151, B153, B154, B162, and a scale copied as a number
(B124), re-biased (B128) or shifted (B156) while loading. Gates: gates.BOUNDS["load"]; how: probes/core/loading.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from parity import load
from parity.session import run_of
from parity.unit.worlds import config_dict, write_checkpoint
from probes.core import loading
from probes.core.records import Measurement, Verdict
from reference.checkpoint import Checkpoint, expected_tensors
from reference.config import ModelConfig


@pytest.fixture(scope="module")
def held(audit, pytestconfig):
    """Production; where its own door refused the load, the same load without the door, so that the tensor is named."""
    run = run_of(pytestconfig)
    if audit.crash is None or audit.crash.phase != "load":
        return audit.production
    return load_without_door(run)


def load_without_door(run):
    """A production whose loader does not check its list, or the reason why there is none."""
    try:
        import production
        from production import weights

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights.LoadAudit, "finish", lambda *_: None)
            return production.load(run.checkpoint_dir, device=run.device, max_context=run.max_context, layers=range(max(run.layers) + 1))
    except Exception as error:
        return f"production.load: {type(error).__name__}: {error}"


@pytest.fixture
def settle(request, record) -> Callable[[tuple[Verdict, Measurement]], None]:
    def settled(result: tuple[Verdict, Measurement]) -> None:
        run_of(request.config).record(result[1])
        record(result[0])

    return settled


@pytest.fixture
def model(held, record):
    if isinstance(held, str):
        record(load.not_loaded(held))
    return held


@pytest.fixture(scope="module")
def checkpoint(pytestconfig):
    run = run_of(pytestconfig)
    return Checkpoint(run.checkpoint_dir, range(max(run.layers) + 1))


def test_every_tensor_is_filled_once_or_listed(model, checkpoint, settle):
    """Names, by the blocks and by the loader's list; no two parameters in one memory."""
    settle(load.judge_books(model, checkpoint))


def test_layer_holds_what_the_checkpoint_stores(layer, model, checkpoint, settle):
    """Every parameter of a judged layer: dtype, shape and bits."""
    found = loading.compare(loading.layer_parameters(model.blocks[layer], layer), checkpoint)
    settle(load.judge_parameters(found, f"layers.{layer}", layer))


def test_the_rest_holds_what_the_checkpoint_stores(model, checkpoint, settle, pytestconfig):
    """embed, hc_head, norm, head, and layers that are loaded and not judged."""
    judged = run_of(pytestconfig).layers
    others = [p for layer in model.layers if layer not in judged for p in loading.layer_parameters(model.blocks[layer], layer)]
    settle(load.judge_parameters(loading.compare([*loading.model_parameters(model), *others], checkpoint), "model", None))


AWKWARD: dict[str, Any] = {
    "n_routed_experts": 300, "num_hidden_layers": 2, "compress_ratios": [4, 128], "num_hash_layers": 1, "hidden_size": 160,
    "moe_intermediate_size": 32, "q_lora_rank": 160, "o_lora_rank": 96, "vocab_size": 96,
}  # fmt: skip


def awkward_checkpoint(directory):
    """Values that a lossy load would change: ids past 256, biases near 8, norms near 0.03, scales of every size, odd block edges."""
    rng = torch.Generator().manual_seed(5)
    changed = {}
    for name, spec in expected_tensors(ModelConfig.from_dict(config_dict(**AWKWARD))).items():
        if name.endswith("norm.weight"):
            changed[name] = (0.03 + 0.01 * torch.randn(spec.shape, generator=rng)).bfloat16()
        elif name.endswith("gate.bias"):
            changed[name] = 8 + 0.01 * torch.randn(spec.shape, generator=rng)
        elif name.endswith("gate.tid2eid"):
            changed[name] = torch.randint(0, 300, spec.shape, generator=rng)
        elif name.endswith(".scale"):  # 2^-60 to 2^60, the byte 134 (2^7) among them
            scale = torch.randint(67, 188, spec.shape, generator=rng).to(torch.uint8)
            scale.flatten()[0] = 134
            changed[name] = scale.view(torch.float8_e8m0fnu)
    return write_checkpoint(directory, seed=11, extra=changed, **AWKWARD)


def test_an_awkward_checkpoint_is_held_bit_for_bit(device, tmp_path, settle):
    """What the bundled checkpoint cannot show: 300 experts, biases that bf16 would merge, widths that are no multiple of 128."""
    import production

    path = awkward_checkpoint(tmp_path)
    try:
        made = production.load(path, device=device.name, max_context=256)
    except Exception as error:
        settle((load.not_loaded(f"production.load: {type(error).__name__}: {error}"), Measurement("load", values={"of": "awkward checkpoint"})))
        return
    verdict, values = load.judge_parameters(loading.compare(loading.all_parameters(made), Checkpoint(path)), "awkward checkpoint", None)
    settle((replace(verdict, point=f"{verdict.point}[awkward checkpoint]" if verdict.reason else verdict.point), values))
