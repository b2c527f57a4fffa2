"""A second DeepSeek-V4 in plain torch, with its own names and its own ring cache: what an adapter takes, on a real engine.

    pytest parity/ --production docs.examples.small_engine:open_engine --layers 0-1

It runs window layers (of the bundled checkpoint: 0 and 1) with embedding, hyper-connections, attention with sink, hash-routed FP4
experts and head, in FP32; keys are kept as e4m3, which `policy` declares. Nothing is imported from the project that audits it.
The adapter is POINTS and the last class. Tests: parity/unit/test_examples.py.
"""

import json
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional as F  # noqa: N812

# ---- the engine ----


def read_weights(folder, wanted):
    """Every tensor that `wanted` takes, decoded to FP32: FP8 with a scale per 128 x 128, FP4 pairs with a scale per 32."""
    raw = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            raw |= {name: shard.get_tensor(name) for name in shard.keys() if wanted(name)}  # noqa: SIM118
    nibbles = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    for name in [name for name in raw if name.endswith(".scale")]:
        at, scale = name.removesuffix("scale") + "weight", raw.pop(name).float()
        if raw[at].dtype == torch.int8:
            codes = raw[at].view(torch.uint8).int()
            raw[at] = nibbles[torch.stack((codes & 15, codes >> 4), -1)].flatten(1) * scale.repeat_interleave(32, 1)
        else:
            rows, columns = raw[at].shape
            raw[at] = raw[at].float() * scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    return {name: w if w.dtype == torch.int64 else w.float() for name, w in raw.items()}


def turn(x, angle, back=False):
    """Rotate adjacent pairs of the last dims of x [b, s, .., d] by angle [s, r/2]."""
    angle = -angle if back else angle
    flat, rotary = x.split((x.shape[-1] - 2 * angle.shape[-1], 2 * angle.shape[-1]), -1)
    turned = torch.view_as_complex(rotary.unflatten(-1, (-1, 2)).contiguous()) * torch.polar(torch.ones_like(angle), angle).reshape(len(angle), *[1] * (x.dim() - 3), -1)
    return torch.cat((flat, torch.view_as_real(turned).flatten(-2)), -1)


def as_e4m3(x):
    """What an FP8 cache gives back: a power-of-two scale per 64 values."""
    blocks = x.unflatten(-1, (-1, 64))
    scale = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448)))
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


class Norm(nn.Module):
    def __init__(self, weight=None):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.rms_norm(x, x.shape[-1:], self.weight, 1e-6)


