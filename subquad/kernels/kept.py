"""Softmax over a few kept keys per head: which keys a store of fixed size holds at every step, and attention to them.

One token is offered at every step. The store keeps the tokens of highest score; where it is full, the lowest leaves.
A score does not change, so a token that has left does not come back. A sparse cache of this kind beside a state of
fixed size: McDermott et al., LoLA (arXiv 2505.23666), with another score.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from subquad.kernels.window_inputs import WindowOutput

# Steps that share one list of candidates, the store before them and their own tokens: the choice loops over these.
CHUNK_SIZE = 128
_TINY = 1e-30
# Stands for the log of an empty part, so that the gradient is 0 and not NaN.
_LOWEST_LOG = -1e30


class KeptKeys(NamedTuple):
    """What a store of `size` tokens holds over T steps in chunks of C. Tokens are named by their index.

    0 to size - 1 are the store's own before the first step, size + t is the token offered at step t, and size + T is
    none.

    Attributes:
        entries: `[B, H, chunks, size + C]` int64, the candidates of every chunk.
        members: `[B, H, chunks, C, size + C]` bool, which of them the store holds after each step.
        leaves: `[B, T, H]` int64, the token that leaves the store, or is not taken in, at each step.
        final: `[B, size, H]` int64, what the store holds at the end, oldest first, none last.
    """

    entries: Tensor
    members: Tensor
    leaves: Tensor
    final: Tensor


@torch.no_grad()
def choose_kept(
    scores: Tensor, size: int, *, documents: Tensor | None = None, chunk_size: int = CHUNK_SIZE
) -> KeptKeys:
    """Choose what the store holds at every step. Of equal scores the older token is kept. Time is O(T (size + C)).

    Args:
        scores: `[B, size + T, H]`: of the store's tokens, oldest first, and of those offered; -inf for none.
        size: most tokens held, at least 1.
        documents: `[B, T]` non-decreasing ids of the steps: a step sees the tokens offered in its own document only,
            and tokens of earlier ones leave unseen. The store must begin empty. None is one document.
        chunk_size: C, steps per chunk; the result does not depend on it.

    Returns:
        The choice.
    """
    batch, total, heads = scores.shape
    num_new = total - size
    chunk = min(chunk_size, num_new)
    # One column more is none, and absent; what fills up the last chunk points to it.
    score = functional.pad(scores.transpose(1, 2), (0, 1), value=float("-inf"))
    document = None
    if documents is not None:
        document = functional.pad(documents + 1, (size, 1)).unsqueeze(1).expand(batch, heads, -1)
    slots = torch.arange(size, device=score.device).expand(batch, heads, size)
    slots = slots.masked_fill(score[..., :size] == float("-inf"), total)
    entries, members, leaves = [], [], []
    for start in range(size, total, chunk):
        own = torch.arange(start, start + chunk, device=score.device).clamp_max(total)
        candidates = torch.cat([slots, own.expand(batch, heads, chunk)], dim=-1)
        held, left = _hold(score, document, candidates, size)
        gone = torch.where(
            left.any(-1),
            candidates[:, :, None].expand_as(left).gather(-1, left.long().argmax(-1, keepdim=True)).squeeze(-1),
            total,
        )
        slots = candidates.masked_fill(~held[:, :, -1], total).sort(-1).values[..., :size]
        if document is not None:
            # the oldest document's tokens leave first, and are not seen meanwhile
            now = document.gather(-1, own.expand(batch, heads, chunk))
            held = held & (document.gather(-1, candidates)[:, :, None] == now[..., None])
            gone = gone.masked_fill(document.gather(-1, gone) != now, total)
        entries.append(candidates)
        members.append(held)
        leaves.append(gone)
    gone = torch.cat(leaves, dim=-1)[..., :num_new].transpose(1, 2)
    return KeptKeys(torch.stack(entries, 2), torch.stack(members, 2), gone, slots.transpose(1, 2))


def _hold(score: Tensor, document: Tensor | None, candidates: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return which candidates are held after each step of a chunk and which leave at it, `[B, H, C, size + C]`."""
    value = score.gather(-1, candidates)
    num = candidates.shape[-1]
    chunk = num - size
    order = value.argsort(dim=-1, descending=True, stable=True)
    if document is not None:
        age = document.gather(-1, candidates).gather(-1, order).argsort(dim=-1, descending=True, stable=True)
        order = order.gather(-1, age)
    offered = torch.ones(chunk, num, dtype=torch.bool, device=score.device)
    offered[:, size:] = offered[:, size:].tril()
    present = offered & (value > float("-inf"))[:, :, None]
    ranked = order[:, :, None].expand_as(present)
    best_first = present.gather(-1, ranked)
    best = best_first & (best_first.int().cumsum(-1) <= size)
    held = torch.zeros_like(present).scatter(-1, ranked, best)
    out = present & ~held
    return held, out & ~functional.pad(out, (0, 0, 1, 0))[:, :, :-1]


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Return tokens by their index, another for every head; none is zeros.

    Args:
        x: `[B, N, H, ...]`.
        index: `[B, M, H]` int64 from 0 to N, N being none.

    Returns:
        `[B, M, H, ...]`.
    """
    padded = torch.cat([x, torch.zeros_like(x[:, :1])], dim=1)
    wide = index.reshape(*index.shape, *(1 for _ in x.shape[3:])).expand(*index.shape, *x.shape[3:])
    return padded.gather(1, wide)


def kept_attention(q: Tensor, k: Tensor, v: Tensor, kept: KeptKeys, *, scale: float | None = None) -> WindowOutput:
    """Attend with softmax to what the store holds after each step. Both results have gradients.

    Args:
        q: `[B, T, num_heads, head_dim]`.
        k: `[B, size + T, num_kv_heads, head_dim]`, the store's keys and those offered; heads h*G .. h*G+G-1 of q share
            key/value head h.
        v: `[B, size + T, num_kv_heads, value_head_dim]`.
        kept: from `choose_kept`, H = num_kv_heads.
        scale: factor on q.k; None is `head_dim ** -0.5`.

    Returns:
        Outputs and log normalisers, to be joined with other parts in log space.
    """
    batch, num_new, num_heads, dim = q.shape
    heads, chunks, chunk, num = kept.members.shape[1:]
    scale = dim**-0.5 if scale is None else scale
    index = kept.entries.permute(0, 2, 3, 1).flatten(1, 2)
    keys, values = (take_tokens(x, index).view(batch, chunks, num, heads, -1) for x in (k, v))
    padded = functional.pad(q, (0, 0, 0, 0, 0, chunks * chunk - num_new))
    queries = padded.view(batch, chunks, chunk, heads, num_heads // heads, dim)
    logits = torch.einsum("bnchgd,bnehd->bhngce", queries, keys)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
    seen = kept.members[:, :, :, None]
    largest = logits.masked_fill(~seen, float("-inf")).amax(-1, keepdim=True).detach()
    weights = (logits - largest.clamp_min(_LOWEST_LOG)).masked_fill(~seen, float("-inf")).exp()
    mass = weights.sum(-1, keepdim=True)
    empty = mass == 0
    out = torch.einsum("bhngce,bnehd->bnchgd", (weights / mass.clamp_min(_TINY)).to(values.dtype), values)
    log_mass = torch.where(empty, float("-inf"), mass.clamp_min(_TINY).log() + largest)
    log_mass = log_mass.squeeze(-1).permute(0, 2, 4, 1, 3)
    return WindowOutput(
        out.reshape(batch, chunks * chunk, num_heads, -1)[:, :num_new],
        log_mass.reshape(batch, chunks * chunk, num_heads)[:, :num_new],
    )


def join_exact(first: WindowOutput, second: WindowOutput) -> WindowOutput:
    """Join two softmaxes over different keys into the softmax over both.

    Args:
        first: one part.
        second: the other, of the same shape.

    Returns:
        Output and log normaliser over all keys; zero and -inf where neither part sees any.
    """
    logs = [part.log_normaliser.clamp_min(_LOWEST_LOG) for part in (first, second)]
    total = torch.logaddexp(*logs)
    out = sum(
        (log - total).exp()[..., None].to(part.out.dtype) * part.out
        for part, log in zip((first, second), logs, strict=True)
    )
    assert isinstance(out, Tensor), "a sum of two tensors"
    return WindowOutput(out, total.masked_fill(total < _LOWEST_LOG / 2, float("-inf")))
