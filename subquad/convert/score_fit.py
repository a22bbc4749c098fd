"""Fitting the far part's score before any training: the mean of its keys, and the narrow maps that keep most of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.convert.watch import watch_teacher
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.feature_maps import LearnedFeatures
from subquad.layers.inputs import HeadInputs

# Of the mean square of a channel, added to all, so that roots have inverses.
RIDGE = 1e-6
# Fewer keys per channel say nothing about a head.
MIN_KEYS_PER_CHANNEL = 4
# A head whose keys are shorter than this per channel (root mean square) has none to fit to.
LEAST_KEY = 1e-4


class ScoreFit:
    """The mean of the keys that reach the far part of every key/value head, and the best narrow maps beside it.

    Softmax does not see a vector subtracted from all keys of a head, since every score of a query falls by the same; a
    power of the score does. With the mean key subtracted (`center_keys`), scores vary around 0, where a square follows
    e^x. What stays in window, sinks and kept keys does not count.

    Narrow maps P, R (`feature_map: learned`, d' rows) of least squares over the scores of the far part's own q and k:
    with C_q, C_k the mean squares of queries and (centred) keys, taken as independent, `E[(q.k - (P q).(R k))^2] =
    |C_q^(1/2) (I - P^T R) C_k^(1/2)|_F^2`, which a truncated singular value decomposition minimises (Eckart and Young
    1936). Query heads of a group share R: with the `C_q^(1/2)` of the group stacked and V the d' first right singular
    vectors of `C_q^(1/2) C_k^(1/2)`, `P = V^T C_k^(1/2)` and `R = V^T C_k^(-1/2)`, up to a factor that makes both of
    one size.
    """

    def __init__(self, layer: SubquadAttention, maps: bool) -> None:
        """Begin with nothing measured.

        Args:
            layer: a converted layer.
            maps: whether the maps of a learned feature map are fitted.
        """
        assert layer.mixer is not None, "a converted layer has a mixer"
        self.layer, self.mixer, self.score = layer, layer.mixer, layer.mixer.score
        self.features = self.score.features if maps else None
        geometry = self.mixer.geometry
        dim, heads = geometry.head_dim, geometry.num_kv_heads
        # on the CPU: MPS has no float64
        self.queries = torch.zeros(geometry.num_heads, dim, dim, dtype=torch.float64)
        self.keys = torch.zeros(heads, dim, dim, dtype=torch.float64)
        self.key_sum = torch.zeros(heads, dim, dtype=torch.float64)
        self.num_keys = torch.zeros(heads, dtype=torch.float64)
        self.num_queries = 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Measure the tokens of one batch: queries that have a far part, and what is written into it.

        Args:
            inputs: the teacher's heads, all of them.
        """
        mixer, inputs = self.mixer, inputs.select(self.layer.split, self.layer.split.mixed)
        exact = mixer.exact_part(inputs) if mixer.config.window else None
        far, written, tokens = mixer.far_stream(inputs, exact)
        reads = inputs.real() if tokens is None else inputs.real() & (tokens >= 1)
        weight = written.weight[..., None].double().expand(-1, -1, len(self.num_keys))
        weight = (weight if written.write is None else weight * written.write).flatten(0, 1).cpu()
        q, k = far.q[reads].double().cpu(), written.k.flatten(0, 1).double().cpu()
        self.queries += torch.einsum("nhd,nhe->hde", q, q)
        self.keys += torch.einsum("nh,nhd,nhe->hde", weight, k, k)
        self.key_sum += torch.einsum("nh,nhd->hd", weight, k)
        self.num_keys += weight.sum(0)
        self.num_queries += len(q)

    @torch.no_grad()
    def write(self) -> bool:
        """Give the layer its mean keys and maps; return False where too few tokens leave it as it was."""
        dim = self.keys.shape[-1]
        if self.num_keys.min() < MIN_KEYS_PER_CHANNEL * dim:
            return False
        queries, keys = self.queries / self.num_queries, self.keys / self.num_keys[:, None, None]
        size = keys.diagonal(dim1=-2, dim2=-1).mean(-1)
        if self.score.key_center is not None:
            center = self.key_sum / self.num_keys[:, None]
            self.score.key_center.copy_(center)
            keys = keys - torch.einsum("hd,he->hde", center, center)
        if self.features is not None:
            self._write_maps(self.features, queries, keys + RIDGE * size[:, None, None] * torch.eye(dim), size)
        return True

    def _write_maps(self, features: LearnedFeatures, queries: Tensor, keys: Tensor, size: Tensor) -> None:
        """Set both maps from mean squares `[heads, d, d]`; heads without keys keep theirs."""
        width, group = features.key_map.shape[-1], self.mixer.geometry.group_size
        own_scale = self.mixer.config.scale or width**-0.5
        factor = (self.layer.scaling / own_scale) ** 0.5
        for head in torch.nonzero(size > LEAST_KEY**2).flatten().tolist():
            own = slice(head * group, (head + 1) * group)
            root = _root(keys[head])
            stacked = (_root(queries[own]) @ root).flatten(0, 1)
            directions = torch.linalg.svd(stacked, full_matrices=False).Vh[:width].mT
            reads, writes = root @ directions, torch.linalg.solve(root, directions)
            balance = (reads.norm() / writes.norm()).sqrt()
            features.query_map[own] = (factor / balance * reads).to(features.query_map)
            features.key_map[head] = (factor * balance * writes).to(features.key_map)


def _root(squares: Tensor) -> Tensor:
    """Return symmetric square roots, `[..., d, d]`."""
    values, vectors = torch.linalg.eigh(squares)
    return (vectors * values.clamp_min(0).sqrt()[..., None, :]) @ vectors.mT


def fits_scores(layer: SubquadAttention, maps: bool) -> bool:
    """Return whether a layer has anything that a `ScoreFit` sets."""
    if layer.mixer is None:
        return False
    return layer.mixer.score.key_center is not None or (maps and layer.mixer.score.features is not None)


def fit_scores(
    model: PreTrainedModel,
    rows: Sequence[dict[str, Tensor]],
    *,
    maps: bool,
    on_batch: Callable[[int], None] | None = None,
) -> bool:
    """Set mean keys (`center_keys`) and, if asked for, narrow maps of every layer that has them.

    Args:
        model: a converted model.
        rows: batches with `input_ids` `[B, T]` and optionally `position_ids`, all on the model's device.
        maps: whether the maps of a learned feature map are fitted.
        on_batch: called with the number of tokens after each batch.

    Returns:
        Whether any layer had something to fit; without one nothing is run. A warning names layers that too few tokens
        leave as they were.
    """
    fits = {layer: ScoreFit(layer, maps) for layer in converted_layers(model) if fits_scores(layer, maps)}
    if not fits:
        return False
    watch_teacher(model, fits, rows, on_batch)
    unfitted = [layer.layer_idx for layer, fit in fits.items() if not fit.write()]
    if unfitted:
        least = int(min(fit.num_keys.min() for fit in fits.values()))
        warnings.warn(
            f"mean keys and maps of layers {unfitted} stay as they were: {least} tokens reach the far part of a head, "
            f"and a fit needs {MIN_KEYS_PER_CHANNEL} per channel; raise calibrate.tokens, or take longer rows",
            stacklevel=2,
        )
    return True
