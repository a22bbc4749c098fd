"""What it costs to keep the far part's state in bfloat16: the loss of text read token by token with a cache.

    python -m benchmarks.quality.decode_loss runs/demo/student --text book.txt --rows 4 --seq-len 512

One forward over a text never rounds its state; a cache with `state_dtype: bfloat16` rounds it at every token. The same
rows are read with the state in float32 and in bfloat16, and at once as a check that decoding equals prefill.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from benchmarks.quality.checkpoint_command import run_command
from subquad.distill import TextSource, build_token_dataset
from subquad.eval.storage import collect_versions, git_commit
from subquad.layers import SubquadAttention, cache_bytes, converted_layers
from subquad.recipes.checkpoint import load_checkpoint

DTYPES = ("float32", "bfloat16")


def set_state_dtype(model: PreTrainedModel, dtype: str) -> int:
    """Let every far part with a state keep it in a dtype; return the bytes of one sequence's cache after 4,096 tokens.

    Args:
        model: a converted model.
        dtype: `float32` or `bfloat16`.

    Returns:
        The bytes, activations in float32.
    """
    layers = converted_layers(model)
    for layer in layers:
        if layer.mixer is not None and layer.mixer_config.linear:
            layer.mixer_config = layer.mixer_config.model_copy(update={"state_dtype": dtype})
            layer.mixer.config = layer.mixer_config
    return sum(_bytes(layer) for layer in layers)


def _bytes(layer: SubquadAttention) -> int:
    return cache_bytes(layer.mixer_config, layer.geometry, 1, 4096, torch.float32)


@torch.no_grad()
def losses(model: PreTrainedModel, ids: Tensor, step: int) -> Tensor:
    """Return the loss of every row, nats per token.

    Args:
        model: a causal language model.
        ids: `[B, T]`.
        step: tokens per forward with a cache; T reads at once, without one.

    Returns:
        `[B]`.
    """
    cache = DynamicCache(config=model.config) if step < ids.shape[1] else None
    found = []
    for start in range(0, ids.shape[1] - 1, step):
        part = ids[:, start : start + step]
        logits = model(part, past_key_values=cache, use_cache=cache is not None).logits
        targets = ids[:, start + 1 : start + 1 + part.shape[1]]
        kept = logits[:, : targets.shape[1]].float().transpose(1, 2)
        found.append(functional.cross_entropy(kept, targets, reduction="none"))
    return torch.cat(found, dim=1).mean(1)


def measure(checkpoint: str, text: str, rows: int, seq_len: int) -> dict[str, Any]:
    """Measure a converted checkpoint.

    Args:
        checkpoint: its folder.
        text: a text file.
        rows: how many rows of it.
        seq_len: tokens per row.

    Returns:
        Losses, bytes, and what is needed to repeat it.
    """
    loaded = load_checkpoint(checkpoint, torch.float32)
    if loaded.tokenizer is None:
        raise SystemExit(f"{checkpoint} has no tokenizer")
    if not converted_layers(loaded.model):
        raise SystemExit(f"{checkpoint} is not converted, so it has no state")
    source = TextSource(kind="text", paths=(text,))
    data = build_token_dataset(source, loaded.tokenizer, seq_len, max_tokens=rows * seq_len, shuffle=False)
    ids = torch.stack([row["input_ids"] for row in data])
    whole = losses(loaded.model, ids, seq_len)
    result: dict[str, Any] = {"checkpoint": checkpoint, "text": Path(text).name, "seq_len": seq_len, "rows": len(ids)}
    result["at_once"] = whole.mean().item()
    for dtype in DTYPES:
        size = set_state_dtype(loaded.model, dtype)
        found = losses(loaded.model, ids, 1)
        error = ((found - whole).std() / len(ids) ** 0.5).item()
        result[dtype] = {"loss": found.mean().item(), "more": (found - whole).mean().item(), "standard_error": error}
        result[dtype]["cache_bytes_4096"] = size
    return {**result, "versions": collect_versions(), "commit": git_commit()}


def render(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    lines = ["| state | loss | more than at once | cache at 4,096 tokens |", "|---|---:|---:|---:|"]
    lines.append(f"| read at once | {result['at_once']:.4f} | | |")
    for dtype in DTYPES:
        found = result[dtype]
        size = found["cache_bytes_4096"] / 2**20
        lines.append(
            f"| {dtype} | {found['loss']:.4f} | {found['more']:+.4f} ± {found['standard_error']:.4f} | {size:.1f} MiB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Read the command line, measure, print and write."""

    def chosen(given: argparse.Namespace) -> dict[str, Any]:
        return measure(given.checkpoint, given.text, given.rows, given.seq_len)

    run_command(__doc__, chosen, render, rows=4, seq_len=512)


if __name__ == "__main__":
    main()
