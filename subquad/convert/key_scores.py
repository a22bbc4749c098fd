"""Fitting which keys a layer keeps: the score of a token predicts the most it will be worth to a far query."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from subquad.convert.watch import watch_teacher
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs
from subquad.layers.kept_keys import token_features

# A key's attention is measured where at least so many queries are beyond its window.
MIN_FAR_QUERIES = 32
# What is worth less than this is worth nothing; its log would only spread the targets.
LEAST_WORTH = 1e-7
RIDGE = 1e-3
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
        device = self.score.weight.device
        self.squares = torch.zeros(size, size, dtype=torch.float64, device=device)
        self.products = torch.zeros(size, heads, dtype=torch.float64, device=device)
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
            self.squares += x.T @ x
            self.products += x.T @ worth[measured].clamp_min(LEAST_WORTH).log().double()
            self.num_tokens += len(x)

    @torch.no_grad()
    def write(self) -> None:
        """Give the layer the fitted score; too few tokens leave it as it was."""
        if self.num_tokens < MIN_TOKENS:
            return
        ridge = RIDGE * self.squares.diagonal().clamp_min(LEAST_WORTH)
        fitted = torch.linalg.solve(self.squares + ridge.diag(), self.products)
        self.score.weight.copy_(fitted[:-1].T)


def keeps_keys(model: PreTrainedModel) -> bool:
    """Return whether any layer of a converted model keeps keys."""
    return any(layer.mixer is not None and layer.mixer_config.kept_keys for layer in converted_layers(model))


def fit_key_scores(
    model: PreTrainedModel, rows: Sequence[dict[str, Tensor]], *, on_batch: Callable[[int], None] | None = None
) -> int:
    """Fit which keys every layer keeps to what exact attention, with the model's own weights, looks at far back.

    Training moves queries and keys away from what the score was fitted to before, so it is fitted again afterwards:
    on SmolLM2-135M that was worth a third of the remaining gap to the teacher, and the needle (`docs/quality.md`).

    Args:
        model: a converted model; nothing but its scores changes.
        rows: batches with `input_ids` `[B, T]` and optionally `position_ids`, all on the model's device.
        on_batch: called with the number of tokens after each batch.

    Returns:
        Tokens that were read; 0, and nothing is run, where no layer keeps keys.
    """
    if not keeps_keys(model):
        return 0
    layers = [layer for layer in converted_layers(model) if layer.mixer is not None and layer.mixer_config.kept_keys]
    fits = {layer: KeyScoreFit(layer) for layer in layers}
    watch_teacher(model, fits, rows, on_batch)
    for fit in fits.values():
        fit.write()
    return sum(row["input_ids"].numel() for row in rows)


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
