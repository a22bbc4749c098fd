"""A greedy continuation, to read what a model writes."""

from __future__ import annotations

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from subquad.errors import ConfigError
from subquad.eval.modes import EvalMode, evaluation_mode


def generate_sample(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int = 40,
    mode: EvalMode | None = "student",
) -> str:
    """Continue a prompt greedily, through the library's own `generate`.

    Args:
        model: A converted model, or with `mode=None` any Hugging Face causal model.
        tokenizer: The model's tokenizer.
        prompt: Text to continue; not put through a chat template.
        max_new_tokens: Longest continuation.
        mode: Attention mode; None leaves the model as it is.

    Returns:
        The continuation without the prompt and without special tokens.

    Raises:
        ConfigError: The prompt has no tokens, or `max_new_tokens` is below 1.
    """
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    inputs = tokenizer(prompt, return_tensors="pt")
    num_prompt = inputs["input_ids"].shape[1]
    if num_prompt == 0:
        raise ConfigError(f"the prompt {prompt!r} has no tokens; give some text")
    device = next(model.parameters()).device
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    # A config of its own: a checkpoint's may ask for sampling.
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max_new_tokens, eos_token_id=tokenizer.eos_token_id, pad_token_id=pad
    )
    with torch.no_grad(), evaluation_mode(model, mode):
        tokens = model.generate(
            inputs["input_ids"].to(device),
            attention_mask=inputs["attention_mask"].to(device),
            generation_config=config,
        )
    # Decoded together: a SentencePiece tokenizer drops the space before the first token it is given.
    before = tokenizer.decode(tokens[0, :num_prompt], skip_special_tokens=True)
    return tokenizer.decode(tokens[0], skip_special_tokens=True).removeprefix(before)
