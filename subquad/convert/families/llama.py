"""Names of the Llama family (also Llama 2 and 3, SmolLM2, TinyLlama)."""

from __future__ import annotations

from subquad.convert.families.base import Family

LLAMA = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    model_type="llama",
    student_model_type="subquad_llama",
    fields={
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "context_length": "max_position_embeddings",
    },
    # Llama 1 and 2 checkpoints carry the rotary frequencies, which the model computes from its config
    ignored_keys=(r".*\.rotary_emb\.inv_freq",),
)
