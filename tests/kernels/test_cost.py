"""The cost model: against published figures, against counted matrix products, and its crossovers by search."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from subquad.errors import ConfigError
from subquad.kernels.chunked import chunked_attention
from subquad.kernels.cost import (
    cheapest_chunk_size,
    chunked_cost,
    decode_cost,
    decode_crossover,
    flops_crossover,
    forward_flops,
    quadratic_cost,
    softmax_cost,
    softmax_decode_cost,
)
from subquad.kernels.counts import HeadShape, token_bytes
from subquad.kernels.inputs import PolyInputs
from subquad.kernels.state import PolyState, num_rows

# far from the ends of a sequence: every chunk reads a state and is written to one
INSIDE = {"initial_state": True, "final_state": True}


def square(head_dim: int, group_size: int = 1, **changes) -> HeadShape:
    return HeadShape(head_dim, head_dim, group_size, **changes)


@pytest.mark.parametrize(
    "head_dim, forward, training",
    [(64, (1049, 4194, 16777), (3670, 14680, 58720)), (128, (2097, 8389, 33554), (7340, 29360, 117441))],
)
def test_softmax_needs_2dn_forward_and_7dn_with_backward(head_dim, forward, training):
    shape = square(head_dim)
    lengths = (8192, 32768, 131072)
    assert tuple(round(softmax_cost(shape, n).flops_per_token / 1000) for n in lengths) == forward
    assert tuple(round(softmax_cost(shape, n, training=True).flops_per_token / 1000) for n in lengths) == training


# (d, G, C), then kFLOP per token and query head and crossover in thousands of tokens, each forward, training with the
# distinct products, training with the square
CHUNKED = [
    ((64, 1, 512), (598, 2093, 2609), (4.7, 4.7, 5.8)),
    ((64, 4, 512), (398, 1294, 1617), (3.1, 2.9, 3.6)),
    ((64, 8, 256), (332, 1047, 1337), (2.6, 2.3, 3.0)),
    ((128, 1, 1024), (4489, 15712, 19874), (17.5, 17.5, 22.2)),
    ((128, 4, 512), (2773, 8913, 11514), (10.8, 9.9, 12.9)),
    ((128, 8, 512), (2509, 7856, 10197), (9.8, 8.8, 11.4)),
]
WAYS = ({}, {"training": True, "contraction": "distinct"}, {"training": True, "contraction": "square"})


@pytest.mark.parametrize("sizes, kiloflops, crossovers", CHUNKED, ids=str)
def test_chunked_flops_and_crossovers(sizes, kiloflops, crossovers):
    head_dim, groups, chunk_size = sizes
    shape = square(head_dim, groups)
    costs = [chunked_cost(shape, 8 * chunk_size, chunk_size, **way, **INSIDE) for way in WAYS]
    assert tuple(round(cost.flops_per_token / groups / 1000) for cost in costs) == kiloflops
    found = [flops_crossover(shape, chunk_size, **way, **INSIDE) for way in WAYS]
    assert tuple(round(length / 1000, 1) for length in found) == crossovers


@pytest.mark.parametrize(
    "sizes, kiloflops",
    [
        ((64, 1, 512), (1114, 3899)),
        ((64, 4, 512), (721, 2327)),
        ((128, 1, 1024), (8651, 30278)),
        ((128, 4, 512), (5374, 17236)),
    ],
    ids=str,
)
def test_states_of_all_d_squared_products_would_cost_nearly_twice_as_much(sizes, kiloflops):
    head_dim, groups, chunk_size = sizes
    shape, seq_len = square(head_dim, groups), 8 * chunk_size
    for training, expected in zip((False, True), kiloflops, strict=True):
        distinct = chunked_cost(shape, seq_len, chunk_size, training=training, contraction="distinct", **INSIDE).flops
        # one chunk of C tokens has the pairs and no state
        pairs = 8 * quadratic_cost(shape, chunk_size, training=training).flops
        full = pairs + (distinct - pairs) * head_dim**2 // num_rows(head_dim, (2,))
        assert round(full / seq_len / groups / 1000) == expected


def test_formulas_with_any_widths_and_powers():
    """`K` is what dq and dk are contracted with: no power 0, and for the square d**2 at power 2."""
    d, e, groups, chunk_size, seq_len = 5, 3, 2, 4, 12
    shape = HeadShape(d, e, groups, (0, 1, 2), window=2, sinks=1)
    rows = 1 + d + d * (d + 1) // 2
    for contraction, contracted in (("distinct", rows - 1), ("square", d + d * d)):
        state = 2 * rows * e * (1 + groups) + 2 * (rows * e * (groups + 2) + contracted * e * (groups + 1))
        pairs = groups * (4 * d + 3 * e) * (chunk_size + 2 * (2 + 1))
        cost = chunked_cost(shape, seq_len, chunk_size, training=True, contraction=contraction, **INSIDE)
        assert cost.flops_per_token == state + pairs


def test_states_cost_nothing_before_the_first_and_after_the_last_chunk():
    shape, state_per_key = square(8, 3), 2 * 36 * 8
    alone, after, before, inside = (
        chunked_cost(shape, 100, 30, initial_state=first, final_state=last).flops
        for first in (False, True)
        for last in (False, True)
    )
    assert after - alone == inside - before == 30 * state_per_key
    assert before - alone == 30 * 3 * state_per_key
    assert chunked_cost(shape, 100, 100) == chunked_cost(shape, 100, 1000) == softmax_cost(shape, 100)


def test_window_and_sinks_are_scored_in_full():
    plain, windowed = HeadShape(8, 6, 3), HeadShape(8, 6, 3, window=64, sinks=4)
    for training, per_pair in ((False, 2 * (8 + 6)), (True, 2 * (4 * 8 + 3 * 6))):
        for cost in (quadratic_cost, lambda *args, **kw: chunked_cost(*args, 256, **kw)):
            added = cost(windowed, 1000, training=training).flops - cost(plain, 1000, training=training).flops
            assert added == 1000 * 3 * 68 * per_pair
    assert softmax_cost(windowed, 1000) == softmax_cost(plain, 1000)


def test_any_power_has_a_quadratic_form_and_only_the_lower_ones_a_state():
    cubic = HeadShape(8, 8, 1, (0, 1, 2, 3))
    assert quadratic_cost(cubic, 100) == softmax_cost(cubic, 100)
    for stateful in (
        lambda: chunked_cost(cubic, 100, 10),
        lambda: chunked_cost(cubic, 100, 100, final_state=True),
        lambda: decode_cost(cubic),
        lambda: flops_crossover(cubic, 256),
        lambda: decode_crossover(cubic),
    ):
        with pytest.raises(ConfigError, match=r"powers above 2 have no state.*use quadratic_cost"):
            stateful()


# compute / memory in ns per token of a key/value head, at 45 % of 790 TFLOP/s and at 4.3 TB/s
TRAFFIC = {
    64: ("1.52 / 2.17", "3.84 / 2.53", "11.9 / 15.8", "29.9 / 16.6"),
    128: ("1.54 / 1.21", "3.93 / 1.56", "12.0 / 8.2", "30.1 / 8.9"),
    256: ("1.59 / 0.72", "4.11 / 1.08", "12.1 / 4.3", "30.5 / 5.0"),
    512: ("1.68 / 0.48", "4.48 / 0.84", "12.3 / 2.4", "31.2 / 3.1"),
    1024: ("1.87 / 0.36", "5.22 / 0.72", "12.6 / 1.4", "32.7 / 2.2"),
}


@pytest.mark.parametrize("chunk_size", TRAFFIC)
@pytest.mark.parametrize("column, head_dim, groups", [(0, 64, 1), (1, 64, 4), (2, 128, 1), (3, 128, 4)])
def test_chunk_traffic(chunk_size, column, head_dim, groups):
    digits = 2 if head_dim == 64 else 1
    cost = chunked_cost(square(head_dim, groups), 4096, chunk_size, **INSIDE)
    state = cost.num_bytes - token_bytes(square(head_dim, groups), 4096, training=False, itemsize=2)
    assert state / 4096 == 4 * num_rows(head_dim, (2,)) * head_dim / chunk_size
    # the design moves every token twice: a preparing kernel copies it
    memory = (2 * cost.num_bytes - state) / 4096 / 4.3e12
    compute = cost.flops_per_token / (0.45 * 790e12)
    assert f"{compute * 1e9:.{digits}f} / {memory * 1e9:.{digits}f}" == TRAFFIC[chunk_size][column]


def test_bytes_of_states_and_tokens():
    for head_dim, chunk_size, mebibytes in ((64, 512, 65), (128, 1024, 258), (128, 512, 516)):
        shape = square(head_dim)
        states = chunked_cost(shape, 131072, chunk_size, **INSIDE).num_bytes - softmax_cost(shape, 131072).num_bytes
        assert states == 2 * mebibytes * 2**20  # written and read
    shape = HeadShape(64, 32, 3)
    assert softmax_cost(shape, 10).num_bytes == 10 * 2 * (3 * 64 + 64 + 32 + 3 * 32)
    assert softmax_cost(shape, 10, training=True).num_bytes == 3 * softmax_cost(shape, 10).num_bytes
    # two borders between three chunks
    alone = chunked_cost(shape, 130, 64, itemsize=4)
    assert alone.num_bytes - softmax_cost(shape, 130, itemsize=4).num_bytes == 2 * 2 * 2080 * 32 * 4
    assert chunked_cost(shape, 130, 64, training=True).num_bytes == 3 * chunked_cost(shape, 130, 64).num_bytes
    assert alone.intensity == alone.flops / alone.num_bytes


# bytes per token as tokens of a bfloat16 KV cache
DECODE = {
    "read and write, float32": ({"state_itemsize": 4}, 2, {64: 4288, 128: 16768}),
    "read and write, bfloat16": ({"state_itemsize": 2}, 2, {64: 2208, 128: 8512}),
    "buffer of 64, float32": ({"buffer_size": 64, "state_itemsize": 4}, 1, {64: 2241, 128: 8674}),
    "buffer of 64, bfloat16": ({"buffer_size": 64, "state_itemsize": 2}, 1, {64: 1168, 128: 4417}),
}


@pytest.mark.parametrize("options, normaliser_moves, tokens", DECODE.values(), ids=DECODE)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_bytes(options, normaliser_moves, tokens, head_dim):
    cost = decode_cost(square(head_dim), normaliser=False, **options)
    # the design counts a d x d float32 matrix as normaliser, which a buffer's flush leaves out
    num_bytes = cost.bytes_per_token + normaliser_moves * 4 * head_dim**2
    assert int(num_bytes / softmax_decode_cost(square(head_dim), 1).num_bytes) == tokens[head_dim]


@pytest.mark.parametrize("head_dim, megabytes", [(64, (2.1, 8.4, 33.6)), (128, (4.2, 16.8, 67.1))])
def test_kv_cache_bytes(head_dim, megabytes):
    costs = [softmax_decode_cost(square(head_dim, 4), length) for length in (8192, 32768, 131072)]
    assert tuple(round(cost.num_bytes / 1e6, 1) for cost in costs) == megabytes
    assert costs[0].flops_per_token == 8192 * 4 * 4 * head_dim


@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_decode_crossover_of_the_published_state(head_dim):
    """Power 2: `d (d + 1)**2 / 2` float32 numbers are read and written, `2 d` bfloat16 numbers per cached token."""
    assert decode_crossover(square(head_dim)) == (head_dim + 1) ** 2 + 1
    assert decode_crossover(square(head_dim), itemsize=4) == (head_dim + 1) ** 2 // 2 + 1
    # the normaliser stays float32
    halved = num_rows(head_dim, (2,)) * (2 * head_dim + 4) * 2 // (4 * head_dim) + 1
    assert decode_crossover(square(head_dim), state_itemsize=2) == halved
    windowed = square(head_dim, window=60, sinks=4)
    assert decode_crossover(windowed) == (head_dim + 1) ** 2 + 64 + 1


@pytest.mark.parametrize("buffer_size", [0, 1, 7, 64])
@pytest.mark.parametrize("normaliser", [True, False])
def test_decode_crossover_is_the_first_length_that_moves_more_bytes(buffer_size, normaliser):
    shape = HeadShape(8, 6, 3, (1, 2), window=5, sinks=2)
    options = {"buffer_size": buffer_size, "normaliser": normaliser}
    per_token = decode_cost(shape, **options).bytes_per_token
    length = decode_crossover(shape, **options)
    assert softmax_decode_cost(shape, length - 1).num_bytes <= per_token < softmax_decode_cost(shape, length).num_bytes


def test_decode_cost_of_a_buffer_is_that_of_a_whole_round():
    rows, d, e, groups, waiting = 8 + 36, 8, 6, 3, 4
    cost = decode_cost(HeadShape(d, e, groups, (1, 2)), buffer_size=waiting, itemsize=2)
    assert cost.num_tokens == waiting
    pairs = 2 * (d + e) * waiting // 2 * waiting * groups
    assert cost.flops == 2 * rows * e * waiting * (groups + 1) + pairs
    # one read per token, one read and one write for the flush, half a buffer of keys and values per token
    assert cost.num_bytes == (waiting + 2) * rows * (e + 1) * 4 + waiting * waiting // 2 * (d + e) * 2


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ends", [{}, {"final_state": True}, INSIDE], ids=["alone", "prompt", "inside"])
@pytest.mark.parametrize(
    "shape", [square(8), square(8, 3, window=16, sinks=2), HeadShape(6, 9, 2, (0, 1, 2)), HeadShape(8, 8, 4, (1,))]
)
def test_flops_crossover_is_the_first_cheaper_length(shape, ends, training):
    def cheaper(seq_len: int) -> bool:
        chunked = chunked_cost(shape, seq_len, 16, training=training, **ends)
        return chunked.flops < softmax_cost(shape, seq_len, training=training).flops

    length = flops_crossover(shape, 16, training=training, **ends)
    assert [cheaper(n) for n in range(1, 2 * length)] == [False] * (length - 1) + [True] * length


@pytest.mark.parametrize("head_dim, groups, expected", [(64, 3, 2774), (64, 4, 2601), (128, 4, 10321), (128, 8, 9289)])
def test_crossover_without_end_states_is_the_rows_whatever_the_chunk(head_dim, groups, expected):
    """`D (1 + 1/G)`: both sides carry the factor `N - C`."""
    assert [flops_crossover(square(head_dim, groups), chunk_size) for chunk_size in (64, 256, 1024)] == [expected] * 3
    assert expected == int(num_rows(head_dim, (2,)) * (1 + 1 / groups)) + 1


# (orders, initial state, final state)
@pytest.mark.parametrize("orders", [(1,), (2,), (1, 2)])
@pytest.mark.parametrize("initial_state", [False, True])
@pytest.mark.parametrize("final_state", [False, True])
def test_flops_are_those_that_the_chunked_form_executes(orders, initial_state, final_state):
    d, e, groups, seq_len, chunk_size, tile_size = 6, 5, 3, 64, 16, 8
    rows = num_rows(d, orders)
    q, k, v = (torch.randn(1, 1, *size, requires_grad=True) for size in ((groups, 64, d), (64, d), (64, e + 1)))
    state = PolyState(torch.randn(1, 1, rows, e), torch.randn(1, 1, rows)) if initial_state else None
    decay, coefs = torch.zeros(1, 1, seq_len), torch.ones(len(orders), 1, groups)
    inputs = PolyInputs(q, k, v, decay, decay.bool(), coefs, orders, state)
    with FlopCounterMode(display=False) as forward:
        out, final = chunked_attention(inputs, chunk_size, final_state, tile_size)
    with FlopCounterMode(display=False) as backward:
        sum(part.sum() for part in (out, *(final or ()))).backward()
    # the last column of v makes the normaliser, and tiles on the diagonal are not halved
    shape = HeadShape(d, e + 1, groups, orders)
    counted = [
        chunked_cost(
            shape,
            seq_len,
            chunk_size,
            training=training,
            initial_state=initial_state,
            final_state=final_state,
            contraction="distinct",
        ).flops
        + groups * seq_len * tile_size * per_pair
        for training, per_pair in ((False, d + e + 1), (True, 4 * d + 3 * (e + 1)))
    ]
    # the state after the last chunk is not recomputed
    spared = 2 * rows * (e + 1) * chunk_size if final_state else 0
    assert forward.get_total_flops() == counted[0]
    assert forward.get_total_flops() + backward.get_total_flops() == counted[1] - spared


def on_no_device(num_queries: int, num_keys: int, orders: tuple[int, ...], state: PolyState | None) -> PolyInputs:
    """Return inputs with d = e = 64 and three query heads per key/value head, without data."""

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, device="meta")

    q, k, v = empty(1, 1, 3, num_queries, 64), empty(1, 1, num_keys, 64), empty(1, 1, num_keys, 65)
    return PolyInputs(q, k, v, None, None, None, orders, state)


@pytest.mark.parametrize("tokens, expected", [(256, 256), (2795, 2795), (2796, 256), (100_000, 256)])
def test_pytorch_takes_many_chunks_from_2796_tokens_on(tokens, expected):
    assert cheapest_chunk_size(on_no_device(tokens, tokens, (2,), None), 256, output_final_state=False) == expected
    assert cheapest_chunk_size(on_no_device(tokens, tokens, (0, 1, 2, 3), None), 256, False) == tokens


def test_flops_in_pytorch():
    pair, per_row = 2 * (64 + 65), 2 * 2080 * 65
    state = PolyState(torch.empty(0), torch.empty(0))
    # 512 tokens in two chunks of two tiles each
    inputs = on_no_device(512, 512, (2,), None)
    pairs = 3 * 2 * (128 * 128 + 128 * 256) * pair
    assert forward_flops(inputs, 256, output_final_state=False) == pairs + 256 * per_row * (3 + 1)
    assert forward_flops(inputs, 256, output_final_state=True) == pairs + per_row * (3 * 256 + 512)
    given = on_no_device(512, 512, (2,), state)
    assert forward_flops(given, 256, output_final_state=True) == pairs + 512 * per_row * (3 + 1)
    # the last 128 of 512 tokens, in one chunk: one tile that sees 384 keys before it
    last = on_no_device(128, 512, (2,), None)
    assert forward_flops(last, 512, output_final_state=False) == 3 * 128 * 512 * pair


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"head_dim": 0}, "head_dim must be 1 or more, got 0"),
        ({"group_size": 0, "value_head_dim": -1}, "value_head_dim must be 1 or more, got -1; group_size"),
        ({"window": -1}, "window, sinks and kept_keys must be 0 or more, got -1, 0 and 0"),
        ({"orders": ()}, "ascending order, got ()"),
        ({"orders": (2, 1)}, "ascending order, got (2, 1)"),
        ({"orders": (1, 1)}, "ascending order, got (1, 1)"),
        ({"orders": (-1,)}, "ascending order, got (-1,)"),
    ],
)
def test_shapes_that_cannot_be(changes, message):
    with pytest.raises(ConfigError) as caught:
        HeadShape(**{"head_dim": 8, "value_head_dim": 8, **changes})
    assert message in str(caught.value)


def test_lengths_that_cannot_be():
    for call in (
        lambda: softmax_cost(square(8), 0),
        lambda: softmax_decode_cost(square(8), 0),
        lambda: quadratic_cost(square(8), 0),
        lambda: chunked_cost(square(8), 10, 0),
        lambda: flops_crossover(square(8), 0),
        lambda: decode_cost(square(8), buffer_size=-1),
    ):
        with pytest.raises(ConfigError, match=r"must be (0|1)"):
            call()


def test_narrow_features_count_with_their_own_width_and_the_window_with_the_heads():
    narrow = HeadShape(16, 64, 3, orders=(0, 1, 2))
    learned = HeadShape(64, 64, 3, orders=(0, 1, 2), feature_dim=16)
    windowed = HeadShape(64, 64, 3, orders=(0, 1, 2), window=64, sinks=4, feature_dim=16)
    assert learned.state_numbers == narrow.state_numbers == (1 + 16 + 136) * 64
    for training in (False, True):
        plain = chunked_cost(learned, 4096, 256, training=training).flops
        assert plain == chunked_cost(narrow, 4096, 256, training=training).flops
        # (d + e) products per pair, and (3 d + 2 e) more backward, for 68 keys of every query.
        products = 128 + (320 if training else 0)
        assert chunked_cost(windowed, 4096, 256, training=training).flops - plain == 2 * products * 3 * 4096 * 68
    # Narrower scores than softmax's pay from the first token on, where no state is written.
    assert flops_crossover(learned, 256, training=True) == 1
    assert flops_crossover(HeadShape(64, 64, 3), 256, training=True) > 256
