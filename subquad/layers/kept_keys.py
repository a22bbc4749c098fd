"""Kept keys: tokens that have left the window and stay exact, a fixed number per key/value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.kernels import WindowOutput
from subquad.kernels.kept import choose_kept, join_exact, kept_attention, take_tokens
from subquad.layers.geometry import LayerGeometry
from subquad.layers.inputs import HeadInputs
from subquad.layers.stream import FarStream, WindowStream, shift_through

NORM = -2
# Scores are multiples of 1 / 256: keys that differ by the rounding of a product only, as those of one token at two
# places in the first layer do, tie, and the older is kept whether a text is read at once or token by token.
STEPS_PER_UNIT = 256.0


class KeyScore(nn.Module):
    """How much a token will be worth once it is far: `s = a . k + b |k| + c |k|**2`, per key/value head.

    It reads the key before its rotation, so that it does not depend on the position. Calibration fits it to the
    teacher: the log of the most that the token is worth to a query beyond the window (`convert/key_scores.py`;
    `key_features` is the regression's input). It starts as `-|k|`: pretrained heads look far back mostly at keys of
    small norm (Devoto et al., arXiv 2406.11430). The choice has no gradient, and training leaves the score as it is.

    Attributes:
        weight: `[num_kv_heads, head_dim + 2]` float32, a, b and c; a buffer.
    """

    weight: Tensor

    def __init__(self, geometry: LayerGeometry) -> None:
        """Create the score of the start.

        Args:
            geometry: sizes of the converted heads only.
        """
        super().__init__()
        self.register_buffer("weight", torch.zeros(geometry.num_kv_heads, geometry.head_dim + 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Prefer keys of small norm."""
        self.weight.zero_()
        self.weight[:, NORM] = -1.0

    @torch.no_grad()
    def forward(self, k: Tensor) -> Tensor:
        """Score keys.

        Args:
            k: `[B, T, num_kv_heads, head_dim]`, not rotated.

        Returns:
            `[B, T, num_kv_heads]` float32.
        """
        scores = (key_features(k) * self.weight.float()).sum(-1)
        return (scores * STEPS_PER_UNIT).round() / STEPS_PER_UNIT


def key_features(k: Tensor) -> Tensor:
    """Return k, its norm and the norm's square, `[..., head_dim + 2]` float32, of keys `[..., head_dim]`."""
    k = k.float()
    norm = k.norm(dim=-1, keepdim=True)
    return torch.cat([k, norm, norm.square()], dim=-1)


class KeptStream:
    """The kept keys of one call: which they are at every step, attention to them, and what the far part gets."""

    def __init__(self, size: int, score: KeyScore, inputs: HeadInputs, stream: WindowStream) -> None:
        """Choose.

        Args:
            size: keys kept per key/value head.
            score: of a key.
            inputs: the converted heads; their cache is updated.
            stream: the window, which has not moved on yet.
        """
        self.size, self.buffers = size, inputs.buffers
        window, num_new = stream.window, inputs.k.shape[1]
        scores = shift_through(score(inputs.k), window, "window_scores", self.buffers)[:, :num_new]
        offered = scores.masked_fill(~stream.leaving[..., None], float("-inf"))
        before = offered.new_full((offered.shape[0], size, offered.shape[2]), float("-inf"))
        if self.buffers is not None:
            before = self.buffers["kept_scores"].masked_fill(~self.buffers["kept_valid"], float("-inf"))
        every = torch.cat([before, offered], dim=1)
        self.choice = choose_kept(every, size, documents=inputs.sequence.documents)
        self._remember("kept_scores", every)
        if self.buffers is not None:
            self.buffers["kept_valid"] = self.choice.final < every.shape[1]

    def attend(self, near: WindowOutput, q: Tensor, k: Tensor, v: Tensor) -> WindowOutput:
        """Join the kept keys with the window.

        Args:
            near: the window.
            q: `[B, T, num_heads, head_dim]` rotated queries.
            k: `[B, T, num_kv_heads, head_dim]` rotated keys that leave the window at each step.
            v: `[B, T, num_kv_heads, head_dim]` their values.

        Returns:
            The exact part.
        """
        self.exact = self._with_kept("kept_keys", k), self._with_kept("kept_values", v)
        return join_exact(near, kept_attention(q, *self.exact, self.choice))

    def reroute(self, far: FarStream, shared: bool) -> FarStream:
        """Write what leaves the store at each step, in place of what leaves the window.

        Args:
            far: what leaves the window.
            shared: whether the far part reads the window's own keys and values; `attend` comes first.

        Returns:
            The same steps with other tokens; the decays stay, since they are those of the steps.
        """
        leaves = self.choice.leaves
        if shared:
            k, v = self.exact
        else:
            k, v = self._with_kept("kept_far_keys", far.k), self._with_kept("kept_far_values", far.v)
        written = (leaves < k.shape[1]).float()
        if far.write is not None:
            written = written * take_tokens(self._with_kept("kept_write", far.write), leaves)
        return FarStream(
            take_tokens(k, leaves), take_tokens(v, leaves), far.log_decay, torch.ones_like(far.weight), written
        )

    def _with_kept(self, name: str, new: Tensor) -> Tensor:
        """Prepend what was kept before this call, and keep what is kept after it."""
        if self.buffers is None:
            past = new.new_zeros((new.shape[0], self.size, *new.shape[2:]))
        else:
            past = self.buffers[name].to(new.dtype)
        every = torch.cat([past, new], dim=1)
        self._remember(name, every)
        return every

    def _remember(self, name: str, every: Tensor) -> None:
        if self.buffers is not None:
            self.buffers[name] = take_tokens(every, self.choice.final).to(self.buffers[name].dtype)
