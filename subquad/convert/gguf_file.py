"""Reading a GGUF file: its header, the Hugging Face config it describes, and its weights and tokenizer."""

from __future__ import annotations

import functools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from huggingface_hub.errors import StrictDataclassError
from tokenizers import pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from subquad.convert.families import find_family
from subquad.errors import SourceError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ROPE_FACTORS = "rope_freqs.weight"
# without these the loader would fall back to the config class's defaults and build another model
_REQUIRED = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)
_SPECIAL_TOKENS = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
# Llama 3.1, 3.2 and 3.3 were all released with these; only the factor differs
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# what GGUFReader raises on bytes that are not what the header promised
_DAMAGE = (ValueError, IndexError, KeyError, OverflowError, OSError, TypeError, MemoryError)


@dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says about itself.

    Attributes:
        path: The file.
        architecture: `general.architecture`.
        metadata: Every key whose value is a number or a string; arrays are left out.
        shapes: Tensor name to shape, in PyTorch's order.
        rope_factors: Divisors of the rotary frequencies (`rope_freqs.weight`), or None.
    """

    path: Path
    architecture: str
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    rope_factors: torch.Tensor | None

    def own(self, key: str) -> Any:
        """Return the metadata value of the architecture's own key, or None."""
        return self.metadata.get(f"{self.architecture}.{key}")


def read_header(path: Path) -> GgufHeader:
    """Read and check a GGUF header; no weight is read. The last file's header is remembered: parsing takes seconds.

    Args:
        path: The file.

    Returns:
        The header.

    Raises:
        SourceError: Not a GGUF file, an unknown version, or truncated or damaged content.
    """
    stat = path.stat()
    return _parse_header(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1)
def _parse_header(path: Path, size: int, modified_ns: int) -> GgufHeader:
    _check_start(path)
    try:
        # besides the header this maps every tensor, and so fails where the file ends early
        reader = GGUFReader(path)
        metadata = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
        shapes = {tensor.name: tuple(int(n) for n in reversed(tensor.shape)) for tensor in reader.tensors}
        factors = [torch.tensor(tensor.data) for tensor in reader.tensors if tensor.name == _ROPE_FACTORS]
        architecture = str(metadata["general.architecture"])
    except _DAMAGE as error:
        raise SourceError(
            f"{path} is truncated or damaged ({error}; the file has {size:,} bytes). Download it again."
        ) from error
    return GgufHeader(path, architecture, metadata, shapes, factors[0] if factors else None)


def _check_start(path: Path) -> None:
    with path.open("rb") as file:
        start = file.read(8)
    if start[:4] != _MAGIC:
        raise SourceError(f"{path} is not a GGUF file: it starts with {start[:4]!r}, not {_MAGIC!r}.")
    if len(start) < 8:
        raise SourceError(f"{path} is truncated: it has only {len(start)} bytes. Download it again.")
    version = struct.unpack("<I", start[4:])[0]
    if version not in _VERSIONS:
        raise SourceError(
            f"{path} is GGUF version {version}; versions {' and '.join(map(str, _VERSIONS))}, little-endian, can "
            "be read. Convert it again with a current llama.cpp."
        )


def read_config(header: GgufHeader) -> LlamaConfig:
    """Return the Hugging Face config that a Llama GGUF file describes.

    Args:
        header: The file's header.

    Returns:
        The config. Llama 3's rotary scaling, which a GGUF file stores only as factors, is restored.

    Raises:
        SourceError: Another architecture, missing metadata, a mixture of experts, or a rotary scaling that the file
            does not describe completely.
    """
    find_family(header.architecture, source=str(header.path))
    missing = [key for key in _REQUIRED if header.own(key) is None]
    if missing:
        keys = ", ".join(f"{header.architecture}.{key}" for key in missing)
        raise SourceError(f"{header.path} lacks the metadata {keys}; convert it again from the original checkpoint.")
    if header.own("expert_count"):
        raise SourceError(
            f"{header.path} is a mixture of {header.own('expert_count')} experts, which cannot be converted; "
            "only dense Llama models can."
        )
    scaling = header.own("rope.scaling.type")
    if scaling not in (None, "none"):
        raise SourceError(
            f"{header.path} scales its rotary embedding ({scaling}), which transformers' GGUF loader drops. "
            "Use the model's Hugging Face checkpoint."
        )
    try:
        config = LlamaConfig.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except (StrictDataclassError, ValueError, KeyError, OSError, TypeError, ArithmeticError) as error:
        reason = " ".join(str(error).split())
        raise SourceError(f"{header.path} describes no Llama that transformers can build: {reason}") from error
    if header.own("attention.key_length") not in (None, config.head_dim):
        raise SourceError(
            f"{header.path} turns {config.head_dim} of {header.own('attention.key_length')} numbers per head by its "
            "rotary embedding; only whole heads are supported."
        )
    if header.rope_factors is not None:
        config.rope_parameters = _llama3_rope(header, config, header.rope_factors)
    # the loader puts the file's free-text title where the checkpoint's address belongs
    config.__dict__.pop("_model_name_or_path", None)
    config.architectures = [LlamaForCausalLM.__name__]
    return config


