"""The exact window as one fused kernel: FlexAttention (Dong et al., arXiv 2412.05496), compiled once per model shape.

Every key is seen by an interval of queries, `since <= query <= until`: an ordinary one by the `window` queries from its
own position on, a sink by all queries after it, neither by another document, and a hidden one by none. Two integers
per key are thus the whole mask, and one mask function serves every combination of arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, FlexKernelOptions, flex_attention

from subquad.kernels.backend import MAX_HEAD_DIM, device_problem
from subquad.kernels.window_inputs import SinkTokens, WindowInputs, WindowOutput, document_ends, document_starts

_BLOCK_SIZE = 128
# One block of queries or less leaves a fused kernel little to do: short calls, as in decoding, stay in PyTorch.
MIN_QUERIES = _BLOCK_SIZE + 1
# tl.dot takes no narrower operand; wider ones exceed the shared memory of some GPUs with FlexAttention's tiles.
_HEAD_DIMS = range(16, MAX_HEAD_DIM + 1)
# For float32, whose default tiles exceed it at head_dim 128.
SMALL_TILES = cast(FlexKernelOptions, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 2})
# Graphs differ by head shape, dtype, whether gradients are recorded and whether the batch is 1, not by lengths.
MAX_GRAPHS = 64


class Visible(NamedTuple):
    """The queries that see each key, `[1 or B, T]` int32: `since <= query <= until`."""

    since: Tensor
    until: Tensor


class Blocks(NamedTuple):
    """Blocks of queries and keys that meet, int32: for each query block `[1 or B, 1, nq]` how many, and which first.

    The indices `[1 or B, 1, nq, nk]` name the key blocks that a query block meets, then the others; `q_*` is the same
    seen from the key blocks.
    """

    kv_num_blocks: Tensor
    kv_indices: Tensor
    q_num_blocks: Tensor
    q_indices: Tensor


def flex_problem(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why the fused window cannot take these inputs, or None if it can."""
    if q.device.type != "cuda":
        return f"the fused window needs an NVIDIA GPU; the tensors are on {q.device.type}"
    problem = device_problem(q.device)
    if problem is not None:
        return problem
    if not q.dtype == k.dtype == v.dtype:
        return f"q, k and v must have one dtype; they have {q.dtype}, {k.dtype} and {v.dtype}"
    if q.dtype == torch.float64:
        return "float64 is computed in PyTorch"
    widths = (q.shape[3], v.shape[3])
    if any(width not in _HEAD_DIMS for width in widths):
        return f"head_dim {widths[0]} (values: {widths[1]}) is outside {_HEAD_DIMS.start} to {_HEAD_DIMS.stop - 1}"
    return None


