"""Decoding with a buffer: new tokens wait outside the state, which is then read but not written at every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from subquad.errors import ConfigError
from subquad.kernels.ops import PolyAttentionOutput, poly_attention
from subquad.kernels.state import PolyState


@dataclass
class DecodeBuffer:
    """Tokens that a state has not taken up yet, and the state.

    A step that writes the state moves its bytes twice. With a buffer it moves them once: the query reads the state and
    the waiting tokens; when `capacity` tokens wait, one step takes them all up. The results are the same.

    Attributes:
        state: The state before the waiting tokens.
        capacity: Tokens that may wait, at least 1 (1 writes at every step). The kernels take up to 64.
        k: `[B, n, Hkv, d]`, the waiting keys, n below `capacity`; None when none waits, like the next three.
        v: `[B, n, Hkv, e]`.
        log_decay: `[B, n, Hkv]`.
        key_weight: `[B, n, Hkv]`.
    """

    state: PolyState
    capacity: int = 64
    k: Tensor | None = None
    v: Tensor | None = None
    log_decay: Tensor | None = None
    key_weight: Tensor | None = None

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ConfigError(f"DecodeBuffer: capacity is {self.capacity}; it must be at least 1 (64 suits a GPU).")

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None = None,
        key_weight: Tensor | None = None,
        **options: Any,
    ) -> PolyAttentionOutput:
        """Let new tokens read all that came before; they join the buffer, or flush it when it is full.

        Args:
            q: `[B, T, H, d]`, queries of the T new tokens.
            k: `[B, T, Hkv, d]`.
            v: `[B, T, Hkv, e]`.
            log_decay: `[B, T, Hkv]` or None, the same in every call.
            key_weight: `[B, T, Hkv]` or None, the same in every call.
            **options: Further arguments of `poly_attention` (`coefs` at least); not those about states.

        Returns:
            Outputs of the new tokens; `final_state` is None where the tokens wait.
        """
        k, v = _joined(self.k, k), _joined(self.v, v)
        log_decay = None if log_decay is None else _joined(self.log_decay, log_decay)
        key_weight = None if key_weight is None else _joined(self.key_weight, key_weight)
        flush = k.shape[1] >= self.capacity
        result = poly_attention(
            q, k, v, log_decay, key_weight=key_weight, initial_state=self.state, output_final_state=flush, **options
        )
        if result.final_state is not None:
            self.state = result.final_state
            self.k = self.v = self.log_decay = self.key_weight = None
        else:
            self.k, self.v, self.log_decay, self.key_weight = k, v, log_decay, key_weight
        return result


def _joined(waiting: Tensor | None, new: Tensor) -> Tensor:
    return new if waiting is None else torch.cat([waiting, new], dim=1)
