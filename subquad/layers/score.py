"""The parts of a score: temperature, offset, mean key, q/k maps, feature map; and a polynomial's coefficients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from subquad.layers.config import MixerConfig
from subquad.layers.feature_maps import FEATURE_MAPS, LearnedFeatures
from subquad.layers.geometry import LayerGeometry


class ScoreMap(nn.Module):
    """Maps q and k, and gives the coefficients of a polynomial `score(x) = sum_n coefs[n] * x**n`.

    `power` is x^n ((x + c)^2 with a learned offset), `taylor` the truncated exponential series [A]. The mean key is
    subtracted first; then come the q/k maps, then the feature map, then the temperature, a factor on the queries'
    features and so on the score.

    Attributes:
        log_temperature: `[num_heads]` float32, 0 at the start; None without `temperature`.
        offset: `[num_heads]` float32, 1 at the start; None without `offset`.
        key_center: `[num_kv_heads, head_dim]` float32, a buffer, 0 until calibration (`convert/score_fit.py`); None
            without `center_keys`.
        query_map: `[num_heads, head_dim, head_dim]` float32, identity at the start; None without `qk_maps`.
        key_map: `[num_kv_heads, head_dim, head_dim]` float32, identity at the start; None without `qk_maps`.
        features: the learned feature map, or None.
    """

    key_center: Tensor | None

    def __init__(self, mixer: MixerConfig, geometry: LayerGeometry) -> None:
        """Create the plain score.

        Args:
            mixer: which parts are learned.
            geometry: sizes of the converted heads only.
        """
        super().__init__()
        self.mixer = mixer
        heads, kv_heads, dim = geometry.num_heads, geometry.num_kv_heads, geometry.head_dim
        self.log_temperature = nn.Parameter(torch.zeros(heads)) if mixer.temperature else None
        self.offset = nn.Parameter(torch.ones(heads)) if mixer.offset else None
        self.register_buffer("key_center", torch.zeros(kv_heads, dim) if mixer.center_keys else None)
        self.query_map = nn.Parameter(torch.zeros(heads, dim, dim)) if mixer.qk_maps else None
        self.key_map = nn.Parameter(torch.zeros(kv_heads, dim, dim)) if mixer.qk_maps else None
        self.features = LearnedFeatures(geometry, mixer.feature_dim) if mixer.feature_dim else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the plain score: temperature 1, offset 1, no mean key, identity maps."""
        with torch.no_grad():
            if self.log_temperature is not None:
                self.log_temperature.zero_()
            if self.offset is not None:
                self.offset.fill_(1.0)
            if self.key_center is not None:
                self.key_center.zero_()
            for matrix in (self.query_map, self.key_map):
                if matrix is not None:
                    matrix.copy_(torch.eye(matrix.shape[-1], device=matrix.device).expand_as(matrix))

    def coefficients(self) -> tuple[float | Tensor, ...]:
        """Return a polynomial's coefficients of x^0, x^1, …; an exact float 0.0 marks a power without state rows."""
        order = self.mixer.order
        if self.mixer.score == "taylor":
            return tuple(1.0 / math.factorial(n) for n in range(order + 1))
        if self.offset is not None:
            return (self.offset.square(), 2.0 * self.offset, 1.0)
        return (0.0,) * order + (1.0,)

    def map_queries(self, q: Tensor) -> Tensor:
        """Return q `[B, T, num_heads, head_dim]` after maps and temperature, same dtype.

        The last dimension becomes `feature_dim` with a learned feature map.
        """
        if self.query_map is not None:
            q = torch.einsum("bthd,hde->bthe", q, self.query_map.to(q.dtype))
        q = self._features(q) if self.features is None else self.features.queries(q)
        if self.log_temperature is not None:
            q = q * self.log_temperature.exp()[:, None].to(q.dtype)
        return q

    def map_keys(self, k: Tensor) -> Tensor:
        """Return k `[B, T, num_kv_heads, head_dim]` centred and mapped, same dtype; last dimension as for queries."""
        if self.key_center is not None:
            k = k - self.key_center.to(k.dtype)
        if self.key_map is not None:
            k = torch.einsum("bthd,hde->bthe", k, self.key_map.to(k.dtype))
        return self._features(k) if self.features is None else self.features.keys(k)

    def _features(self, x: Tensor) -> Tensor:
        name = self.mixer.feature_map
        return x if name == "identity" else FEATURE_MAPS[name](x)
