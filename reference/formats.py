"""Number formats: e4m3, e2m1 and e8m0 decoded and rounded to, and the policy that says where a model rounds.

Rounding returns fp32 values on the format's grid, never codes. A block's scale is the published one, a power of two
rounded up: 2^ceil(log2(amax / largest)), exact at powers of two (amax = 448 * 2^n gives 2^n). The named rounding
points of dsv4.md section 3 are `POINTS`; a `Policy` is a set of them and applies each at its place.

Tests: parity/unit/test_formats.py.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from reference.config import InputError

E4M3_MAX, E4M3_LEAST_AMAX = 448.0, 1e-4
E2M1_MAX, E2M1_LEAST_AMAX = 6.0, 6.0 * 2.0**-126
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # codes 0..7; bit 3 is the sign
KV_BLOCK, INDEX_BLOCK, LINEAR_BLOCK = 64, 32, 128  # values per scale along the last axis

# ---- decoding what a checkpoint stores ----


def decode_e8m0(code: Tensor) -> Tensor:
    """uint8 -> fp32: byte b is 2^(b - 127), 255 is NaN."""
    value = torch.ldexp(torch.ones(code.shape), code.int() - 127)
    return torch.where(code == 255, torch.nan, value)


def decode_e4m3(code: Tensor) -> Tensor:
    """uint8 or float8_e4m3fn -> fp32."""
    return code.view(torch.float8_e4m3fn).float()


def decode_e2m1(packed: Tensor) -> Tensor:
    """uint8 [..., k] -> fp32 [..., 2k]; NOTE: the low nibble is the even index."""
    table = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES))
    code = torch.stack((packed & 0xF, packed >> 4), -1).flatten(-2)
    return table[code.int()]


def decode_fp8_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in] e4m3, scale [ceil(out/128), ceil(in/128)] e8m0 -> fp32 [out, in]."""
    out, into = weight.shape
    rows = decode_e8m0(scale).repeat_interleave(128, 0)[:out]
    return decode_e4m3(weight) * rows.repeat_interleave(128, 1)[:, :into]


def decode_fp4_weight(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [out, in/2] two e2m1 a byte, scale [out, in/32] e8m0 -> fp32 [out, in]."""
    out, blocks = scale.shape
    return (decode_e2m1(weight).view(out, blocks, 32) * decode_e8m0(scale)[..., None]).view(out, blocks * 32)


# ---- rounding to a format ----


def power_of_two_scale(amax: Tensor, largest: float, least_amax: float) -> Tensor:
    """2^ceil(log2(max(amax, least_amax) / largest)), exact; NaN where amax is not finite."""
    amax = amax.float()
    mantissa, exponent = torch.frexp(amax.clamp_min(least_amax))  # amax = mantissa * 2^exponent, mantissa in [0.5, 1)
    largest_mantissa, largest_exponent = math.frexp(largest)
    ceil_log2 = exponent - largest_exponent + (mantissa > largest_mantissa).int()
    return torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), ceil_log2), torch.nan)


def round_e4m3(x: Tensor) -> Tensor:
    """Nearest e4m3 value, ties to even, clamped to +-448."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn).float()


def round_e2m1(x: Tensor) -> Tensor:
    """Nearest e2m1 value, ties to the even code, clamped to +-6."""
    size = x.abs().clamp_max(E2M1_MAX)
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))  # spacing of the grid around size
    return torch.copysign(torch.round(size / step) * step, x)  # round is half-to-even: so are the codes


