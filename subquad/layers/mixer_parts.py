"""What the steps of a mixer hand to one another."""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from subquad.kernels import WindowOutput
from subquad.layers.far_weight import FarInputs
from subquad.layers.kept_keys import KeptStream
from subquad.layers.stream import WindowStream

# How far the output reaches.
Reach = Literal["all", "exact_only", "window_only"]


class MixerParts(NamedTuple):
    """What `Mixer.finish` joins.

    Attributes:
        far: `[B, T, num_heads, head_dim]`, the far part's weighted mean where the pure mixer divides by the sum of
            weights or by the count, else its numerator in float32; None where nothing left the window.
        mass: `[B, T, num_heads]`, the far part's sum of weights; None where no window shares it.
        near: the window; None for the pure mixer.
        skip: `[B, T, num_heads, head_dim]`, what the skip connection adds, or None.
        gate: `[B, T, num_heads, head_dim]`, factors on the output, or None.
        far_inputs: what the far part's weight may follow; None without a window.
    """

    far: Tensor | None
    mass: Tensor | None
    near: WindowOutput | None
    skip: Tensor | None = None
    gate: Tensor | None = None
    far_inputs: FarInputs | None = None


class ExactPart(NamedTuple):
    """What `Mixer.parts` computes before the far part, and independently of it.

    Attributes:
        near: window, sinks and kept keys.
        stream: which tokens leave the window.
        kept: the store of kept keys, or None.
        rotated: the teacher's q and k.
        leaving: keys and values that leave the window at each step; None where nobody reads them.
        reach: how far the output reaches.
    """

    near: WindowOutput
    stream: WindowStream
    kept: KeptStream | None
    rotated: tuple[Tensor, Tensor]
    leaving: tuple[Tensor, Tensor] | None
    reach: Reach


class FarHeads(NamedTuple):
    """The far part's heads before their maps, not yet delayed; `v` has its value step, `skipped` is v before it."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor | None
    write: Tensor | None
    skipped: Tensor
