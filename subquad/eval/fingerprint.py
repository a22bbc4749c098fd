"""A short name for exactly these weights in exactly this architecture."""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

_CHUNK = 1 << 22
# 2^64 divided by the golden ratio, as a signed number: neighbours get weights far apart.
_SPREAD = 0x9E3779B97F4A7C15 - (1 << 64)
_MIXER_MARK = ".mixer."
# What two loads of one checkpoint may differ in without computing anything else.
_NO_PART_OF_IT = {
    "_attn_implementation", "_model_name_or_path", "_name_or_path", "architectures", "auto_map", "dtype", "model_type",
    "torch_dtype", "transformers_version", "use_cache",
}  # fmt: skip


def fingerprint(model: PreTrainedModel, *, teacher: bool = False) -> str:
    """Return a fingerprint of a model: of its config, and of every bit of its parameters and saved buffers.

    Args:
        model: The model, on any device.
        teacher: Leave out the mixers, which the teacher's attention does not use.

    Returns:
        16 hexadecimal digits, equal on all devices and for any number of threads.
    """
    digest = hashlib.sha256(_config_text(model.config, teacher).encode())
    saved = model.state_dict().keys()
    buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in saved]
    for name, tensor in [*model.named_parameters(), *buffers]:
        if teacher and _MIXER_MARK in name:
            continue
        values = tensor.detach()
        digest.update(f"{name} {tuple(values.shape)} {values.dtype} {_checksum(values)}\n".encode())
    return digest.hexdigest()[:16]


def _config_text(config: PreTrainedConfig, teacher: bool) -> str:
    left_out = _NO_PART_OF_IT | ({"mixers"} if teacher else set())
    chosen = {name: value for name, value in config.to_dict().items() if name.lstrip("_") not in left_out}
    return json.dumps(
        {name: value for name, value in chosen.items() if name not in left_out}, sort_keys=True, default=str
    )


def _checksum(values: Tensor) -> int:
    """Return a sum of the bits, weighted by position, modulo 2^64: whole numbers, so that the order does not matter."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    flat = values.contiguous().view(-1).view(integers)
    total = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits = flat[start : start + _CHUNK].long()
        position = torch.arange(start + 1, start + 1 + bits.numel(), device=bits.device)
        total += int(((bits + 1) * (position * _SPREAD)).sum())
    return total % (1 << 64)
