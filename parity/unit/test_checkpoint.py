"""Checkpoints at the door: complete ones are read raw, every damage is one clear line before or while reading."""

import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from parity.unit.worlds import write_checkpoint
from reference import checkpoint
from reference.checkpoint import INDEX_NAME, SINGLE_NAME, Checkpoint, expected_tensors
from reference.config import InputError, ModelConfig

TINY = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
SMALL: dict[str, Any] = {
    "num_hidden_layers": 3, "compress_ratios": [0, 4, 128], "hidden_size": 64, "n_routed_experts": 2, "moe_intermediate_size": 32,
    "vocab_size": 32, "num_attention_heads": 2, "q_lora_rank": 32,
}  # fmt: skip
FIRST = "model-00001-of-00002.safetensors"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A good small checkpoint in two shards, with an MTP tensor. Do not write into it."""
    return write_checkpoint(
        tmp_path_factory.mktemp("world") / "good", seed=1, extra={"mtp.0.norm.weight": torch.ones(4)}, **SMALL
    )


@pytest.fixture
def broken(world, tmp_path):
    """A copy to break."""
    return Path(shutil.copytree(world, tmp_path / "broken"))


def read_all(directory, layers=None):
    """Open a checkpoint and read every needed tensor."""
    checkpoint = Checkpoint(directory, layers)
    return {name: checkpoint.raw(name) for name in checkpoint.specs}


def edit_index(directory, change):
    path = directory / INDEX_NAME
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def edit_tensors(directory, change):
    """Change {name: tensor} of the shard that holds a name, for each name given by `change(tensors)`; index kept in step."""
    weight_map = json.loads((directory / INDEX_NAME).read_text())["weight_map"]
    for file in sorted(set(weight_map.values())):
        tensors = load_file(directory / file)
        change(tensors)
        save_file({n: t.contiguous() for n, t in tensors.items()}, directory / file)


def replace(name, make):
    """An edit of one tensor, wherever it lies."""

    def change(tensors):
        if name in tensors:
            tensors[name] = make(tensors[name])

    return lambda directory: edit_tensors(directory, change)


# ---- good ones ----


def test_the_bundled_checkpoint_is_complete():
    checkpoint = Checkpoint(TINY)
    assert checkpoint.ignored == ()
    assert "8 layers (2 window, 3 csa, 3 hca)" in checkpoint.describe()
    assert len(checkpoint.unread()) == len(checkpoint.specs)


def test_raw_tensors_are_untouched_and_counted_once(world):
    checkpoint = Checkpoint(world)
    stored = load_file(world / FIRST) | load_file(world / FIRST.replace("00001-", "00002-"))
    kinds = set()
    for name, spec in checkpoint.specs.items():
        value = checkpoint.raw(name)
        kinds.add((spec.dtype, value.dtype))
        assert tuple(value.shape) == spec.shape
        assert torch.equal(value.view(torch.uint8), stored[name].view(torch.uint8))
    assert kinds == {
        ("F8_E4M3", torch.float8_e4m3fn), ("F8_E8M0", torch.uint8), ("I8", torch.uint8), ("BF16", torch.bfloat16), ("F32", torch.float32), ("I64", torch.int64),
    }  # fmt: skip
    assert checkpoint.unread() == ()
    assert checkpoint.ignored == ("mtp.0.norm.weight",)
    assert "1 mtp tensors ignored" in checkpoint.describe()
    assert checkpoint.packed_bytes() == sum(t.nbytes for n, t in stored.items() if not n.startswith("mtp."))


@pytest.mark.parametrize("shards", [1, 3])
def test_prefix_and_number_of_shards_do_not_matter(world, tmp_path, shards):
    other = write_checkpoint(tmp_path / "other", seed=1, prefix="model.", shards=shards, **SMALL)
    assert (other / SINGLE_NAME).exists() == (shards == 1)
    a, b = read_all(world), read_all(other)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[n].view(torch.uint8), b[n].view(torch.uint8)) for n in a)


def test_a_prefix_of_layers_needs_only_its_tensors(world):
    checkpoint = Checkpoint(world, range(1))
    assert checkpoint.layers == (0,)
    assert not any(name.startswith(("layers.1.", "layers.2.")) for name in checkpoint.specs)
    with pytest.raises(InputError, match="not among the tensors"):
        checkpoint.raw("layers.1.attn.wq_a.weight")


def test_shards_that_nobody_needs_may_be_missing(broken):
    weight_map = json.loads((broken / INDEX_NAME).read_text())["weight_map"]
    needed = {weight_map[n] for n in expected_tensors(ModelConfig.from_dir(broken), [0])}
    for file in set(weight_map.values()) - needed:
        (broken / file).unlink()
    read_all(broken, range(1))


@pytest.mark.parametrize("layers", [[], [1], [0, 2], range(4), [1, 0], range(1, 2)])
def test_only_a_prefix_of_layers_can_be_opened(world, layers):
    with pytest.raises(InputError, match="prefix range"):
        Checkpoint(world, layers)


def test_the_hash_follows_the_bytes(world, broken):
    before = Checkpoint(world).hash()
    assert Checkpoint(broken).hash() == before
    replace("layers.0.hc_attn_scale", lambda t: t + 1)(broken)
    assert Checkpoint(broken).hash() != before


def test_the_hash_is_of_the_checkpoint_and_not_of_the_layers_that_are_needed(world, broken, monkeypatch):
    weight_map = json.loads((broken / INDEX_NAME).read_text())["weight_map"]
    needed = {weight_map[n] for n in expected_tensors(ModelConfig.from_dir(broken), [0])}
    rest = sorted(set(weight_map.values()) - needed)
    assert rest, "every shard is needed: this shows nothing"
    for limit in (checkpoint.FULL_HASH_LIMIT_BYTES, 0):  # whole, sampled
        monkeypatch.setattr(checkpoint, "FULL_HASH_LIMIT_BYTES", limit)
        whole = Checkpoint(world).hash()
        assert whole.startswith("sampled-") == (limit == 0)
        assert Checkpoint(world, range(1)).hash() == whole
    (broken / rest[0]).unlink()
    assert Checkpoint(broken, range(1)).hash() not in (whole, Checkpoint(world).hash()), "a partial download is not the checkpoint"


def test_a_link_to_a_shard_elsewhere_is_a_shard(broken, tmp_path):
    shutil.move(broken / FIRST, tmp_path / "blob")
    (broken / FIRST).symlink_to(tmp_path / "blob")
    read_all(broken)


# ---- damage ----


def truncate(size):
    def cut(directory):
        data = (directory / FIRST).read_bytes()
        (directory / FIRST).write_bytes(data[:size] if size >= 0 else data[: len(data) + size])

    return cut


def write_index(text):
    return lambda directory: (directory / INDEX_NAME).write_text(text)


def huge_header(directory):
    data = (directory / FIRST).read_bytes()
    (directory / FIRST).write_bytes(struct.pack("<Q", 1 << 60) + data[8:])


def a_pickle(directory):
    (directory / FIRST).write_bytes(pickle.dumps({"embed.weight": 1}))


def unlist(name):
    return lambda directory: edit_index(directory, lambda m: m.pop(name))


def point_to(file):
    return lambda directory: edit_index(directory, lambda m: m.update({"norm.weight": file}))


def drop(name):
    return lambda directory: edit_tensors(directory, lambda tensors: tensors.pop(name, None))


def nan_at(*place):
    def poison(tensor):
        tensor = tensor.clone()
        if tensor.dtype in (torch.float32, torch.bfloat16):
            tensor[place] = float("nan")
        else:
            tensor.view(torch.uint8)[place] = 0xFF
        return tensor

    return poison


def add_extra(directory):
    save_file({"layers.0.attn.zebra": torch.ones(1)}, directory / "more.safetensors")
    edit_index(directory, lambda m: m.update({"layers.0.attn.zebra": "more.safetensors"}))


def hide_extra(directory):
    def change(tensors):
        if "norm.weight" in tensors:
            tensors["layers.0.attn.zebra"] = torch.ones(1)

    edit_tensors(directory, change)


DAMAGE = {
    "a missing shard": (lambda d: (d / FIRST).unlink(), f"{FIRST}: shard is missing"),
    "a truncated shard": (truncate(-1), "truncated or broken shard"),
    "half a shard": (truncate(20000), "truncated or broken shard"),
    "a shard cut in its header": (truncate(100), "truncated or broken shard"),
    "an empty shard": (truncate(0), "truncated or broken shard"),
    "a header longer than the file": (huge_header, "truncated or broken shard"),
    "a pickle": (a_pickle, "truncated or broken shard"),
    "a shard that is a directory": (lambda d: ((d / FIRST).unlink(), (d / FIRST).mkdir()), "shard is missing"),
    "no index and no single file": (lambda d: (d / INDEX_NAME).unlink(), "not a checkpoint directory"),
    "a broken index": (write_index("{"), "broken index"),
    "an index that is a list": (write_index("[]"), "broken index"),
    "an index without a map": (write_index("{}"), "broken index"),
    "a map that is a list": (write_index('{"weight_map": ["a"]}'), "broken index"),
    "an empty map": (write_index('{"weight_map": {}}'), "tensors missing"),
    "a nested index": (write_index("[" * 100000), "broken index"),
    "a tensor that is not listed": (unlist("norm.weight"), "1 tensor missing, first 'norm.weight'"),
    "a tensor that is not in its shard": (drop("layers.1.attn.attn_sink"), "'layers.1.attn.attn_sink' is missing"),
    "a misspelt tensor": (
        lambda d: edit_index(d, lambda m: m.update({"nrom.weight": m.pop("norm.weight")})),
        "nearest is 'nrom.weight'",
    ),
    "an extra tensor": (add_extra, "1 tensor that no part of the model takes, first 'layers.0.attn.zebra'"),
    "an extra tensor that the index hides": (hide_extra, "holds 'layers.0.attn.zebra', which"),
    "a tensor listed with and without prefix": (
        lambda d: edit_index(d, lambda m: m.update({"model.norm.weight": m["norm.weight"]})),
        "listed twice",
    ),
    "an index that points up": (point_to("../good/" + FIRST), "no .safetensors file of this directory"),
    "an index that points to a root": (point_to("/etc/passwd"), "no .safetensors file of this directory"),
    "an index that points below": (point_to("sub/x.safetensors"), "no .safetensors file of this directory"),
    "an index that points to a pickle": (point_to("model.bin"), "no .safetensors file of this directory"),
    "an index that points to a number": (point_to(7), "no .safetensors file of this directory"),
    "a name no file can have": (point_to("a\0.safetensors"), "shard is missing"),
    "a wrong shape": (replace("layers.0.attn.attn_sink", lambda t: t[:1]), "layers.0.attn.attn_sink: shape [1], expected [2]"),
    "a transposed weight": (replace("layers.0.attn.wq_a.weight", lambda t: t.t()), "shape [64, 32], expected [32, 64]"),
    "a wrong dtype": (replace("norm.weight", lambda t: t.float()), "norm.weight: stored as F32, expected BF16"),
    "a scale of another dtype": (
        replace("layers.0.attn.wkv.scale", lambda t: t.view(torch.uint8)),
        "layers.0.attn.wkv.scale: stored as U8, expected F8_E8M0",
    ),
    "NaN in a weight's scale": (
        replace("layers.1.attn.wq_a.scale", nan_at(0, 0)),
        "layers.1.attn.wq_a.scale: NaN scale (e8m0 byte 255) at [0, 0]",
    ),
    "NaN in an expert's scale": (
        replace("layers.2.ffn.experts.1.w2.scale", nan_at(3, 0)),
        "experts.1.w2.scale: NaN scale (e8m0 byte 255) at [3, 0]",
    ),
    "NaN in a mixing scale": (replace("layers.0.hc_attn_scale", nan_at(1)), "layers.0.hc_attn_scale: NaN at [1]"),
    "NaN in an FP8 weight": (
        replace("layers.0.attn.wkv.weight", nan_at(2, 5)),
        "layers.0.attn.wkv.weight: NaN weight (e4m3 code 0x7f) at [2, 5]",
    ),
    "NaN in a norm": (replace("norm.weight", nan_at(7)), "norm.weight: NaN at [7]"),
    "an expert that does not exist": (
        replace("layers.0.ffn.gate.tid2eid", lambda t: torch.full_like(t, 2)),
        "layers.0.ffn.gate.tid2eid: expert id out of range at [0, 0]",
    ),
    "a negative expert": (replace("layers.0.ffn.gate.tid2eid", lambda t: t - 5), "expert id out of range"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_one_clear_line(broken, damage):
    break_it, message = DAMAGE[damage]
    break_it(broken)
    with pytest.raises(InputError) as caught:
        read_all(broken)
    assert message in str(caught.value)
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_single_broken_file_is_one_clear_line(tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / SINGLE_NAME).write_bytes(b"not safetensors")
    with pytest.raises(InputError, match="truncated or broken"):
        Checkpoint(tmp_path)


def test_a_link_that_leads_nowhere_is_a_missing_shard(broken, tmp_path):
    (broken / FIRST).unlink()
    (broken / FIRST).symlink_to(tmp_path / "nothing")
    with pytest.raises(InputError, match="shard is missing"):
        Checkpoint(broken)


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(InputError, match="not a checkpoint directory"):
        Checkpoint(tmp_path)
    with pytest.raises(InputError, match="no such directory"):
        Checkpoint(tmp_path / "nothing")


def test_a_broken_config_is_found_first(broken):
    (broken / "config.json").write_text("{")
    with pytest.raises(InputError, match="broken JSON"):
        Checkpoint(broken)


def test_every_shape_follows_from_the_config(world):
    """Spot checks by hand, so that a wrong formula in expected_tensors is not confirmed by itself."""
    specs = expected_tensors(ModelConfig.from_dir(TINY))
    shapes = {name: specs[name].shape for name in specs}
    assert shapes["layers.0.attn.wo_a.weight"] == (256, 512)
    assert shapes["layers.0.attn.wq_b.weight"] == (1024, 128)
    assert shapes["layers.2.attn.indexer.compressor.ape"] == (4, 256)
    assert shapes["layers.3.attn.compressor.ape"] == (128, 128)
    assert shapes["layers.2.attn.compressor.wkv.weight"] == (256, 256)
    assert shapes["layers.2.ffn.experts.0.w2.weight"] == (256, 64)
    assert shapes["layers.2.ffn.experts.0.w2.scale"] == (256, 4)
    assert shapes["layers.0.hc_attn_fn"] == (24, 1024)
    assert "layers.0.ffn.gate.tid2eid" in shapes
    assert "layers.2.ffn.gate.bias" in shapes
    assert "layers.0.attn.compressor.ape" not in shapes
    assert "layers.3.attn.indexer.wq_b.weight" not in shapes