def _round_blocks(x: Tensor, block: int, e4m3: bool) -> Tensor:
    """Scale, clamp and round every `block` values of the last axis; its last block may be shorter."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x.float(), (0, -width % block)).unflatten(-1, (-1, block))
    amax = padded.abs().amax(-1, keepdim=True)
    if e4m3:
        scale = power_of_two_scale(amax, E4M3_MAX, E4M3_LEAST_AMAX)
        rounded = round_e4m3(padded / scale) * scale
    else:
        scale = power_of_two_scale(amax, E2M1_MAX, E2M1_LEAST_AMAX)
        rounded = round_e2m1(padded / scale) * scale
    return rounded.flatten(-2)[..., :width]


def round_e4m3_blocks(x: Tensor, block: int) -> Tensor:
    """x as e4m3 with one power-of-two scale per `block` values of the last axis; fp32 values."""
    return _round_blocks(x, block, True)


def round_e2m1_blocks(x: Tensor, block: int = INDEX_BLOCK) -> Tensor:
    """x as e2m1 with one power-of-two scale per `block` values of the last axis; fp32 values."""
    return _round_blocks(x, block, False)


def round_bf16(x: Tensor) -> Tensor:
    """Nearest BF16 value, ties to even; fp32."""
    return x.bfloat16().float()


# ---- where a model rounds ----

STORAGE = frozenset({"kv.e4m3", "compressor.e4m3", "indexer.q.e2m1", "indexer.compressor.e2m1"})
PUBLISHED = STORAGE | {"linear_in.e4m3", "bf16"}
# What a plain BF16 model of a framework rounds besides the outputs at `bf16`; the published model keeps these in FP32.
EAGER = frozenset({"softmax.bf16", "score.bf16", "rope.bf16", "q_factor.bf16", "pool.bf16", "post.bf16", "comb.bf16", "gate.bf16", "hidden.bf16", "logits.bf16"})
POINTS = PUBLISHED | EAGER | {"p.bf16"}
NAMED = {"exact": frozenset[str](), "storage": STORAGE, "published": PUBLISHED, "eager.bf16": EAGER | {"bf16"}}


@dataclass(frozen=True)
class Policy:
    """A set of rounding points; each method rounds at its point when the set holds it, else returns its argument.

    points   subset of `POINTS`
    """

    points: frozenset[str]

    @classmethod
    def parse(cls, policy: str | Iterable[str]) -> Policy:
        """"exact", "storage", "published", one point, or any set of points. Raises InputError on an unknown name."""
        if isinstance(policy, str):
            if policy in NAMED:
                return cls(NAMED[policy])
            policy = (policy,)
        if not isinstance(policy, Iterable):
            raise InputError(f"policy: expected a name or a set of rounding points, got {policy!r}")
        points = frozenset(policy)
        for point in sorted(points - POINTS, key=str):
            near = difflib.get_close_matches(str(point), [*POINTS, *NAMED], n=1)
            hint = f"; nearest is {near[0]!r}" if near else ""
            raise InputError(f"policy: unknown rounding point {point!r}{hint}; known: {', '.join(sorted(POINTS))}")
        return cls(points)

    def bf16(self, x: Tensor) -> Tensor:
        return round_bf16(x) if "bf16" in self.points else x

    def linear_in(self, x: Tensor) -> Tensor:
        """Input of an FP8 or FP4 linear (not wo_a): e4m3, one scale per 128."""
        return round_e4m3_blocks(x, LINEAR_BLOCK) if "linear_in.e4m3" in self.points else x

    def kv(self, x: Tensor, rotary_dims: int) -> Tensor:
        """Window key: e4m3 per 64 on all but the last `rotary_dims`, which are not rounded."""
        return self._stored(x, rotary_dims) if "kv.e4m3" in self.points else x

    def compressed(self, x: Tensor, rotary_dims: int) -> Tensor:
        """Main compressed entry: as `kv`."""
        return self._stored(x, rotary_dims) if "compressor.e4m3" in self.points else x

    def index_q(self, x: Tensor) -> Tensor:
        """Indexer query after the Hadamard rotation: e2m1 per 32."""
        return round_e2m1_blocks(x) if "indexer.q.e2m1" in self.points else x

    def index_key(self, x: Tensor) -> Tensor:
        """Indexer key after the Hadamard rotation: e2m1 per 32."""
        return round_e2m1_blocks(x) if "indexer.compressor.e2m1" in self.points else x

    def p(self, x: Tensor) -> Tensor:
        """exp(score - max) before it weighs the values; the denominator is not rounded."""
        return round_bf16(x) if "p.bf16" in self.points else x

    @property
    def weight(self) -> Callable[[Tensor], Tensor] | None:
        """Of attention weights after their division; None: they are not divided before they weigh the values."""
        return round_bf16 if "softmax.bf16" in self.points else None

    def score(self, x: Tensor) -> Tensor:
        """Attention logits q . k, before and after their scale."""
        return self._narrow("score.bf16", x)

    def angle(self, x: Tensor) -> Tensor:
        """cos and sin of the rotation."""
        return self._narrow("rope.bf16", x)

    def q_factor(self, x: Tensor) -> Tensor:
        """1 / rms of the weightless norm of a query head."""
        return self._narrow("q_factor.bf16", x)

    def pool(self, x: Tensor) -> Tensor:
        """kv and gate of a compressor, and its softmax weights."""
        return self._narrow("pool.bf16", x)

    def post(self, x: Tensor) -> Tensor:
        """Weights of a block's output per stream, and their products with it."""
        return self._narrow("post.bf16", x)

    def comb(self, x: Tensor) -> Tensor:
        """The stream mixing matrix, and the mixed streams."""
        return self._narrow("comb.bf16", x)

    def gate(self, x: Tensor) -> Tensor:
        """Router logits, scores and weights."""
        return self._narrow("gate.bf16", x)

    def hidden(self, x: Tensor) -> Tensor:
        """silu(gate) of an expert, and its product with up before the expert's weight."""
        return self._narrow("hidden.bf16", x)

    def logits(self, x: Tensor) -> Tensor:
        """What the head puts out."""
        return self._narrow("logits.bf16", x)

    def _narrow(self, point: str, x: Tensor) -> Tensor:
        return round_bf16(x) if point in self.points else x

    @staticmethod
    def _stored(x: Tensor, rotary_dims: int) -> Tensor:
        return torch.cat((round_e4m3_blocks(x[..., :-rotary_dims], KV_BLOCK), x[..., -rotary_dims:]), -1)