def _llama3_rope(header: GgufHeader, config: LlamaConfig, factors: torch.Tensor) -> dict[str, Any]:
    """Return `rope_parameters` that give the file's frequencies, or refuse: the loader drops them silently."""
    plain = dict(config.rope_parameters)
    if bool((factors == 1.0).all()):
        return plain
    scaled = {**plain, "rope_type": "llama3", "factor": float(factors.max()), **_LLAMA3_ROPE}
    trial = LlamaConfig.from_dict({**config.to_dict(), "rope_parameters": scaled})
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](trial, device=torch.device("cpu"))
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    expected = plain["rope_theta"] ** -exponents / factors
    if frequencies.shape != expected.shape or not torch.allclose(frequencies, expected, rtol=1e-3, atol=0.0):
        raise SourceError(
            f"{header.path} scales its rotary frequencies ({_ROPE_FACTORS}) in a way that is not Llama 3's, and "
            "transformers' GGUF loader drops it. Use the model's Hugging Face checkpoint."
        )
    return scaled


def hf_shapes(header: GgufHeader, hf_names: list[str], num_layers: int) -> dict[str, tuple[int, ...]]:
    """Return the file's tensor shapes under the names the Hugging Face model gives them.

    Args:
        header: The file's header.
        hf_names: Parameter names of the Hugging Face model.
        num_layers: Its layers.

    Returns:
        Tensor name to shape; a tensor that the model does not have keeps its GGUF name.
    """
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, num_layers)
    to_hf = {names.get_name(hf_name, try_suffixes=(".weight", ".bias")): hf_name for hf_name in hf_names}
    return {to_hf.get(name, name): shape for name, shape in header.shapes.items() if name != _ROPE_FACTORS}


def dequantise(header: GgufHeader, config: LlamaConfig, dtype: torch.dtype) -> tuple[LlamaForCausalLM, dict[str, Any]]:
    """Load the weights with transformers' GGUF loader, as a plain model.

    Args:
        header: The file's header.
        config: Its config, from `read_config`.
        dtype: Dtype of the weights.

    Returns:
        The model and transformers' loading info.

    Raises:
        SourceError: A quantisation type that the gguf package cannot undo.
    """
    try:
        model, loading_info = LlamaForCausalLM.from_pretrained(
            header.path.parent, gguf_file=header.path.name, config=config, dtype=dtype, output_loading_info=True
        )
    except NotImplementedError as error:
        raise SourceError(f"{header.path} uses a quantisation that cannot be undone here: {error}") from error
    # the weights are plain now; with these left over, save_pretrained and Trainer would still refuse the model
    vars(model.config).pop("quantization_config", None)
    for name in ("hf_quantizer", "is_quantized", "quantization_method"):
        vars(model).pop(name, None)
    return model, loading_info


def load_tokenizer(header: GgufHeader) -> PreTrainedTokenizerBase:
    """Load the tokenizer and repair what transformers' GGUF loader gets wrong.

    Three things are set from the metadata: the special tokens (5.17 takes `bos` for `eos`), no clean-up of spaces in
    a byte-level vocabulary (it is lossy), and SmolLM's split before digits (without it, runs of spaces before a
    number are cut differently than in training; llama.cpp's `LLAMA_VOCAB_PRE_TYPE_SMOLLM`).

    Args:
        header: The file's header.

    Returns:
        The tokenizer.

    Raises:
        SourceError: The file holds no tokenizer that transformers can build.
    """
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(header.path.parent, gguf_file=header.path.name)
    except (ValueError, KeyError, OSError, TypeError) as error:
        raise SourceError(f"{header.path} holds no tokenizer that transformers can build: {error}") from error
    for key, name in _SPECIAL_TOKENS.items():
        token_id = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
        setattr(tokenizer, name, None if token_id is None else tokenizer.convert_ids_to_tokens(int(token_id)))
    if header.metadata.get("tokenizer.ggml.model") == "gpt2":
        tokenizer.clean_up_tokenization_spaces = False
    if header.metadata.get("tokenizer.ggml.pre") == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return tokenizer
