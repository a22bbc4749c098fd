"""Held-out loss by position in the document, with standard errors and paired differences between models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from subquad.errors import ConfigError, DataError, TrainingError
from subquad.eval.modes import EvalMode, evaluation_mode

IGNORE_LABEL = -100
POSITION_BUCKETS = tuple(2**power for power in range(6, 18))
Row = Mapping[str, Sequence[int] | Tensor]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class PositionBucket:
    """The loss of the tokens whose position in their document lies in `start <= position < end`.

    Attributes:
        start: First position.
        end: One past the last position; None for no bound.
        num_tokens: Number of predicted tokens.
        loss: Mean negative log likelihood, nats per token.
        standard_error: Standard error of `loss` over rows; None with fewer than two rows.
    """

    start: int
    end: int | None
    num_tokens: int
    loss: float
    standard_error: float | None


@dataclass(frozen=True, eq=False)
class LossResult:
    """Sums of the negative log likelihood per row and position bucket; every figure is derived from them.

    Attributes:
        row_sums: `[num_rows, num_buckets]` float64, nats.
        row_tokens: `[num_rows, num_buckets]` int64, number of predicted tokens.
        position_buckets: Upper bounds of the buckets (exclusive); one more bucket without a bound follows the last.
    """

    row_sums: Tensor
    row_tokens: Tensor
    position_buckets: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        """Number of rows that have a predicted token."""
        return int((self.row_tokens.sum(1) > 0).sum())

    @property
    def num_tokens(self) -> int:
        """Number of predicted tokens."""
        return int(self.row_tokens.sum())

    @property
    def loss(self) -> float:
        """Mean negative log likelihood in nats per token."""
        return float(self.row_sums.sum()) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """`exp(loss)`; infinite where that overflows."""
        return perplexity(self.loss)

    @property
    def standard_error(self) -> float | None:
        """Standard error of `loss`, with the row as the sampling unit; None with fewer than two rows."""
        return _ratio_standard_error(self.row_sums.sum(1), self.row_tokens.sum(1))

    @property
    def by_position(self) -> list[PositionBucket]:
        """The buckets that hold at least one token, nearest to the start of the document first."""
        starts = (0, *self.position_buckets)
        ends = (*self.position_buckets, None)
        buckets = []
        for index, (start, end) in enumerate(zip(starts, ends, strict=True)):
            sums, tokens = self.row_sums[:, index], self.row_tokens[:, index]
            num_tokens = int(tokens.sum())
            if num_tokens:
                error = _ratio_standard_error(sums, tokens)
                buckets.append(PositionBucket(start, end, num_tokens, float(sums.sum()) / num_tokens, error))
        return buckets


@dataclass(frozen=True)
class LossDifference:
    """A paired difference of two losses on the same tokens.

    Attributes:
        difference: Mean of (first - second), nats per token; negative where the first is better.
        standard_error: Standard error of `difference` over rows; None with fewer than two rows.
    """

    difference: float
    standard_error: float | None


def evaluate_loss(
    model: PreTrainedModel,
    rows: Iterable[Row],
    *,
    mode: EvalMode | None = "student",
    position_buckets: Sequence[int] = POSITION_BUCKETS,
    batch_size: int = 4,
    tokens_per_chunk: int = 512,
    progress: Progress | None = None,
) -> LossResult:
    """Measure the loss of a causal language model on packed rows.

    Runs without gradients, dropout or cache. The logits exist for `tokens_per_chunk` tokens at a time, so the peak
    memory does not hold a `[batch_size, seq_len, vocab_size]` tensor. The position of a token is the number of tokens
    of its document before it, which is what the model predicts it from.

    Args:
        model: A converted model (with or without peft adapters), or with `mode=None` any Hugging Face causal model.
        rows: A data set of any kind, or any iterable of mappings (a stream is read into memory) with `input_ids` `[T]`;
            `position_ids` `[T]`, restarting at 0 with each document (absent: the row is one document); `labels` `[T]`,
            aligned with `input_ids` and not shifted, -100 where the token is not to be predicted (absent: all but the
            first token of each document). Rows may differ in length.
        mode: Attention mode; None leaves the model as it is.
        position_buckets: Ascending upper bounds (exclusive) of the position buckets.
        batch_size: Rows per forward pass; does not change the result beyond rounding.
        tokens_per_chunk: Tokens whose logits exist at once.
        progress: Called with (rows done, rows in all) after each batch.

    Returns:
        The sums per row and bucket, on the CPU.

    Raises:
        ConfigError: A batch size, chunk size or bucket list that breaks its rule.
        DataError: No rows, rows without `input_ids`, columns of different lengths, or nothing to predict.
        TrainingError: The loss of a row is not finite.
    """
    edges = _checked_edges(position_buckets, batch_size, tokens_per_chunk)
    held_out = _indexed(rows)
    if len(held_out) == 0:
        raise DataError("there are no rows to evaluate: the held-out set is empty. Give more text or shorter rows.")
    num_buckets = len(edges) + 1
    sums = torch.zeros(len(held_out) * num_buckets, dtype=torch.float64)
    tokens = torch.zeros(len(held_out) * num_buckets, dtype=torch.int64)
    device = next(model.parameters()).device
    with torch.no_grad(), evaluation_mode(model, mode):
        for first_row, batch in _batches(held_out, batch_size):
            nll, row_index, positions = _token_losses(
                model, {k: v.to(device) for k, v in batch.items()}, tokens_per_chunk
            )
            cell = (first_row + row_index) * num_buckets + torch.bucketize(positions, torch.tensor(edges), right=True)
            sums.index_add_(0, cell, nll)
            tokens.index_add_(0, cell, torch.ones_like(cell))
            _check_finite(nll, first_row + row_index, mode)
            if progress is not None:
                progress(min(first_row + batch_size, len(held_out)), len(held_out))
    if not int(tokens.sum()):
        raise DataError(
            f"none of the {len(held_out)} rows has a token to predict: every label is -100 or a first token."
        )
    return LossResult(sums.view(-1, num_buckets), tokens.view(-1, num_buckets), edges)


def compare_losses(first: LossResult, second: LossResult) -> LossDifference:
    """Return the paired difference `first - second` of two evaluations of the same rows.

    Pairing removes what both share (how hard each row is), so the standard error is far below those of the two losses.

    Args:
        first: Result of one model or mode.
        second: Result of the other, on the same rows.

    Returns:
        The difference and its standard error.

    Raises:
        ConfigError: The two were not measured on the same tokens.
    """
    _check_same_tokens(first, second)
    return _paired(first.row_sums.sum(1) - second.row_sums.sum(1), first.row_tokens.sum(1))


def compare_losses_by_position(first: LossResult, second: LossResult) -> list[LossDifference]:
    """Return the paired difference `first - second` in each position bucket that holds a token.

    Args:
        first: Result of one model or mode.
        second: Result of the other, on the same rows and with the same buckets.

    Returns:
        Differences in the order of `LossResult.by_position`.

    Raises:
        ConfigError: The two were not measured on the same tokens or with the same buckets.
    """
    _check_same_tokens(first, second)
    if first.position_buckets != second.position_buckets:
        raise ConfigError(
            f"position buckets differ: {first.position_buckets} and {second.position_buckets}. Evaluate both with the "
            "same buckets."
        )
    difference = first.row_sums - second.row_sums
    return [
        _paired(difference[:, index], tokens)
        for index, tokens in enumerate(first.row_tokens.unbind(1))
        if int(tokens.sum())
    ]


def _check_same_tokens(first: LossResult, second: LossResult) -> None:
    if not torch.equal(first.row_tokens.sum(1), second.row_tokens.sum(1)):
        raise ConfigError(
            f"losses on different tokens cannot be compared: {first.num_tokens} tokens in {first.num_rows} rows and "
            f"{second.num_tokens} in {second.num_rows}. Evaluate both on the same rows."
        )


def _paired(sums: Tensor, tokens: Tensor) -> LossDifference:
    return LossDifference(float(sums.sum()) / int(tokens.sum()), _ratio_standard_error(sums, tokens))


def perplexity(loss: float) -> float:
    """Return `exp(loss)`, infinite where a float64 overflows."""
    return math.exp(loss) if loss < 709 else math.inf


def _ratio_standard_error(sums: Tensor, tokens: Tensor) -> float | None:
    """Linearised standard error of the ratio `sum(sums) / sum(tokens)` over independent rows (Cochran 1977, eq. 6.13).

    Rows differ in their number of tokens, so the mean is a ratio of two sums.
    """
    used = tokens > 0
    num_rows = int(used.sum())
    if num_rows < 2:
        return None
    sums, tokens = sums[used], tokens[used].double()
    total = tokens.sum()
    residuals = sums - sums.sum() / total * tokens
    return math.sqrt(num_rows / (num_rows - 1) * float(residuals.square().sum())) / float(total)


def _checked_edges(position_buckets: Sequence[int], batch_size: int, tokens_per_chunk: int) -> tuple[int, ...]:
    problems = []
    edges = tuple(position_buckets)
    if any(low >= high for low, high in zip((0, *edges), edges, strict=False)):
        problems.append(f"position_buckets must be ascending and above 0, got {list(edges)}")
    if batch_size < 1:
        problems.append(f"batch_size must be at least 1, got {batch_size}")
    if tokens_per_chunk < 1:
        problems.append(f"tokens_per_chunk must be at least 1, got {tokens_per_chunk}")
    if problems:
        raise ConfigError("; ".join(problems))
    return edges


def _indexed(rows: Iterable[Row]) -> Sequence[Row]:
    """Return rows that can be indexed as they are, so that a data set stays on disk; read others into memory."""
    indexed = isinstance(rows, Sized) and hasattr(rows, "__getitem__")
    return cast(Sequence[Row], rows) if indexed else list(rows)


def _batches(rows: Sequence[Row], batch_size: int) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Yield (index of the first row, `input_ids`, `position_ids` and `labels` of `[batch, longest row]`)."""
    for first in range(0, len(rows), batch_size):
        group = [_row_tensors(rows[index], index) for index in range(first, min(first + batch_size, len(rows)))]
        # Right padding is a document of its own after the row, so causal attention keeps it out of the row.
        pads = {"input_ids": 0, "position_ids": 0, "labels": IGNORE_LABEL}
        yield (
            first,
            {
                name: nn.utils.rnn.pad_sequence([row[name] for row in group], batch_first=True, padding_value=pad)
                for name, pad in pads.items()
            },
        )