class Dense(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


class Mixer(nn.Module):
    """Hyper-connections: streams [b, s, n, D] -> what the block reads, and how its output goes back."""

    def __init__(self, w, at, n, iterations):
        super().__init__()
        self.fn, self.base, self.scale, self.n, self.iterations = w[f"{at}_fn"], w[f"{at}_base"], w[f"{at}_scale"], n, iterations

    def forward(self, streams):
        n = self.n
        read, write, mix = (F.linear(Norm()(streams.flatten(2)), self.fn) * torch.repeat_interleave(self.scale, torch.tensor([n, n, n * n])) + self.base).split((n, n, n * n), -1)
        read, write, mix = torch.sigmoid(read) + 1e-6, 2 * torch.sigmoid(write), mix.unflatten(-1, (n, n)).softmax(-1) + 1e-6
        for i in range(2 * self.iterations - 1):  # columns first and last
            mix = mix / (mix.sum(-2 if i % 2 == 0 else -1, keepdim=True) + 1e-6)
        return torch.einsum("bsn,bsnd->bsd", read, streams), read, write, mix


class Ring(nn.Module):
    """Attention over the last W keys: those of this call, and those that the ring holds at slot `position % W`."""

    def __init__(self, sink, W):
        super().__init__()
        self.sink, self.W = sink, W

    def forward(self, q, keys, cache, first):
        """q [b, s, h, d], keys [b, s, d] -> output, positions that were read [b, s, W] with -1 behind them."""
        s, W = q.shape[1], self.W
        position, slot = first + torch.arange(s), torch.arange(W)
        held = first - 1 - (first - 1 - slot) % W  # what a slot holds, by rule; below zero: nothing yet
        keys, at = torch.cat((cache["keys"], keys), 1), torch.cat((held, position))
        seen = (at >= 0) & (at <= position[:, None]) & (at > position[:, None] - W)
        score = torch.einsum("bshd,bkd->bhsk", q, keys) * q.shape[-1] ** -0.5
        score = torch.cat((score.masked_fill(~seen, -torch.inf), self.sink[:, None, None].expand(len(q), -1, s, 1)), -1)
        out = torch.einsum("bhsk,bkd->bshd", score.softmax(-1)[..., :-1], keys)
        tags = torch.cat((cache["tags"], position))  # what was really written there
        read = torch.where(seen, tags, 1 << 62).sort(-1).values[:, :W]
        last = position[-W:]
        cache["keys"][:, self.slot(last)], cache["tags"][self.slot(last)] = keys[:, W:][:, -W:], last
        return out, F.pad(read.masked_fill(read == 1 << 62, -1), (0, W - read.shape[1]), value=-1).expand(len(q), -1, -1)

    def slot(self, position):
        return position % self.W


class Attention(nn.Module):
    def __init__(self, w, at, c):
        super().__init__()
        self.heads, self.groups = c["num_attention_heads"], c["o_groups"]
        self.down, self.up, self.key = (Dense(w[f"{at}.{name}.weight"]) for name in ("wq_a", "wq_b", "wkv"))
        self.down_norm, self.key_norm = Norm(w[f"{at}.q_norm.weight"]), Norm(w[f"{at}.kv_norm.weight"])
        self.ring, self.merge, self.out = Ring(w[f"{at}.attn_sink"], c["sliding_window"]), nn.Identity(), Dense(w[f"{at}.wo_b.weight"])
        self.low, self.r = w[f"{at}.wo_a.weight"].unflatten(0, (self.groups, -1)), c["qk_rope_head_dim"]
        self.rate = c["rope_theta"] ** (-torch.arange(0, self.r, 2) / self.r)

    def forward(self, x, cache, first):
        angle = (first + torch.arange(x.shape[1]))[:, None].float() * self.rate
        q = turn(Norm()(self.up(self.down_norm(self.down(x))).unflatten(-1, (self.heads, -1))), angle)
        k = turn(self.key_norm(self.key(x)), angle)
        k = torch.cat((as_e4m3(k[..., : -self.r]), k[..., -self.r :]), -1)
        o = self.merge(turn(self.ring(q, k, cache, first)[0], angle, back=True))
        return self.out(torch.einsum("bsgi,goi->bsgo", o.flatten(2).unflatten(-1, (self.groups, -1)), self.low).flatten(2))


class Router(nn.Module):
    def __init__(self, w, at, c):
        super().__init__()
        self.weight, self.table, self.scale = w[f"{at}.weight"], w[f"{at}.tid2eid"], c["routed_scaling_factor"]

    def forward(self, x, tokens):
        score, chosen = F.softplus(F.linear(x, self.weight)).sqrt(), self.table[tokens].sort(-1).values
        share = score.gather(-1, chosen)
        return score, chosen, self.scale * share / share.sum(-1, keepdim=True)


class Experts(nn.Module):
    def __init__(self, w, at, c):
        super().__init__()
        self.limit, self.router = c["swiglu_limit"], Router(w, f"{at}.gate", c)
        names = [f"{at}.experts.{e}" for e in range(c["n_routed_experts"])] + [f"{at}.shared_experts"]
        self.weights = [[w[f"{name}.w{i}.weight"] for i in (1, 2, 3)] for name in names]

    def one(self, e, x):
        gate, down, up = self.weights[e]
        return F.linear(F.silu(F.linear(x, gate).clamp_max(self.limit)) * F.linear(x, up).clamp(-self.limit, self.limit), down)

    def forward(self, x, tokens):
        _, chosen, share = self.router(x, tokens)
        out = self.one(-1, x)
        for e in chosen.unique().tolist():
            out = out + self.one(e, x) * ((chosen == e) * share).sum(-1, keepdim=True)
        return out


class Layer(nn.Module):
    def __init__(self, w, at, c):
        super().__init__()
        self.mixers = nn.ModuleList(Mixer(w, f"{at}.hc_{half}", c["hc_mult"], c["hc_sinkhorn_iters"]) for half in ("attn", "ffn"))
        self.norms = nn.ModuleList(Norm(w[f"{at}.{half}_norm.weight"]) for half in ("attn", "ffn"))
        self.attention, self.experts = Attention(w, f"{at}.attn", c), Experts(w, f"{at}.ffn", c)

    def forward(self, streams, tokens, cache, first):
        for mixer, norm, block in zip(self.mixers, self.norms, (lambda x: self.attention(x, cache, first), lambda x: self.experts(x, tokens)), strict=True):
            x, _, write, mix = mixer(streams)
            streams = write[..., None] * block(norm(x))[..., None, :] + torch.einsum("bsij,bsid->bsjd", mix, streams)
        return streams


class Head(nn.Module):
    """The streams become one."""

    def __init__(self, w):
        super().__init__()
        self.fn, self.base, self.scale = w["hc_head_fn"], w["hc_head_base"], w["hc_head_scale"]

    def forward(self, streams):
        return torch.einsum("bsn,bsnd->bsd", torch.sigmoid(F.linear(Norm()(streams.flatten(2)), self.fn) * self.scale + self.base) + 1e-6, streams)


class SmallEngine(nn.Module):
    def __init__(self, folder, layers):
        super().__init__()
        c = self.config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        if any(c["compress_ratios"][n] for n in layers) or max(layers) >= c["num_hash_layers"]:
            raise ValueError("this engine runs hash-routed window layers only; next: --layers 0-1")
        w = read_weights(folder, lambda name: not name.startswith("layers.") or int(name.split(".")[1]) in layers)
        self.table = nn.Embedding.from_pretrained(w["embed.weight"])
        self.stack = nn.ModuleList(Layer(w, f"layers.{n}", c) for n in layers)
        self.head, self.norm, self.to_vocab = Head(w), Norm(w["norm.weight"]), Dense(w["head.weight"])

    def cache(self, batch):
        W, d = self.config["sliding_window"], self.config["head_dim"]
        return {"length": 0, "rings": [{"keys": torch.zeros(batch, W, d), "tags": torch.full((W,), -1)} for _ in self.stack]}

    def forward(self, tokens, cache):
        streams = self.table(tokens)[:, :, None].expand(-1, -1, self.config["hc_mult"], -1)
        for layer, ring in zip(self.stack, cache["rings"], strict=True):
            streams = layer(streams, tokens, ring, cache["length"])
        cache["length"] += tokens.shape[1]
        return self.to_vocab(self.norm(self.head(streams)))


# ---- the adapter ----


def part(i):
    return lambda call: call.output[i]


POINTS = {
    "embed": "table",
    **{f"layers.{{layer}}.hc_{half}.{name}": (f"stack.{{layer}}.mixers.{h}", part(i)) for h, half in enumerate(("attn", "ffn")) for i, name in enumerate(("a", "pre", "post", "comb"))},
    **{f"layers.{{layer}}.{half}.norm": f"stack.{{layer}}.norms.{h}" for h, half in enumerate(("attn", "ffn"))},
    "layers.{layer}.attn.q_norm": "stack.{layer}.attention.down_norm",
    "layers.{layer}.attn.q": ("stack.{layer}.attention.ring", lambda call: call.args[0]),
    "layers.{layer}.attn.kv": ("stack.{layer}.attention.ring", lambda call: call.args[1]),
    "layers.{layer}.attn.core": ("stack.{layer}.attention.ring", part(0)),
    "layers.{layer}.attn.visible": ("stack.{layer}.attention.ring", part(1)),
    "layers.{layer}.attn.o": "stack.{layer}.attention.merge",
    "layers.{layer}.attn.out": "stack.{layer}.attention",
    "layers.{layer}.hc_attn.X": ("stack.{layer}.mixers.1", lambda call: call.args[0]),
    **{f"layers.{{layer}}.ffn.{name}": ("stack.{layer}.experts.router", part(i)) for i, name in enumerate(("gate", "experts", "weights"))},
    "layers.{layer}.ffn.out": "stack.{layer}.experts",
    "layers.{layer}.hc_ffn.X": "stack.{layer}",
    "hc_head": "head",
    "norm": "norm",
}


class Adapter:
    """What the audit asks for: a table of points, the roundings, and three calls."""

    name, points, policy = "small engine", POINTS, ("kv.e4m3",)

    def __init__(self, engine):
        self.root = engine

    def new_state(self, batch, max_context):
        return self.root.cache(batch)

    def prefill(self, tokens, state):
        return self.root(tokens, state)

    def decode(self, tokens, state):
        return self.root(tokens[:, None], state)[:, 0]


def open_engine(checkpoint_dir, layers):
    return Adapter(SmallEngine(checkpoint_dir, list(layers)))
