"""What attention costs in each of its forms, and the length from which one form needs less than another.

These are counts, not times, for one key/value head with the query heads that share it; `counts.py` says of what.
"""

from __future__ import annotations

from collections.abc import Callable

from subquad.errors import ConfigError
from subquad.kernels.counts import (
    AttentionCost,
    Contraction,
    HeadShape,
    check_counts,
    kv_bytes,
    pair_flops,
    state_flops,
    state_flops_backward,
    token_bytes,
)
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import MAX_STATE_ORDER, num_rows
from subquad.kernels.tiles import TILE_SIZE

# Of 128, 256, 512 and 1024 the fastest at 4,096 tokens and, with 1024, at 2,048 (forward + backward, d = 64, 9 query
# and 3 key/value heads, one CPU thread): smaller chunks pay for loop overhead, larger ones for pairs.
DEFAULT_CHUNK_SIZE = 256


def softmax_cost(shape: HeadShape, seq_len: int, *, training: bool = False, itemsize: int = 2) -> AttentionCost:
    """Return the cost of causal softmax attention over a sequence, as flash attention computes it.

    With half the square skipped, `(d + e) N` FLOPs per token and query head forward, `(4 d + 3 e) N` with the backward
    pass (which recomputes the scores): `2 d N` and `7 d N` at e = d. Dao, FlashAttention-2 (arXiv 2307.08691).

    Args:
        shape: Sizes; powers, window and sinks do not matter.
        seq_len: Tokens N.
        training: Whether to add the backward pass.
        itemsize: Bytes per entry of q, k, v and the output.

    Returns:
        The cost of the sequence.

    Raises:
        ConfigError: `seq_len` below 1.
    """
    check_counts(seq_len=seq_len)
    flops = pair_flops(shape, shape.group_size * seq_len, seq_len, training)
    return AttentionCost(flops, token_bytes(shape, seq_len, training, itemsize), seq_len)


def quadratic_cost(shape: HeadShape, seq_len: int, *, training: bool = False, itemsize: int = 2) -> AttentionCost:
    """Return the cost of one chunk over the whole sequence, for any powers: softmax's matrix products, plus the window.

    Args:
        shape: Sizes.
        seq_len: Tokens.
        training: Whether to add the backward pass.
        itemsize: Bytes per entry of q, k, v and the output.

    Returns:
        The cost of the sequence.

    Raises:
        ConfigError: `seq_len` below 1.
    """
    return chunked_cost(shape, seq_len, seq_len, training=training, itemsize=itemsize)