def _row_tensors(row: Row, index: int) -> dict[str, Tensor]:
    if "input_ids" not in row:
        raise DataError(f"row {index} has no input_ids (columns: {', '.join(row) or 'none'}).")
    input_ids = torch.as_tensor(row["input_ids"], dtype=torch.long)
    position_ids = torch.as_tensor(row.get("position_ids", torch.arange(len(input_ids))), dtype=torch.long)
    labels = row.get("labels")
    if labels is None:
        labels = input_ids.masked_fill(position_ids == 0, IGNORE_LABEL) if len(position_ids) == len(input_ids) else ()
    columns = {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "labels": torch.as_tensor(labels, dtype=torch.long),
    }
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) != 1:
        raise DataError(f"row {index} has columns of different lengths: {lengths}. They must be aligned by token.")
    return columns


def _token_losses(model: PreTrainedModel, batch: dict[str, Tensor], chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss (float64), row and position of every predicted token, `[num_tokens]` each, on the CPU."""
    hidden = model.get_decoder()(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False
    ).last_hidden_state
    targets = batch["labels"][:, 1:]
    row_index, column = torch.nonzero(targets != IGNORE_LABEL, as_tuple=True)
    predicted, wanted = hidden[row_index, column], targets[row_index, column]
    head = model.get_output_embeddings()
    losses = [
        F.cross_entropy(head(predicted[start : start + chunk]).float(), wanted[start : start + chunk], reduction="none")
        for start in range(0, len(wanted), chunk)
    ]
    # On the CPU the sum over tokens has a fixed order, and float64 makes it independent of the batch size.
    nll = torch.cat(losses).double().cpu() if losses else torch.zeros(0, dtype=torch.float64)
    positions = batch["position_ids"][row_index, column + 1]
    return nll, row_index.cpu(), positions.cpu()


def _check_finite(nll: Tensor, row_index: Tensor, mode: EvalMode | None) -> None:
    bad = ~torch.isfinite(nll)
    if bad.any():
        raise TrainingError(
            f"the loss of row {int(row_index[bad][0])} is not finite (mode {mode or 'as is'}): the model's weights or "
            "states overflowed. Evaluate in float32, or go back to the last good checkpoint."
        )
