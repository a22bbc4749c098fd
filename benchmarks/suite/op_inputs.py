"""Random inputs of the op's cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.suite.op_cases import OpCase
from benchmarks.suite.settings import DTYPES
from subquad.kernels import PolyState, poly_attention

_TOKENS_BEFORE = 40
_STRONGEST_DECAY = 200.0
# Scaled score of a query with its own key. Near 0, a square makes a row that sees few keys 0 / 0.
_OWN_SCORE = 2.0
_MANY = 8


@dataclass(frozen=True)
class OpInputs:
    """Tensors of one call.

    Attributes:
        q: `[B, Tq, H, d]`, like k and v in the case's dtype.
        k: `[B, T, Hkv, d]`.
        v: `[B, T, Hkv, e]`.
        log_decay: `[B, T, Hkv]` float32, or None.
        key_weight: `[B, T, Hkv]` float32, or None.
        values: `[B, Hkv, rows, e]` float32 of the initial state, or None.
        normaliser: `[B, Hkv, rows]` float32, as above.
        coefs: One entry per power; tensors are `[H]` float32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    key_weight: Tensor | None
    values: Tensor | None
    normaliser: Tensor | None
    coefs: tuple[float | Tensor, ...]

    @property
    def state(self) -> PolyState | None:
        """The initial state."""
        if self.values is None or self.normaliser is None:
            return None
        return PolyState(self.values, self.normaliser)

    def tensors(self) -> dict[str, Tensor]:
        """Return every tensor that has a gradient, by name."""
        names = ("q", "k", "v", "log_decay", "key_weight", "values", "normaliser")
        named = {name: getattr(self, name) for name in names}
        named |= {f"coefs[{n}]": coef for n, coef in enumerate(self.coefs) if isinstance(coef, Tensor)}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def mapped(self, change: Callable[[Tensor], Tensor]) -> OpInputs:
        """Return the inputs with `change` applied to every tensor."""
        changed = {name: change(tensor) for name, tensor in self.tensors().items()}
        coefs = tuple(changed.pop(f"coefs[{n}]", coef) for n, coef in enumerate(self.coefs))
        return replace(self, coefs=coefs, **changed)


def draw_inputs(case: OpCase, seed: int, device: torch.device) -> OpInputs:
    """Draw the inputs of a case, the same on every device.

    Args:
        case: Sizes and kinds.
        seed: Seed.
        device: Where the tensors go.

    Returns:
        The inputs, in the case's dtype.
    """
    generator = torch.Generator().manual_seed(seed)
    heads = case.kv_heads * case.groups
    q = _normal(generator, case.batch, case.num_queries, heads, case.head_dim)
    k = _normal(generator, case.batch, case.tokens, case.kv_heads, case.head_dim)
    v = _normal(generator, case.batch, case.tokens, case.kv_heads, case.width)
    if case.inputs != "free":
        q = _leaning(q, k[:, -case.num_queries :].repeat_interleave(case.groups, dim=2))
    if case.inputs == "common_mean":
        k, q = _around_a_mean(k, q, generator)
    elif case.inputs == "zero_rows":
        q[:, ::7] = 0.0
    coefs = _coefficients(case, generator)
    state = _earlier_tokens(case, coefs, generator) if case.state else None
    dtype = DTYPES[case.dtype]
    inputs = OpInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=v.to(dtype),
        log_decay=_log_decay(case, generator),
        key_weight=_key_weight(case, generator),
        values=None if state is None else state.values,
        normaliser=None if state is None else state.normaliser,
        coefs=coefs,
    )
    return inputs.mapped(lambda tensor: tensor.to(device))


def _normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator)


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.rand(shape, generator=generator)


def _leaning(q: Tensor, k: Tensor) -> Tensor:
    """Move each query along its own key, so that their scaled score is `_OWN_SCORE`."""
    missing = _OWN_SCORE * k.shape[-1] ** 0.5 - (q * k).sum(-1, keepdim=True)
    return q + missing / k.square().sum(-1, keepdim=True) * k


def _around_a_mean(k: Tensor, q: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Move all keys by a vector four times their spread, and make the queries orthogonal to it."""
    direction = torch.nn.functional.normalize(_normal(generator, k.shape[-1]), dim=0)
    size = 4.0 * k.shape[-1] ** 0.5
    return k + size * direction, q - (q @ direction).unsqueeze(-1) * direction


def _key_weight(case: OpCase, generator: torch.Generator) -> Tensor | None:
    shape = (case.batch, case.tokens, case.kv_heads)
    if case.inputs == "zero_rows":
        # The first queries see no key at all.
        weight = torch.ones(shape)
        weight[:, : case.tokens // 10] = 0.0
        return weight
    if not case.key_weights:
        return None
    weight = 0.5 + _uniform(generator, *shape)
    if case.decay in ("none", "gentle"):
        # Not the first ones, for which it would leave few keys or none.
        weight[:, _MANY:][_uniform(generator, *shape)[:, _MANY:] < 0.1] = 0.0
    return weight


def _coefficients(case: OpCase, generator: torch.Generator) -> tuple[float | Tensor, ...]:
    if case.score == "offset":
        offset = 0.5 + _uniform(generator, case.kv_heads * case.groups)
        return offset.square(), 2 * offset, torch.ones_like(offset)
    return {"linear": (0.0, 1.0), "square": (0.0, 0.0, 1.0), "taylor": (1.0, 1.0, 0.5)}[case.score]


def _log_decay(case: OpCase, generator: torch.Generator) -> Tensor | None:
    shape = (case.batch, case.tokens, case.kv_heads)
    if case.decay == "none":
        return None
    draw = _uniform(generator, *shape)
    if case.decay == "gentle":
        return -0.3 * draw
    if case.decay == "strong":
        return -_STRONGEST_DECAY * draw
    decay = -draw if case.decay == "resets" else -(10 ** (5 * draw - 3)).clamp(max=_STRONGEST_DECAY)
    # Documents of about 100 tokens at full size; a single token starts one in half of the heads.
    return decay.masked_fill(_uniform(generator, *shape) < max(0.01, 0.5 / case.tokens), -torch.inf)


def _earlier_tokens(case: OpCase, coefs: tuple[float | Tensor, ...], generator: torch.Generator) -> PolyState:
    """Return the state that a stretch of earlier tokens leaves, in float32."""
    k = _normal(generator, case.batch, _TOKENS_BEFORE, case.kv_heads, case.head_dim)
    v = _normal(generator, case.batch, _TOKENS_BEFORE, case.kv_heads, case.width)
    q = torch.zeros(case.batch, 1, case.kv_heads * case.groups, case.head_dim)
    result = poly_attention(q, k, v, coefs=coefs, output_final_state=True, form="quadratic", backend="torch")
    assert result.final_state is not None, "a final state was asked for"
    return result.final_state
