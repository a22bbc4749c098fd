"""`LayerGeometry`: the sizes of one attention layer, and of the part of it a mixer converts."""

from __future__ import annotations

from dataclasses import dataclass

from subquad.errors import ConfigError


@dataclass(frozen=True)
class LayerGeometry:
    """Sizes of one attention layer.

    Attributes:
        hidden_size: width of the layer's input.
        num_heads: query heads.
        num_kv_heads: key/value heads; num_heads is a multiple.
        head_dim: width of one head's q, k and v.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.num_kv_heads < 0 or (self.num_kv_heads and self.num_heads % self.num_kv_heads):
            raise ConfigError(f"num_heads ({self.num_heads}) must be a multiple of num_kv_heads ({self.num_kv_heads})")

    @property
    def group_size(self) -> int:
        """Query heads per key/value head."""
        return self.num_heads // self.num_kv_heads if self.num_kv_heads else 1

    def split(self, exact_kv_heads: tuple[int, ...]) -> tuple[HeadSplit, LayerGeometry]:
        """Divide the heads into those that stay exact softmax and those a mixer takes over.

        Args:
            exact_kv_heads: indices of the key/value heads that stay exact.

        Returns:
            The head indices of both parts, and the geometry of the converted part.

        Raises:
            ConfigError: An index outside 0 .. num_kv_heads - 1.
        """
        bad = [head for head in exact_kv_heads if not 0 <= head < self.num_kv_heads]
        if bad:
            raise ConfigError(f"exact_kv_heads {bad} must be between 0 and {self.num_kv_heads - 1}")
        exact = tuple(sorted(exact_kv_heads))
        mixed = tuple(head for head in range(self.num_kv_heads) if head not in exact)
        geometry = LayerGeometry(self.hidden_size, len(mixed) * self.group_size, len(mixed), self.head_dim)
        return HeadSplit(exact, mixed, self.group_size), geometry


@dataclass(frozen=True)
class HeadSplit:
    """Which key/value heads stay exact and which are converted; query heads follow their key/value head."""

    exact: tuple[int, ...]
    mixed: tuple[int, ...]
    group_size: int

    def query_heads(self, kv_heads: tuple[int, ...]) -> list[int]:
        """Return the query heads that read the given key/value heads, in order."""
        return [head * self.group_size + offset for head in kv_heads for offset in range(self.group_size)]
