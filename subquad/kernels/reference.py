"""The quadratic form: the definition of the op, any degree, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.decay import wide_dtype
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import PolyState, join_state, key_features, query_features, split_state


def polynomial(x: Tensor, coefs: Tensor, orders: tuple[int, ...]) -> Tensor:
    """Evaluate `sum_n coefs_n x**n` by Horner's rule.

    Args:
        x: `[B, Hkv, G, Tq, T]`.
        coefs: `[len(orders), Hkv, G]`.
        orders: The powers, lowest first.

    Returns:
        The shape of `x`.
    """
    by_order = {order: coef[:, :, None, None] for order, coef in zip(orders, coefs, strict=True)}
    result = by_order[orders[-1]].expand_as(x)
    for order in range(orders[-1] - 1, -1, -1):
        result = result * x
        if order in by_order:
            result = result + by_order[order]
    return result


def _pair_decay(log_decay: Tensor, resets: Tensor, num_queries: int) -> Tensor:
    """Return `exp(L_ts)`, `[B, Hkv, Tq, T]`; 0 for keys after the query and for keys before a reset.

    `L_ts` is summed for every query on its own, from the query backwards: no difference of two long sums, neither here
    nor in its gradient. That is what the other forms are measured against.
    """
    num_keys = log_decay.shape[-1]
    positions = torch.arange(num_keys, device=log_decay.device)
    after = positions <= positions[num_keys - num_queries :, None]
    counted = (log_decay.to(wide_dtype(log_decay.device)).unsqueeze(-2) * after).flip(-1).cumsum(-1).flip(-1)
    # The sum over r >= s includes the key's own decay, which the sum over r > s leaves out.
    log_pair = torch.nn.functional.pad(counted[..., 1:], (0, 1))
    segment = resets.cumsum(-1)
    visible = after & (segment[..., num_keys - num_queries :, None] == segment[..., None, :])
    return log_pair.to(log_decay.dtype).masked_fill(~visible, -torch.inf).exp()


def quadratic_attention(inputs: PolyInputs, output_final_state: bool) -> tuple[Tensor, PolyState | None]:
    """Compute every pair's weight: `O(Tq T)` time and memory.

    Args:
        inputs: The op's inputs; `Tq <= T`, the queries being the last positions.
        output_final_state: Whether to return the state after the last key (powers up to 2 only).

    Returns:
        Numerator and, as last column, normaliser `[B, Hkv, G, Tq, e + 1]`; the final state or None.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    num_queries = q.shape[-2]
    pair = _pair_decay(inputs.log_decay, inputs.resets, num_queries)
    total = inputs.log_decay.to(wide_dtype(q.device)).cumsum(-1)
    from_start = total.to(q.dtype).masked_fill(inputs.resets.cumsum(-1) > 0, -torch.inf).exp()
    score = polynomial(q @ k.mT.unsqueeze(2), inputs.coefs, inputs.orders)
    out = (score * pair.unsqueeze(2)) @ v.unsqueeze(2)
    before = None if inputs.state is None else join_state(inputs.state)
    if before is not None:
        features = query_features(q, inputs.coefs.unsqueeze(-1), inputs.orders)
        out = out + features @ before.unsqueeze(2) * from_start[:, :, None, -num_queries:, None]
    if not output_final_state:
        return out, None
    state = key_features(k, inputs.orders).mT @ (v * pair[..., -1, :, None])
    if before is not None:
        state = state + before * from_start[..., -1, None, None]
    return out, split_state(state)
