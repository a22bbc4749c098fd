"""The states before every chunk of a segment, and, backwards, the gradients of the states after every chunk.

Both are the same recurrence over chunks, `S <- decay * S + sum_t phi(x_t) y_t^T`: forward with keys and values,
backwards with queries and the gradients of what they read. `scan.py` does the value rows of power 2, `rest.py`
the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.kernels.state import multiplicity
from subquad.kernels.triton.prepare import KeyWorkspace, QueryGradients
from subquad.kernels.triton.problem import Carry, Segment, States
from subquad.kernels.triton.rest import carry_rest, sum_rest
from subquad.kernels.triton.scan import scan_products


def states_before_chunks(
    segment: Segment, keys: KeyWorkspace, initial: Carry | None, output_final: bool
) -> tuple[States, Carry | None]:
    """Compute the state before every chunk of a segment.

    Args:
        segment: The tokens.
        keys: Its keys and values, prepared.
        initial: The state before the segment; None is zero.
        output_final: Whether to return the state after the segment.

    Returns:
        The states and, if asked for, the state after the segment.
    """
    problem = segment.problem
    final = None if not output_final else _empty_carry(segment)
    products = None
    if keys.scan is not None:
        products, _ = scan_products(segment, keys.scan, keys.total, initial, final, None)
    rest = sum_rest(segment, problem.k, problem.v, problem.weight, reverse=False)
    carry_rest(segment, rest, keys.total, initial, final, reverse=False)
    return States(products, rest, initial is not None), final


def gradients_after_chunks(
    segment: Segment,
    queries: QueryGradients,
    states: States,
    total: Tensor,
    final_gradient: Carry | None,
    output_initial: bool,
) -> tuple[States, Tensor, Carry | None]:
    """Compute the gradient of the state after every chunk of a segment.

    Args:
        segment: The tokens.
        queries: Its queries and the gradients of what they read, prepared.
        states: The states before the chunks.
        total: `[B * Hkv, chunks]`, the decay over each chunk.
        final_gradient: The gradient of the state after the segment; None is zero.
        output_initial: Whether to return the gradient of the state before the segment.

    Returns:
        The gradients without multiplicities (they read like states); `[B * Hkv, chunks]`, the inner product of each
        gradient, decayed over the chunk, with the state before it; the gradient of the state before the segment.
    """
    problem = segment.problem
    many = multiplicity(problem.k.shape[3], problem.weight)
    first = problem.num_rest_rows
    initial_gradient = None if not output_initial else _empty_carry(segment)
    products, inner = None, torch.zeros_like(total)
    if queries.scan is not None:
        products, partial = scan_products(
            segment, queries.scan, total, final_gradient, initial_gradient, states.products
        )
        inner = partial.sum(-1)
    rest = sum_rest(segment, problem.q, queries.gradient, queries.normaliser_gradient, reverse=True)
    seed = final_gradient
    if seed is not None and 2 in problem.orders:
        seed = Carry(seed.values, _scaled_rows(seed.normaliser, first, 1 / many))
    carry_rest(segment, rest, total, seed, initial_gradient, reverse=True)
    weighted = rest * states.rest
    if 2 in problem.orders:
        weighted = _scaled_rows(weighted, weighted.shape[-1] - many.shape[0], many)
        if initial_gradient is not None:
            initial_gradient = Carry(initial_gradient.values, _scaled_rows(initial_gradient.normaliser, first, many))
    return (
        States(products, rest, final_gradient is not None),
        inner + weighted.sum(-1) * total,
        initial_gradient,
    )


def _scaled_rows(rows: Tensor, first: int, factor: Tensor) -> Tensor:
    """Return `rows` with those from `first` on multiplied by `factor`."""
    return torch.cat([rows[..., :first], rows[..., first:] * factor], dim=-1)


def _empty_carry(segment: Segment) -> Carry:
    problem = segment.problem
    rows = problem.num_rows
    values = segment.workspace(rows, problem.v.shape[3], dtype=torch.float32)
    return Carry(values, segment.workspace(rows, dtype=torch.float32))
