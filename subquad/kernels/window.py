"""Exact softmax attention on a sliding window plus sink tokens, in linear time, with its log-sum-exp."""

from __future__ import annotations

import logging
from typing import Literal

from torch import Tensor

from subquad.errors import ConfigError
from subquad.kernels.backend import backend_from_environment, say_once, under_autocast
from subquad.kernels.window_blocked import blocked_window_attention
from subquad.kernels.window_flex import MIN_QUERIES, flex_problem, flex_window_attention
from subquad.kernels.window_inputs import SinkTokens, WindowInputs, WindowOutput

WindowBackend = Literal["auto", "torch", "flex"]
WINDOW_BACKENDS = ("auto", "torch", "flex")


def window_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    scale: float | None = None,
    valid: Tensor | None = None,
    documents: Tensor | None = None,
    sinks: SinkTokens | int = 0,
    backend: WindowBackend = "auto",
) -> WindowOutput:
    """Attend with softmax to the last `window` tokens (the query's own included) and to the sink tokens.

    Time and memory are O(T * window). Both results have gradients. A token is counted once, also where a sink is in
    the window.

    Args:
        q: `[B, Tq, num_heads, head_dim]`; the queries are the last Tq positions of k.
        k: `[B, T, num_kv_heads, head_dim]`, T >= Tq; heads h*G .. h*G+G-1 of q share key/value head h.
        v: `[B, T, num_kv_heads, value_head_dim]`.
        window: number of positions seen, >= 1.
        scale: factor on q.k; None is `head_dim ** -0.5`.
        valid: `[B, T]` bool, False hides a key (padding, an empty cache slot, a token given as a sink as well); None
            shows all.
        documents: `[B, T]` integer ids, equal for the tokens of one document, which stand together; a query sees keys
            of its own document only. None is one document.
        sinks: how many of the first keys of each document are seen whatever their distance; or tokens kept beside k
            that are, by queries of any document.
        backend: `flex` is one fused FlexAttention kernel, on NVIDIA GPUs; it runs compiled, once per model shape.
            `torch` handles queries in blocks, each with the keys its window can reach. `auto` takes `flex` on a GPU
            that runs it for more than 128 queries, unless the environment says `SUBQUAD_BACKEND=torch`; a GPU that
            does not run it is named in a warning, once per reason.

    Returns:
        Outputs and log normalisers, to be joined with other parts in log space.

    Raises:
        ConfigError: `window` below 1, num_heads not a multiple of num_kv_heads, or a backend that is unknown or cannot
            run.
    """
    if window < 1:
        raise ConfigError(f"window must be at least 1 (the token itself), got {window}")
    if q.shape[2] % k.shape[2]:
        raise ConfigError(f"num_heads ({q.shape[2]}) must be a multiple of num_kv_heads ({k.shape[2]})")
    scale = q.shape[3] ** -0.5 if scale is None else scale
    if q.device.type == "cuda":
        q, k, v = under_autocast(q, k, v)
    inputs = WindowInputs(q, k, v, window, scale, valid, documents, sinks)
    if _fuses(backend, q, k, v):
        return flex_window_attention(inputs)
    return blocked_window_attention(inputs)


def _fuses(backend: WindowBackend, q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether FlexAttention runs."""
    if backend not in WINDOW_BACKENDS:
        raise ConfigError(
            f"window_attention: backend {backend!r} is unknown; it must be one of {', '.join(WINDOW_BACKENDS)}."
        )
    if backend == "torch":
        return False
    if backend == "auto" and (
        q.device.type != "cuda" or q.shape[1] < MIN_QUERIES or backend_from_environment() == "torch"
    ):
        return False
    problem = flex_problem(q, k, v)
    if problem is None:
        return True
    if backend == "flex":
        raise ConfigError(f"window_attention: backend 'flex' cannot run: {problem}. Use backend='auto' or 'torch'.")
    say_once(logging.WARNING, "window_attention runs in PyTorch on this GPU, which is slower: %s", problem)
    return False
