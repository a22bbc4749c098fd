"""The fused window against its definition: traced as on a GPU, run by FlexAttention's own PyTorch implementation."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.nn import functional
from torch.nn.attention import flex_attention as torch_flex

from subquad.kernels import window_flex
from subquad.kernels.window_flex import flex_window_attention
from tests.kernels.window_oracle import (
    make_window_case,
    sees,
    window_by_definition,
    with_window_gradients,
    worst_window_error,
)


@pytest.fixture(scope="module")
def graphs():
    """Trace with dynamic shapes but generate no kernels; return the counter of graphs."""
    counter = CompileCounter()
    traced = torch.compile(window_flex._attend, backend=counter, dynamic=True, fullgraph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_flex, "_compiled", lambda: traced)
        # PyTorch has the backward pass on the CPU, but refuses it, as its compiler cannot generate it there.
        patch.setattr(torch_flex, "_validate_device", lambda *tensors: None)
        yield counter


CASES = {
    "plain": {},
    "sinks": {"sinks": 4},
    "more sinks than keys": {"sinks": 500},
    "window of one": {"window": 1, "sinks": 2},
    "window over all": {"window": 999},
    "one query per key": {"num_queries": 150, "seq_len": 150, "sinks": 3},
    "padding": {"padded": True, "sinks": 2},
    "documents": {"packed": True},
    "documents with sinks": {"packed": True, "sinks": 3, "num_queries": 270, "seq_len": 270},
    "documents, sinks, padding": {"packed": True, "sinks": 3, "padded": True},
    "sinks beside": {"sinks": "beside"},
    "sinks beside, padding": {"sinks": "beside", "padded": True},
    "batch of one": {"batch_size": 1, "sinks": 2},
    "no groups": {"heads": (2, 2), "sinks": 2},
    "one group of three": {"heads": (3, 1), "widths": (16, 24), "sinks": 2},
    "scale": {"scale": 0.7, "sinks": 2},
}


def case_named(name, **changes):
    """Return the inputs of a case and their leaves."""
    return make_window_case(**({"num_queries": 200, "seq_len": 263, "window": 40} | CASES[name] | changes))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_the_definition(graphs, name):
    case = case_named(name)
    expected = with_window_gradients(window_by_definition, *case)
    actual = with_window_gradients(flex_window_attention, *case)
    assert worst_window_error(actual, expected) < 1e-5
    assert actual[1].dtype == torch.float32


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_half_precision_keeps_log_normalisers_in_float32(graphs, dtype, tolerance):
    case = case_named("sinks", dtype=dtype)
    expected = with_window_gradients(window_by_definition, *case)
    actual = with_window_gradients(flex_window_attention, *case)
    assert worst_window_error(actual, expected) < tolerance
    assert actual[0].dtype == dtype
    assert actual[1].dtype == torch.float32
    assert worst_window_error(actual[1:2], expected[1:2]) < 1e-5


def test_rows_that_see_nothing_give_zeros(graphs):
    inputs, leaves = case_named("padding")
    out, log_normaliser, *gradients = with_window_gradients(flex_window_attention, inputs, leaves)
    assert (log_normaliser[0, :100] == -torch.inf).all()
    assert not out[0, :100].any()
    assert not gradients[0][0, :100].any()
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_lengths_windows_and_sinks_share_a_graph(graphs):
    torch._dynamo.reset()
    before = graphs.frame_count
    # Lengths whose blocks are as many as the heads, and batches as large: numbers that graphs could confuse.
    for length, window, sinks, batch_size in [(512, 40, 0, 2), (256, 7, 3, 4), (300, 999, 300, 3), (700, 64, 1, 2)]:
        inputs, _ = make_window_case(length, length, window, sinks=sinks, padded=length > 300, batch_size=batch_size)
        flex_window_attention(inputs)
    assert graphs.frame_count == before + 1


def test_inside_a_compiled_model(graphs):
    inputs, _ = case_named("documents, sinks, padding")
    model = torch.compile(flex_window_attention, backend="eager", fullgraph=True)
    assert worst_window_error([*model(inputs)], [*window_by_definition(inputs)]) < 1e-5


def test_layout_of_lengths_is_computed_once_and_serves_training_after_inference_mode(graphs):
    window_flex._layout_of_lengths.cache_clear()
    inputs, leaves = case_named("sinks")
    with torch.inference_mode():
        flex_window_attention(inputs)
    with_window_gradients(flex_window_attention, inputs, leaves)
    assert window_flex._layout_of_lengths.cache_info()[:2] == (1, 1)


def listed(num_blocks, indices):
    """Return `[B, rows, columns]` bool, the blocks that a block mask lists."""
    order = indices[:, 0].long()
    dense = torch.zeros(order.shape, dtype=torch.bool)
    return dense.scatter(2, order, torch.arange(order.shape[2]) < num_blocks[:, 0, :, None])


@pytest.mark.parametrize("name", CASES)
def test_every_block_with_a_pair_is_listed(name):
    # On the CPU FlexAttention reads the mask alone; its kernels visit the listed blocks only.
    inputs, _ = case_named(name)
    seen = sees(inputs)
    padding = [size for length in (seen.shape[2], seen.shape[1]) for size in (0, -length % 128)]
    needed = functional.pad(seen, padding).unflatten(2, (-1, 128)).unflatten(1, (-1, 128)).any(4).any(2)
    blocks = window_flex.layout(inputs)[1]
    from_queries = listed(blocks.kv_num_blocks, blocks.kv_indices)
    assert not (needed & ~from_queries).any()
    assert torch.equal(from_queries, listed(blocks.q_num_blocks, blocks.q_indices).mT)


@pytest.mark.parametrize("packed", [False, True])
def test_blocks_that_meet_are_linear_in_the_length(packed):
    inputs, _ = make_window_case(4096, 4096, 100, sinks=4, widths=(1, 1), heads=(1, 1), batch_size=1)
    if packed:
        inputs = inputs._replace(documents=torch.arange(4096)[None] // 1000)
    blocks = window_flex.layout(inputs)[1]
    # Its own block, the one before, and the one with the sinks of its document.
    assert blocks.kv_num_blocks.max() == 3
    assert blocks.kv_num_blocks.sum() == blocks.q_num_blocks.sum()
    first = blocks.kv_indices[0, 0, 20, : blocks.kv_num_blocks[0, 0, 20]].tolist()
    assert first == ([15, 19, 20] if packed else [0, 19, 20])
