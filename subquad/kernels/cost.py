"""How much each form costs, and from which length a state is smaller than a KV cache."""

from __future__ import annotations

import math

from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import MAX_STATE_ORDER, num_rows

DEFAULT_CHUNK_SIZE = 128


def quadratic_flops(inputs: PolyInputs) -> int:
    """Return the forward FLOPs of the quadratic form per sequence and key/value head (masked pairs are computed too)."""
    groups, num_queries, head_dim = inputs.q.shape[2:]
    return 2 * groups * num_queries * inputs.k.shape[-2] * (head_dim + inputs.v.shape[-1])


def chunked_flops(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> int:
    """Return the forward FLOPs of the chunked form per sequence and key/value head.

    The first chunk reads no state unless there is an initial one; the last one writes none unless it is asked for.
    """
    groups, num_queries, head_dim = inputs.q.shape[2:]
    num_keys, width = inputs.v.shape[-2:]
    chunk_size = min(chunk_size, num_keys)
    inside = 2 * groups * num_queries * chunk_size * (head_dim + width)
    reading = num_queries if inputs.state is not None else min(num_queries, num_keys - chunk_size)
    writing = num_keys if output_final_state else num_keys - chunk_size
    return inside + 2 * num_rows(head_dim, inputs.orders) * width * (groups * reading + writing)


def cheapest_form(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> str:
    """Choose the form of `poly_attention(form="auto")`.

    Returns:
        `recurrent` for one token with a state, `quadratic` for powers above 2 and where the chunked form would need at
        least as many FLOPs, else `chunked`.
    """
    if inputs.orders[-1] > MAX_STATE_ORDER:
        return "quadratic"
    if inputs.state is not None and inputs.k.shape[-2] == 1:
        return "recurrent"
    if quadratic_flops(inputs) <= chunked_flops(inputs, chunk_size, output_final_state):
        return "quadratic"
    return "chunked"


def crossover_length(head_dim: int, value_head_dim: int) -> int:
    """Return the length from which 2Mamba's state holds fewer numbers than a KV cache, per key/value head.

    The state of power 2 has `d (d + 1) / 2` rows of `e + 1` numbers, and the width-2 convolution keeps one token's q, k
    and v (`2 d + e`); a KV cache has `d + e` numbers per token. At `e = d` that is `N > (d + 1)**2 / 4 + 3 / 2`
    (Mongaras & Larson, 2Mamba2Furious).

    Args:
        head_dim: Width d of a key.
        value_head_dim: Width e of a value.

    Returns:
        The smallest number of tokens whose KV cache is larger than the state.
    """
    numbers = num_rows(head_dim, (2,)) * (value_head_dim + 1) + 2 * head_dim + value_head_dim
    return math.floor(numbers / (head_dim + value_head_dim)) + 1
