"""Fitting which keys a layer keeps: the score of a token predicts the most it will be worth to a far query."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from subquad.convert.watch import CHECKED_ROWS, mean_loss, watch_teacher
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs
from subquad.layers.kept_keys import token_features

# A key's attention is measured where at least so many queries are beyond its window.
MIN_FAR_QUERIES = 32
# What is worth less than this is worth nothing; its log would only spread the targets.
LEAST_WORTH = 1e-7
RIDGE = 1e-3
# A fit may raise the loss of a few rows by this much (nats per token): it is made for recall, which loss hardly sees.
MOST_LOSS = 0.01
# Fewer measured tokens say nothing about a few hundred features, whatever the ridge.
MIN_TOKENS = 256


class KeyScoreFit:
    """Least squares, per key/value head, of the log of the most that a token is worth to any far query.

    The regression is on `token_features` and a constant, with a ridge of 1e-3 of each feature's mean square; the
    constant is not part of the score, which orders tokens of one head only. A token is worth its attention, the
    teacher's over all tokens, times the norm of its value; a query is far from what is `window` or more tokens behind
    it. The largest attention chose better than its root mean square and that better than its mean, with the value's
    norm each did, and the layer's input predicts it better than the key alone (`docs/quality.md`).
    """

    def __init__(self, layer: SubquadAttention) -> None:
        """Begin with nothing measured.

        Args:
            layer: a converted layer that keeps keys.
        """
        assert layer.mixer is not None, "a converted layer has a mixer"
        assert layer.mixer.key_score is not None, "the layer keeps keys"
        self.layer, self.score = layer, layer.mixer.key_score
        heads, size = self.score.weight.shape[0], self.score.weight.shape[1] + 1
        # on the CPU: for all layers of a model with 8B parameters these are 4 GiB
        self.squares = torch.zeros(size, size, dtype=torch.float64)
        self.products = torch.zeros(size, heads, dtype=torch.float64)
        self.num_tokens = 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Measure the tokens of one batch.

        Args:
            inputs: the teacher's heads, all of them.
        """
        inputs = inputs.select(self.layer.split, self.layer.split.mixed)
        features = functional.pad(token_features(inputs), (0, 1), value=1.0)
        for row in range(inputs.q.shape[0]):
            attention, measured = far_attention(self.layer, inputs, row)
            worth = attention * inputs.v[row].float().norm(dim=-1)
            x = features[row, measured].double()
            self.squares += (x.T @ x).cpu()
            self.products += (x.T @ worth[measured].clamp_min(LEAST_WORTH).log().double()).cpu()
            self.num_tokens += len(x)

    @torch.no_grad()
    def write(self) -> bool:
        """Give the layer the fitted score; return False where too few tokens leave it as it was."""
        if self.num_tokens < MIN_TOKENS:
            return False
        ridge = RIDGE * self.squares.diagonal().clamp_min(LEAST_WORTH)
        fitted = torch.linalg.solve(self.squares + ridge.diag(), self.products)
        self.score.weight.copy_(fitted[:-1].T)
        return True


@dataclass(frozen=True)
class KeyFit:
    """What a fit of the scores of kept keys did.

    Attributes:
        tokens: tokens that were read.
        loss_before: nats per token of the first rows with the scores as they were.
        loss_after: the same with the fitted scores.
        kept: whether these stay; where they raise that loss by more than 0.01, the former ones do.
    """

    tokens: int
    loss_before: float
    loss_after: float
    kept: bool


def keeps_keys(model: PreTrainedModel) -> bool:
    """Return whether any layer of a converted model keeps keys."""
    return bool(_keeping(model))


def fit_key_scores(
    model: PreTrainedModel, rows: Sequence[dict[str, Tensor]], *, on_batch: Callable[[int], None] | None = None
) -> KeyFit | None:
    """Fit which keys every layer keeps to what exact attention, with the model's own weights, looks at far back.

    Training moves queries and keys away from what the score was fitted to before, so it is fitted again afterwards
    (`docs/quality.md`). Fitted scores that raise the model's loss by more than 0.01 are undone with a warning; another
    names the layers that had too few tokens for a fit.

    Args:
        model: a converted model; nothing but its scores changes.
        rows: batches with `input_ids` `[B, T]` and optionally `position_ids`, all on the model's device.
        on_batch: called with the number of tokens after each batch.

    Returns:
        What was done; None, and nothing is run, where no layer keeps keys.
    """
    layers = _keeping(model)
    if not layers:
        return None
    loss_before = mean_loss(model, rows[:CHECKED_ROWS])
    fits = {layer: KeyScoreFit(layer) for layer in layers}
    saved = {fit: fit.score.weight.clone() for fit in fits.values()}
    watch_teacher(model, fits, rows, on_batch)
    unfitted = [layer.layer_idx for layer, fit in fits.items() if not fit.write()]
    if unfitted:
        least = min(fit.num_tokens for fit in fits.values())
        warnings.warn(
            f"kept keys of layers {unfitted} are chosen by the scores they had: {least} tokens could be measured, and "
            f"a fit needs {MIN_TOKENS}; raise calibrate.key_tokens, or take rows longer than the window by more than "
            f"{MIN_FAR_QUERIES} tokens",
            stacklevel=2,
        )
    loss_after = mean_loss(model, rows[:CHECKED_ROWS])
    kept = loss_after <= loss_before + MOST_LOSS
    if not kept:
        warnings.warn(
            f"fitting which keys are kept raised the loss on its own rows from {loss_before:.4f} to {loss_after:.4f} "
            "and was undone",
            stacklevel=2,
        )
        for fit, weight in saved.items():
            fit.score.weight.copy_(weight)
    return KeyFit(sum(row["input_ids"].numel() for row in rows), loss_before, loss_after, kept)


def _keeping(model: PreTrainedModel) -> list[SubquadAttention]:
    layers = converted_layers(model)
    return [layer for layer in layers if layer.mixer is not None and layer.mixer.key_score is not None]


def far_attention(layer: SubquadAttention, inputs: HeadInputs, row: int) -> tuple[Tensor, Tensor]:
    """Return the most attention that a query beyond the window pays to each key.

    Args:
        layer: the layer.
        inputs: its converted heads.
        row: which sequence.

    Returns:
        `[T, num_kv_heads]`, the largest attention probability of far queries of the group's heads, and `[T]` bool, the
        keys that are no sinks and have enough far queries.
    """
    config, group = layer.mixer_config, layer.split.group_size
    q, k = (x[row] for x in inputs.rotate(inputs.q, inputs.k))
    steps = torch.arange(q.shape[0], device=q.device)
    real = inputs.real()[row]
    seen = (steps <= steps[:, None]) & real
    if inputs.sequence.documents is not None:
        documents = inputs.sequence.documents[row]
        seen = seen & (documents == documents[:, None])
    far = seen & (steps[:, None] - steps >= config.window) & real[:, None]
    attention = []
    for head in range(k.shape[1]):
        logits = torch.einsum("tgd,sd->gts", q[:, head * group : (head + 1) * group], k[:, head]).float()
        weights = (logits * layer.scaling).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
        attention.append((weights * far).amax((0, 1)))
    rank = inputs.sequence.token_rank(None, inputs.q)[row]
    measured = (far.sum(0) >= MIN_FAR_QUERIES) & real & (rank > config.sinks)
    return torch.stack(attention, dim=-1), measured
