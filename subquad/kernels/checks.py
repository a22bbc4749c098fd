"""Checks of the op's arguments: everything that is wrong, in one message."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.errors import ConfigError
from subquad.kernels.backend import PRECISIONS
from subquad.kernels.state import MAX_STATE_ORDER, Coefs, PolyState, active_orders, num_rows

MAX_ORDER = 10
FORMS = ("auto", "quadratic", "chunked", "recurrent")


def check_shapes(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, key_weight: Tensor | None) -> None:
    """Raise `ConfigError` unless the tensors are `[B, T, heads, width]` of one problem."""
    problems = []
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.dim() != 4 or 0 in tensor.shape:
            problems.append(
                f"{name} has shape {list(tensor.shape)}; it must be [batch, tokens, heads, width], none of them 0"
            )
        if not tensor.is_floating_point():
            problems.append(f"{name} is {tensor.dtype}; it must be a floating point tensor")
    if not problems:
        problems = _disagreements(q, k, v)
    for name, per_key in (("log_decay", log_decay), ("key_weight", key_weight)):
        if per_key is not None and per_key.shape != k.shape[:3]:
            problems.append(
                f"{name} has shape {list(per_key.shape)}; it must be [batch, tokens, heads] of k, {list(k.shape[:3])}"
            )
    _raise(problems)


def _disagreements(q: Tensor, k: Tensor, v: Tensor) -> list[str]:
    problems = []
    if k.shape[:3] != v.shape[:3]:
        problems.append(f"k {list(k.shape)} and v {list(v.shape)} must agree in batch, tokens and heads")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        problems.append(f"q {list(q.shape)} and k {list(k.shape)} must agree in batch and width")
    if q.shape[1] > k.shape[1]:
        problems.append(f"q has {q.shape[1]} tokens and k {k.shape[1]}; the queries are the last of the key positions")
    if q.shape[2] % k.shape[2]:
        problems.append(f"q has {q.shape[2]} heads and k {k.shape[2]}; the first must be a multiple of the second")
    return problems


def check_coefs(coefs: Coefs, num_heads: int) -> None:
    """Raise `ConfigError` unless `coefs` are 1 to 11 numbers or per-query-head tensors, one of them not 0."""
    problems = []
    if not 1 <= len(coefs) <= MAX_ORDER + 1:
        problems.append(f"coefs has {len(coefs)} entries; it must have one per power 0, 1, 2, … up to {MAX_ORDER}")
    for order, coef in enumerate(coefs):
        if isinstance(coef, Tensor) and coef.shape != (num_heads,):
            problems.append(
                f"coefs[{order}] has shape {list(coef.shape)}; a tensor must be [query heads] = [{num_heads}]"
            )
    if not active_orders(coefs):
        problems.append(f"coefs {coefs} are all 0; the score needs at least one power")
    _raise(problems)


def check_form(
    form: str, orders: tuple[int, ...], num_queries: int, num_keys: int, needs_state: bool, chunk_size: int | None
) -> None:
    """Raise `ConfigError` unless the form can compute these powers and lengths."""
    problems = []
    if form not in FORMS:
        problems.append(f"form {form!r} is unknown; it must be one of {', '.join(FORMS)}")
    if chunk_size is not None and chunk_size < 1:
        problems.append(f"chunk_size is {chunk_size}; it must be at least 1")
    if orders[-1] > MAX_STATE_ORDER:
        if form in ("chunked", "recurrent"):
            problems.append(
                f"form {form!r} with power {orders[-1]}: powers above {MAX_STATE_ORDER} need form 'auto' or 'quadratic'"
            )
        if needs_state:
            problems.append(f"power {orders[-1]} has no state (only powers up to {MAX_STATE_ORDER} have); leave it out")
    if form == "recurrent" and (num_queries, num_keys) != (1, 1):
        problems.append(
            f"form 'recurrent' takes one token, got {num_queries} queries and {num_keys} keys; use 'chunked'"
        )
    _raise(problems)


def check_cu_seqlens(cu_seqlens: Tensor, k: Tensor, needs_state: bool) -> None:
    """Raise `ConfigError` unless the boundaries cut one row of k into sequences, and no state goes in or out."""
    problems = []
    if k.shape[0] != 1:
        problems.append(f"cu_seqlens packs sequences into one row, but the batch has {k.shape[0]}; flatten it")
    if needs_state:
        problems.append(
            "cu_seqlens with a state: there would be one state per sequence; run them as a batch, padding with "
            "key_weight 0"
        )
    if cu_seqlens.dim() != 1 or cu_seqlens.is_floating_point() or cu_seqlens.shape[0] < 2:
        problems.append(f"cu_seqlens must be whole numbers [sequences + 1], got {cu_seqlens.dtype} {cu_seqlens.shape}")
    # torch.compile cannot look at values.
    elif not torch.compiler.is_compiling():
        bounds = cu_seqlens.tolist()
        if bounds[0] != 0 or bounds[-1] != k.shape[1] or bounds != sorted(bounds):
            problems.append(f"cu_seqlens must ascend from 0 to the {k.shape[1]} tokens of k, got {bounds}")
    _raise(problems)


def check_bidirectional(form: str, has_decay: bool, needs_state: bool, packed: bool, same_length: bool) -> None:
    """Raise `ConfigError` unless the arguments make sense where every query sees every key (`causal=False`)."""
    problems = []
    if has_decay:
        problems.append(
            "log_decay with causal=False: a decay says how much of the past is left at a query, and here a query sees "
            "the tokens after it too; leave it out"
        )
    if needs_state:
        problems.append("a state with causal=False: nothing comes after a sum over all tokens; leave it out")
    if form == "recurrent":
        problems.append("form 'recurrent' with causal=False: a token sees those after it; use 'auto' or 'chunked'")
    if packed and not same_length:
        problems.append("cu_seqlens with causal=False needs as many queries as keys, to know whose queries they are")
    _raise(problems)


def check_precision(precision: str) -> None:
    """Raise `ConfigError` unless the precision is a known one."""
    _raise([] if precision in PRECISIONS else [f"precision {precision!r} must be one of {', '.join(PRECISIONS)}"])


def check_state(state: PolyState, k: Tensor, v: Tensor, orders: tuple[int, ...]) -> None:
    """Raise `ConfigError` unless the state belongs to these keys, values and powers."""
    expected = (k.shape[0], k.shape[2], num_rows(k.shape[3], orders))
    problems = []
    if state.values.shape != (*expected, v.shape[3]):
        problems.append(f"initial_state.values has shape {list(state.values.shape)}, not {[*expected, v.shape[3]]}")
    if state.normaliser.shape != expected:
        problems.append(f"initial_state.normaliser has shape {list(state.normaliser.shape)}, not {list(expected)}")
    if problems:
        problems.append(f"the state is [batch, kv heads, rows of powers {list(orders)}, value width]")
    _raise(problems)


def _raise(problems: list[str]) -> None:
    if problems:
        raise ConfigError("poly_attention: " + "; ".join(problems) + ".")
