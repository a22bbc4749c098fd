"""Feature maps on q and k: the score is `x_ts = scale * phi(q_t) . phi(k_s)`.

A map comes after the rotary embedding, so that ReLU and elu + 1 keep every score at or above 0; rotating the features
instead would not. The cosine map and the learned map's start commute with the rotation.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from subquad.layers.geometry import LayerGeometry

# Below this a vector's length is rounding noise: it is divided by this instead.
COSINE_EPS = 1e-6


def cosine_features(x: Tensor) -> Tensor:
    """Return x of unit length along the last dimension (Cottention [B]); a zero vector stays zero. Same dtype."""
    wide = x if x.dtype == torch.float64 else x.float()
    return functional.normalize(wide, dim=-1, eps=COSINE_EPS).to(x.dtype)


def elu_features(x: Tensor) -> Tensor:
    """Return `elu(x) + 1`, above 0 (Katharopoulos et al., Transformers are RNNs, 2020)."""
    return functional.elu(x) + 1


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "elu": elu_features,
    "cosine": cosine_features,
}


class LearnedFeatures(nn.Module):
    """Learned narrow q and k, `phi(q) = P q`, `phi(k) = R k` with d' rows each (Based [F] learns q and k of width 16).

    Based trains its narrow q and k from scratch. A conversion reuses the teacher's: P and R start as the same
    selection of d'/2 rotary pairs of the head (coordinates i and i + d/2, which turn together), which commutes with the
    rotation, so that scores still depend on distances only. `start_from` picks, for every key/value head, the pairs in
    which the rows of `W_q` and `W_k` are largest; before, they are spread evenly over the frequencies. Both maps carry
    the factor `(d' / d) ** 0.25`, so that the start is the teacher's own score on these coordinates.

    Attributes:
        query_map: `[num_heads, head_dim, feature_dim]` float32.
        key_map: `[num_kv_heads, head_dim, feature_dim]` float32.
    """

    def __init__(self, geometry: LayerGeometry, feature_dim: int) -> None:
        """Create the evenly spread start.

        Args:
            geometry: sizes of the converted heads only.
            feature_dim: width d' of the features, at most head_dim.
        """
        super().__init__()
        self.geometry = geometry
        head_dim = geometry.head_dim
        self.query_map = nn.Parameter(torch.zeros(geometry.num_heads, head_dim, feature_dim))
        self.key_map = nn.Parameter(torch.zeros(geometry.num_kv_heads, head_dim, feature_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Select pairs spread evenly over the rotary frequencies, the same in every head."""
        num_pairs = self.geometry.head_dim // 2
        chosen = -(-self.key_map.shape[-1] // 2)
        pairs = torch.arange(chosen, device=self.key_map.device) * num_pairs // max(chosen, 1)
        self._select(pairs.expand(self.geometry.num_kv_heads, -1))

    @torch.no_grad()
    def start_from(self, q_weight: Tensor, k_weight: Tensor) -> None:
        """Select the strongest pairs of every key/value head: the largest `|W_q rows|^2 |W_k rows|^2`.

        Args:
            q_weight: `[num_heads * head_dim, hidden_size]` of the converted heads.
            k_weight: `[num_kv_heads * head_dim, hidden_size]`.
        """
        kv_heads, head_dim = self.geometry.num_kv_heads, self.geometry.head_dim
        energy = [
            weight.float().square().sum(-1).view(kv_heads, -1, 2, head_dim // 2) for weight in (q_weight, k_weight)
        ]
        strength = energy[0].sum((1, 2)) * energy[1].sum((1, 2))
        chosen = -(-self.key_map.shape[-1] // 2)
        self._select(strength.topk(chosen, dim=-1).indices.sort(dim=-1).values)

    @torch.no_grad()
    def _select(self, pairs: Tensor) -> None:
        """Set both maps to the selection of `pairs` `[num_kv_heads, pairs]`; an odd width leaves half a pair out."""
        head_dim, feature_dim = self.key_map.shape[1:]
        coordinates = torch.stack([pairs, pairs + head_dim // 2], dim=-1).flatten(1)[:, :feature_dim]
        factor = (feature_dim / head_dim) ** 0.25
        selection = factor * functional.one_hot(coordinates, head_dim).mT.to(self.key_map.dtype)
        self.key_map.copy_(selection)
        self.query_map.copy_(selection.repeat_interleave(self.geometry.group_size, dim=0))

    def queries(self, q: Tensor) -> Tensor:
        """Return features `[B, T, num_heads, feature_dim]` of q, same dtype."""
        return torch.einsum("bthd,hde->bthe", q, self.query_map.to(q.dtype))

    def keys(self, k: Tensor) -> Tensor:
        """Return features `[B, T, num_kv_heads, feature_dim]` of k, same dtype."""
        return torch.einsum("bthd,hde->bthe", k, self.key_map.to(k.dtype))
