"""A tiny Llama with weights large enough that attention attends to something."""

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


def tiny_teacher(**changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    # Larger weights than the default start give attention something to attend to.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(8.0)
    return model


def tiny_tokens(batch_size=2, seq_len=40, seed=3) -> torch.Tensor:
    return torch.randint(3, 97, (batch_size, seq_len), generator=torch.Generator().manual_seed(seed))


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Root mean square of the difference over that of b."""
    return ((a - b).square().mean() / b.square().mean()).sqrt().item()
