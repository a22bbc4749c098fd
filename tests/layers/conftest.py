"""Tiny Llama models shared by the layer and model tests."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny_config(**changes) -> LlamaConfig:
    values = {
        "vocab_size": 97,
        "hidden_size": 36,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 256,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(values | changes))


@pytest.fixture
def teacher() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config()).eval()
    # Larger weights than the default start give attention something to attend to.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(8.0)
    return model
