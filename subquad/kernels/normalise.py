"""Division by the sum of weights, guarded identically in every form."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import row_slices, square_rows

# Below this share of its bound a sum of weights is rounding noise of the state path (about 10 float32 roundings).
_RELATIVE_FLOOR = 1e-6
# Below this a sum of weights has underflowed: the row sees no key.
_NO_KEY = 1e-30


def _decayed_sum(x: Tensor, factor: Tensor) -> Tensor:
    """Return `y_t = x_t + factor_t y_{t-1}` along the last dimension, in log2(T) doubling steps.

    After the step of width w, `x_t` sums the last 2 w tokens and `factor_t` is the decay over them. The factors of the
    first tokens reach before the sequence and are never used.
    """
    step = 1
    while step < x.shape[-1]:
        x = torch.cat([x[..., :step], x[..., step:] + factor[..., step:] * x[..., :-step]], dim=-1)
        factor = torch.cat([factor[..., :step], factor[..., step:] * factor[..., :-step]], dim=-1)
        step *= 2
    return x


@torch.no_grad()
def normaliser_bound(inputs: PolyInputs, causal: bool = True) -> Tensor | None:
    """Bound the sum of weights from above, from its even powers.

    `sum_s kw_s exp(L_ts) (|c0| + |c2| (scale |q_t| |k_s|)**2)`; the odd power needs no term, `2 |x| <= 1 + x**2`. What
    came before the first key enters by the state's constant row and by the sum of its squares' rows.

    Args:
        inputs: The op's inputs, powers at most 2.
        causal: Whether a query meets the keys up to its own only; else all of them, without decays or state.

    Returns:
        `[B, Hkv, G, Tq]` (`[B, Hkv, G, 1 or Tq]` where not causal), or None where no even power is present.
    """
    head_dim, num_queries = inputs.q.shape[-1], inputs.q.shape[-2]
    rows = row_slices(head_dim, inputs.orders)
    key_weight = inputs.v[..., -1]
    factor = inputs.log_decay.exp().masked_fill(inputs.resets, 0.0)
    bound = None
    for coef, order in zip(inputs.coefs, inputs.orders, strict=True):
        if order == 1:
            continue
        sizes = (key_weight if order == 0 else key_weight * inputs.k.square().sum(-1)).clone()
        if inputs.state is not None:
            before = inputs.state.normaliser[..., rows[order]]
            if order == 2:
                before = before.index_select(-1, square_rows(head_dim, before.device))
            sizes[..., 0] += factor[..., 0] * before.sum(-1)
        total = _decayed_sum(sizes, factor)[..., -num_queries:] if causal else sizes.sum(-1, keepdim=True)
        term = total.unsqueeze(2) * coef.abs().unsqueeze(-1)
        if order == 2:
            term = term * inputs.q.square().sum(-1)
        bound = term if bound is None else bound + term
    return bound


def guarded_division(numerator: Tensor, normaliser: Tensor, bound: Tensor | None) -> Tensor:
    """Divide by the sum of weights, keeping it away from 0.

    The sum is moved, with its sign, to at least 1e-6 of `bound`. A row whose sum is 0 (no visible key) or has
    underflowed gives 0, with gradient 0.

    Args:
        numerator: `[..., e]`.
        normaliser: `[...]`.
        bound: `[...]`, from `normaliser_bound`; None guards only the zeros.

    Returns:
        `[..., e]`.
    """
    sees_key = normaliser.abs() > _NO_KEY
    safe = normaliser
    if bound is not None:
        floor = bound * _RELATIVE_FLOOR
        safe = torch.where(normaliser.abs() < floor, torch.copysign(floor, normaliser.detach()), normaliser)
    safe = torch.where(sees_key, safe, 1.0).unsqueeze(-1)
    return torch.where(sees_key.unsqueeze(-1), numerator / safe, 0.0)