def chunked_cost(
    shape: HeadShape,
    seq_len: int,
    chunk_size: int,
    *,
    training: bool = False,
    initial_state: bool = False,
    final_state: bool = False,
    contraction: Contraction = "square",
    itemsize: int = 2,
) -> AttentionCost:
    """Return the cost of the chunked form over a sequence.

    FLOPs per token and query head, with R state rows and far from the ends, `K = R` for the distinct products or
    `sum d**n` for the square:

    - forward: `2 R e (1 + 1/G)` to write and read states, `(d + e) C` for the pairs inside a chunk;
    - backward: `R e (2 + 4/G)` to recompute the states, sum their gradients and take dv from those,
      `2 K e (1 + 1/G)` to contract dq and dk, `(3 d + 2 e) C` for the pairs;
    - exact keys, W + S + K of window, sinks and kept keys: `2 (d + e)` of each forward, `2 (3 d + 2 e)` backward.

    Bytes per token: q, k, v and the output once (three times with the backward pass), and a state written and read
    once per chunk, `4 R e / C` with 2-byte entries; backward the recomputed states and their gradients likewise.

    Args:
        shape: Sizes; powers at most 2 unless the chunk holds the whole sequence and no state is given or wanted.
        seq_len: Tokens N.
        chunk_size: Tokens C per chunk.
        training: Whether to add the backward pass.
        initial_state: Whether the first chunk reads a state too.
        final_state: Whether the last chunk is written to the state too.
        contraction: `square` as the Triton kernels do, or `distinct`, the least that is possible.
        itemsize: Bytes per entry of q, k, v, the output and the stored states.

    Returns:
        The cost of the sequence.

    Raises:
        ConfigError: A length below 1, or powers above 2 where a state is needed.
    """
    check_counts(seq_len=seq_len, chunk_size=chunk_size)
    chunk_size = min(chunk_size, seq_len)
    reads = seq_len if initial_state else seq_len - chunk_size
    writes = seq_len if final_state else seq_len - chunk_size
    num_queries = shape.group_size * seq_len
    flops = pair_flops(shape.mapped, num_queries, chunk_size, training)
    flops += pair_flops(shape, num_queries, 2 * shape.exact_keys, training)
    num_bytes = token_bytes(shape, seq_len, training, itemsize)
    if reads or writes:
        flops += state_flops(shape, shape.group_size * reads, writes)
        if training:
            flops += state_flops_backward(shape, shape.group_size * reads, writes, contraction)
        # a state is written and read between two chunks, and moved once at either end that has one
        moves = 2 * (-(-seq_len // chunk_size) - 1) + initial_state + final_state
        num_bytes += (3 if training else 1) * moves * shape.state_numbers * itemsize
    return AttentionCost(flops, num_bytes, seq_len)


def decode_cost(
    shape: HeadShape,
    *,
    buffer_size: int = 0,
    normaliser: bool = True,
    state_itemsize: int = 4,
    itemsize: int = 2,
) -> AttentionCost:
    """Return the cost of the recurrent form, which does not depend on how many tokens came before.

    Unbuffered, every token reads and writes the state: `2 R (e b + 4)` bytes with b bytes per entry of the values.
    Buffered, B tokens wait as keys and values (half of them on average), every token reads the state, and the B-th
    writes them all to it, which reads and writes it once. The token's own q, k, v and output are not counted.

    Args:
        shape: Sizes; powers at most 2. Window and sinks are read at every token.
        buffer_size: Tokens B that wait before the state is updated; 0 updates it at every token.
        normaliser: Whether the state has the normaliser's column, in float32.
        state_itemsize: Bytes per entry of the state's values.
        itemsize: Bytes per entry of keys and values.

    Returns:
        The cost of one token, or of one round of the buffer.

    Raises:
        ConfigError: Powers above 2, or a negative buffer.
    """
    if buffer_size < 0:
        raise ConfigError(f"buffer_size must be 0 (no buffer) or more, got {buffer_size}")
    num_tokens = max(buffer_size, 1)
    num_queries = shape.group_size * num_tokens
    flops = state_flops(shape, num_queries, num_tokens)
    flops += pair_flops(shape.mapped, num_queries, buffer_size, training=False)
    flops += pair_flops(shape, num_queries, 2 * shape.exact_keys, training=False)
    state = shape.state_numbers * state_itemsize
    if normaliser:
        state += shape.state_numbers // shape.value_head_dim * 4
    state_moves = num_tokens + 2 if buffer_size else 2
    # twice, because half of the buffer is full on average
    keys_twice = num_tokens * (buffer_size + 2 * shape.exact_keys)
    num_bytes = state_moves * state + keys_twice * kv_bytes(shape, itemsize) // 2
    return AttentionCost(flops, num_bytes, num_tokens)


def softmax_decode_cost(shape: HeadShape, seq_len: int, *, itemsize: int = 2) -> AttentionCost:
    """Return the cost of one token of softmax attention with a key/value cache of `seq_len` tokens.

    Args:
        shape: Sizes; powers, window and sinks do not matter.
        seq_len: Tokens in the cache, the new one included; all are read.
        itemsize: Bytes per entry of keys and values.

    Returns:
        The cost of the token.

    Raises:
        ConfigError: `seq_len` below 1.
    """
    check_counts(seq_len=seq_len)
    flops = pair_flops(shape, shape.group_size, 2 * seq_len, training=False)
    return AttentionCost(flops, seq_len * kv_bytes(shape, itemsize), 1)


def flops_crossover(
    shape: HeadShape,
    chunk_size: int,
    *,
    training: bool = False,
    initial_state: bool = False,
    final_state: bool = False,
    contraction: Contraction = "square",
) -> int:
    """Return the length from which the chunked form needs fewer FLOPs than causal softmax attention.

    At e = d, power 2, without a window and with `D = d (d + 1) / 2`, forward that is `D (1 + 1/G)` tokens where the
    ends hold no state (training, or a sequence scored once) and up to `C` more where they do.

    Args:
        shape: Sizes; powers at most 2.
        chunk_size: Tokens per chunk.
        training: Whether to compare forward and backward together.
        initial_state: Whether the first chunk reads a state too.
        final_state: Whether the last chunk is written to the state too (a prompt before decoding).
        contraction: As for `chunked_cost`.

    Returns:
        The smallest such number of tokens.

    Raises:
        ConfigError: `chunk_size` below 1, or powers above 2.
    """

    def is_cheaper(seq_len: int) -> bool:
        chunked = chunked_cost(
            shape,
            seq_len,
            chunk_size,
            training=training,
            initial_state=initial_state,
            final_state=final_state,
            contraction=contraction,
        )
        return chunked.flops < softmax_cost(shape, seq_len, training=training).flops

    # Up to one chunk the pairs are the same, or fewer numbers with narrow features. Beyond, softmax gains on it with
    # every token.
    above = chunk_size
    while above and is_cheaper(above):
        above //= 2
    return _first_length(is_cheaper, above=above)


def bidirectional_crossover(shape: HeadShape) -> int:
    """Return the length from which one state of all keys needs fewer FLOPs than all pairs (encoders, `causal=False`).

    With `rows` rows of the state, forward: `rows e (1 + 1/G) / (d + e)` tokens.

    Args:
        shape: Sizes; powers at most 2, window and sinks do not matter.

    Returns:
        The smallest such number of tokens.

    Raises:
        ConfigError: Powers above 2.
    """

    def is_cheaper(seq_len: int) -> bool:
        queries = shape.group_size * seq_len
        # `pair_flops` is of queries that meet half of a stretch
        return state_flops(shape, queries, seq_len) < pair_flops(shape, queries, 2 * seq_len, training=False)

    return 1 if is_cheaper(1) else _first_length(is_cheaper, above=1)


def decode_crossover(
    shape: HeadShape,
    *,
    buffer_size: int = 0,
    normaliser: bool = True,
    state_itemsize: int = 4,
    itemsize: int = 2,
) -> int:
    """Return the length from which a decoded token moves fewer bytes than one that reads a key/value cache.

    Args:
        shape: Sizes; powers at most 2.
        buffer_size: As for `decode_cost`.
        normaliser: As for `decode_cost`.
        state_itemsize: Bytes per entry of the state's values.
        itemsize: Bytes per entry of keys and values, in the cache and in window, sinks and buffer.

    Returns:
        The smallest such number of tokens in the cache: `(d + 1)**2 + 1` at power 2, e = d, float32 and bfloat16.

    Raises:
        ConfigError: Powers above 2, or a negative buffer.
    """
    decode = decode_cost(
        shape, buffer_size=buffer_size, normaliser=normaliser, state_itemsize=state_itemsize, itemsize=itemsize
    )
    return decode.num_bytes // (decode.num_tokens * kv_bytes(shape, itemsize)) + 1


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


def _first_length(is_cheaper: Callable[[int], bool], above: int) -> int:
    """Return the smallest length that is cheaper; `above` is not, and once cheaper it stays so."""
    low, high = above, max(2 * above, 1)
    while not is_cheaper(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_cheaper(middle) else (middle, high)
    return high


def forward_flops(inputs: PolyInputs, chunk_size: int, output_final_state: bool) -> int:
    """Return the forward FLOPs of the chunked form in PyTorch per sequence and key/value head.

    As `chunked_cost` counts them, with values of width `e + 1` (the last column makes the normaliser), tiles above
    whose diagonal nothing is skipped, and queries that may be fewer than the keys. The first chunk reads no state
    unless there is an initial one, and the last one writes none unless the final state is asked for: one chunk over all
    tokens is the quadratic form.

    Args:
        inputs: The op's inputs.
        chunk_size: Tokens per chunk.
        output_final_state: Whether the state after the last key is wanted.

    Returns:
        The number of multiplications and additions.
    """
    groups, num_queries, head_dim = inputs.q.shape[2:]
    num_keys, width = inputs.v.shape[-2:]
    shape = HeadShape(head_dim, width, groups, inputs.orders)
    chunk_size = min(chunk_size, num_keys)
    keys_before = num_keys - num_queries if chunk_size == num_keys else 0
    keys_per_query = keys_before + (min(chunk_size, num_queries) + TILE_SIZE) // 2
    flops = pair_flops(shape, groups * num_queries, 2 * keys_per_query, training=False)
    if inputs.orders[-1] > MAX_STATE_ORDER:
        return flops
    reads = num_queries if inputs.state is not None else min(num_queries, num_keys - chunk_size)
    writes = num_keys if output_final_state else num_keys - chunk_size
    return flops + state_flops(shape, groups * reads, writes)


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
