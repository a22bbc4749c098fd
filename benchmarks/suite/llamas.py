"""Llama-shaped models with random weights and converted layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Every kind of mixer that has a far part: with the window of the presets, and pure, where the kernel is all there is.
MIXERS: Mapping[str, dict[str, Any]] = {
    "2mamba": {"preset": "2mamba"},
    "mamba2s": {"preset": "mamba2s"},
    "taylor": {"preset": "taylor"},
    "2mamba-pure": {"preset": "2mamba", "window": 0},
    "mamba2s-pure": {"preset": "mamba2s", "window": 0},
    "taylor-pure": {"preset": "taylor", "window": 0},
}
MIXER_MARK = ".self_attn.mixer."


@dataclass(frozen=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama, named as in its configuration."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    initializer_range: float = 0.02


def random_student(
    shape: LlamaShape, mixer: str, *, device: torch.device, dtype: torch.dtype, seed: int
) -> PreTrainedModel:
    """Build a model whose layers are all converted; the teacher is one of its modes.

    Args:
        shape: Sizes.
        mixer: A name of `MIXERS`.
        device: Where the weights are made: the same seed gives other weights on another device.
        dtype: Dtype of all weights but the mixers', which are float32.
        seed: Seed.

    Returns:
        The model, in evaluation mode, without gradients switched off.
    """
    # Here, so that the sections on the op run where transformers is not installed.
    from subquad.layers import resolve_mixer
    from subquad.models.llama import SubquadLlamaConfig, SubquadLlamaForCausalLM

    mixers = [resolve_mixer(MIXERS[mixer]).model_dump(mode="json")] * shape.num_hidden_layers
    config = SubquadLlamaConfig(**vars(shape), mixers=mixers, attn_implementation="sdpa")
    torch.manual_seed(seed)
    with torch.device(device):
        model = SubquadLlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if MIXER_MARK not in name:
            parameter.data = parameter.data.to(dtype)
    return model.eval()


def stir_mixers(model: PreTrainedModel, seed: int) -> None:
    """Give a fresh model's mixers an effect: they start so that the window outweighs the far part by e^14.

    Args:
        model: Changed in place.
        seed: Seed of the noise on every parameter of the mixers.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if MIXER_MARK not in name:
                continue
            if name.endswith("log_mix"):
                parameter.zero_()
            spread = 0.02 if parameter.dim() == 3 else 0.1
            parameter.add_(spread * torch.randn(parameter.shape, generator=generator).to(parameter.device))
