"""A checkpoint directory as named raw tensors: packed weights and scales untouched, nothing decoded.

Both models read through this file, so it holds no arithmetic: which tensors there must be, their stored dtype and
shape (dsv4.md section 2), where they lie, and which of them were consumed. Only safetensors are read, never pickles.

    python -c "from reference.checkpoint import Checkpoint; print(Checkpoint('checkpoints/tiny-dsv4').describe())"

Tests: parity/unit/test_checkpoint.py.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from reference.config import InputError, ModelConfig

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
FULL_HASH_LIMIT_BYTES = 1 << 30  # above it the hash covers headers, sizes and the ends of every shard

E4M3, E8M0, FP4, BF16, F32, I64 = "F8_E4M3", "F8_E8M0", "I8", "BF16", "F32", "I64"
ITEM_BYTES = {E4M3: 1, E8M0: 1, FP4: 1, BF16: 2, F32: 4, I64: 8}


@dataclass(frozen=True)
class TensorSpec:
    """How one tensor is stored: safetensors dtype name and shape. FP4 weights are I8, two e2m1 codes a byte."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        n = ITEM_BYTES[self.dtype]
        for size in self.shape:
            n *= size
        return n


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def expected_tensors(config: ModelConfig, layers: Sequence[int] | None = None) -> dict[str, TensorSpec]:
    """Every tensor that `embed`, the given layers, `hc_head`, `norm` and `head` need, by name without prefix."""
    c, specs = config, {}
    D, n, h, d = c.hidden_size, c.hc_mult, c.num_attention_heads, c.head_dim

    def fp8(name: str, out: int, into: int) -> None:
        specs[f"{name}.weight"] = TensorSpec(E4M3, (out, into))
        specs[f"{name}.scale"] = TensorSpec(E8M0, (_ceil(out, 128), _ceil(into, 128)))

    def fp4(name: str, out: int, into: int) -> None:
        specs[f"{name}.weight"] = TensorSpec(FP4, (out, into // 2))
        specs[f"{name}.scale"] = TensorSpec(E8M0, (out, into // 32))

    def compressor(name: str, ratio: int, width: int) -> None:
        features = c.overlap(ratio) * width
        specs[f"{name}.wkv.weight"] = specs[f"{name}.wgate.weight"] = TensorSpec(BF16, (features, D))
        specs[f"{name}.norm.weight"] = TensorSpec(BF16, (width,))
        specs[f"{name}.ape"] = TensorSpec(F32, (ratio, features))

    specs["embed.weight"] = specs["head.weight"] = TensorSpec(BF16, (c.vocab_size, D))
    specs["norm.weight"] = TensorSpec(BF16, (D,))
    specs["hc_head_fn"] = TensorSpec(F32, (n, n * D))
    specs["hc_head_base"] = TensorSpec(F32, (n,))
    specs["hc_head_scale"] = TensorSpec(F32, (1,))
    for layer in range(c.num_hidden_layers) if layers is None else layers:
        at = f"layers.{layer}"
        for half in ("attn", "ffn"):
            specs[f"{at}.{half}_norm.weight"] = TensorSpec(BF16, (D,))
            specs[f"{at}.hc_{half}_fn"] = TensorSpec(F32, ((2 + n) * n, n * D))
            specs[f"{at}.hc_{half}_base"] = TensorSpec(F32, ((2 + n) * n,))
            specs[f"{at}.hc_{half}_scale"] = TensorSpec(F32, (3,))
        fp8(f"{at}.attn.wq_a", c.q_lora_rank, D)
        fp8(f"{at}.attn.wq_b", h * d, c.q_lora_rank)
        fp8(f"{at}.attn.wkv", d, D)
        fp8(f"{at}.attn.wo_a", c.o_groups * c.o_lora_rank, h * d // c.o_groups)
        fp8(f"{at}.attn.wo_b", D, c.o_groups * c.o_lora_rank)
        specs[f"{at}.attn.q_norm.weight"] = TensorSpec(BF16, (c.q_lora_rank,))
        specs[f"{at}.attn.kv_norm.weight"] = TensorSpec(BF16, (d,))
        specs[f"{at}.attn.attn_sink"] = TensorSpec(F32, (h,))
        if c.ratio(layer):
            compressor(f"{at}.attn.compressor", c.ratio(layer), d)
        if c.ratio(layer) == 4:
            fp8(f"{at}.attn.indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            specs[f"{at}.attn.indexer.weights_proj.weight"] = TensorSpec(BF16, (c.index_n_heads, D))
            compressor(f"{at}.attn.indexer.compressor", 4, c.index_head_dim)
        specs[f"{at}.ffn.gate.weight"] = TensorSpec(BF16, (c.n_routed_experts, D))
        if c.is_hash(layer):
            specs[f"{at}.ffn.gate.tid2eid"] = TensorSpec(I64, (c.vocab_size, c.num_experts_per_tok))
        else:
            specs[f"{at}.ffn.gate.bias"] = TensorSpec(F32, (c.n_routed_experts,))
        names = [f"{at}.ffn.experts.{e}" for e in range(c.n_routed_experts)]
        for name, linear in [(m, fp4) for m in names] + [(f"{at}.ffn.shared_experts", fp8)]:
            linear(f"{name}.w1", c.moe_intermediate_size, D)
            linear(f"{name}.w2", D, c.moe_intermediate_size)
            linear(f"{name}.w3", c.moe_intermediate_size, D)
    return specs


class Checkpoint:
    """An opened checkpoint directory.

    layers        the layers whose tensors are needed: None for all, else a prefix range(0, n)
    config        ModelConfig
    specs         what is needed: name -> TensorSpec; checked at construction against the files' headers
    ignored       names in the files that this project does not use (`mtp.*`)
    consumed      names that were read with `raw`; `unread()` is what remains

    Raises InputError: missing directory, file or tensor, truncated shard, broken JSON, tensors nobody knows,
    a wrong shape or dtype, an index that points outside the directory.
    """

    def __init__(self, checkpoint_dir: str | Path, layers: range | Sequence[int] | None = None) -> None:
        self.directory = Path(checkpoint_dir)
        self.config = ModelConfig.from_dir(self.directory)
        self.layers = check_layers(self.config, layers)
        self._shard_of: dict[str, Path] = {}  # name without prefix -> file
        self._stored: dict[str, str] = {}  # name without prefix -> name in the file
        self._open: dict[Path, Any] = {}
        self.consumed: set[str] = set()
        self._read_index()
        self.specs = expected_tensors(self.config, self.layers)
        self.ignored = tuple(sorted(n for n in self._shard_of if n.startswith("mtp.")))
        self._check_names()
        self._check_headers()

    # ---- opening ----

    def _read_index(self) -> None:
        index = self.directory / INDEX_NAME
        if index.is_file():
            try:
                weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
                entries = [(str(name), str(file)) for name, file in weight_map.items()]
            except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as error:
                raise InputError(f"{index}: broken index: {type(error).__name__}: {error}") from None
        elif (self.directory / SINGLE_NAME).is_file():
            entries = [(name, SINGLE_NAME) for name in self._shard(self.directory / SINGLE_NAME).keys()]  # noqa: SIM118
        else:
            raise InputError(f"{self.directory}: neither {INDEX_NAME} nor {SINGLE_NAME}; this is not a checkpoint directory")
        root = self.directory.resolve()
        for stored, file in entries:
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise InputError(f"{index}: {stored!r} points to {file!r}, which is no .safetensors file of this directory")
            path = self.directory / file
            if path.exists() and root not in path.resolve().parents and not path.is_symlink():
                raise InputError(f"{index}: {stored!r} points outside the directory: {file!r}")
            name = stored.removeprefix("model.")
            if name in self._shard_of:
                raise InputError(f"{index}: tensor {name!r} is listed twice, with and without the prefix 'model.'")
            self._shard_of[name], self._stored[name] = path, stored

    def _shard(self, path: Path) -> Any:
        if path not in self._open:
            if not path.is_file():
                raise InputError(f"{path}: shard is missing; the index lists it")
            try:
                self._open[path] = safe_open(str(path), framework="pt", device="cpu")
            except (SafetensorError, OSError, ValueError) as error:
                raise InputError(f"{path}: truncated or broken shard: {error}") from None
        return self._open[path]

    def _check_names(self) -> None:
        missing = [name for name in self.specs if name not in self._shard_of]
        if missing:
            near = difflib.get_close_matches(missing[0], self._shard_of, n=1)
            hint = f"; nearest is {near[0]!r}" if near else ""
            raise InputError(f"{self.directory}: {len(missing)} tensor{'s' * (len(missing) != 1)} missing, first {missing[0]!r}{hint}")
        known = expected_tensors(self.config)
        extra = [name for name in self._shard_of if name not in known and not name.startswith("mtp.")]
        if extra:
            raise InputError(f"{self.directory}: {len(extra)} tensor{'s' * (len(extra) != 1)} that no part of the model takes, first {extra[0]!r}")

    def _check_headers(self) -> None:
        listed: dict[Path, set[str]] = {}
        for name, path in self._shard_of.items():
            listed.setdefault(path, set()).add(name)
        needed = sorted({self._shard_of[name] for name in self.specs})
        for path in needed:
            self._shard(path)
        for path in needed:
            held = {stored.removeprefix("model.") for stored in self._shard(path).keys()}  # noqa: SIM118  safe_open has keys(), it cannot be iterated
            unlisted = sorted(n for n in held - listed[path] if not n.startswith("mtp."))
            if unlisted:
                raise InputError(f"{path}: holds {unlisted[0]!r}, which {INDEX_NAME} does not list for it")
        for name, spec in self.specs.items():
            path = self._shard_of[name]
            try:
                header = self._shard(path).get_slice(self._stored[name])
                dtype, shape = str(header.get_dtype()), tuple(header.get_shape())
            except SafetensorError:
                raise InputError(f"{path}: tensor {name!r} is missing; the index lists it here") from None
            if dtype != spec.dtype:
                raise InputError(f"{path}: {name}: stored as {dtype}, expected {spec.dtype}")
            if shape != spec.shape:
                raise InputError(f"{path}: {name}: shape {list(shape)}, expected {list(spec.shape)}")

    # ---- reading ----

    def raw(self, name: str) -> Tensor:
        """The stored tensor, untouched, and marked as consumed. Raises InputError on a NaN scale or sink value.

        F8_E4M3 -> float8_e4m3fn, F8_E8M0 -> uint8 (the exponent byte), FP4 -> uint8 (two codes, low nibble first),
        BF16 -> bfloat16, F32 -> float32, I64 -> int64.
        """
        if name not in self.specs:
            raise InputError(f"{self.directory}: {name!r} is not among the tensors of the loaded layers")
        try:
            tensor: Tensor = self._shard(self._shard_of[name]).get_tensor(self._stored[name])
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self._shard_of[name]}: {name}: cannot be read: {error}") from None
        spec = self.specs[name]
        if spec.dtype == E8M0:
            tensor = tensor.view(torch.uint8)
            if bool((tensor == 255).any()):
                raise InputError(f"{self._shard_of[name]}: {name}: NaN scale (e8m0 byte 255) at {_first(tensor == 255)}")
        elif spec.dtype == FP4:
            tensor = tensor.view(torch.uint8)
        elif spec.dtype == E4M3:
            bad = (tensor.view(torch.uint8) & 0x7F) == 0x7F
            if bool(bad.any()):
                raise InputError(f"{self._shard_of[name]}: {name}: NaN weight (e4m3 code 0x7f) at {_first(bad)}")
        elif spec.dtype in (F32, BF16):
            bad = torch.isnan(tensor)
            if bool(bad.any()):
                raise InputError(f"{self._shard_of[name]}: {name}: NaN at {_first(bad)}")
        elif name.endswith("tid2eid"):
            bad = (tensor < 0) | (tensor >= self.config.n_routed_experts)
            if bool(bad.any()):
                raise InputError(f"{self._shard_of[name]}: {name}: expert id out of range at {_first(bad)}")
        self.consumed.add(name)
        return tensor

    def unread(self) -> tuple[str, ...]:
        """Needed tensors that nobody has read yet; empty after a complete load."""
        return tuple(sorted(set(self.specs) - self.consumed))

    def packed_bytes(self) -> int:
        """Bytes of the needed tensors as stored."""
        return sum(spec.nbytes for spec in self.specs.values())

    def hash(self) -> str:
        """sha256 over config and every shard, 16 hex digits, whichever layers are needed; above 1 GiB over headers, sizes and both ends.

        A shard that is not there counts by its name, so that a partial download has a hash of its own.
        """
        digest = hashlib.sha256()
        shards = sorted(set(self._shard_of.values()))
        digest.update((self.directory / "config.json").read_bytes())
        full = sum(path.stat().st_size for path in shards if path.exists()) <= FULL_HASH_LIMIT_BYTES
        for path in shards:
            if not path.exists():
                digest.update(f"{path.name} missing".encode())
                continue
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            for block in _blocks(path, None if full else 1 << 20):
                digest.update(block)
        return ("" if full else "sampled-") + digest.hexdigest()[:16]

    def describe(self) -> str:
        """One line for people: layers by kind, tensors, bytes, what is ignored."""
        kinds = [self.config.kind(layer) for layer in self.layers]
        counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("window", "csa", "hca"))
        line = f"{self.directory}: {len(kinds)} layers ({counts}), {len(self.specs)} tensors, {self.packed_bytes() / 1e6:.1f} MB packed"
        if self.ignored:
            line += f", {len(self.ignored)} mtp tensors ignored"
        if self.config.unknown_keys:
            line += f", unknown config keys: {', '.join(self.config.unknown_keys)}"
        return line


def check_layers(config: ModelConfig, layers: range | Sequence[int] | None) -> tuple[int, ...]:
    """The layers of a prefix range as a tuple; None is all. Raises InputError when it is no prefix."""
    if layers is None:
        return tuple(range(config.num_hidden_layers))
    wanted = tuple(layers) if isinstance(layers, Sequence) else ()
    if not wanted or wanted != tuple(range(len(wanted))) or len(wanted) > config.num_hidden_layers:
        raise InputError(f"layers={layers!r}: expected a prefix range(0, n) with n in 1..{config.num_hidden_layers}")
    return wanted


def _first(mask: Tensor) -> list[int]:
    return mask.nonzero()[0].tolist()


def _blocks(path: Path, ends: int | None) -> Iterator[bytes]:
    with path.open("rb") as file:
        if ends is None:
            while block := file.read(1 << 22):
                yield block
        else:
            header = int.from_bytes(file.read(8), "little")
            yield file.read(header + ends)
            file.seek(max(path.stat().st_size - ends, 0))
            yield file.read(ends)


