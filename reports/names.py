"""What a reader calls the measurements that have no section of their own: title, what it says, limit and what it does not look at.

A measurement or key that is not listed is shown under its own name. Tests: parity/unit/test_reports.py.
"""

from __future__ import annotations

# name -> (title, note under it)
TITLES: dict[str, tuple[str, str]] = {
    "ladder": (
        "Price of the formats, noise and production's error",
        "Streams after each layer in prefill, rel-L2 of the median and worst token, free-running. Formats: the reference under production's rounding against one that rounds nothing, each on its own choices. Noise: its twins. Production: against the reference on production's choices. Reported, not judged; decode is not looked at.",
    ),
    "load.books": ("Checkpoint: every tensor accounted for", "Limit 0 wrong: each needed tensor fills one parameter, once. Not looked at: mtp tensors (listed as ignored)."),
    "load": ("Weights as loaded", "Each parameter read back from the kernels' layout against a direct decode of the checkpoint: limit 0 values. Not looked at: whether the checkpoint's own numbers are the published ones."),
    "memory.widths": ("Widths of what is kept", "Bytes of a row that the first call wrote, against the buffer and the width that the format needs: limit 0 apart."),
    "memory.rate": ("Bytes per token and constant, per layer kind", "Measured at three lengths or more, against the closed formula of the formats: limit 0 bytes off the line."),
    "memory.footprint": ("KV cache at 1,048,576 tokens", "Limits: the closed formula within 1 %, 15 GB. Beside it the same in BF16, and with an indexer key taken for all heads wide. Not held here: weights and activations."),
    "memory.reported": ("What production says of its own size", "Limit: 0 bytes between what is said and what is held."),
    "memory.transients": ("Allocations of a prefill", "Limit 0 tensors beside the logits, at two capacities and positions; the logits' checksum is the same at every capacity."),
    "memory.slope": ("Memory over decode steps", "Limits: 0 tensors allocated, 0 bytes more in the state, 50 MB between samples. Not looked at: other processes on the device."),
    "memory.capacity": ("What a full cache does", "It takes its last token, refuses one more by name and changes nothing that is stored: limit 0 positions changed."),
    "graph": ("Captured graphs that decode was replayed from", "Host code saw the captured length, replays were at others. Taps copy into buffers that are poisoned before a replay: one that did not fire is not run. Prefill and single operations are not captured."),
    "device.kernels": ("The same kernels on the CPU device: what ran", "From the point named on, the GPU ran another kernel than the CPU device, so sums may stand in another order and the reference's limits hold."),
    "device.points": ("The same kernels on the CPU device: how near", "The isolated layers again, same input and state, prefill and the first decode steps; worst and typical row over the judged layers, relative L2; sets: queries that differ. Limits: gates device.*. Not looked at: later steps, and whatever is wrong on both."),
    "not covered": ("What production does not show", "Points that nobody could judge, with how many tests asked for each and the first of them."),
    "not applicable": ("What this model does not have", "Mechanisms of DeepSeek-V4 that a generic audit does not look for."),
    "logprobs": ("Log-probabilities of a server", "As read from the given file, against the reference."),
    "policy": ("Where production rounds", "Shares of shown values that lie on each format's grid; declared and published as the policies say. No number: no shown point holds the rounded values."),
    "outside.left_padding": ("Left padding", "A row alone against the same row behind pads and an attention mask, positions its own: what a batch of unequal rows would cost. Reported, not judged."),
    "waiver": ("Waivers of this run", "Known deviations that were accepted, each with its reason, its end and the verdicts that it met."),
    "seconds": ("Time of the run", ""),
    "early end": ("Where the fault profile ended", "Once a gate is red the models are not run further; what was not run then is no part of the verdict."),
    "reference_cache": ("Reference passes from an earlier run", "Production is never taken from there."),
}  # fmt: skip

