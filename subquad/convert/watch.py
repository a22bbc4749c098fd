"""Running a converted model over a few rows: as its teacher while its layers are measured, or for its loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from subquad.layers import SubquadAttention, attention_mode
from subquad.layers.inputs import HeadInputs

# Rows on which a model's loss is asked for before and after a change that may be undone.
CHECKED_ROWS = 4


class Watcher(Protocol):
    """What measures a layer."""

    def add(self, inputs: HeadInputs) -> None:
        """Read one batch of the inputs that the layer has in the teacher."""


@torch.no_grad()
def watch_teacher(
    model: PreTrainedModel,
    watchers: Mapping[SubquadAttention, Watcher],
    rows: Sequence[dict[str, Tensor]],
    on_batch: Callable[[int], None] | None = None,
) -> None:
    """Run a converted model with exact attention and hand every watched layer's input to its watcher.

    Args:
        model: the model; adapters that are on stay on.
        watchers: by layer; without any nothing runs.
        rows: batches with `input_ids` `[B, T]` and optionally `position_ids`; other columns are not read.
        on_batch: called with the number of tokens after each batch.
    """
    with attention_mode(model, "teacher"), watching(watchers):
        for row in rows:
            if watchers:
                inputs = {name: row[name] for name in ("input_ids", "position_ids") if name in row}
                model.model(**inputs, use_cache=False)
            if on_batch is not None:
                on_batch(row["input_ids"].numel())


@contextmanager
def watching(watchers: Mapping[SubquadAttention, Watcher]) -> Iterator[None]:
    """Hand every watched layer's input to its watcher, in whatever mode the model runs.

    Args:
        watchers: by layer.

    Yields:
        Nothing.
    """

    def hook(layer: SubquadAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs = layer.inputs(kwargs["hidden_states"], kwargs["position_embeddings"], kwargs.get("sequence"))
        watchers[layer].add(inputs)

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in watchers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def mean_loss(model: PreTrainedModel, rows: Sequence[dict[str, Tensor]]) -> float:
    """Return the student's mean loss per predicted token, nats; the first token of a document is not predicted."""
    total, count = 0.0, 0
    for row in rows:
        inputs = {name: row[name] for name in ("input_ids", "position_ids") if name in row}
        targets = row["input_ids"][:, 1:]
        if "position_ids" in row:
            targets = targets.masked_fill(row["position_ids"][:, 1:] == 0, -100)
        logits = model(**inputs, use_cache=False).logits[:, :-1].float()
        total += functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").item()
        count += int((targets != -100).sum())
    return total / max(count, 1)
