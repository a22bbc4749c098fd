"""Building the model of a recipe from random weights."""

from __future__ import annotations

import logging

from transformers import LlamaConfig, set_seed

from subquad.convert.plan import ConversionPlan, plan_conversion
from subquad.errors import ConfigError
from subquad.models import SubquadLlamaConfig, SubquadLlamaForCausalLM
from subquad.pretrain.schema import PretrainRecipe

logger = logging.getLogger(__name__)


def plan_model(recipe: PretrainRecipe) -> ConversionPlan:
    """Check the mixers of a recipe against its decoder and count what each holds; builds nothing.

    Warns of a window as long as the rows, and of a windowed mixer's small start.

    Args:
        recipe: the recipe.

    Returns:
        The plan: every layer with its mixer, parameters and cache bytes.

    Raises:
        ConfigError: parts, layers or heads that the decoder cannot have or does not have, a window beyond the rows.
    """
    plan = plan_conversion(LlamaConfig(**_sizes(recipe, vocab_size=1)), recipe.mixer, recipe.layers)
    if any(mixer.window for mixer in plan.mixers.values()):
        logger.warning(
            "%s: a mixer with a window starts with a far part of nearly no weight, which suits pretrained weights; "
            "from random weights it may learn nothing. The papers' systems have window: 0",
            recipe.name,
        )
    return plan


def build_model(recipe: PretrainRecipe, vocab_size: int, eos_token_id: int | None = None) -> SubquadLlamaForCausalLM:
    """Build the model of a recipe with random weights; the same recipe always gives the same weights.

    Weights are normal with `model.initializer_range`, norms 1; the mixers' own parameters start as in a conversion
    (convolution an identity, decay and value step independent of the token), but see `scratch_mixer` for the decay.

    Args:
        recipe: the recipe; its seed is set for every random number generator.
        vocab_size: number of token ids.
        eos_token_id: id of the end-of-text token, if there is one.

    Returns:
        The model, in float32, on the CPU.

    Raises:
        ConfigError: as for `plan_model`.
    """
    plan = plan_model(recipe)
    mixers = [layer.mixer.model_dump(mode="json") if layer.converted else None for layer in plan.layers]
    config = SubquadLlamaConfig(**_sizes(recipe, vocab_size) | {"mixers": mixers, "eos_token_id": eos_token_id})
    set_seed(recipe.seed)
    try:
        return SubquadLlamaForCausalLM(config)
    except ConfigError:
        raise
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"recipe {recipe.name}: the model cannot be built: {error}") from error


def _sizes(recipe: PretrainRecipe, vocab_size: int) -> dict[str, object]:
    model = recipe.model
    return {
        "vocab_size": vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.mlp_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width_of_head,
        "max_position_embeddings": recipe.context_length,
        "tie_word_embeddings": model.tie_embeddings,
        "initializer_range": model.initializer_range,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "bos_token_id": None,
        "eos_token_id": None,
    }