COMMON = {"of": "part", "bf16_gb": "BF16, GB", "lengths": "at tokens", "operations": "by"}
COLUMNS: dict[str, dict[str, str]] = {
    "policy": {
        "on_grid": "values on the grid", "rounds": "rounds as seen", "otherwise": "otherwise than published", "off_rotated": "off the rotated reference", "off_unrotated": "off the unrotated reference",
    },
    "outside.left_padding": {"pads": "pads before it", "largest_logit_difference": "largest logit difference"},
    "load.books": {"in_checkpoint": "tensors in the checkpoint", "tensors": "tensors consumed", "wrong": "not exactly once"},
    "load": {"megabytes": "MB", "least_scale": "smallest scale", "checksum_held": "checksum, held", "checksum_stored": "checksum, stored", "different": "values that differ"},
    "memory.widths": {
        "name": "row", "values": "values per row", "weights": "width that the weights make", "written": "bytes written", "held": "bytes kept", "wanted": "bytes due",
        "beyond": "bytes written elsewhere",
    },
    "memory.rate": {
        "kind": "layer kind", "bytes": "bytes held", "constant_bytes": "constant, bytes", "off_the_line": "bytes off the line", "formula_constant": "formula: constant",
        "formula_per_token": "formula: per token", "bf16_per_token": "BF16: per token",
    },
    "memory.footprint": {
        "kv_gb": "KV cache, GB", "formula_gb": "closed formula, GB", "buffers_gb": "work buffers, GB", "wrong_width_gb": "wrong width, GB", "wrong_width": "what the wrong width is",
    },
    "memory.reported": {
        "held": "bytes held", "formula": "bytes said", "constant_held": "constant, held", "constant_said": "constant, said", "per_token_held": "per token, held",
        "per_token_said": "per token, said", "total_over_length": "all bytes over tokens",
    },
    "memory.transients": {"max_context": "capacity, tokens", "position": "at token", "count": "tensors allocated", "size_bytes": "bytes allocated", "logits": "checksum of the logits"},
    "memory.slope": {
        "allocations": "tensors allocated", "allocated_bytes": "bytes allocated", "state_growth_bytes": "growth of the state, bytes", "live_growth_bytes": "growth of all tensors, bytes",
        "host_growth_bytes": "growth on the host, bytes", "element_growth": "growth of containers, elements",
        "sampled": "sampled memory", "every": "every steps", "first_mb": "first sample, MB", "last_mb": "last sample, MB", "spread_mb": "largest less smallest, MB",
    },
    "graph": {
        "captured_at": "captured at tokens", "replayed_at": "replayed at tokens, least and most", "elsewhere": "replays at other lengths only", "launches": "launches in the graph",
        "host_steps": "torch steps in the graph", "given_choices": "choices from outside",
    },
    "device.kernels": {
        "plan": "variants", "plan_beside": "variants on the CPU device", "kernels": "kernels on the CPU device", "only_gpu": "only on the GPU", "only_cpu": "only on the CPU device",
        "other_from": "another kernel from", "problem": "what stopped it",
    },
    "device.points": {"of": "point", "in_layer": "in layer", "equal_bits": "share of elements equal in every bit"},
    "memory.capacity": {"capacity": "capacity, tokens", "taken": "tokens taken", "refusals": "one more is refused with", "changed": "stored parts changed", "failed": "what went wrong"},
    "reference_cache": {"from_cache": "passes from the cache", "computed": "passes computed", "ignored_files": "files ignored", "MB_read": "MB read", "MB_written": "MB written", "not_kept": "why not kept"},
}  # fmt: skip


def title(name: str) -> str:
    return TITLES[name][0] if name in TITLES else name.replace("_", " ").replace(".", ", ")


def note(name: str) -> str:
    return TITLES[name][1] if name in TITLES else ""


def column(name: str, key: str) -> str:
    """A key of a measurement in words."""
    return COLUMNS.get(name, {}).get(key) or COMMON.get(key) or key.replace("_", " ")
