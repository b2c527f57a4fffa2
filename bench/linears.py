"""The products with weights: decode at 1 and 8 tokens against the rate at which weights can be read, prefill against the MMA rate.

    python -m bench.linears --device cuda                # Flash and Pro; about 40 s
    python -m bench.linears --only "decode wq_b" --only experts

Decode: FP8, BF16 and FP4 weights, every byte read once (variant stream; rows of a warp and slices of a row are tried beside the
ones that production takes). Prefill: 4096 rows, mma.sync (tiles) and wgmma, x in bf16. Weights are random codes without NaN.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bench.harness import Bench
from production import ops
from reference.formats import E2M1_VALUES

BF16, F32, I32, U8 = torch.bfloat16, torch.float32, torch.int32, torch.uint8
BF16_LIMIT, F32_LIMIT = 4e-3, 2e-5  # worst row, relative L2: a bf16 step of a large element; fp32 sums in another order
E4M3_CODES = 64.0  # root mean square of a code's value
Flash, Pro = "Flash", "Pro"
# name -> (D, heads, q_lora, o_groups, o_lora, I, E)
WIDTHS = {Flash: (4096, 64, 1024, 8, 1024, 2048, 256), Pro: (7168, 128, 1536, 16, 1024, 3072, 384)}
SMALL = (512, 8, 256, 2, 128, 256, 8)
K_CHOSEN, HEAD_DIM, VOCAB, INDEX = 6, 512, 129280, 64 * 128


class Weights:
    """Random packed weights on one device."""

    def __init__(self, bench: Bench) -> None:
        self.device = bench.torch_device
        self.generator = torch.Generator(self.device).manual_seed(1)

    def bf16(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=F32).to(BF16)

    def bytes_(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=U8)

    def fp8(self, N: int, K: int) -> tuple[Tensor, Tensor]:
        codes = (torch.randn(N, K, generator=self.generator, device=self.device) * E4M3_CODES).clamp_(-448, 448).to(torch.float8_e4m3fn).view(U8)
        return codes, self.bytes_(110, 118, -(-N // 128), -(-K // 128))

    def fp4(self, E: int, N: int, K: int) -> tuple[Tensor, Tensor]:
        return self.bytes_(0, 256, E, N, K // 2), self.bytes_(110, 118, E, N, K // 32)


def decode_fp8(codes: Tensor, scale: Tensor) -> Tensor:
    """[N, K] fp32."""
    wide = torch.exp2(scale.float() - 127).repeat_interleave(128, 0)[: len(codes)].repeat_interleave(128, 1)[:, : codes.shape[1]]
    return codes.view(torch.float8_e4m3fn).float() * wide


def decode_fp4(packed: Tensor, scale: Tensor) -> Tensor:
    """[N, K] fp32 of one expert."""
    values = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], device=packed.device)
    both = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).long()
    return values[both] * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)


def worst_row(got: Tensor, want: Tensor) -> float:
    """Largest relative L2 of a row; NaN where something was not written."""
    return float(((got.float() - want).norm(dim=-1) / want.norm(dim=-1)).max())


def checked(run: Callable[[], object], out: Tensor, want: Callable[[], Tensor], limit: float) -> Callable[[], tuple[float, float]]:
    def check() -> tuple[float, float]:
        out.fill_(torch.nan)
        run()
        return worst_row(out, want()), limit

    return check


class Linears:
    def __init__(self, bench: Bench) -> None:
        self.bench, self.make = bench, Weights(bench)

    def fp8(self, phase: str, name: str, T: int, N: int, K: int, variants: dict[str, dict[str, object]], groups: int = 1, us: float | None = None) -> None:
        """y [T, groups * N]; variants: name to show -> arguments of linear_fp8."""
        bench, shape = self.bench, f"{T} x {groups * K:,} -> {groups * N:,}"
        wanted = {v: a for v, a in variants.items() if bench.wants(f"{phase} {name}", v, shape)}
        if not wanted:
            return
        codes, scale = self.make.fp8(groups * N, K)
        x = self.make.bf16(T, groups * K)
        out = torch.empty(T, groups * N, dtype=BF16, device=bench.torch_device)

        def want() -> Tensor:
            parts = [x[:, g * K : (g + 1) * K].float() @ decode_fp8(codes[g * N : (g + 1) * N], scale[g * N // 128 : -(-(g + 1) * N // 128)]).T for g in range(groups)]
            return torch.cat(parts, 1)

        for variant, arguments in wanted.items():
            run = lambda arguments=arguments: ops.linear_fp8(bench.device, x, codes, scale, out, groups, **arguments)  # noqa: E731
            bench.case(
                f"{phase} {name}", variant, shape, run, checked(run, out, want, BF16_LIMIT), predicted_us=us,
                bytes=codes.numel() + scale.numel() + 2 * (x.numel() + out.numel()), flops=2.0 * T * groups * N * K,
            )  # fmt: skip

    def bf16(self, phase: str, name: str, T: int, N: int, K: int, variants: dict[str, dict[str, object]], us: float | None = None) -> None:
        bench, shape = self.bench, f"{T} x {K:,} -> {N:,}"
        wanted = {v: a for v, a in variants.items() if bench.wants(f"{phase} {name}", v, shape)}
        if not wanted:
            return
        x, w = self.make.bf16(T, K), self.make.bf16(N, K)
        out = torch.empty(T, N, dtype=F32, device=bench.torch_device)
        want = lambda: torch.cat([x.float() @ part.float().T for part in w.split(16384)], 1)  # noqa: E731
        for variant, arguments in wanted.items():
            run = lambda arguments=arguments: ops.linear_bf16(bench.device, x, w, out, **arguments)  # noqa: E731
            bench.case(
                f"{phase} {name}", variant, shape, run, checked(run, out, want, F32_LIMIT), predicted_us=us,
                bytes=2 * (w.numel() + x.numel()) + 4 * out.numel(), flops=2.0 * T * N * K,
            )  # fmt: skip

    def experts(self, phase: str, T: int, D: int, width: int, E: int, up: dict[str, dict[str, object]], down: dict[str, dict[str, object]], us: tuple[float, float] | None = None) -> None:
        """Up (w1 and w3 of T tokens) and down, of K_CHOSEN random experts a token."""
        bench, k = self.bench, min(K_CHOSEN, E)
        shape = f"{T} x {k} of {E}, {D:,} x {width:,}"
        if not any(bench.wants(f"{phase} experts {which}", v, shape) for which, variants in (("up", up), ("down", down)) for v in variants):
            return
        where = bench.torch_device
        experts = torch.rand(T, E, generator=self.make.generator, device=where).topk(k, 1).indices.sort(1).values.to(I32).contiguous()
        distinct, some = len(experts.unique()), slice(0, 3)  # tokens that are compared
        scratch = torch.empty(ops.experts_scratch(T, k, E), dtype=I32, device=where)
        (w1, s1), (w3, s3), (w2, s2) = self.make.fp4(E, width, D), self.make.fp4(E, width, D), self.make.fp4(E, D, width)
        x, h = self.make.bf16(T, D), self.make.bf16(T, k, width)
        both, out = torch.empty(2, T, k, width, dtype=BF16, device=where), torch.empty(T, k, D, dtype=BF16, device=where)

        def of_some(given: Tensor, w: Tensor, s: Tensor) -> Tensor:
            return torch.stack([torch.stack([decode_fp4(w[e], s[e]) @ row.float() for e, row in zip(chosen, rows, strict=True)]) for chosen, rows in zip(experts[some].tolist(), given, strict=True)])

        def check_up(run: Callable[[], object]) -> tuple[float, float]:
            both.fill_(torch.nan)
            run()
            given = x[some, None].expand(-1, k, -1)
            error = max(worst_row(both[i, some], of_some(given, w, s)) for i, (w, s) in enumerate(((w1, s1), (w3, s3))))
            return error if bool(both.isfinite().all()) else float("nan"), BF16_LIMIT

        def check_down(run: Callable[[], object]) -> tuple[float, float]:
            out.fill_(torch.nan)
            run()
            error = worst_row(out[some], of_some(h[some], w2, s2))
            return error if bool(out.isfinite().all()) else float("nan"), BF16_LIMIT

        matrix = distinct * (D * width / 2 + D * width / 32)  # bytes
        for variant, arguments in up.items():
            run = lambda arguments=arguments: ops.experts_up(bench.device, x, experts, w1, s1, w3, s3, both[0], both[1], scratch=scratch, **arguments)  # noqa: E731
            bench.case(
                f"{phase} experts up", variant, shape, run, lambda run=run: check_up(run), predicted_us=us[0] if us else None,  # type: ignore[misc]
                bytes=2 * matrix + 2 * (x.numel() + both.numel()), flops=4.0 * T * k * D * width,
            )  # fmt: skip
        for variant, arguments in down.items():
            run = lambda arguments=arguments: ops.experts_down(bench.device, h, experts, w2, s2, out, scratch=scratch, **arguments)  # noqa: E731
            bench.case(
                f"{phase} experts down", variant, shape, run, lambda run=run: check_down(run), predicted_us=us[1] if us else None,  # type: ignore[misc]
                bytes=matrix + 2 * (h.numel() + out.numel()), flops=2.0 * T * k * D * width,
            )  # fmt: skip


def streams(*names: str, slices: tuple[int, ...] = ()) -> dict[str, dict[str, object]]:
    """Variants by the name that is shown: as production slices, then each of `slices` for the first one."""
    found: dict[str, dict[str, object]] = {name: {"variant": name} for name in names}
    return found | {f"{names[0]} in {n}": {"variant": names[0], "slices": n} for n in slices}


def decode(bench: Bench, linears: Linears, model: str) -> None:
    D, heads, q_lora, groups, o_lora, width, E = SMALL if bench.small else WIDTHS[model]
    vocab, index = (1000, 256) if bench.small else (VOCAB, INDEX)
    qd = heads * HEAD_DIM // (8 if bench.small else 1)
    first = model == Flash
    one = streams("stream")
    for T in (1, 8):
        tried = first and T == 1
        few = streams("stream32", "stream16", slices=(1, 2, 8)) if tried else streams("stream32", "stream16")
        with bench.section(f"{model}, {T} tokens"):
            linears.fp8("decode", f"wq_a {model}", T, q_lora, D, streams("stream", "stream16", slices=(4,)) if tried else one, us=2.6 if first else None)
            linears.fp8("decode", f"wkv {model}", T, HEAD_DIM, D, one, us=2.2 if first else None)
            linears.fp8("decode", f"wq_b {model}", T, qd, q_lora, streams("stream", "stream8", slices=(2,)) if tried else one, us=10.0 if first else None)
            linears.fp8("decode", f"wo_a {model}", T, o_lora, qd // groups, one, groups, us=10.0 if first else None)
            linears.fp8("decode", f"wo_b {model}", T, D, groups * o_lora, streams("stream", "stream8", slices=(4,)) if tried else one, us=10.0 if first else None)
            linears.experts("decode", T, D, width, E, few, few, us=(16.0, 8.5) if tried else None)
            if first:
                linears.fp8("decode", "indexer wq_b", T, index, q_lora, one, us=4.0)
                linears.fp8("decode", "shared w1", T, width, D, one, us=4.0)
                linears.fp8("decode", "shared w2", T, D, width, one, us=4.0)
                linears.bf16("decode", "head", T, vocab, D, streams("stream", "stream8", slices=(2,)) if tried else one, us=265.0)
                linears.bf16("decode", "compressor wkv", T, 2 * HEAD_DIM, D, one, us=4.0)
                linears.bf16("decode", "gate", T, E, D, one, us=2.5)
    if first:
        with bench.section("before"):  # what stream replaces
            linears.fp8("decode", f"wq_b {model}", 1, qd, q_lora, streams("thin"))
            linears.experts("decode", 1, D, width, E, streams("thin"), {})


def prefill(bench: Bench, linears: Linears) -> None:
    D, heads, q_lora, groups, o_lora, width, E = SMALL if bench.small else WIDTHS[Flash]
    T, qd = (140, 512) if bench.small else (4096, heads * HEAD_DIM)
    hopper = () if bench.small else ("wgmma128", "wgmma256")
    every = streams("tiles128", "tiles256", *hopper)
    with bench.section("prefill"):
        linears.fp8("prefill", "wq_b", T, qd, q_lora, every | ({} if bench.small else streams("mma")), us=600.0)
        linears.fp8("prefill", "wo_b", T, D, groups * o_lora, every, us=570.0)
        linears.fp8("prefill", "wo_a", T, o_lora, qd // groups, every, groups, us=570.0)
        linears.fp8("prefill", "wq_a", T, q_lora, D, every, us=90.0)
        linears.bf16("prefill", "compressor wkv", T, 2 * HEAD_DIM, D, every, us=90.0)
        both = streams("tiles128", "tiles256", *hopper[:1])
        linears.experts("prefill", T, D, width, E, both, both, us=(2500.0, 1250.0))


def main(argv: list[str] | None = None) -> None:
    bench = Bench("linears", argv)
    linears = Linears(bench)
    if not bench.small:
        bench.device.prebuild(["linear_stream", "experts_stream", "linear_tiles", "experts_tiles", "linear_wgmma", "experts_wgmma", "linear_fp8", "experts"])
    prefill(bench, linears)
    decode(bench, linears, Flash)
    decode(bench, linears, Pro)
    bench.finish()


if __name__ == "__main__":
    main()
