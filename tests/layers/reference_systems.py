"""Every system a second time: one function each, loops over tokens in float64, straight from the formulas.

Nothing here reads a `MixerConfig`. Each function takes the layer's projected heads and the mixer's parameters by name,
and returns every head's output before the output projection. Differentiable by autograd.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EPS = 1e-6


@dataclass
class Tokens:
    """One sequence, float64.

    Attributes:
        x: `[T, hidden]`, the layer's input.
        q: `[T, H, d]`, not rotated, like k `[T, Hkv, d]`; v `[T, Hkv, e]`.
        cos: `[T, d]`, as sin.
        p: the mixer's parameters by name.
    """

    x: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    p: dict[str, Tensor]

    def rotated(self) -> tuple[Tensor, Tensor]:
        return self._rotate(self.q), self._rotate(self.k)

    def _rotate(self, heads: Tensor) -> Tensor:
        half = heads.shape[-1] // 2
        turned = torch.cat([-heads[..., half:], heads[..., :half]], dim=-1)
        return heads * self.cos[:, None] + turned * self.sin[:, None]

    def linear(self, name: str) -> Tensor:
        return self.x @ self.p[f"{name}.weight"].T + self.p[f"{name}.bias"]


def attend(
    q: Tensor, k: Tensor, v: Tensor, score: Callable[[Tensor], Tensor], scale: float, log_a: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return numerators `[T, H, e]` and sums of weights `[T, H]`, pair by pair."""
    num_tokens, heads = q.shape[:2]
    group = heads // k.shape[1]
    numerators, sums = [], []
    for t in range(num_tokens):
        for h in range(heads):
            kv = h // group
            numerator, total = torch.zeros_like(v[0, 0]), torch.zeros_like(v[0, 0, 0])
            for s in range(t + 1):
                weight = score(scale * (q[t, h] * k[s, kv]).sum())
                if log_a is not None:
                    weight = weight * log_a[s + 1 : t + 1, kv].sum().exp()
                numerator, total = numerator + weight * v[s, kv], total + weight
            numerators.append(numerator)
            sums.append(total)
    return torch.stack(numerators).view(num_tokens, heads, -1), torch.stack(sums).view(num_tokens, heads)


def mean(parts: tuple[Tensor, Tensor]) -> Tensor:
    """Divide by the sums of weights; a query whose weights are all 0 (ReLU features that never meet) gives 0."""
    return parts[0] / (parts[1] + (parts[1] == 0))[..., None]


