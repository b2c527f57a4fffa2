"""1,048,576 tokens through a few layers of real width on one card: prefill to the limit, decode up to it, one token past it.

    python -m bench.million --seconds 240                       # Flash: window, CSA, HCA, CSA; random weights and tokens
    python -m bench.million --skip 917504 --steps 1000          # the first tokens' cache is random bytes, the rest is prefilled
    python -m bench.million --device cpu                        # the same in small

Prints tokens/s after every call of prefill. When --seconds is over the prefill stops, what was reached is told and decode goes on
from there. Judged: every token taken; memory flat over the steps (eager, then captured) and nothing allocated by them; attention
and selection of some queries of the last chunk and of the last steps against FP64 over the same cache; what the last step saw;
finite logits; one token too many is refused, names --max-context and changes nothing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.harness import Bench, text_table
from bench.oracle import Seen
from bench.synthetic import preset, synthetic_model
from probes.core import memory
from production.engine import count_allocations
from production.model import State, Transformer
from production.workspace import Workspace
from reference.config import InputError

FLAT_BYTES = 50e6
EVERY = 10  # steps between samples
AGREE = 16  # tokens that go both ways
AGREE_LIMIT = 0.1  # of a logits row, the median of them: sums in another order flip a rounding here and there
LEAST_STEPS = 6  # two warm up, one is profiled, two are observed
FORMULA_LIMIT = 0.01
ATTENTION_LIMIT = 8e-3  # as the audit's core.witness
RECALL_LIMIT = 3e-3  # 99.7 %
# For a million tokens in the default layers, by the variant of prefill's linears, from 65,536 tokens of the same run and single kernels.
# tiles (with flash): a chunk of 4096 tokens takes 75 ms and at the end 143: index scores of two layers 41 ms more, HCA attention 22, top-k 2.
# wgmma (attention too): 46 and 103. A captured step took 1.49 ms in 182 launches and takes 84 now; a launch costs an eager one 50 us.
PREDICTED = {
    "tiles": {"prefill, all calls": 37_600.0, "prefill, the last full call": 29_000.0},
    "wgmma": {"prefill, all calls": 55_000.0, "prefill, the last full call": 40_500.0},
}
PREDICTED_ALWAYS = {"eager steps": 8.0, "captured steps": 1.25, "memory reserved, the most ever": 20.5}
SMALL: dict[str, Any] = {
    "hidden_size": 256, "num_attention_heads": 8, "head_dim": 128, "q_lora_rank": 128, "o_lora_rank": 64, "o_groups": 4, "index_n_heads": 8,
    "index_topk": 32, "n_routed_experts": 8, "moe_intermediate_size": 128, "vocab_size": 512, "num_experts_per_tok": 2,
}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    bench = Bench("million", argv, _options, timed=False)
    args = bench.args
    tokens = args.tokens or (640 if bench.small else memory.MILLION)
    chunk = args.chunk or (64 if bench.small else 4096)
    steps = args.steps or (20 if bench.small else 1000)
    if steps < LEAST_STEPS or tokens < chunk + 2 * steps:
        raise SystemExit(f"--steps {steps} --tokens {tokens}: expected at least {LEAST_STEPS} steps, and tokens for a chunk and twice the steps")
    ratios = tuple(int(ratio) for ratio in args.ratios.split(","))
    config = preset(args.width, ratios, **(SMALL if bench.small else {}))
    began = time.perf_counter()
    if not bench.small:  # every kernel side by side: one by one, at first use, they take minutes
        bench.device.prebuild()
        print(f"kernels built in {time.perf_counter() - began:.1f} s", flush=True)
        began = time.perf_counter()
    model = synthetic_model(config, bench.device, tokens, chunk, args.variants, seed=args.seed)
    weights = memory.held_bytes(model.weights)
    state = model.new_state(1)
    bench.device.synchronize()
    print(f"{model.describe()}; {weights / 1e9:.2f} GB of random weights, made in {time.perf_counter() - began:.1f} s", flush=True)
    run = Run(bench, model, state, tokens, steps, args.seed)
    bench.note(width=args.width, ratios=list(ratios), tokens=tokens, chunk=chunk, variants=model.plan.name, skipped=args.skip, **run.sizes())
    with bench.section("skip"):
        run.skip(args.skip)
    with bench.section("prefill"):
        run.prefill(args.call or 8 * chunk, args.seconds)
    for part in (run.agree, run.decode, run.last_steps, run.most, run.beyond):
        with bench.section(part.__name__):
            part()
    bench.finish()


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--width", choices=("flash", "pro"), default="flash", help="whose layers (default: flash)")
    parser.add_argument("--ratios", metavar="LIST", default="0,4,128,4", help="0 window, 4 CSA, 128 HCA (default: 0,4,128,4)")
    parser.add_argument("--tokens", metavar="N", type=int, help="--max-context of the model (default: 1048576; 640 on the CPU)")
    parser.add_argument("--chunk", metavar="N", type=int, help="prefill chunk (default: 4096; 64 on the CPU)")
    parser.add_argument("--call", metavar="N", type=int, help="tokens of one prefill call (default: 8 chunks)")
    parser.add_argument("--steps", metavar="N", type=int, help="decode steps, eager and as many captured (default: 1000; 20 on the CPU)")
    parser.add_argument("--step-seconds", metavar="N", type=float, default=60.0, help="start no step after this many seconds of steps, of each way (default: 60)")
    parser.add_argument("--skip", metavar="N", type=int, default=0, help="tokens whose cache is random instead of prefilled, a multiple of 128")
    parser.add_argument("--variants", choices=("portable", "fast"), help="plan of kernel variants (default: the device's own)")
    parser.add_argument("--profile", action="store_true", help="also what each kernel takes in one chunk and in two steps at that depth")
    parser.add_argument("--seed", metavar="N", type=int, default=0)


class _PutBack(Exception):  # noqa: N818 (no error: it undoes a call)
    pass


class Run:
    """One state on its way to the limit.

    ids       random tokens, one more than fit | out  logits of a step | at  tokens held
    """

    def __init__(self, bench: Bench, model: Transformer, state: State, tokens: int, steps: int, seed: int) -> None:
        self.bench, self.model, self.state, self.tokens, self.steps = bench, model, state, tokens, steps
        self.ids = torch.randint(0, model.config.vocab_size, (tokens + 1,), generator=torch.Generator().manual_seed(seed))
        self.out = torch.empty(1, model.config.vocab_size, dtype=torch.float32, device=bench.torch_device)
        self.shape = f"{len(model.layers)} layers, {tokens:,} tokens"
        usual = bench.args.width == "flash" and bench.args.ratios == "0,4,128,4" and tokens == memory.MILLION and model.plan.name == "fast" and not bench.args.skip
        self.predicted = PREDICTED_ALWAYS | PREDICTED.get(model.plan.prefill.linear, {}) if usual else {}

    @property
    def at(self) -> int:
        return int(self.state.length[0])

    def judge(self, what: str, check: Callable[[], tuple[float, float]]) -> None:
        self.bench.judge(what, self.model.plan.name, self.shape, check)

    def rate(self, what: str, value: float, of: str) -> None:
        self.bench.record(what, self.model.plan.name, self.shape, value, of, self.predicted.get(what))

    # ---- memory ----

    def sizes(self) -> dict[str, float]:
        """Bytes of the state by part; a backup that held the entries would double the cache."""
        cache, backup = sum(self.state.cache.nbytes().values()), memory.held_bytes(self.state.backup.copies)
        workspace: Workspace = self.state.workspace
        sizes = {"cache_bytes": cache, "backup_bytes": backup, "workspace_bytes": workspace.nbytes(), **self.card()}
        print(", ".join(f"{name} {value / 1e9:.3f} GB" for name, value in sizes.items()), flush=True)
        due = memory.expected_total(self.model.config, 0, workspace.chunk, layers=len(self.model.layers))
        self.judge("backup of a prefill against rings, open groups and lengths alone", lambda: (abs(backup / due - 1), FORMULA_LIMIT))
        due = memory.expected_total(self.model.config, self.tokens, workspace.chunk, layers=len(self.model.layers))
        self.judge("cache against the formula of its formats", lambda: (abs(cache / due - 1), FORMULA_LIMIT))
        return sizes

    def card(self) -> dict[str, float]:
        if self.bench.torch_device.type != "cuda":
            return {}
        device = self.bench.torch_device
        return {"allocated": torch.cuda.memory_allocated(device), "reserved": torch.cuda.memory_reserved(device), "most_reserved": torch.cuda.max_memory_reserved(device)}

    # ---- prefill ----

    def skip(self, count: int) -> None:
        """Take over a random state of `count` tokens, by production's own import."""
        if not count:
            return
        c, where = self.model.config, self.bench.torch_device
        if count % 128 or count > self.tokens - 2 * self.steps - self.state.workspace.chunk:
            raise InputError(f"--skip {count}: expected a multiple of 128 that leaves a chunk and the steps")
        generator = torch.Generator(where).manual_seed(1)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=where)

        for layer in self.model.layers:
            cache = self.state.cache.layers[layer]
            snapshot = {"length": torch.tensor([count]), "kv": normal(1, c.sliding_window, c.head_dim)}
            for name, held, width in (("compressor", cache.state, c.head_dim), ("indexer.compressor", cache.index_state, c.index_head_dim)):
                if held is not None:
                    snapshot |= {f"{name}.kv": normal(*held.kv.shape), f"{name}.gate": normal(*held.kv.shape), f"{name}.entries": normal(1, count // cache.ratio, width)}
            self.state.import_layer(layer, snapshot)
        gc.collect()
        if where.type == "cuda":
            torch.cuda.empty_cache()
        print(f"the first {count:,} tokens were NOT computed: their cache is random", flush=True)

    def prefill(self, call: int, seconds: float) -> None:
        """Up to the last 2 * steps tokens, `call` at a time; the last chunk alone and observed."""
        chunk, goal = self.state.workspace.chunk, self.tokens - 2 * self.steps
        began, start, cut = time.perf_counter(), self.at, False
        speeds: list[tuple[int, int, float]] = []  # reached, tokens, seconds of each call
        tail = chunk * (2 if self.bench.args.profile else 1)
        while self.at < goal - tail:
            many = min(call, goal - tail - self.at)
            took = self._call(many)
            speeds.append((self.at, many, took))
            passed = time.perf_counter() - self.bench.began
            left = (goal - self.at) / (many / took)
            print(f"prefill {self.at:,} of {goal:,}: {many:,} tokens in {took:.2f} s, {many / took:,.0f} tokens/s, {1e3 * took / (many / chunk):.0f} ms a chunk, "
                  f"about {left:.0f} s to go at this speed, {passed:.0f} s in all", flush=True)  # fmt: skip
            self.bench.note(reached=self.at, calls=speeds)
            self.bench.write()
            if passed > seconds:
                cut = True
                break
        if self.bench.args.profile:
            at = self.at
            self._profile(f"prefill of {chunk:,} tokens from {at:,}", lambda: self._call(min(chunk, goal - self.at)))
        at, last = self.at, min(chunk, goal - self.at)
        seen = Seen(self.model, self.model.layers, sorted({0, last // 3, last - 2, last - 1} & set(range(last))))
        with self.model.taps.observe(seen.points, seen.take):
            self._call(last)
        took = time.perf_counter() - began
        print(f"prefilled {self.at - start:,} tokens in {took:.1f} s, {(self.at - start) / took:,.0f} tokens/s{'; cut off by --seconds' if cut else ''}", flush=True)
        self.bench.note(prefill_seconds=took, prefill_tokens=self.at - start, reached=self.at, calls=speeds, cut=cut, **self.card())
        if speeds:  # without the profiled and the observed chunk
            self.rate("prefill, all calls", sum(one[1] for one in speeds) / sum(one[2] for one in speeds), "tokens/s")
            _, count, last_took = ([one for one in speeds if one[1] == call] or speeds)[-1]
            self.rate("prefill, the last full call", count / last_took, "tokens/s")
        self.judge("prefill, tokens not taken", lambda: (goal - self.at, 0.0))
        self._witnesses(seen, at, "prefill")

    def _profile(self, what: str, work: Callable[[], object]) -> None:
        """What each kernel took, by CUPTI."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            work()
            self.bench.device.synchronize()
        rows = sorted(((e.self_device_time_total, e.count, e.key) for e in found.key_averages() if e.self_device_time_total), reverse=True)
        total = sum(us for us, _, _ in rows)
        table = [[name[:60], str(count), f"{us:,.0f}", f"{us / count:,.1f}", f"{100 * us / total:.1f}"] for us, count, name in rows[:24]]
        print(f"\nprofile of {what}: {total / 1e3:,.2f} ms of kernels\n" + text_table(["kernel", "launches", "us", "us each", "%"], table) + "\n", flush=True)
        self.bench.note(**{f"profile of {what}": [[name, count, us] for us, count, name in rows[:24]]})

    def _call(self, count: int) -> float:
        at, began = self.at, time.perf_counter()
        logits = self.model.prefill(self.ids[None, at : at + count], self.state, logits="last")
        finite = bool(logits.isfinite().all())
        took = time.perf_counter() - began
        if not finite:
            raise RuntimeError(f"prefill of tokens {at} to {at + count}: logits that are not finite")
        return took

    # ---- decode ----

    def agree(self) -> None:
        """The next tokens once by prefill and once by decode, from the same state, which is put back both times.

        Decode takes over which experts and entries prefill chose: a near-tie that falls the other way is no error.
        """
        ids, found, choices = self.ids[self.at : self.at + AGREE], [], {}

        def take(point: str, value: Tensor) -> None:
            choices[point] = value.clone()

        def by_prefill() -> Tensor:
            with self.model.taps.observe([point for point in self.model.taps.points if point.endswith(("ffn.experts", "attn.selected"))], take):
                return self.model.prefill(ids[None], self.state)[0]

        def by_decode() -> Tensor:
            rows = []
            for at in range(len(ids)):
                given = {point: value[:, at : at + 1] for point, value in choices.items()}
                rows.append(self.model.decode(ids[at : at + 1], self.state, choices=given))
            return torch.cat(rows)

        for way in (by_prefill, by_decode):
            try:
                with self.state.backup.kept_on_error(range(len(self.model.layers))):
                    found.append(way().double())
                    raise _PutBack
            except _PutBack:
                pass
        errors = ((found[0] - found[1]).norm(dim=-1) / found[0].norm(dim=-1)).cpu()
        print(f"{AGREE} tokens at {self.at:,}, decode against prefill: logits off by {float(errors.median()):.2e} (median), {float(errors.max()):.2e} (worst)", flush=True)
        self.judge(f"decode against prefill, {AGREE} tokens, median row of logits", lambda: (float(errors.median()), AGREE_LIMIT))

    def decode(self) -> None:
        """Eager steps, then captured ones; every step's memory counted, sampled every EVERY steps."""
        graph = self.model.capture(self.state)
        self._steps("eager", self.model_decode)
        self._steps("captured", lambda tokens: graph.decode(tokens, out=self.out))
        self.bench.note(graph=graph.facts())
        if self.bench.args.profile:
            for how, step in (("eager", self.model_decode), ("captured", lambda tokens: graph.decode(tokens, out=self.out))):
                self._profile(f"an {how} step at {self.at:,}" if how == "eager" else f"a {how} step at {self.at:,}", lambda: step(self.ids[self.at : self.at + 1]))  # noqa: B023

    def model_decode(self, tokens: Tensor) -> Tensor:
        return self.model.decode(tokens, self.state, out=self.out)

    def _steps(self, how: str, step: Callable[[Tensor], Tensor]) -> None:
        device = self.bench.torch_device
        for _ in range(2):  # what the counter and the first step make
            with count_allocations():
                step(self.ids[self.at : self.at + 1])
        count = self.steps - 4 - self.bench.args.profile  # two of each are for last_steps
        source, first = memory.process_bytes(device)
        samples, wrong, start = [first], 0, self.at
        times: list[float] = []
        began, done = time.perf_counter(), 0
        with count_allocations() as counted:
            while done < count and (not times or times[-1] < self.bench.args.step_seconds):
                step(self.ids[start + done : start + done + 1])
                done += 1
                if done % EVERY == 0 or done == count:
                    self.bench.device.synchronize()
                    times.append(time.perf_counter() - began)
                    samples.append(memory.process_bytes(device)[1])
        wrong += not bool(self.out.isfinite().all())
        ms = 1e3 * times[-1] / done
        spread = max(samples) - min(samples)
        print(f"{how}: {done} of {count} steps from {start:,}, {ms:.2f} ms a step, {source} {samples[0] / 1e9:.3f} GB, spread {spread / 1e6:.1f} MB over {len(samples)} samples, "
              f"{max(counted.count, counted.device_count)} allocations {list(dict.fromkeys(counted.operations))[:4]}", flush=True)  # fmt: skip
        self.bench.note(**{f"{how}_ms_a_step": ms, f"{how}_first_sample": samples[0], f"{how}_last_sample": samples[-1], f"{how}_samples": len(samples), f"{how}_allocations": counted.count, f"{how}_device_allocations": counted.device_count})
        self.rate(f"{how} steps", ms, "ms a step")
        self.judge(f"{how} steps, not taken in --step-seconds", lambda: (count - done, 0.0))
        self.judge(f"{how} steps, {source} spread in MB", lambda: (spread / 1e6, FLAT_BYTES / 1e6))
        self.judge(f"{how} steps, allocations", lambda: (max(counted.count, counted.device_count), 0.0))
        self.judge(f"{how} steps, logits not finite", lambda: (float(wrong), 0.0))

    def last_steps(self) -> None:
        """The last steps, two eager and two captured, observed: keys that were read, attention and selection again."""
        for how in ("eager", "captured"):
            for _ in range(2):
                at, seen = self.at, Seen(self.model, self.model.layers, [0], visible=True)
                step = self.model_decode if how == "eager" else self.model.capture(self.state, tuple(seen.points)).decode
                with self.model.taps.observe(seen.points, seen.take):
                    step(self.ids[at : at + 1])
            self._witnesses(seen, at, f"{how} step")
            off = sum(abs(a - b) for layer in self.model.layers for pair in zip(seen.visible_counts(layer), seen.due_counts(layer, at), strict=True) for a, b in zip(*pair, strict=True))
            print(f"{how} step at position {at:,} read (window, compressed): {[seen.visible_counts(layer)[0] for layer in self.model.layers]}", flush=True)
            self.judge(f"{how} step, keys read off the rule", lambda off=off: (off, 0.0))  # type: ignore[misc]

    def _witnesses(self, seen: Seen, start: int, phase: str) -> None:
        cache = self.state.cache
        for layer in self.model.layers:
            kind, sink = self.model.config.kind(layer), self.model.weights.layers[layer].attn.attn_sink
            self.judge(f"{phase}, layer {layer} ({kind}), attention against FP64", lambda: (seen.attention_error(cache, sink, layer, start), ATTENTION_LIMIT))  # noqa: B023 (called at once)
            if kind == "csa":
                found = seen.recall(cache, layer, start)
                print(f"{phase}, layer {layer}: recall of {found.discarding} queries over {(start + 1) // 4:,} keys: mean {found.mean:.5f}, worst {found.worst:.5f}, "
                      f"judged {found.judged_worst:.5f}, near-ties {found.near_ties}, beyond {found.beyond}", flush=True)  # fmt: skip
                self.judge(f"{phase}, layer {layer} ({kind}), 1 - recall", lambda: (found.lost, RECALL_LIMIT))  # noqa: B023

    # ---- the limit ----

    def beyond(self) -> None:
        """At the limit, one token more by every way: refused in words, nothing changed."""
        if self.at != self.tokens:
            print(f"the limit was not reached: {self.at:,} of {self.tokens:,} tokens", flush=True)
            self.judge("tokens short of the limit", lambda: (self.tokens - self.at, 0.0))
            return
        token, graph = self.ids[-1:], self.model.capture(self.state)
        before = self._digest()
        ways: dict[str, Callable[[], object]] = {
            "decode": lambda: self.model.decode(token, self.state, out=self.out),
            "captured decode": lambda: graph.decode(token, out=self.out),
            "prefill": lambda: self.model.prefill(token[None], self.state, logits="last"),
        }
        taken = 0
        for way, ask in ways.items():
            try:
                ask()
                taken += 1
                print(f"{way}: took token {self.tokens + 1:,}", flush=True)
            except InputError as error:
                taken += "--max-context" not in str(error)
                print(f"{way}: {error}", flush=True)
        changed = sum(a != b for a, b in zip(before, self._digest(), strict=True))
        self.judge("one token too many, ways that took it or did not name --max-context", lambda: (taken, 0.0))
        self.judge("one token too many, tensors of the cache that changed", lambda: (changed, 0.0))

    def most(self) -> None:
        """What the allocator ever held."""
        for name, value in self.card().items():
            if name == "most_reserved":
                self.bench.note(most_reserved=value)
                self.rate("memory reserved, the most ever", value / 1e9, "GB")

    def _digest(self) -> list[int]:
        """A sum over every tensor of the cache, place by place weighted, and the lengths on the host."""
        sums = []
        for layer in self.state.cache.layers:
            for tensors in self.state.cache.parts(layer).values():
                for tensor in tensors:
                    raw = tensor.view(torch.uint8).flatten()
                    sums += [int((part * (torch.arange(len(part), device=part.device) % 251 + 1).to(torch.uint8)).sum(dtype=torch.int64)) for part in raw.split(1 << 26)]
        return [*sums, self.at]


if __name__ == "__main__":
    main()
