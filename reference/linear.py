"""A weight matrix as the checkpoint stores it, decoded when it is used.

Packed FP8 and FP4 weights stay packed: decoded, one real layer (256 experts) would take 26 GB. What was decoded last is
kept in `Decoded`, bounded in bytes: 64 MiB hold all of a small model (the bundled one takes 49 MB, so it is
decoded once) and two experts' matrices of a real one, whose larger matrices are never kept.

Tests: parity/unit/test_reference.py.
"""

from __future__ import annotations

from torch import Tensor

from reference.checkpoint import E4M3, FP4, Checkpoint
from reference.formats import Policy, decode_fp4_weight, decode_fp8_weight
from reference.ops import Sums

DECODED_BYTES = 64 << 20


class Decoded:
    """Decoded weights by name, at most `limit_bytes` of them; the oldest go first."""

    def __init__(self, limit_bytes: int = DECODED_BYTES) -> None:
        self.limit_bytes = limit_bytes
        self.held_bytes = 0
        self._held: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        return self._held.get(name)

    def keep(self, name: str, weight: Tensor) -> None:
        if weight.nbytes > self.limit_bytes:
            return
        while self.held_bytes + weight.nbytes > self.limit_bytes:
            self.held_bytes -= self._held.pop(next(iter(self._held))).nbytes
        self._held[name] = weight
        self.held_bytes += weight.nbytes


class Linear:
    """y = W x with W as stored: FP8 per 128 x 128, FP4 per 32, or BF16; the output is rounded at the `bf16` point.

    name    tensor name without `.weight`
    round_input   the input is a `linear_in.e4m3` point (FP8 and FP4 weights but wo_a)
    """

    def __init__(
        self, checkpoint: Checkpoint, name: str, policy: Policy, sums: Sums, decoded: Decoded, round_input: bool = True
    ) -> None:
        self.name, self.policy, self.sums, self.round_input = name, policy, sums, round_input
        self._dtype = checkpoint.specs[f"{name}.weight"].dtype
        self._weight = checkpoint.raw(f"{name}.weight")
        self._scale = checkpoint.raw(f"{name}.scale") if self._dtype in (E4M3, FP4) else None
        self._decoded = decoded

    def weight(self) -> Tensor:
        """fp32 [out, in]."""
        weight = self._decoded.get(self.name)
        if weight is None:
            if self._scale is None:
                weight = self._weight.float()
            else:
                decode = decode_fp8_weight if self._dtype == E4M3 else decode_fp4_weight
                weight = decode(self._weight, self._scale)
            self._decoded.keep(self.name, weight)
        return weight

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        if self.round_input:
            x = self.policy.linear_in(x)
        return self.policy.bf16(self.sums.linear(x, self.weight()))