def convolved(tokens: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return a causal depthwise convolution of `[T, channels]`."""
    width = weight.shape[1]
    rows = []
    for t in range(tokens.shape[0]):
        row = bias
        for lag in range(min(width, t + 1)):
            row = row + weight[:, width - 1 - lag] * tokens[t - lag]
        rows.append(row)
    return torch.stack(rows)


def with_conv(tokens: Tokens, activation: Callable[[Tensor], Tensor] = lambda x: x) -> Tokens:
    parts = [tokens.q, tokens.k, tokens.v]
    flat = torch.cat([part.flatten(1) for part in parts], dim=1)
    out = activation(convolved(flat, tokens.p["conv.weight"], tokens.p["conv.bias"]))
    split = out.split([part[0].numel() for part in parts], dim=1)
    q, k, v = (new.view(part.shape) for new, part in zip(split, parts, strict=True))
    return Tokens(tokens.x, q, k, v, tokens.cos, tokens.sin, tokens.p)


def softplus(x: Tensor) -> Tensor:
    return torch.log1p(x.exp())


def sigmoid(x: Tensor) -> Tensor:
    return 1 / (1 + (-x).exp())


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight


def rms_of_all_heads(y: Tensor, tokens: Tokens) -> Tensor:
    return rms(y.flatten(1), tokens.p["norm_weight"]).view(y.shape)


def head_weight(y: Tensor, tokens: Tokens, name: str = "norm_weight") -> Tensor:
    return tokens.p[name].view(y.shape[1:])


def unit(x: Tensor) -> Tensor:
    return x / x.square().sum(-1, keepdim=True).sqrt()


def elu_plus_one(x: Tensor) -> Tensor:
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def relu(x: Tensor) -> Tensor:
    return torch.where(x > 0, x, 0.0)


def taylor(order: int) -> Callable[[Tensor], Tensor]:
    return lambda x: sum(x**i / math.factorial(i) for i in range(order + 1)) + 0 * x


def root(tokens: Tokens) -> float:
    return tokens.q.shape[-1] ** -0.5


def linear_identity(tokens: Tokens) -> Tensor:
    numerator, _ = attend(*tokens.rotated(), tokens.v, lambda x: x, root(tokens))
    return rms_of_all_heads(numerator, tokens)


def of_features(feature: Callable[[Tensor], Tensor], score, scale: float | None = None):
    def system(tokens: Tokens) -> Tensor:
        q, k = tokens.rotated()
        return mean(attend(feature(q), feature(k), tokens.v, score, scale or root(tokens)))

    return system


def cottention(tokens: Tokens) -> Tensor:
    q, k = tokens.rotated()
    exponent = sigmoid(tokens.p["position_step.exponent"])
    v = torch.stack([tokens.v[s] / (s + 1) ** exponent[:, None] for s in range(len(tokens.v))])
    return attend(unit(q), unit(k), v, lambda x: x, 1.0)[0]


def of_exp(normalise: Callable[[Tensor, Tokens], Tensor]):
    def system(tokens: Tokens) -> Tensor:
        numerator, _ = attend(*tokens.rotated(), tokens.v, torch.exp, root(tokens))
        return normalise(numerator, tokens)

    return system


def l2(y: Tensor, tokens: Tokens) -> Tensor:
    return unit(y) * head_weight(y, tokens)


def head_rms(y: Tensor, tokens: Tokens) -> Tensor:
    return rms(y, head_weight(y, tokens))


def layer_norm(y: Tensor, tokens: Tokens) -> Tensor:
    centred = y - y.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    return centred / variance.sqrt() * head_weight(y, tokens) + head_weight(y, tokens, "norm_bias")


def softmax_gate(tokens: Tokens) -> Tensor:
    numerator, _ = attend(*tokens.rotated(), tokens.v, lambda x: torch.minimum(x, 0 * x + 5.0).exp(), root(tokens))
    count = torch.arange(1, len(numerator) + 1, dtype=numerator.dtype)
    return numerator / count[:, None, None] * sigmoid(tokens.linear("gate")).view(numerator.shape)


def mamba2(tokens: Tokens) -> Tensor:
    mixed = with_conv(tokens, silu)
    dt = softplus(tokens.linear("decay"))
    log_a = -tokens.p["decay.log_rate"].exp() * dt
    y, _ = attend(*mixed.rotated(), dt[..., None] * mixed.v, lambda x: x, root(tokens), log_a)
    group = y.shape[1] // mixed.v.shape[1]
    heads = [y[:, h] + tokens.p["skip"][h] * mixed.v[:, h // group] for h in range(y.shape[1])]
    y = torch.stack(heads, dim=1)
    return rms_of_all_heads(y * silu(tokens.linear("gate")).view(y.shape), tokens)


def mamba2s(tokens: Tokens) -> Tensor:
    mixed = with_conv(tokens)
    v = softplus(tokens.linear("value_step"))[..., None] * mixed.v
    y, _ = attend(*mixed.rotated(), v, lambda x: x, root(tokens), -softplus(tokens.linear("decay")))
    return rms_of_all_heads(y, tokens)


def two_mamba(score: Callable[[Tensor], Tensor]):
    def system(tokens: Tokens) -> Tensor:
        mixed = with_conv(tokens)
        log_a = -softplus(tokens.linear("decay"))
        return mean(attend(*mixed.rotated(), mixed.v, score, root(tokens), log_a))

    return system


def two_mamba_with_write_gate(tokens: Tokens) -> Tensor:
    """A weight that is a factor of the key's token scales that token's value and its 1 in the sum of weights."""
    mixed = with_conv(tokens)
    written = sigmoid(tokens.linear("write_gate"))[..., None]
    values = torch.cat([written * mixed.v, written], dim=-1)
    sums, _ = attend(*mixed.rotated(), values, torch.square, root(tokens), -softplus(tokens.linear("decay")))
    return sums[..., :-1] / sums[..., -1:]


def two_mamba_with_offset_and_value_step(tokens: Tokens) -> Tensor:
    mixed = with_conv(tokens)
    v = softplus(tokens.linear("value_step"))[..., None] * mixed.v
    q, k = mixed.rotated()
    log_a, heads = -softplus(tokens.linear("decay")), range(q.shape[1])
    group = q.shape[1] // k.shape[1]
    by_head = []
    for h in heads:
        kv = slice(h // group, h // group + 1)
        offset = tokens.p["score.offset"][h]
        score = lambda x, c=offset: (x + c) ** 2  # noqa: E731
        by_head.append(mean(attend(q[:, h : h + 1], k[:, kv], v[:, kv], score, root(tokens), log_a[:, kv])))
    return torch.cat(by_head, dim=1)


def fox(tokens: Tokens) -> Tensor:
    log_a = sigmoid(tokens.linear("decay")).log()
    return mean(attend(*tokens.rotated(), tokens.v, torch.exp, root(tokens), log_a))


def fox_pro(tokens: Tokens) -> Tensor:
    share = sigmoid(tokens.linear("shift"))
    kv_heads = tokens.k.shape[1]
    k, v = tokens.k.clone(), tokens.v.clone()
    for t in range(len(k)):
        for h in range(kv_heads):
            a, b = share[t, h], share[t, kv_heads + h]
            before_k = tokens.k[t - 1, h] if t else torch.zeros_like(tokens.k[0, h])
            before_v = tokens.v[t - 1, h] if t else torch.zeros_like(tokens.v[0, h])
            k[t, h] = a * before_k + (1 - a) * tokens.k[t, h]
            v[t, h] = b * before_v + (1 - b) * tokens.v[t, h]
    q = rms(tokens.q, tokens.p["qk_norm.query_weight"])
    k = rms(k, tokens.p["qk_norm.key_weight"])
    rotated = Tokens(tokens.x, q, k, v, tokens.cos, tokens.sin, tokens.p).rotated()
    y = mean(attend(*rotated, v, torch.exp, root(tokens), sigmoid(tokens.linear("decay")).log()))
    return head_rms(y, tokens) * sigmoid(tokens.linear("gate")).view(y.shape)


def based(tokens: Tokens) -> Tensor:
    q, k = tokens.rotated()
    q = torch.einsum("thd,hde->the", q, tokens.p["score.features.query_map"])
    k = torch.einsum("thd,hde->the", k, tokens.p["score.features.key_map"])
    return mean(attend(q, k, tokens.v, taylor(2), q.shape[-1] ** -0.5))


def identity(x: Tensor) -> Tensor:
    return x


# Name, the mixer, the reference.
SYSTEMS = {
    "linear-identity": ("linear-identity", linear_identity),
    "linear-relu": ("linear-relu", of_features(relu, lambda x: x)),
    "linear-elu": ("linear-elu", of_features(elu_plus_one, lambda x: x)),
    "cottention": ("cottention", cottention),
    "taylor-0": ({"preset": "taylor-pure", "order": 0}, of_features(identity, taylor(0))),
    "taylor-1": (
        {"preset": "taylor-pure", "order": 1, "normaliser": "none"},
        lambda tokens: attend(*tokens.rotated(), tokens.v, taylor(1), root(tokens))[0],
    ),
    "taylor-2": ("taylor-pure", of_features(identity, taylor(2))),
    "taylor-4": ({"preset": "taylor-pure", "order": 4}, of_features(identity, taylor(4))),
    "taylor-relu": ("taylor-relu", of_features(relu, taylor(2))),
    "taylor-elu": ("taylor-elu", of_features(elu_plus_one, taylor(2))),
    "taylor-elu-3": ({"preset": "taylor-elu", "order": 3}, of_features(elu_plus_one, taylor(3))),
    "taylor-cosine": ("taylor-cosine", of_features(unit, taylor(2), 1.0)),
    "softmax-l2": ("softmax-l2", of_exp(l2)),
    "softmax-rms": ("softmax-rms", of_exp(head_rms)),
    "softmax-layer": ("softmax-layer", of_exp(layer_norm)),
    "softmax-gate": ("softmax-gate", softmax_gate),
    "mamba2": ("mamba2", mamba2),
    "mamba2s": ("mamba2s-pure", mamba2s),
    "2mamba": ("2mamba-pure", two_mamba(torch.square)),
    "2mamba-offset-value-step": (
        {"preset": "2mamba-pure", "offset": True, "value_step": "softplus"},
        two_mamba_with_offset_and_value_step,
    ),
    "2mamba-write": ({"preset": "2mamba-pure", "write_gate": True}, two_mamba_with_write_gate),
    "2mamba-e": ("2mamba-e", two_mamba(torch.exp)),
    "fox": ("fox", fox),
    "fox-pro": ("fox-pro", fox_pro),
    "based": ({"preset": "based", "feature_dim": 5}, based),
}
