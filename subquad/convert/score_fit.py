"""Fitting the far part's score before any training: the mean key, and the narrow maps that keep most of the score."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from subquad.convert.watch import watch_teacher
from subquad.layers import SubquadAttention, converted_layers
from subquad.layers.inputs import HeadInputs

# Of the mean square of a channel, added to all: what no calibration token shows is not stretched.
RIDGE = 1e-3


class ScoreFit:
    """The mean far key of every key/value head, and the best narrow maps beside it.

    Softmax does not see a vector subtracted from all keys of a head, since every score of a query falls by the same; a
    power of the score does. With the mean key subtracted (`center_keys`), scores vary around 0, where a square follows
    e^x.

    Narrow maps P, R (`feature_map: learned`, d' rows) of least squares over the teacher's scores: with C_q, C_k the
    mean squares of queries and (centred) keys, taken as independent, `E[(q.k - (P q).(R k))^2] = |C_q^(1/2) (I - P^T R)
    C_k^(1/2)|_F^2`, which a truncated singular value decomposition minimises (Eckart and Young 1936). Query heads of a
    group share R: with the `C_q^(1/2)` of the group stacked and V the d' first right singular vectors of
    `C_q^(1/2) C_k^(1/2)`, `P = V^T C_k^(1/2)` and `R = V^T C_k^(-1/2)`.
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
        dim = geometry.head_dim
        # on the CPU: MPS has no float64
        self.queries = torch.zeros(geometry.num_heads, dim, dim, dtype=torch.float64)
        self.keys = torch.zeros(geometry.num_kv_heads, dim, dim, dtype=torch.float64)
        self.key_sum = torch.zeros(geometry.num_kv_heads, dim, dtype=torch.float64)
        self.num_queries = self.num_keys = 0

    @torch.no_grad()
    def add(self, inputs: HeadInputs) -> None:
        """Measure the tokens of one batch: queries with a far part and keys that are no sinks.

        Args:
            inputs: the teacher's heads, all of them.
        """
        config, inputs = self.mixer.config, inputs.select(self.layer.split, self.layer.split.mixed)
        rank, real = inputs.sequence.token_rank(None, inputs.real()), inputs.real()
        q, k = self.mixer.far_heads(inputs, rank)[:2]
        q = q[real & (rank > config.window + config.sinks)].double().cpu()
        k = k[real & (rank > config.sinks)].double().cpu()
        self.queries += torch.einsum("nhd,nhe->hde", q, q)
        self.keys += torch.einsum("nhd,nhe->hde", k, k)
        self.key_sum += k.sum(0)
        self.num_queries += len(q)
        self.num_keys += len(k)

    @torch.no_grad()
    def write(self) -> None:
        """Give the layer its mean keys and maps; rows that no token leaves the window of change nothing."""
        if not self.num_queries:
            return
        queries, keys = self.queries / self.num_queries, self.keys / self.num_keys
        if self.score.key_center is not None:
            center = self.key_sum / self.num_keys
            self.score.key_center.copy_(center)
            keys = keys - torch.einsum("hd,he->hde", center, center)
        if self.features is None:
            return
        width, group = self.features.key_map.shape[-1], self.mixer.geometry.group_size
        own_scale = self.mixer.config.scale or width**-0.5
        factor = (self.layer.scaling / own_scale) ** 0.5
        root_q, root_k = _ridge_root(queries), _ridge_root(keys)
        stacked = (root_q.unflatten(0, (-1, group)) @ root_k[:, None]).flatten(1, 2)
        directions = torch.linalg.svd(stacked, full_matrices=False).Vh[:, :width].mT
        self.features.key_map.copy_(factor * torch.linalg.solve(root_k, directions))
        self.features.query_map.copy_(factor * (root_k @ directions).repeat_interleave(group, dim=0))


def _ridge_root(squares: Tensor) -> Tensor:
    """Return the symmetric square roots of mean squares `[heads, d, d]`, with the ridge."""
    mean = squares.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    ridge = RIDGE * mean[:, None, None] * torch.eye(squares.shape[-1], dtype=squares.dtype)
    values, vectors = torch.linalg.eigh(squares + ridge)
    return (vectors * values.clamp_min(0).sqrt()[:, None]) @ vectors.mT


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
        Whether any layer had something to fit; without one nothing is run.
    """
    fits = {layer: ScoreFit(layer, maps) for layer in converted_layers(model) if fits_scores(layer, maps)}
    if not fits:
        return False
    watch_teacher(model, fits, rows, on_batch)
    for fit in fits.values():
        fit.write()
    return True
