"""What `subquad pretrain` prints at the end."""

from __future__ import annotations

from pathlib import Path

from subquad.eval.style import format_bytes, format_positions, format_seconds, with_error
from subquad.pretrain.results import PretrainResults


def summarise(results: PretrainResults, run_dir: Path) -> str:
    """Return the result of a training from random weights in lines of text.

    Args:
        results: the result.
        run_dir: the run's folder.

    Returns:
        Lines without a last line break.
    """
    mixers = ", ".join(f"{count} × {label}" for label, count in results.mixers.items())
    lines = [
        f"{results.name}: {results.parameters:,} parameters, layers: {mixers}",
        f"trained on {results.tokens:,} tokens in {format_seconds(results.train_seconds)}",
        f"cache {format_bytes(results.cache_bytes)}, key/value cache {format_bytes(results.kv_bytes)} "
        "at the longest row, in float32",
    ]
    if results.loss is not None:
        loss = with_error(results.loss.value, results.loss.standard_error)
        lines.append(f"held-out loss {loss} nats/token on {results.loss.num:,} tokens of {results.data}")
    lines += [
        f"  position {format_positions(bucket.start, bucket.end)}: {with_error(bucket.loss, bucket.standard_error)}"
        for bucket in results.by_position
    ]
    lines += [
        f"recall at {length:,} tokens: {with_error(found.value, found.standard_error)} (guessing: {results.chance:.4f})"
        for length, found in results.recall.items()
    ]
    return "\n".join([*lines, f"checkpoint: {run_dir / 'model'}"])
