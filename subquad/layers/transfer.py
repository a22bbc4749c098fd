"""The local loss of attention transfer: student output against teacher output, one layer's memory at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from subquad.layers.inputs import HeadInputs

if TYPE_CHECKING:
    from subquad.layers.attention import SubquadAttention


class _EagerGradient(torch.autograd.Function):
    """A scalar whose gradients are computed in the forward, so that its graph is freed at once.

    The losses of all layers are then summed and backpropagated once, as Trainer and DDP expect, while only the
    parameters' gradients were kept.
    """

    @staticmethod
    def forward(ctx: Any, compute: Callable[[], Tensor], *parameters: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = compute()
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        ctx.save_for_backward(*gradients)
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(None if grad is None else grad * grad_loss.to(grad.dtype) for grad in ctx.saved_tensors)


def local_loss(attention: SubquadAttention, inputs: HeadInputs, teacher_out: Tensor) -> Tensor:
    """Return the student's squared error against the teacher's output, divided by the teacher's mean square.

    Args:
        attention: the layer.
        inputs: the teacher's heads; no gradient flows into them.
        teacher_out: `[B, T, hidden_size]`, what the layer returns; padding does not count.

    Returns:
        Scalar float32, differentiable with respect to the mixer's trainable parameters. 1 is as bad as an output of 0.
    """
    q, k, v = (x.detach() for x in (inputs.q, inputs.k, inputs.v))
    inputs = inputs._replace(hidden_states=inputs.hidden_states.detach(), q=q, k=k, v=v)
    real = inputs.real()[..., None]
    target = teacher_out.detach().float() * real

    def compute() -> Tensor:
        out = attention.project_out(attention.student_heads(inputs)).float() * real
        return (out - target).square().sum() / target.square().sum()

    parameters: list[Tensor] = []
    if attention.mixer is not None:
        parameters = [parameter for parameter in attention.mixer.parameters() if parameter.requires_grad]
    if not torch.is_grad_enabled() or not parameters:
        with torch.no_grad():
            return compute()
    return _EagerGradient.apply(compute, *parameters)
