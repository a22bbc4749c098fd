"""The counts that `cost.py` puts together: what pairs, states and tokens cost one key/value head.

FLOPs are those of the matrix products (a multiplication and an addition are 2). Left out are decays, exponentials, the
normaliser (3 % of the state's products at a value width of 64) and everything outside the op, such as projections.
Bytes are those moved if every tensor is read and written once; a key tile read again from a processor's cache is not
counted. Every count is for one key/value head with the query heads that share it: a layer costs `num_kv_heads` times
that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from subquad.errors import ConfigError
from subquad.kernels.state import MAX_STATE_ORDER, num_rows

# How dq and dk are contracted with the states: over all d**n products (Triton) or the distinct ones (PyTorch).
Contraction = Literal["square", "distinct"]


@dataclass(frozen=True)
class HeadShape:
    """Sizes of one key/value head, the query heads that read it, and its score.

    Attributes:
        head_dim: Width d of a key.
        value_head_dim: Width e of a value.
        group_size: Query heads G per key/value head.
        orders: Powers of the score, lowest first (ignored for softmax). Powers above 2 have no state.
        window: Last tokens that are scored exactly beside the polynomial.
        sinks: First tokens that are scored exactly beside the polynomial.
        kept_keys: Far tokens that are scored exactly beside the polynomial.
        feature_dim: Width of q and k in the polynomial, where a feature map changes it; None is `head_dim`.

    Raises:
        ConfigError: A size below 1, a negative window, or powers that are not ascending.
    """

    head_dim: int
    value_head_dim: int
    group_size: int = 1
    orders: tuple[int, ...] = (2,)
    window: int = 0
    sinks: int = 0
    feature_dim: int | None = None
    kept_keys: int = 0

    def __post_init__(self) -> None:
        check_counts(head_dim=self.head_dim, value_head_dim=self.value_head_dim, group_size=self.group_size)
        if min(self.window, self.sinks, self.kept_keys) < 0:
            raise ConfigError(
                f"window, sinks and kept_keys must be 0 or more, got {self.window}, {self.sinks} and {self.kept_keys}"
            )
        if not self.orders or self.orders[0] < 0 or list(self.orders) != sorted(set(self.orders)):
            raise ConfigError(f"orders must be powers 0, 1, 2, … in ascending order, got {self.orders}")

    @property
    def mapped(self) -> HeadShape:
        """The polynomial's own shape: q and k of `feature_dim` entries."""
        return self if self.feature_dim is None else replace(self, head_dim=self.feature_dim, feature_dim=None)

    @property
    def exact_keys(self) -> int:
        """Keys that each query scores exactly: window, sinks and kept keys."""
        return self.window + self.sinks + self.kept_keys

    @property
    def state_numbers(self) -> int:
        """Numbers of the state's values, `rows * e`: `d (d + 1) / 2 * e` at power 2 (arXiv 2602.17363)."""
        if self.orders[-1] > MAX_STATE_ORDER:
            raise ConfigError(f"powers above {MAX_STATE_ORDER} have no state, got {self.orders}; use quadratic_cost")
        return num_rows(self.mapped.head_dim, self.orders) * self.value_head_dim

    def contracted_numbers(self, contraction: Contraction) -> int:
        """Return the numbers of the state that dq and dk are contracted with; power 0 has no gradient for them."""
        powers = tuple(order for order in self.orders if order > 0)
        if contraction == "square":
            return sum(self.mapped.head_dim**order for order in powers) * self.value_head_dim
        return num_rows(self.mapped.head_dim, powers) * self.value_head_dim


@dataclass(frozen=True)
class AttentionCost:
    """What one key/value head and its query heads do for `num_tokens` tokens.

    Attributes:
        flops: Multiplications and additions.
        num_bytes: Bytes read and written.
        num_tokens: Tokens they are for.
    """

    flops: int
    num_bytes: int
    num_tokens: int

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token of the key/value head; over `group_size` it is per token and query head."""
        return self.flops / self.num_tokens

    @property
    def bytes_per_token(self) -> float:
        """Bytes per token of the key/value head."""
        return self.num_bytes / self.num_tokens

    @property
    def intensity(self) -> float:
        """FLOPs per byte."""
        return self.flops / self.num_bytes


def pair_flops(shape: HeadShape, num_queries: int, span: int, training: bool) -> int:
    """Return the FLOPs of queries that each meet half of `span` keys on average, as in a causal stretch of that length.

    Per pair `2 (d + e)` FLOPs forward (q.k and w v), and `2 (3 d + 2 e)` backward (q.k again, the gradient of w, dq, dk
    and dv).
    """
    products = shape.head_dim + shape.value_head_dim
    if training:
        products += 3 * shape.head_dim + 2 * shape.value_head_dim
    return products * num_queries * span


def state_flops(shape: HeadShape, reads: int, writes: int) -> int:
    """Return the forward FLOPs of `reads` queries that read a state of `rows x e` and `writes` keys written to it."""
    return 2 * shape.state_numbers * (reads + writes)


def state_flops_backward(shape: HeadShape, reads: int, writes: int, contraction: Contraction) -> int:
    """Return the backward FLOPs of the same queries and keys.

    The keys are written again to recompute the states, the queries are written to the states' gradients, dv is read
    from those; dq and dk are contracted with the states and with their gradients.
    """
    contracted = shape.contracted_numbers(contraction) * (reads + writes)
    return 2 * (shape.state_numbers * (reads + 2 * writes) + contracted)


def token_bytes(shape: HeadShape, num_tokens: int, training: bool, itemsize: int) -> int:
    """Return the bytes of q, k, v and the output; the backward pass adds twice that, for those and their gradients."""
    width = (shape.group_size + 1) * (shape.head_dim + shape.value_head_dim)
    return (3 if training else 1) * width * num_tokens * itemsize


def kv_bytes(shape: HeadShape, itemsize: int) -> int:
    """Return the bytes of one token's key and value."""
    return (shape.head_dim + shape.value_head_dim) * itemsize


def check_counts(**counts: int) -> None:
    """Raise a `ConfigError` that names every count below 1."""
    problems = [f"{name} must be 1 or more, got {count}" for name, count in counts.items() if count < 1]
    if problems:
        raise ConfigError("; ".join(problems))
