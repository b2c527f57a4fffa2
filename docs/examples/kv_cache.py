"""Writes the KV cache of docs/examples/small_engine.py as a paged engine holds it: packed bytes, a page table, cache.json.

    python -m docs.examples.kv_cache my-cache      # then: python -m probes.kv_cache my-cache

An entry of DeepSeek-V4 is (d - r) e4m3 codes, r bf16 values, and an e8m0 scale per 64 codes, padded to 8 bytes. Yours has them already:
write the tensors as they lie, and say where. The format: docs/trace.md.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from docs.examples.small_engine import open_engine

CHECKPOINT = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-dsv4"
TOKENS, LAYERS, PAGE = list(range(300, 450)), [0, 1], 16  # 150 tokens: the ring of 128 has turned


def packed(keys, r):
    """[n, d] -> bytes [n, entry]."""
    plain, rotary = keys[:, :-r].unflatten(-1, (-1, 64)), keys[:, -r:].bfloat16().contiguous().view(torch.uint8)
    power = torch.ceil(torch.log2(plain.abs().amax(-1).clamp_min(1e-4) / 448))
    codes = (plain / torch.exp2(power)[..., None]).to(torch.float8_e4m3fn).flatten(1).view(torch.uint8)
    entry = torch.cat((codes, rotary, (power + 127).to(torch.uint8)), -1)
    return torch.nn.functional.pad(entry, (0, -entry.shape[1] % 8))


def main(argv):
    if len(argv) != 1:
        print("python -m docs.examples.kv_cache DIR", file=sys.stderr)
        return 2
    out = Path(argv[0])
    out.mkdir(parents=True, exist_ok=True)
    adapter = open_engine(CHECKPOINT, LAYERS)
    state = adapter.new_state(1, len(TOKENS))
    with torch.no_grad():
        adapter.prefill(torch.tensor([TOKENS]), state)
    config = adapter.root.config
    slots = config["sliding_window"]
    pages = torch.randperm(slots // PAGE, generator=torch.Generator().manual_seed(1))  # where the engine put them
    tensors, layers = {}, {}
    for layer, ring in zip(LAYERS, state["rings"], strict=True):
        entries = packed(ring["keys"][0], config["qk_rope_head_dim"]).unflatten(0, (-1, PAGE))
        tensors[f"swa.{layer}"] = torch.empty_like(entries).index_copy_(0, pages, entries)
        layers[str(layer)] = {"window": {"tensor": f"swa.{layer}", "block_size": PAGE, "slots": slots, "page_table": [pages.tolist()]}}
    save_file(tensors, out / "cache.safetensors")
    described = {"kind": "dsv4-kv-cache", "schema": 1, "engine": adapter.name, "policy": list(adapter.policy), "tokens": [TOKENS], "layers": layers}
    (out / "cache.json").write_text(json.dumps(described), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