def flex_window_attention(inputs: WindowInputs) -> WindowOutput:
    """Compute `window_attention` with FlexAttention.

    A `scale` other than `head_dim ** -0.5` is multiplied into q, in q's dtype.

    Args:
        inputs: checked inputs.

    Returns:
        Outputs and log normalisers.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    factor = inputs.scale * q.shape[3] ** 0.5
    # A float argument of a compiled function with dynamic shapes becomes a symbol, which the kernel cannot hold.
    if abs(factor - 1) > 1e-12:
        q = q * factor
    visible, blocks = layout(inputs)
    # Copies: whether an argument is a view distinguishes graphs, too.
    since, until = (x.repeat(k.shape[0] // x.shape[0], 1) for x in visible)
    if inputs.valid is not None:
        until = torch.where(inputs.valid, until, -1)
    if isinstance(inputs.sinks, SinkTokens):
        first_query = inputs.sinks.first_query.int()
        k, v = torch.cat([k, inputs.sinks.keys], dim=1), torch.cat([v, inputs.sinks.values], dim=1)
        since = torch.cat([since, first_query], dim=1)
        until = torch.cat([until, torch.full_like(first_query, q.shape[1])], dim=1)
    return WindowOutput(*_fused(q, k, v, since, until, *blocks))


def layout(inputs: WindowInputs) -> tuple[Visible, Blocks]:
    """Return which queries see the keys of k, whatever `valid` says, and which blocks meet."""
    num_queries, seq_len = inputs.q.shape[1], inputs.k.shape[1]
    beside = inputs.sinks.keys.shape[1] if isinstance(inputs.sinks, SinkTokens) else 0
    among = inputs.sinks if isinstance(inputs.sinks, int) else 0
    if inputs.documents is None:
        return _layout_of_lengths(num_queries, seq_len, inputs.window, among, beside, inputs.q.device)
    starts, ends = document_starts(inputs.documents), document_ends(inputs.documents)
    visible = _visible(num_queries, starts, ends, inputs.window, among)
    return visible, _meeting_blocks(visible, num_queries, beside)


@functools.lru_cache(maxsize=32)
def _layout_of_lengths(
    num_queries: int, seq_len: int, window: int, among: int, beside: int, device: torch.device
) -> tuple[Visible, Blocks]:
    # Tensors made in inference mode could not be kept for a later backward pass.
    with torch.inference_mode(False):
        starts = torch.zeros((1, seq_len), dtype=torch.int64, device=device)
        visible = _visible(num_queries, starts, starts + seq_len - 1, window, among)
        return visible, _meeting_blocks(visible, num_queries, beside)


def _visible(num_queries: int, starts: Tensor, ends: Tensor, window: int, sinks: int) -> Visible:
    """Return the queries that see each key, given the first and last position of its document `[B, T]`."""
    seq_len = starts.shape[1]
    steps = torch.arange(seq_len, device=starts.device).expand_as(starts)
    last = torch.where(steps - starts < sinks, ends, torch.minimum(ends, steps + min(window, seq_len) - 1))
    first_query = seq_len - num_queries
    return Visible((steps - first_query).int(), (last - first_query).int())


def _meeting_blocks(visible: Visible, num_queries: int, sinks_beside: int) -> Blocks:
    """Return the blocks in which some query sees some key; every query may see the sinks kept beside k."""
    tail = (0, -(visible.since.shape[1] + sinks_beside) % _BLOCK_SIZE)
    # A key that no query sees: an interval that meets no block.
    since = visible.since.masked_fill(visible.until < 0, num_queries)
    since = functional.pad(functional.pad(since, (0, sinks_beside), value=0), tail, value=num_queries)
    until = functional.pad(functional.pad(visible.until, (0, sinks_beside), value=num_queries), tail, value=-1)
    first = since.unflatten(1, (-1, _BLOCK_SIZE)).amin(-1)[:, None]
    last = until.unflatten(1, (-1, _BLOCK_SIZE)).amax(-1)[:, None]
    begin = torch.arange(0, num_queries, _BLOCK_SIZE, device=since.device)[:, None]
    meets = (first < begin + _BLOCK_SIZE) & (last >= begin)
    return Blocks(*_in_order(meets[:, None]), *_in_order(meets[:, None].mT))


def _in_order(meets: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many entries of each row are True, and the columns with those first, in ascending order."""
    columns = meets.int().argsort(dim=-1, descending=True, stable=True)
    return meets.sum(-1, dtype=torch.int32), columns.int().contiguous()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    since: Tensor,
    until: Tensor,
    kv_num_blocks: Tensor,
    kv_indices: Tensor,
    q_num_blocks: Tensor,
    q_indices: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attend. All arguments are tensors, so that no length is a constant of the compiled graph."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (since[batch, key] <= query) & (query <= until[batch, key])

    block_mask = block_mask_of(q, k, Blocks(kv_num_blocks, kv_indices, q_num_blocks, q_indices), sees)
    out, auxiliary = flex_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        block_mask=block_mask,
        enable_gqa=True,
        kernel_options=SMALL_TILES if q.dtype == torch.float32 else None,
        return_aux=AuxRequest(lse=True),
    )
    assert auxiliary.lse is not None, "it was asked for"
    return out.transpose(1, 2), auxiliary.lse.transpose(1, 2)


def block_mask_of(q: Tensor, k: Tensor, blocks: Blocks, sees: Callable[..., Tensor]) -> BlockMask:
    """Return FlexAttention's mask of queries `[B, Tq, ...]`, keys `[B, T, ...]`, the blocks that meet, and the rule."""
    return BlockMask(
        seq_lengths=(q.shape[1], k.shape[1]),
        kv_num_blocks=blocks.kv_num_blocks,
        kv_indices=blocks.kv_indices,
        full_kv_num_blocks=None,
        full_kv_indices=None,
        q_num_blocks=blocks.q_num_blocks,
        q_indices=blocks.q_indices,
        full_q_num_blocks=None,
        full_q_indices=None,
        BLOCK_SIZE=(_BLOCK_SIZE, _BLOCK_SIZE),
        mask_mod=sees,
    )


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    return torch.compile(_attend, dynamic=True, fullgraph=True)


def _fused(*tensors: Tensor) -> tuple[Tensor, Tensor]:
    """Call `_attend` compiled; inside a model that is being compiled, as part of its graph."""
    if torch.compiler.is_compiling():
        return _attend(*tensors)
    for x in tensors[:3]:
        # Else a length that happens to equal a number of heads would be taken for it, and be a constant, too.
        torch._dynamo.mark_static(x, [2, 3])
    with torch._dynamo.config.patch(recompile_limit=MAX_GRAPHS):
        return _compiled()(*tensors)
