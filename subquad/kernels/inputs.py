"""The layout of the op's inputs that all forms share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from subquad.kernels.state import PolyState


class PolyInputs(NamedTuple):
    """The op's inputs in the layout that all forms share.

    Attributes:
        q: `[B, Hkv, G, Tq, d]`, multiplied by the scale.
        k: `[B, Hkv, T, d]`.
        v: `[B, Hkv, T, e + 1]`: `key_weight * [v, 1]`; the last column makes the normaliser.
        log_decay: `[B, Hkv, T]`, finite, <= 0.
        resets: `[B, Hkv, T]`, boolean.
        coefs: `[len(orders), Hkv, G]`.
        orders: The powers `coefs` belongs to.
        state: The state before the first key, or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    resets: Tensor
    coefs: Tensor
    orders: tuple[int, ...]
    state: PolyState | None
