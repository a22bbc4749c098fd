"""The loss of stage 2: Kullback-Leibler divergence to the teacher and cross-entropy, from hidden states.

The logits of a row of tokens are the largest tensor of a training step (`[B, T, vocab]` in float32), so they exist
for one chunk of tokens at a time only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from subquad.distill.packing import IGNORED_LABEL


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """What the loss of stage 2 is made of: `kl * KL(teacher || student) + ce * cross_entropy + hidden * mismatch`.

    Attributes:
        kl: Weight of the divergence to the teacher, at least 0.
        ce: Weight of the cross-entropy with the text, at least 0.
        hidden: Weight of the mismatch of the last hidden states, at least 0: `hidden_mismatch_sum`.
        temperature: Divides both models' logits in the divergence, above 0. The divergence is multiplied by its
            square so that gradients keep their size (Hinton et al. 2015, section 2).
    """

    kl: float = 1.0
    ce: float = 0.0
    hidden: float = 0.0
    temperature: float = 1.0

    @property
    def reads_teacher(self) -> bool:
        """Whether the loss needs the teacher's hidden states."""
        return bool(self.kl or self.hidden)


def next_token_targets(input_ids: Tensor, position_ids: Tensor | None, labels: Tensor | None) -> Tensor:
    """Return what each position has to predict.

    Args:
        input_ids: Token ids `[B, T]`.
        position_ids: Positions `[B, T]` that restart at each document, or None; read where `labels` is None.
        labels: Labels `[B, T]` as Hugging Face has them (not shifted, -100 is ignored), or None.

    Returns:
        Targets `[B, T]`: the label of the next position; -100 at the end of a document and of the row.
    """
    if labels is None:
        labels = input_ids if position_ids is None else input_ids.masked_fill(position_ids == 0, IGNORED_LABEL)
    return F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)


def next_token_weights(loss_weights: Tensor) -> Tensor:
    """Return the weights `[B, T]` of what each position predicts, from those of the tokens, as `next_token_targets`."""
    return F.pad(loss_weights[:, 1:], (0, 1))


