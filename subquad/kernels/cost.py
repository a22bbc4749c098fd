"""How much each way of computing the op costs, and from which length a state is smaller than a KV cache."""

from __future__ import annotations

from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import MAX_STATE_ORDER, num_rows
from subquad.kernels.tiles import TILE_SIZE

# Of 128, 256, 512 and 1024 the fastest at 4,096 tokens and, with 1024, at 2,048 (forward + backward, d = 64, 9 query
# and 3 key/value heads, one CPU thread): smaller chunks pay for loop overhead, larger ones for pairs.
DEFAULT_CHUNK_SIZE = 256


def forward_flops(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> int:
    """Return the forward FLOPs of the chunked form per sequence and key/value head.

    With `G` query heads per key/value head and `R` state rows: `2 G (d + e + 1)` per pair of a query and a key of its
    chunk (above-diagonal tiles are skipped), `2 R (e + 1)` per key written to the state, `2 G R (e + 1)` per query that
    reads it. The first chunk reads no state unless there is an initial one, and the last one writes none unless the
    final state is asked for: one chunk over all tokens is the quadratic form.

    Args:
        inputs: The op's inputs.
        chunk_size: Tokens per chunk.
        output_final_state: Whether the state after the last key is wanted.

    Returns:
        The number of multiplications and additions.
    """
    groups, num_queries, head_dim = inputs.q.shape[2:]
    num_keys, width = inputs.v.shape[-2:]
    chunk_size = min(chunk_size, num_keys)
    keys_before = num_keys - num_queries if chunk_size == num_keys else 0
    keys_per_query = keys_before + (min(chunk_size, num_queries) + TILE_SIZE) // 2
    flops = 2 * groups * num_queries * keys_per_query * (head_dim + width)
    if inputs.orders[-1] > MAX_STATE_ORDER:
        return flops
    reads = num_queries if inputs.state is not None else min(num_queries, num_keys - chunk_size)
    writes = num_keys if output_final_state else num_keys - chunk_size
    return flops + 2 * num_rows(head_dim, inputs.orders) * width * (groups * reads + writes)


def cheapest_chunk_size(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> int:
    """Return `chunk_size`, or the whole length where that needs no more FLOPs (always for powers above 2).

    At d = e = 64 with three query heads per key/value head, power 2 and no state in or out, the whole length is chosen
    up to 2,795 tokens; measured on a CPU, forward + backward cross between 2,048 and 4,096.
    """
    num_keys = inputs.k.shape[-2]
    if inputs.orders[-1] > MAX_STATE_ORDER or chunk_size >= num_keys:
        return num_keys
    whole = forward_flops(inputs, num_keys, output_final_state)
    return num_keys if whole <= forward_flops(inputs, chunk_size, output_final_state) else chunk_size


def crossover_length(head_dim: int, value_head_dim: int) -> int:
    """Return the length from which the state of power 2 holds fewer numbers than a KV cache, per key/value head.

    The state has `d (d + 1) / 2` rows of `e + 1` numbers, and a width-2 convolution keeps one token's q, k and v
    (`2 d + e`); a KV cache has `d + e` numbers per token. At `e = d` that is `N > (d + 1)**2 / 4 + 3 / 2` (Mongaras &
    Larson, 2Mamba2Furious, arXiv 2602.17363).

    Args:
        head_dim: Width d of a key.
        value_head_dim: Width e of a value.

    Returns:
        The smallest number of tokens whose KV cache is larger than the state.
    """
    numbers = num_rows(head_dim, (2,)) * (value_head_dim + 1) + 2 * head_dim + value_head_dim
    return numbers // (head_dim + value_head_dim) + 1
