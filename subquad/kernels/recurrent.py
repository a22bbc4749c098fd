"""The recurrent form: one token, the state in and out. Used for decoding."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import PolyState, key_features, query_features


def recurrent_step(inputs: PolyInputs, output_final_state: bool) -> tuple[Tensor, PolyState | None]:
    """Add one token to the state and query it (differentiable; the given state is not changed).

    The query heads of a group read the state once, together.

    Args:
        inputs: The op's inputs with `Tq = T = 1`, powers at most 2.
        output_final_state: Whether to return the state after the token.

    Returns:
        Numerator and, as last column, normaliser `[B, Hkv, G, 1, e + 1]`; the state after the token or None.
    """
    key_rows = key_features(inputs.k.squeeze(-2), inputs.orders)
    value, weight = inputs.v[..., 0, :-1], inputs.v[..., 0, -1:]
    values, normaliser = key_rows.unsqueeze(-1) * value.unsqueeze(-2), key_rows * weight
    if inputs.state is not None:
        decay = inputs.log_decay.exp().masked_fill(inputs.resets, 0.0)
        values = torch.addcmul(values, inputs.state.values, decay.unsqueeze(-1))
        normaliser = torch.addcmul(normaliser, inputs.state.normaliser, decay)
    query_rows = query_features(inputs.q.squeeze(-2), inputs.coefs, inputs.orders)
    out = torch.cat([query_rows @ values, query_rows @ normaliser.unsqueeze(-1)], dim=-1)
    return out.unsqueeze(-2), PolyState(values, normaliser) if output_final_state else None
