"""Tiny Llama checkpoints for the tests: as a Hugging Face directory and as a GGUF file."""

from __future__ import annotations

from pathlib import Path

import gguf
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + ["ĠĠ", "he"]
CHAT_TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tiny_config(**changes) -> LlamaConfig:
    values = {
        "vocab_size": len(TOKENS),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    return LlamaConfig(**{**values, **changes})


def tiny_model(seed: int = 0, **changes) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():  # far from zero, so that a lost or misplaced tensor shows in the logits
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(TOKENS)}, merges=[("Ġ", "Ġ"), ("h", "e")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=SPECIAL[1],
        eos_token=SPECIAL[2],
        unk_token=SPECIAL[0],
        pad_token=SPECIAL[2],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def write_hf(directory: Path, model: LlamaForCausalLM | None = None, tokenizer: bool = True, **save) -> Path:
    (model or tiny_model()).save_pretrained(directory, **save)
    if tokenizer:
        tiny_tokenizer().save_pretrained(directory)
    return directory


def write_gguf(
    path: Path,
    model: LlamaForCausalLM | None = None,
    *,
    architecture: str = "llama",
    metadata: dict[str, int | float | str] | None = None,
    without: tuple[str, ...] = (),
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Write a float32 GGUF as llama.cpp does; `without` leaves out keys or tensors, the others add some."""
    model = model or tiny_model()
    config = model.config
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.dimension_count": config.head_dim,
        "rope.freq_base": config.rope_parameters["rope_theta"],
        "vocab_size": config.vocab_size,
        **(metadata or {}),
    }
    for key, value in values.items():
        if key in without:
            continue
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)]
        add(f"{architecture}.{key}", value)
    _add_tokenizer(writer)
    for name, tensor in {**_gguf_tensors(model), **(extra or {})}.items():
        if name not in without:
            writer.add_tensor(name, tensor.detach().float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: gguf.GGUFWriter) -> None:
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([control if token in SPECIAL else normal for token in TOKENS])
    writer.add_token_merges(["Ġ Ġ", "h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _gguf_tensors(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    tensors = {}
    for name, tensor in model.named_parameters():
        for projection, num_heads in heads.items():
            if f"{projection}.weight" in name:  # GGUF interleaves the two halves that rotary embeddings pair
                halves = tensor.reshape(num_heads, 2, config.head_dim // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        tensors[names.get_name(name, try_suffixes=(".weight",))] = tensor.contiguous()
    return tensors


def logits(model, length: int = 40) -> torch.Tensor:
    tokens = (torch.arange(length) * 7 + 3) % len(TOKENS)
    with torch.no_grad():
        return model(input_ids=tokens[None]).logits
