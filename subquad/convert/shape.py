"""Which shapes of a supported family can be converted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subquad.convert.families import Family
from subquad.errors import SourceError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# these recompute the rotary frequencies as the sequence grows; a state made of keys rotated earlier cannot follow
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def check_shape(hf_config: PretrainedConfig, family: Family, source: str = "this model") -> None:
    """Check that every attention layer of a model can be replaced.

    Args:
        hf_config: The model's config.
        family: Its family.
        source: What to call the model in the message.

    Raises:
        SourceError: Every reason why it cannot.
    """
    num_heads, num_kv_heads, head_dim = (
        family.size(hf_config, name) for name in ("num_heads", "num_kv_heads", "head_dim")
    )
    problems = []
    if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
        problems.append(
            f"{num_heads} query heads do not divide evenly over {num_kv_heads} key/value heads; "
            "a state belongs to one key/value head and is shared by a whole number of query heads"
        )
    if not family.causal:
        problems += _encoder_problems(hf_config)
    if family.rotary and (head_dim < 2 or head_dim % 2):
        problems.append(f"head_dim {head_dim} is not an even number, which rotary embeddings need")
    if getattr(hf_config, "sliding_window", None):
        problems.append(
            f"its attention has a sliding window of {hf_config.sliding_window} tokens; "
            "only full attention can be a teacher"
        )
    if family.size(hf_config, "num_layers") < 1:
        problems.append("it has no layers")
    problems += _rope_problems(hf_config)
    if problems:
        raise SourceError(
            f"{source} is a {family.architecture} of a shape that cannot be converted: {'; '.join(problems)}."
        )


def _encoder_problems(hf_config: PretrainedConfig) -> list[str]:
    problems = []
    if hf_config.hidden_size % hf_config.num_attention_heads:
        problems.append(
            f"its hidden size {hf_config.hidden_size} is not a multiple of its {hf_config.num_attention_heads} heads"
        )
    if getattr(hf_config, "is_decoder", False) or getattr(hf_config, "add_cross_attention", False):
        problems.append("it is used as a decoder (is_decoder or add_cross_attention); only the encoder is supported")
    positions = getattr(hf_config, "position_embedding_type", None) or "absolute"
    if positions != "absolute":
        problems.append(f"its positions are {positions!r}, inside the softmax; only 'absolute' ones are supported")
    return problems


def _rope_problems(hf_config: PretrainedConfig) -> list[str]:
    rope = getattr(hf_config, "rope_parameters", None) or {}
    problems = []
    if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
        problems.append(
            f"its rotary embedding ({rope['rope_type']}) changes with the sequence length, so rotated keys already "
            "written into a state would be wrong later; default, linear, yarn and llama3 are supported"
        )
    partial = rope.get("partial_rotary_factor") or getattr(hf_config, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        problems.append(
            f"its rotary embedding turns only a part ({partial}) of each head; only whole heads are supported"
        )
    return problems
