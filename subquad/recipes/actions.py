"""What single commands do outside a run: plan, evaluate a checkpoint, continue a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from rich.table import Table

from subquad.console import open_console
from subquad.convert.families import require_decoder
from subquad.convert.plan import ConversionPlan, plan_conversion
from subquad.convert.source import inspect_source
from subquad.distill import TextSource, build_token_dataset
from subquad.errors import ConfigError, DataError
from subquad.eval.generate import generate_sample
from subquad.eval.loss import LossResult, evaluate_loss
from subquad.eval.modes import EvalMode
from subquad.eval.style import with_error
from subquad.layers import converted_layers
from subquad.recipes.checkpoint import Checkpoint, load_checkpoint
from subquad.recipes.checks import check_recipe_against
from subquad.recipes.progress import progress_bar
from subquad.recipes.schema import Recipe
from subquad.recipes.settings import weights_dtype


@dataclass(frozen=True)
class Measurement:
    """Losses of one checkpoint on the same tokens.

    Attributes:
        checkpoint: its folder or name.
        data: what the text is.
        losses: what was measured, by name; the model itself first.
    """

    checkpoint: str
    data: str
    losses: dict[str, LossResult]

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as plain values for JSON; losses are nats per token."""
        return {
            "checkpoint": self.checkpoint,
            "data": self.data,
            "num_tokens": next(iter(self.losses.values())).num_tokens,
            "loss": {name: result.loss for name, result in self.losses.items()},
            "standard_error": {name: result.standard_error for name, result in self.losses.items()},
            "perplexity": {name: result.perplexity for name, result in self.losses.items()},
        }

    def table(self) -> Table:
        """Return the figures as a table for a rich console."""
        num_tokens = next(iter(self.losses.values())).num_tokens
        table = Table(title=f"{self.checkpoint} on {num_tokens:,} tokens of {self.data}", title_justify="left")
        for heading in ("Model", "Nats/token", "Perplexity"):
            table.add_column(heading, justify="left" if heading == "Model" else "right")
        for name, result in self.losses.items():
            table.add_row(name, with_error(result.loss, result.standard_error), f"{result.perplexity:.2f}")
        return table


def plan_recipe(recipe: Recipe) -> ConversionPlan:
    """Check a recipe against its model and return what every layer would become; loads no weights.

    Args:
        recipe: the recipe.

    Returns:
        The plan.

    Raises:
        ConfigError: the recipe does not fit the model.
        SourceError: the model is missing, damaged or cannot be converted.
    """
    hf_config = inspect_source(recipe.model.source).hf_config
    check_recipe_against(recipe, hf_config)
    dtype = weights_dtype(recipe, hf_config)
    convert = recipe.convert
    return plan_conversion(hf_config, convert.mixer, convert.layers, exact_kv_heads=convert.named_heads, dtype=dtype)


def evaluate_checkpoint(source: str, paths: Sequence[str], *, tokens: int, seq_len: int) -> Measurement:
    """Measure the loss of a checkpoint, and of a converted one also with its far part off.

    Args:
        source: a converted checkpoint, or a teacher.
        paths: text files; none takes the held-out part of the embedded text.
        tokens: most tokens to measure on.
        seq_len: tokens per row.

    Returns:
        The losses.

    Raises:
        ConfigError: `seq_len` is beyond the model's context, `tokens` below one row, or the model is an encoder.
        SourceError: the checkpoint cannot be loaded.
        DataError: the text is missing or too short.
    """
    text = TextSource(kind="text", paths=tuple(paths)) if paths else TextSource(kind="embedded", part="eval")
    checkpoint = _load(source)
    require_decoder(checkpoint.model.config.model_type, "the loss on the next token")
    context_length = checkpoint.model.config.max_position_embeddings
    if seq_len > context_length:
        raise ConfigError(f"--seq-len is {seq_len}, beyond the model's context of {context_length}; lower it")
    rows = build_token_dataset(text, checkpoint.tokenizer, seq_len, max_tokens=tokens)
    if not isinstance(rows, Dataset):
        raise AssertionError("local text is not streamed")
    modes: dict[str, EvalMode | None] = {"as it is": None}
    layers = converted_layers(checkpoint.model)
    if layers and all(layer.mixer is None or layer.mixer_config.window for layer in layers):
        modes["far part off"] = "student_without_far"
    losses = {}
    for name, mode in modes.items():
        with progress_bar(f"loss, {name}", open_console(stderr=True)) as advance:
            losses[name] = evaluate_loss(checkpoint.model, rows, mode=mode, progress=advance)
    return Measurement(source, text.describe(), losses)


def continue_prompt(source: str, prompt: str, tokens: int) -> str:
    """Continue a prompt greedily.

    Args:
        source: a converted checkpoint, or a teacher.
        prompt: text to continue.
        tokens: most tokens to write.

    Returns:
        The continuation, without the prompt.

    Raises:
        ConfigError: the prompt has no tokens, or the model is an encoder.
        SourceError: the checkpoint cannot be loaded.
        DataError: the checkpoint has no tokenizer.
    """
    checkpoint = _load(source)
    require_decoder(checkpoint.model.config.model_type, "generating text")
    return generate_sample(checkpoint.model, checkpoint.tokenizer, prompt, max_new_tokens=tokens, mode=None)


def _load(source: str) -> Checkpoint:
    checkpoint = load_checkpoint(source)
    if checkpoint.tokenizer is None:
        raise DataError(f"{source} has no tokenizer, so it cannot read text; put its files beside the weights.")
    checkpoint.model.to(PartialState().device)
    return checkpoint