def distillation_loss(
    student_hidden: Tensor,
    teacher_hidden: Tensor | None,
    targets: Tensor,
    student_head: nn.Module,
    teacher_head: nn.Module | None,
    weights: LossWeights,
    chunk_tokens: int = 512,
    *,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the loss per predicted token, averaged over all of them whatever the batch and length.

    At temperature tau, `KL = tau**2 * sum_v p_v (log p_v - log q_v)` with `p = softmax(teacher / tau)` and
    `q = softmax(student / tau)`. Logits are made from the hidden states `chunk_tokens` at a time and freed again:
    gradients with respect to the hidden states (and to the head, where it is trained) are computed in the forward
    pass, since the loss is a scalar and they only need scaling later. Memory is one chunk of both models' logits and
    one `[B, T, hidden]` gradient; the head runs once per token and model, not twice as recomputation would have it.
    The result can be differentiated once.

    Args:
        student_hidden: Student's last hidden states `[B, T, hidden]`, before its head.
        teacher_hidden: Teacher's `[B, T, hidden]`, without gradient; None where `weights` read no teacher.
        targets: Next tokens `[B, T]`, -100 at positions that count for nothing.
        student_head: Maps hidden states to logits `[..., vocab]`.
        teacher_head: The teacher's head (the same module where the two models share it); None with `teacher_hidden`.
        weights: Weights and temperature.
        chunk_tokens: Tokens whose logits exist at one time.
        token_weights: Weight `[B, T]` of each position in the sum, at least 0; None is 1. They do not change what the
            sum is divided by, so that a weight of 10 counts as ten tokens of text.

    Returns:
        Scalar float32; 0 if every position is masked.
    """
    assert teacher_hidden is not None or not weights.reads_teacher, "the loss needs a teacher"
    assert teacher_head is not None or not weights.kl, "KL needs the teacher's head"
    flat_hidden = student_hidden.flatten(0, 1)
    flat_teacher = None if teacher_hidden is None else teacher_hidden.detach().flatten(0, 1)
    flat_targets = targets.flatten()
    flat_weights = None if token_weights is None else token_weights.float().flatten()

    def chunk_loss(hidden: Tensor, start: int) -> Tensor:
        stop = start + len(hidden)
        teacher_logits = None
        if weights.kl and flat_teacher is not None and teacher_head is not None:
            with torch.no_grad():
                teacher_logits = teacher_head(flat_teacher[start:stop])
        counted = None if flat_weights is None else flat_weights[start:stop]
        return token_loss_sum(student_head(hidden), teacher_logits, flat_targets[start:stop], weights, counted)

    parameters = [parameter for parameter in student_head.parameters() if parameter.requires_grad]
    needs_grad = torch.is_grad_enabled() and (flat_hidden.requires_grad or bool(parameters))
    total = torch.zeros((), device=flat_hidden.device)
    if weights.kl or weights.ce:
        total = _SumOfChunks.apply(chunk_loss, chunk_tokens, needs_grad, flat_hidden, *parameters)
    if weights.hidden and flat_teacher is not None:
        total = total + weights.hidden * hidden_mismatch_sum(flat_hidden, flat_teacher, flat_targets, flat_weights)
    return total / (flat_targets != IGNORED_LABEL).sum().clamp(min=1)


@torch.no_grad()
def token_log_probs(hidden: Tensor, targets: Tensor, head: nn.Module, chunk_tokens: int = 512) -> Tensor:
    """Return the log probability of every target, from hidden states, `chunk_tokens` at a time.

    Args:
        hidden: Last hidden states `[B, T, hidden]`.
        targets: Next tokens `[B, T]`, -100 at positions that count for nothing.
        head: Maps hidden states to logits `[..., vocab]`.
        chunk_tokens: Tokens whose logits exist at one time.

    Returns:
        `[B, T]` float32, nats; 0 where a position counts for nothing.
    """
    chunks = zip(hidden.flatten(0, 1).split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True)
    found = [
        -F.cross_entropy(head(states).float(), ids, ignore_index=IGNORED_LABEL, reduction="none")
        for states, ids in chunks
    ]
    return torch.cat(found).view(targets.shape)


def token_loss_sum(
    student_logits: Tensor,
    teacher_logits: Tensor | None,
    targets: Tensor,
    weights: LossWeights,
    token_weights: Tensor | None = None,
) -> Tensor:
    """Return the weighted loss summed over the tokens that count, computed in float32.

    Args:
        student_logits: `[N, vocab]`.
        teacher_logits: `[N, vocab]`, or None for no divergence.
        targets: `[N]`, -100 at positions that count for nothing.
        weights: Weights and temperature.
        token_weights: `[N]` float32, weight of each position; None is 1.

    Returns:
        Scalar float32.
    """
    counts = targets != IGNORED_LABEL
    losses = torch.zeros(len(targets), dtype=torch.float32, device=student_logits.device)
    if teacher_logits is not None and weights.kl:
        student_log = F.log_softmax(student_logits.float() / weights.temperature, dim=-1)
        teacher_log = F.log_softmax(teacher_logits.float() / weights.temperature, dim=-1)
        divergence = F.kl_div(student_log, teacher_log, reduction="none", log_target=True).sum(dim=-1)
        losses = losses + weights.kl * weights.temperature**2 * divergence
    if weights.ce:
        losses = losses + weights.ce * F.cross_entropy(
            student_logits.float(), targets, ignore_index=IGNORED_LABEL, reduction="none"
        )
    if token_weights is not None:
        losses = losses * token_weights
    return torch.where(counts, losses, 0.0).sum()


def hidden_mismatch_sum(
    student_hidden: Tensor, teacher_hidden: Tensor, targets: Tensor, token_weights: Tensor | None = None
) -> Tensor:
    """Return the squared distance of two models' hidden states over the teacher's square, summed over tokens.

    Args:
        student_hidden: `[N, hidden]`.
        teacher_hidden: `[N, hidden]`.
        targets: `[N]`, -100 at positions that count for nothing.
        token_weights: `[N]` float32, weight of each position; None is 1.

    Returns:
        Scalar float32; a token whose hidden state is zero adds its weight.
    """
    student, teacher = student_hidden.float(), teacher_hidden.float()
    losses = (student - teacher).square().sum(-1) / teacher.square().sum(-1).clamp_min(1e-12)
    if token_weights is not None:
        losses = losses * token_weights
    return torch.where(targets != IGNORED_LABEL, losses, 0.0).sum()


class _SumOfChunks(torch.autograd.Function):
    """Sum of `chunk_loss(hidden[start:stop], start)` whose gradient is taken chunk by chunk in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        chunk_loss: Callable[[Tensor, int], Tensor],
        chunk_tokens: int,
        needs_grad: bool,
        hidden: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        grads = [torch.zeros_like(hidden), *(torch.zeros_like(p, dtype=torch.float32) for p in parameters)]
        for start in range(0, len(hidden), chunk_tokens):
            with torch.set_grad_enabled(needs_grad):
                chunk = hidden[start : start + chunk_tokens].detach().requires_grad_(needs_grad)
                loss = chunk_loss(chunk, start)
            if needs_grad:
                chunk_grad, *parameter_grads = torch.autograd.grad(loss, [chunk, *parameters])
                grads[0][start : start + chunk_tokens] = chunk_grad
                _add(grads[1:], parameter_grads)
            total += loss.detach()
        ctx.grads = grads
        ctx.dtypes = [hidden.dtype, *(parameter.dtype for parameter in parameters)]
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [(grad * grad_total).to(dtype) for grad, dtype in zip(ctx.grads, ctx.dtypes, strict=True)]
        return None, None, None, *scaled


def _add(totals: Sequence[Tensor], terms: Sequence[Tensor]) -> None:
    for total, term in zip(totals, terms, strict=True):
        total += term
