"""Which key/value heads stay softmax: the heads whose conversion the model's own predictions miss most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.distill.losses import LossWeights, distillation_loss, next_token_targets
from subquad.errors import ConfigError
from subquad.layers import SubquadAttention, attention_mode, converted_layers

# Every round drops this share of the heads that are left, the least useful ones.
DROPPED_PER_ROUND = 0.3
# Gradients are taken where heads are half softmax: at their teacher the divergence has no slope.
MIDDLE = 0.5

Row = dict[str, Tensor]


class Head(NamedTuple):
    """A key/value head of the model."""

    layer_idx: int
    kv_head: int


@dataclass(frozen=True)
class RankedHead:
    """What keeping one key/value head exact is worth.

    Attributes:
        layer_idx: its layer.
        kv_head: its index there.
        text: nats per token of text that it saves, by its slope in the last round it took part in.
        recall: the same per token of a recalled answer.
        value: both as shares of what converting every head costs, recall times its weight; the order of the ranking.
    """

    layer_idx: int
    kv_head: int
    text: float
    recall: float
    value: float


@dataclass(frozen=True)
class HeadRanking:
    """The key/value heads of a model, the most useful first.

    Attributes:
        heads: every head; the first `kept` were never dropped, the others follow in the opposite order of dropping.
        kept: how many the ranking was made for.
        text_gap: divergence of the converted model from its teacher, nats per token of text.
        recall_gap: the same per token of a recalled answer.
        tokens: tokens that were read, each time they were.
    """

    heads: tuple[RankedHead, ...]
    kept: int
    text_gap: float
    recall_gap: float
    tokens: int

    def exact_kv_heads(self, count: int | None = None) -> dict[int, tuple[int, ...]]:
        """Return the first heads by layer: layer index to ascending head indices; `count` None is `kept`."""
        chosen = sorted((head.layer_idx, head.kv_head) for head in self.heads[: self.kept if count is None else count])
        return {layer: tuple(head for at, head in chosen if at == layer) for layer in dict(chosen)}


def rank_heads(
    model: PreTrainedModel,
    text_rows: Sequence[Row],
    recall_rows: Sequence[Row],
    *,
    keep: int,
    recall_weight: float = 1.0,
    on_batch: Callable[[int], None] | None = None,
) -> HeadRanking:
    """Rank the key/value heads by what their conversion costs, and keep the most useful ones.

    Every head's output is a mixture of its softmax and its mixer. The slope of the divergence from the teacher, taken
    half-way with all heads that are left, says what each is worth while the others are as they are; the least useful
    30 % become mixers and the rest is measured again, until `keep` are left. Heads that only matter together, or that
    stand in for each other, are told apart so, which one ranking of all heads cannot. The idea of gates on heads is
    that of DuoAttention (Xiao et al. 2024, arXiv 2410.10819), which trains them.

    Args:
        model: a converted model without exact heads, calibrated; nothing of it changes.
        text_rows: batches `input_ids` `[B, T]`, optionally `position_ids` and `labels`, of ordinary text.
        recall_rows: the same; the labels that are not -100 are answers that stand far back in the row. May be empty.
        keep: heads to keep, at least 1 and fewer than there are.
        recall_weight: how much the share of the recall gap counts beside the share of the text gap.
        on_batch: called with the number of tokens after each batch (for a progress bar).

    Returns:
        The ranking.

    Raises:
        ConfigError: No converted layer, layers with exact heads already, no rows, or a `keep` out of range.
    """
    layers = {layer.layer_idx: layer for layer in converted_layers(model) if layer.mixer is not None}
    _check(layers, text_rows, keep)
    study = _Study(model, layers, on_batch)
    kinds = {"text": list(text_rows), "recall": list(recall_rows)}
    gaps = {kind: study.divergence(rows) for kind, rows in kinds.items()}
    left = [Head(index, head) for index, layer in layers.items() for head in range(layer.geometry.num_kv_heads)]
    ranked: list[RankedHead] = []
    dropped: list[RankedHead] = []
    for count in rounds(len(left), keep):
        dropped = [*ranked[count:], *dropped]
        left = [Head(head.layer_idx, head.kv_head) for head in ranked[:count]] or left
        slopes = {kind: study.slopes(rows, left) for kind, rows in kinds.items()}
        ranked = _ranked(left, slopes, gaps, recall_weight)
    return HeadRanking((*ranked, *dropped), keep, gaps["text"], gaps["recall"], study.tokens)


def rounds(count: int, keep: int) -> list[int]:
    """Return how many heads are left in each round, from all `count` of them to `keep`."""
    sizes = [count]
    while sizes[-1] > keep:
        sizes.append(max(keep, min(sizes[-1] - 1, round(sizes[-1] * (1 - DROPPED_PER_ROUND)))))
    return sizes


def _check(layers: dict[int, SubquadAttention], text_rows: Sequence[Row], keep: int) -> None:
    if not layers:
        raise ConfigError("rank_heads: the model has no converted layer")
    exact = [index for index, layer in layers.items() if layer.split.exact]
    if exact:
        raise ConfigError(
            f"rank_heads chooses exact heads, but layers {exact} have exact_kv_heads already; convert without them"
        )
    if not text_rows:
        raise ConfigError("rank_heads: no rows of text were given; it needs at least one batch")
    count = sum(layer.geometry.num_kv_heads for layer in layers.values())
    if not 1 <= keep < count:
        raise ConfigError(f"rank_heads: keep must be at least 1 and below the {count} converted heads, got {keep}")


def _ranked(
    heads: Sequence[Head], slopes: dict[str, dict[Head, float]], gaps: dict[str, float], recall_weight: float
) -> list[RankedHead]:
    """Return the heads, the most useful first."""

    def value(head: Head) -> float:
        shares = {kind: slopes[kind][head] / gaps[kind] if gaps[kind] > 0 else 0.0 for kind in gaps}
        return shares["text"] + recall_weight * shares["recall"]

    ranked = [RankedHead(*head, slopes["text"][head], slopes["recall"][head], value(head)) for head in heads]
    return sorted(ranked, key=lambda head: (-head.value, head.layer_idx, head.kv_head))


class _Study:
    """Divergences and slopes of one model, whose weights are left alone."""

    def __init__(
        self, model: PreTrainedModel, layers: dict[int, SubquadAttention], on_batch: Callable[[int], None] | None
    ) -> None:
        self.model, self.layers, self.on_batch = model, layers, on_batch
        self.tokens = 0
        # rows are read many times; their teacher does not change
        self.teachers: dict[int, Tensor] = {}

    def divergence(self, rows: Sequence[Row]) -> float:
        """Return the converted model's mean divergence from its teacher per token that counts; 0 without rows."""
        with torch.no_grad():
            losses = [self._loss(row).item() for row in rows]
        return sum(losses) / max(len(losses), 1)

    def slopes(self, rows: Sequence[Row], left: Sequence[Head]) -> dict[Head, float]:
        """Return how much the mean divergence falls per unit of softmax in each head that is left, all half softmax."""
        totals = dict.fromkeys(left, 0.0)
        for row in rows:
            shares = {
                index: torch.tensor(
                    [MIDDLE * (Head(index, head) in totals) for head in range(layer.geometry.num_kv_heads)],
                    device=self.model.device,
                    requires_grad=True,
                )
                for index, layer in self.layers.items()
            }
            with _softmax_shares(self.layers, shares), _frozen(self.model):
                gradients = torch.autograd.grad(self._loss(row), list(shares.values()))
            for index, gradient in zip(shares, gradients, strict=True):
                for head, slope in enumerate(gradient.tolist()):
                    if Head(index, head) in totals:
                        totals[Head(index, head)] -= slope / len(rows)
        return totals

    def _loss(self, row: Row) -> Tensor:
        inputs = {name: row[name] for name in ("input_ids", "position_ids") if name in row}
        teacher = self.teachers.get(id(row))
        if teacher is None:
            with torch.no_grad(), attention_mode(self.model, "teacher"):
                teacher = self.model.base_model(**inputs, use_cache=False).last_hidden_state
            self.teachers[id(row)] = teacher
        with attention_mode(self.model, "student"):
            student = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        targets = next_token_targets(row["input_ids"], row.get("position_ids"), row.get("labels"))
        head = self.model.get_output_embeddings()
        loss = distillation_loss(student, teacher, targets, head, head, LossWeights(kl=1.0))
        self.tokens += row["input_ids"].numel()
        if self.on_batch is not None:
            self.on_batch(row["input_ids"].numel())
        return loss


@contextmanager
def _softmax_shares(layers: dict[int, SubquadAttention], shares: dict[int, Tensor]) -> Iterator[None]:
    try:
        for index, layer in layers.items():
            layer.softmax_share = shares[index]
        yield
    finally:
        for layer in layers.values():
            layer.softmax_share = None


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
