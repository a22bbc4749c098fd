"""The local loss of attention transfer: student output against teacher output, one layer's memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from subquad.layers.sequence import SequenceInfo

if TYPE_CHECKING:
    from subquad.layers.attention import SubquadAttention


class _EagerGradient(torch.autograd.Function):
    """A scalar whose gradients are computed in the forward, so that its graph is freed at once.

    The losses of all layers are then summed and backpropagated once, as Trainer and DDP expect, while only the
    parameters' gradients were kept.
    """

    @staticmethod
    def forward(ctx, compute: Callable[[], Tensor], *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = compute()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        ctx.save_for_backward(*gradients)
        return loss.detach()

    @staticmethod
    def backward(ctx, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)


def local_loss(
    attention: SubquadAttention,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    rope: tuple[Tensor, Tensor],
    sequence: SequenceInfo | None,
    teacher_out: Tensor,
) -> Tensor:
    """Return the student's squared error against the teacher's output, divided by the teacher's mean square.

    Args:
        attention: the layer.
        inputs: hidden states `[B, T, hidden_size]` and the projected q, k, v of the teacher.
        rope: (cos, sin).
        sequence: padding and documents; padding does not count.
        teacher_out: `[B, T, hidden_size]` after `o_proj`.

    Returns:
        Scalar float32, differentiable with respect to the mixer's trainable parameters. 1 is as bad as an output of 0.
    """
    hidden_states, *projected = (x.detach() for x in inputs)
    target = teacher_out.detach().float()

    def compute() -> Tensor:
        heads = attention.student_heads(hidden_states, tuple(projected), rope, sequence)
        out = attention.o_proj(heads.flatten(2)).float()
        error, power = (out - target).square(), target.square()
        if sequence is not None and sequence.real is not None:
            real = sequence.real[..., None]
            error, power = error * real, power * real
        return error.sum() / power.sum()

    parameters = [] if attention.mixer is None else trainable(attention.mixer)
    if not torch.is_grad_enabled() or not parameters:
        with torch.no_grad():
            return compute()
    return _EagerGradient.apply(compute, *parameters)


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """Return the module's parameters that require gradients."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]
