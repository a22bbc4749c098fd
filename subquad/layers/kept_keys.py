"""Kept keys: tokens that have left the window and stay exact, a fixed number per key/value head."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subquad.kernels import WindowOutput
from subquad.kernels.kept import choose_kept, join_exact, kept_attention, take_tokens
from subquad.layers.config import MixerConfig
from subquad.layers.geometry import LayerGeometry
from subquad.layers.inputs import HeadInputs
from subquad.layers.stream import FarStream, WindowStream, shift_through

# Scores are multiples of 1 / 256: tokens that differ by the rounding of a product only, as one word at two places in
# the first layer does, tie, and the older is kept whether a text is read at once or token by token.
STEPS_PER_UNIT = 256.0
# No value is shorter than this for its logarithm.
LEAST_NORM = 1e-6


class KeyScore(nn.Module):
    """How much a token will be worth once it is far: `s = w . f` per key/value head, f of `token_features`.

    It reads the layer's input and the key before its rotation, so that it does not depend on the position. Calibration
    fits it to the teacher: the log of the most that the token is worth to a query beyond the window
    (`convert/key_scores.py`). It starts as `-|k|`: pretrained heads look far back mostly at keys of small norm (Devoto
    et al., arXiv 2406.11430). The choice has no gradient, and training leaves the score as it is.

    Attributes:
        weight: `[num_kv_heads, hidden_size + 3 * num_kv_heads]` float32; a buffer.
    """

    weight: Tensor

    def __init__(self, geometry: LayerGeometry) -> None:
        """Create the score of the start.

        Args:
            geometry: sizes of the converted heads only.
        """
        super().__init__()
        self.hidden_size, heads = geometry.hidden_size, geometry.num_kv_heads
        self.register_buffer("weight", torch.zeros(heads, self.hidden_size + 3 * heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Prefer keys of small norm."""
        self.weight.zero_()
        self.weight[:, self.hidden_size :].fill_diagonal_(-1.0)

    @torch.no_grad()
    def forward(self, inputs: HeadInputs) -> Tensor:
        """Score tokens.

        Args:
            inputs: the converted heads.

        Returns:
            `[B, T, num_kv_heads]` float32.
        """
        with torch.autocast(inputs.k.device.type, enabled=False):
            scores = token_features(inputs) @ self.weight.float().T
        return (scores * STEPS_PER_UNIT).round() / STEPS_PER_UNIT


def token_features(inputs: HeadInputs) -> Tensor:
    """Return what a token's score is linear in, the same for all heads of a layer.

    Args:
        inputs: the converted heads.

    Returns:
        `[B, T, hidden_size + 3 * num_kv_heads]` float32: the layer's input, then of every key/value head the norm of
        its key, then the squares of these norms, then the logs of the norms of the values.
    """
    keys, values = (x.float().norm(dim=-1) for x in (inputs.k, inputs.v))
    logs = values.clamp_min(LEAST_NORM).log()
    return torch.cat([inputs.hidden_states.float(), keys, keys.square(), logs], dim=-1)


class KeptStream:
    """The kept keys of one call: which they are at every step, attention to them, and what the far part gets."""

    def __init__(self, config: MixerConfig, score: KeyScore, inputs: HeadInputs, stream: WindowStream) -> None:
        """Choose.

        Args:
            config: how many keys are kept per key/value head, and how much later ones are preferred.
            score: of a token.
            inputs: the converted heads; their cache is updated.
            stream: the window, which has not moved on yet.
        """
        self.size, self.buffers = config.kept_keys, inputs.buffers
        window, num_new, size = stream.window, inputs.k.shape[1], self.size
        scores = score(inputs)
        if config.kept_recency:
            # a score in itself does not change: the order of two tokens is the same at every later one
            scores = scores + (config.kept_recency / 1000.0) * stream.rank[..., None]
        scores = shift_through(scores, window, "window_scores", self.buffers)[:, :num_new]
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
