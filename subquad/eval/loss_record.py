"""Held-out loss as an evaluation task: by position, for every contestant, on the same rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from subquad.errors import OutputError
from subquad.eval.contestants import Clock, Contestant
from subquad.eval.loss import POSITION_BUCKETS, LossResult, Row, evaluate_loss, perplexity
from subquad.eval.records import EvalRecord, Finite, Metric, hash_prompts, list_problems, save_record


class LossSettings(BaseModel):
    """What to measure the loss on.

    Attributes:
        data: What the text is, in words.
        tokens: Most tokens to measure on.
        seq_len: Tokens per row.
        seed: Seed that picked the rows.
        shuffle: Whether it picked them; otherwise they are the first ones.
        batch_size: Rows per forward pass; changes no figure beyond rounding.
        position_buckets: Ascending upper bounds (exclusive) of the position buckets.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    data: str
    tokens: Annotated[int, Field(ge=1)] = 16_384
    seq_len: Annotated[int, Field(ge=2)] = 512
    seed: int = 0
    shuffle: bool = True
    batch_size: Annotated[int, Field(ge=1)] = 4
    position_buckets: tuple[int, ...] = POSITION_BUCKETS


def run_loss(
    contestants: Sequence[Contestant],
    rows: Sequence[Row],
    settings: LossSettings,
    folder: Path,
    *,
    command: str,
    task: str = "loss",
    progress: Callable[[int, int], None] | None = None,
) -> list[EvalRecord]:
    """Measure the loss of every contestant on the same rows.

    Args:
        contestants: The models.
        rows: Tokenised rows, as for `evaluate_loss`.
        settings: Where the rows came from.
        folder: Evaluation folder; what it has of equal settings and rows is not measured again.
        command: Command that repeats it.
        task: Name of the task, for several texts.
        progress: Called with (rows done, rows in all) of each contestant.

    Returns:
        One record each, with metrics `loss` (nats per token) and `perplexity`, and the sums of every row in `details`,
        from which paired differences follow (`unpack_loss`).

    Raises:
        OutputError: The folder cannot be written.
    """
    prompts = hash_prompts([int(token) for token in row["input_ids"]] for row in rows)
    chosen = settings.model_dump(mode="json") | {"rows_hash": prompts}
    records = []
    for contestant in contestants:
        record = contestant.finished_record(folder, task, chosen)
        if record is None:
            clock = Clock.start()
            result = evaluate_loss(
                contestant.model,
                rows,
                mode=contestant.mode,
                position_buckets=settings.position_buckets,
                batch_size=settings.batch_size,
                progress=progress,
            )
            record = EvalRecord(
                task=task,
                model=contestant.name,
                metrics=_metrics(result),
                settings=chosen,
                details=pack_loss(result),
                provenance=clock.provenance(
                    contestant,
                    seed=settings.seed,
                    batch_size=settings.batch_size,
                    prompts_hash=prompts,
                    command=command,
                ),
            )
            save_record(record, folder)
        records.append(record)
    return records


def _metrics(result: LossResult) -> dict[str, Metric]:
    loss, error, num = result.loss, result.standard_error, result.num_tokens
    values = perplexity(loss)
    # The derivative of exp: the error of the perplexity to first order.
    scaled = None if error is None else error * values
    return {
        "loss": Metric(value=loss, standard_error=error, num=num, higher_is_better=False),
        "perplexity": Metric(value=values, standard_error=scaled, num=num, higher_is_better=False),
    }


def pack_loss(result: LossResult) -> dict[str, Any]:
    """Return an evaluation as plain values; `unpack_loss` turns them back without loss."""
    return {
        "loss": result.loss,
        "row_sums": result.row_sums.tolist(),
        "row_tokens": result.row_tokens.tolist(),
        "position_buckets": list(result.position_buckets),
    }


def unpack_loss(content: Mapping[str, Any]) -> LossResult:
    """Return the evaluation that `pack_loss` packed.

    Args:
        content: What it returned.

    Returns:
        The evaluation.

    Raises:
        OutputError: It is not what `pack_loss` returns.
    """
    try:
        found = _Packed.model_validate(content)
        sums = torch.tensor(found.row_sums, dtype=torch.float64)
        tokens = torch.tensor(found.row_tokens, dtype=torch.int64)
    except ValidationError as error:
        raise OutputError(f"the sums of its rows cannot be read ({list_problems(error)}).") from error
    except ValueError as error:
        raise OutputError(f"its rows differ in their number of buckets ({error}).") from error
    num_buckets = len(found.position_buckets) + 1
    if sums.shape != tokens.shape or sums.ndim != 2 or sums.shape[1] != num_buckets:
        raise OutputError(
            f"row_sums {list(sums.shape)} and row_tokens {list(tokens.shape)} must both have a row for each row of the "
            f"text and {num_buckets} columns, one more than position_buckets."
        )
    return LossResult(sums, tokens, found.position_buckets)


class _Packed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")

    row_sums: tuple[tuple[Finite, ...], ...]
    row_tokens: tuple[tuple[Annotated[int, Field(ge=0)], ...], ...]
    position_buckets: tuple[int, ...]


def is_loss(record: EvalRecord) -> bool:
    """Return whether it is a record of `run_loss`."""
    return "row_sums" in record.details and "loss" in record.metrics
