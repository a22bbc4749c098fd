"""Fitting which keys a layer keeps: the score of a key predicts the attention it gets once it is far."""

from __future__ import annotations

import torch
from torch import Tensor

from subquad.layers import SubquadAttention
from subquad.layers.inputs import HeadInputs
from subquad.layers.kept_keys import key_features

# A key's attention is measured where at least so many queries are beyond its window.
MIN_FAR_QUERIES = 32
# Attention below this is as good as none; its log would only spread the targets.
LEAST_ATTENTION = 1e-7
RIDGE = 1e-3


class KeyScoreFit:
    """Least squares, per key/value head, of the log of the mean attention that a key receives from far queries.

    The regression is on `key_features` and a constant, with a ridge of 1e-3 per key; the constant is not part of the
    score, which orders keys of one head only. Attention is the teacher's, over all tokens, summed over the query heads
    that share the key; a query is far from a key that is `window` or more tokens behind it.
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
        self.squares = torch.zeros(heads, size, size, dtype=torch.float64)
        self.products = torch.zeros(heads, size, dtype=torch.float64)
        self.num_keys = 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Measure the keys of one batch.

        Args:
            inputs: the teacher's heads, all of them.
        """
        inputs = inputs.select(self.layer.split, self.layer.split.mixed)
        features = key_features(inputs.k)
        features = torch.cat([features, torch.ones_like(features[..., :1])], dim=-1)
        for row in range(inputs.q.shape[0]):
            received, measured = far_attention(self.layer, inputs, row)
            x = features[row, measured].transpose(0, 1).double().cpu()
            y = received[measured].clamp_min(LEAST_ATTENTION).log().T.double().cpu()
            self.squares += x.transpose(1, 2) @ x
            self.products += (x.transpose(1, 2) @ y[..., None])[..., 0]
            self.num_keys += x.shape[1]

    @torch.no_grad()
    def write(self) -> None:
        """Give the layer the fitted score; too few keys leave it as it was."""
        size = self.squares.shape[1]
        if self.num_keys < size:
            return
        ridge = RIDGE * self.num_keys * torch.eye(size, dtype=torch.float64)
        fitted = torch.linalg.solve(self.squares + ridge, self.products)
        self.score.weight.copy_(fitted[:, :-1])


def far_attention(layer: SubquadAttention, inputs: HeadInputs, row: int) -> tuple[Tensor, Tensor]:
    """Return how much attention keys receive from beyond the window.

    Args:
        layer: the layer.
        inputs: its converted heads.
        row: which sequence.

    Returns:
        `[T, num_kv_heads]`, the mean over far queries of the attention probability, summed over the query heads of the
        group, and `[T]` bool, the keys that are no sinks and have enough far queries.
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
    received = []
    for head in range(k.shape[1]):
        logits = torch.einsum("tgd,sd->gts", q[:, head * group : (head + 1) * group], k[:, head]).float()
        weights = (logits * layer.scaling).masked_fill(~seen, float("-inf")).softmax(-1).nan_to_num()
        received.append((weights * far).sum((0, 1)))
    queries = far.sum(0)
    rank = inputs.sequence.token_rank(None, inputs.q)[row]
    measured = (queries >= MIN_FAR_QUERIES) & real & (rank > config.sinks)
    return torch.stack(received, dim=-1) / queries.clamp_min(1)[:, None], measured
