"""Synthetic recall: rows of token ids in which keys are asked for whose values lie far back, and how often it works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from datasets import Dataset
from transformers import PreTrainedModel

from subquad.distill.data import rows_dataset
from subquad.distill.packing import IGNORED_LABEL
from subquad.eval.modes import evaluation_mode
from subquad.eval.records import Metric
from subquad.pretrain.schema import RecallSection

ASK = 0
# training, and each measured length, draw from streams of their own
_TRAIN_STREAM = 0
_EVAL_SEED = 20_240_607
# no more tokens than this in a forward pass of the measurement
_TOKENS_PER_BATCH = 16_384


def recall_rows(section: RecallSection, num_rows: int, seq_len: int, seed: int, stream: int = _TRAIN_STREAM) -> Dataset:
    """Draw rows; the same arguments always give the same rows.

    Ids: 0 asks, then come the keys, the values and the fillers.

    Args:
        section: what rows are made of.
        num_rows: rows to draw.
        seq_len: tokens of a row, at least `section.shortest_row`.
        seed: seed of the draw.
        stream: independent rows of the same seed, by number.

    Returns:
        Rows `input_ids`, `position_ids`, `labels` `[seq_len]` int64; only values after a question are predicted.
    """
    rng = np.random.default_rng((seed, stream))
    tokens = _fillers(section, rng, (num_rows, seq_len))
    keys = 1 + _distinct(rng, num_rows, section.num_keys, section.num_pairs)
    values = 1 + section.num_keys + rng.integers(0, section.num_values, (num_rows, section.num_pairs))
    body = seq_len - 3 * section.num_queries
    # a pair takes two places: choose slots in a row that is shorter by one place per pair, then spread them
    slots = np.sort(_distinct(rng, num_rows, body - section.num_pairs, section.num_pairs), axis=1)
    starts = slots + np.arange(section.num_pairs)
    rows = np.arange(num_rows)[:, None]
    tokens[rows, starts], tokens[rows, starts + 1] = keys, values
    asked = _distinct(rng, num_rows, section.num_pairs, section.num_queries)
    questions = body + 3 * np.arange(section.num_queries)
    tokens[:, questions] = ASK
    tokens[:, questions + 1] = keys[rows, asked]
    tokens[:, questions + 2] = values[rows, asked]
    labels = np.full_like(tokens, IGNORED_LABEL)
    labels[:, questions + 2] = tokens[:, questions + 2]
    positions = np.broadcast_to(np.arange(seq_len), tokens.shape)
    return rows_dataset({"input_ids": tokens, "position_ids": positions, "labels": labels})


def evaluate_recall(model: PreTrainedModel, section: RecallSection) -> dict[int, Metric]:
    """Measure how often the value asked for gets the largest logit, at every length of the section.

    The rows depend on the section alone, so that every model answers the same questions.

    Args:
        model: a causal language model whose ids are those of `recall_rows`.
        section: what rows are made of, and the lengths.

    Returns:
        Length to accuracy in [0, 1]; the standard error takes the row as the sampling unit.
    """
    found = {}
    for length in section.eval_lengths:
        rows = recall_rows(section, section.eval_rows, length, _EVAL_SEED, stream=length)
        hits = _row_hits(model, rows, max(1, _TOKENS_PER_BATCH // length))
        error = float(hits.std(ddof=1) / np.sqrt(len(hits))) if len(hits) > 1 else None
        found[length] = Metric(value=float(hits.mean()), standard_error=error, num=len(hits) * section.num_queries)
    return found


def chance(section: RecallSection) -> float:
    """Return the accuracy of one who knows only which tokens are values."""
    return 1.0 / section.num_values


@torch.no_grad()
def _row_hits(model: PreTrainedModel, rows: Dataset, batch_size: int) -> np.ndarray:
    """Return the share of right answers of every row."""
    device = next(model.parameters()).device
    hits: list[np.ndarray] = []
    with evaluation_mode(model, None):
        for batch in rows.iter(batch_size=batch_size):
            hits.append(_batch_hits(model, {name: value.to(device) for name, value in batch.items()}))
    return np.concatenate(hits)


def _batch_hits(model: PreTrainedModel, batch: Mapping[str, torch.Tensor]) -> np.ndarray:
    hidden = model.get_decoder()(input_ids=batch["input_ids"], use_cache=False).last_hidden_state
    asked = batch["labels"][:, 1:] != IGNORED_LABEL
    best = model.get_output_embeddings()(hidden[:, :-1][asked]).argmax(-1)
    right = best == batch["labels"][:, 1:][asked]
    return right.view(len(asked), -1).float().mean(1).cpu().numpy().astype(np.float64)


def _fillers(section: RecallSection, rng: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    first = 1 + section.num_keys + section.num_values
    return rng.integers(first, first + section.num_fillers, shape)


def _distinct(rng: np.random.Generator, num_rows: int, high: int, count: int) -> np.ndarray:
    """Return `[num_rows, count]` numbers in [0, high), different within a row, in random order."""
    return rng.permuted(np.broadcast_to(np.arange(high), (num_rows, high)), axis=1)[:, :count]
