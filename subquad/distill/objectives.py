"""The two training objectives as modules whose forward returns the loss.

A Trainer wraps the module it trains (DDP, FSDP, autocast) and that wrapping acts on `forward` only, so everything a
step computes, the teacher's pass included, happens inside one forward of the wrapped module.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from subquad.convert.adapters import adapters_disabled
from subquad.distill.losses import (
    LossWeights,
    distillation_loss,
    next_token_targets,
    next_token_weights,
    token_log_probs,
)
from subquad.layers import attention_mode, collect_local_losses

# A token that the window has no idea of: more nats than this say no more.
MOST_FAR_GAIN = 5.0


class Objective(nn.Module):
    """What a `DistillTrainer` trains.

    Attributes:
        student: The converted causal language model.
    """

    # the Trainer asks for these: the loss is a mean per batch, so gradient accumulation has to divide it; and these
    # are the blocks that FSDP shards one by one
    accepts_loss_kwargs = False

    def __init__(self, student: PreTrainedModel) -> None:
        """Take a model.

        Args:
            student: The converted causal language model, not copied.
        """
        super().__init__()
        self.student = student
        self._no_split_modules = student._no_split_modules


class TransferObjective(Objective):
    """Stage 1: each converted layer's output against the teacher's, given the teacher's input to that layer."""

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> dict[str, Tensor]:
        """Return the mean of the layers' local losses.

        The model runs as the teacher up to the last layer and no further: no logits are computed.

        Args:
            input_ids: Token ids `[B, T]`.
            position_ids: Positions `[B, T]` that restart at each document, or None.

        Returns:
            `loss`: scalar float32; 1 is a student output no better than zero.
        """
        with attention_mode(self.student, "transfer"):
            self.student.base_model(input_ids=input_ids, position_ids=position_ids, use_cache=False)
        losses = collect_local_losses(self.student)
        return {"loss": torch.stack(list(losses.values())).mean()}


class LogitObjective(Objective):
    """Stage 2: the model's output distribution against the teacher's, and optionally the text itself.

    Attributes:
        teacher: A separate teacher, or None where the student in teacher mode, its adapters off, is the teacher.
        weights: What the loss is made of.
        chunk_tokens: Tokens whose logits exist at one time.
        far_weight: How much more a token counts per nat of its log probability that the teacher has from beyond window
            and sinks; 0 counts all tokens alike.
    """

    def __init__(
        self,
        student: PreTrainedModel,
        teacher: PreTrainedModel | None,
        weights: LossWeights,
        chunk_tokens: int,
        far_weight: float = 0.0,
    ) -> None:
        """Take the models.

        Args:
            student: The converted causal language model, not copied.
            teacher: A separate teacher, or None where the student is its own.
            weights: What the loss is made of; `kl` and `hidden` of 0 save the teacher's pass.
            chunk_tokens: Tokens whose logits exist at one time.
            far_weight: See above; above 0 it needs the student as its own teacher, and costs a forward pass more.
        """
        super().__init__(student)
        self.teacher = teacher
        self.weights = weights
        self.chunk_tokens = chunk_tokens
        self.far_weight = far_weight

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        loss_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Return the loss per predicted token.

        Args:
            input_ids: Token ids `[B, T]`.
            position_ids: Positions `[B, T]` that restart at each document, or None.
            labels: Labels `[B, T]`, not shifted, -100 is ignored; None takes them from the other two.
            loss_weights: Weights `[B, T]` of the labels; None is 1.

        Returns:
            `loss`: scalar float32 in nats.
        """
        targets = next_token_targets(input_ids, position_ids, labels)
        token_weights = None if loss_weights is None else next_token_weights(loss_weights)
        reads_teacher = self.weights.reads_teacher or self.far_weight
        teacher_hidden = self._teacher_hidden(input_ids, position_ids) if reads_teacher else None
        if teacher_hidden is not None and self.far_weight:
            gain = self._far_gain(input_ids, position_ids, teacher_hidden, targets)
            token_weights = (1.0 if token_weights is None else token_weights) * (1.0 + self.far_weight * gain)
        student_hidden = self.student.base_model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        teacher = self.student if self.teacher is None else self.teacher
        loss = distillation_loss(
            student_hidden,
            teacher_hidden if self.weights.reads_teacher else None,
            targets,
            self.student.get_output_embeddings(),
            teacher.get_output_embeddings(),
            self.weights,
            self.chunk_tokens,
            token_weights=token_weights,
        )
        return {"loss": loss}

    @torch.no_grad()
    def _far_gain(
        self, input_ids: Tensor, position_ids: Tensor | None, teacher_hidden: Tensor, targets: Tensor
    ) -> Tensor:
        """Return what the teacher gains from beyond window and sinks, `[B, T]` nats between 0 and `MOST_FAR_GAIN`."""
        with attention_mode(self.student, "window_only"), adapters_disabled(self.student):
            window_hidden = self.student.base_model(
                input_ids=input_ids, position_ids=position_ids, use_cache=False
            ).last_hidden_state
        head = self.student.get_output_embeddings()
        teacher, window = (
            token_log_probs(hidden, targets, head, self.chunk_tokens) for hidden in (teacher_hidden, window_hidden)
        )
        return (teacher - window).clamp(0.0, MOST_FAR_GAIN)

    @torch.no_grad()
    def _teacher_hidden(self, input_ids: Tensor, position_ids: Tensor | None) -> Tensor:
        inputs = {"input_ids": input_ids, "position_ids": position_ids, "use_cache": False}
        if self.teacher is not None:
            self.teacher.eval()
            return self.teacher.base_model(**inputs).last_hidden_state
        with attention_mode(self.student, "teacher"), adapters_disabled(self.student):
            return self.student.base_model(**inputs).last_hidden_state
