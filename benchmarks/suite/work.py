"""FLOPs and bytes of what is timed, from the package's cost model."""

from __future__ import annotations

from benchmarks.suite.contenders import Pass, Sizes
from subquad.kernels.cost import chunked_cost, decode_cost, softmax_cost, softmax_decode_cost
from subquad.kernels.counts import HeadShape, kv_bytes
from subquad.kernels.state import state_bytes
from subquad.kernels.triton.tuning import default_chunk_size, switch_len


def head_shape(sizes: Sizes, orders: tuple[int, ...]) -> HeadShape:
    """Return one key/value head and its query heads as the cost model takes them."""
    return HeadShape(sizes.head_dim, sizes.head_dim, sizes.groups, orders)


def chosen_chunk_size(sizes: Sizes, which: Pass, orders: tuple[int, ...]) -> int:
    """Return the chunk size that the kernels take by themselves; the whole length for the quadratic kernel."""
    one_chunk = which != "prefill" and sizes.tokens <= switch_len(sizes.head_dim, sizes.groups, orders)
    return sizes.tokens if one_chunk else default_chunk_size(sizes.head_dim, sizes.groups)


def subquad_flops(sizes: Sizes, which: Pass, orders: tuple[int, ...], chunk_size: int | None = None) -> int:
    """Return the FLOPs that the kernels execute, padding of tiles left out.

    Args:
        sizes: Sizes.
        which: The pass.
        orders: Powers with state rows.
        chunk_size: Tokens per chunk; None is what the kernels choose.

    Returns:
        FLOPs of all heads and sequences.
    """
    cost = chunked_cost(
        head_shape(sizes, orders),
        sizes.tokens,
        chunk_size or chosen_chunk_size(sizes, which, orders),
        training=which == "forward_backward",
        final_state=which == "prefill",
    )
    return cost.flops * sizes.kv_heads * sizes.batch


def softmax_flops(sizes: Sizes, which: Pass) -> int:
    """Return the FLOPs of causal flash attention for all heads and sequences."""
    cost = softmax_cost(head_shape(sizes, (2,)), sizes.tokens, training=which == "forward_backward")
    return cost.flops * sizes.kv_heads * sizes.batch


def step_bytes(sizes: Sizes, orders: tuple[int, ...]) -> int:
    """Return the bytes of one decoded token that reads and writes the float32 state."""
    return decode_cost(head_shape(sizes, orders)).num_bytes * sizes.kv_heads * sizes.batch


def buffered_bytes(sizes: Sizes, orders: tuple[int, ...], pending: int) -> int:
    """Return the bytes of one decoded token that reads the float32 state and `pending` keys and values."""
    state = state_bytes(sizes.kv_heads, sizes.head_dim, sizes.head_dim, orders)
    return (state + pending * sizes.kv_heads * kv_bytes(head_shape(sizes, orders), 2)) * sizes.batch


def cache_bytes(sizes: Sizes) -> int:
    """Return the bytes of one decoded token that reads a bfloat16 key/value cache of `sizes.tokens` tokens."""
    return softmax_decode_cost(head_shape(sizes, (2,)), sizes.tokens).num_bytes * sizes.kv_heads * sizes.batch
