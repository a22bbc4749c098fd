"""The exact window written a second time, as one masked softmax over all keys in float64, and cases to compare on."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels import SinkTokens, WindowOutput
from subquad.kernels.window_inputs import WindowInputs
from tests.kernels.oracle import relative_rms


def window_by_definition(inputs: WindowInputs) -> WindowOutput:
    """Attend to all keys under the mask that the docstring of `window_attention` describes."""
    q, k, v, sinks = inputs.q.double(), inputs.k.double(), inputs.v.double(), inputs.sinks
    seen = sees(inputs)
    if isinstance(sinks, SinkTokens):
        k, v = torch.cat([k, sinks.keys.double()], dim=1), torch.cat([v, sinks.values.double()], dim=1)
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scores = torch.einsum("bthd,bshd->bhts", q, k) * inputs.scale
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    log_normaliser = scores.logsumexp(-1)
    shift = log_normaliser.masked_fill(log_normaliser == -torch.inf, 0)
    weights = (scores - shift[..., None]).exp()
    return WindowOutput(torch.einsum("bhts,bshe->bthe", weights, v), log_normaliser.transpose(1, 2))


def sees(inputs: WindowInputs) -> Tensor:
    """Return `[B, Tq, T + N]` bool, token by token: the keys and then the sinks kept beside them."""
    batch_size, seq_len = inputs.k.shape[:2]
    documents = torch.zeros(batch_size, seq_len, dtype=torch.int64) if inputs.documents is None else inputs.documents
    num_sinks = inputs.sinks if isinstance(inputs.sinks, int) else 0
    seen = torch.zeros(batch_size, inputs.q.shape[1], seq_len, dtype=torch.bool)
    for row, ids in enumerate(documents.tolist()):
        for query in range(inputs.q.shape[1]):
            here = inputs.first_position + query
            start = ids.index(ids[here])
            near = range(max(start, here - inputs.window + 1), here + 1)
            seen[row, query, [*near, *range(start, min(start + num_sinks, here + 1))]] = True
    if inputs.valid is not None:
        seen &= inputs.valid[:, None]
    if isinstance(inputs.sinks, SinkTokens):
        queries = torch.arange(inputs.q.shape[1])
        seen = torch.cat([seen, inputs.sinks.first_query[:, None] <= queries[:, None]], dim=-1)
    return seen


def make_window_case(
    num_queries: int,
    seq_len: int,
    window: int,
    *,
    sinks: int | str = 0,
    padded: bool = False,
    packed: bool = False,
    batch_size: int = 2,
    heads: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (16, 16),
    scale: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[WindowInputs, list[Tensor]]:
    """Draw inputs and return them with the tensors that have a gradient; `sinks="beside"` keeps three beside k.

    Padding hides the first half of row 0, where only sinks beside k are left to see, and single keys elsewhere.
    """
    generator = torch.Generator().manual_seed(num_queries + 1000 * seq_len + window)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype).requires_grad_()

    q = draw(batch_size, num_queries, heads[0], widths[0])
    k, v = (draw(batch_size, seq_len, heads[1], width) for width in widths)
    leaves = [q, k, v]
    valid = documents = None
    if padded:
        valid = torch.rand(batch_size, seq_len, generator=generator) > 0.2
        valid[0, : seq_len - num_queries // 2] = False
    if packed:
        documents = (torch.rand(batch_size, seq_len, generator=generator) < 0.1).cumsum(1)
    if sinks == "beside":
        beside = [draw(batch_size, 3, heads[1], width) for width in widths]
        first_query = torch.tensor([[-5, 1, num_queries // 2], [0, num_queries - 1, num_queries]])
        leaves += beside
        sinks = SinkTokens(*beside, first_query[torch.arange(batch_size) % 2])
    scale = widths[0] ** -0.5 if scale is None else scale
    return WindowInputs(q, k, v, window, scale, valid, documents, sinks), leaves


def with_window_gradients(attend, inputs: WindowInputs, leaves: list[Tensor]) -> list[Tensor]:
    """Return the outputs, the log normalisers and the gradients of all leaves of a sum that uses both."""
    result = attend(inputs)
    finite = result.log_normaliser.isfinite()
    generator = torch.Generator().manual_seed(1)
    losses = []
    for tensor in (result.out, result.log_normaliser.masked_fill(~finite, 0)):
        losses.append((tensor.double() * torch.randn(tensor.shape, generator=generator)).sum())
    return [result.out, result.log_normaliser, *torch.autograd.grad(sum(losses), leaves)]


def worst_window_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative RMS error; infinite log normalisers must be infinite in both."""
    errors = []
    for got, wanted in zip(actual, expected, strict=True):
        hidden = wanted == -torch.inf
        if not torch.equal(got == -torch.inf, hidden):
            return float("inf")
        errors.append(relative_rms(got.masked_fill(hidden, 0), wanted.masked_fill(hidden, 0)))
    return max(errors)
