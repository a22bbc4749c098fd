"""From the outcomes of single prompts to the metrics, details, baselines and notes of a record."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from subquad.eval.metric_text import known_error
from subquad.eval.niah.cells import group_cells
from subquad.eval.niah.measure import Cost, Outcome, make_cells, mean_reciprocal_rank
from subquad.eval.niah.prompts import NiahPrompt
from subquad.eval.niah.settings import NiahSettings
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.records import Metric

_METRICS = (
    "accuracy",
    "values_named",
    "key_logprob",
    "key_logprob_per_token",
    "key_rank1",
    "key_reciprocal_rank",
)


def make_metrics(outcomes: Sequence[Outcome]) -> dict[str, Metric]:
    """Return the metrics over all prompts; a score that was not measured has none.

    Args:
        outcomes: One per prompt.

    Returns:
        `accuracy`, `values_named` (several values only), `key_logprob`, `key_logprob_per_token`, `key_rank1`,
        `key_reciprocal_rank`.
    """
    scores = [prompt_scores(outcome) for outcome in outcomes]
    numbers = {name: [found[name] for found in scores if name in found] for name in _METRICS}
    metrics = {}
    for name, values in numbers.items():
        if values:
            mean, error = mean_and_error(values)
            metrics[name] = Metric(value=mean, standard_error=known_error(mean, error), num=len(values))
    return metrics


def prompt_scores(outcome: Outcome) -> dict[str, float]:
    """Return what one prompt adds to each metric, whose mean over prompts is the metric.

    Args:
        outcome: What a model made of the prompt.

    Returns:
        Numbers by metric; a score that was not measured has none.
    """
    found: dict[str, float] = {}
    if outcome.share_named is not None:
        found["accuracy"] = float(outcome.share_named == 1)
        if len(outcome.values) > 1:
            found["values_named"] = outcome.share_named
    if outcome.log_probs is not None:
        found["key_logprob"] = sum(outcome.log_probs)
        found["key_logprob_per_token"] = fmean(outcome.log_probs)
    if outcome.ranks is not None:
        found["key_rank1"] = float(max(outcome.ranks) == 1)
        found["key_reciprocal_rank"] = mean_reciprocal_rank(outcome.ranks)
    return found


def metric_notes(metrics: Mapping[str, Metric]) -> list[str]:
    """Say which metrics have no standard error although there are several prompts, see `known_error`."""
    names = [name for name, metric in metrics.items() if metric.num > 1 and metric.standard_error is None]
    return [f"No standard error of {', '.join(names)}: every prompt scores the same."] if names else []


def make_details(
    prompts: Sequence[NiahPrompt], outcomes: Sequence[Outcome], cost: Cost, not_measured: Sequence[tuple[int, str]]
) -> dict[str, Any]:
    """Return the cells, what they say by length and by depth, and the cost.

    Args:
        prompts: What was measured, by length, then depth.
        outcomes: One per prompt.
        cost: What it took.
        not_measured: Lengths that were left out, with the reason.

    Returns:
        Plain data: `cells` (`cells_of` reads them), `by_length`, `by_depth` (`Group`), `not_measured`, `cost` (`Cost`).
    """
    cells = make_cells(prompts, outcomes)
    return {
        "cells": [cell.model_dump(mode="json") for cell in cells],
        "by_length": [group.model_dump(mode="json") for group in group_cells(cells, "length")],
        "by_depth": [group.model_dump(mode="json") for group in group_cells(cells, "depth")],
        "not_measured": [{"length": length, "reason": reason} for length, reason in not_measured],
        "cost": dataclasses.asdict(cost),
    }


def baselines(settings: NiahSettings) -> dict[str, float]:
    """Return what a model scores that knows the form of the answer but not which value it is.

    With several names it knows all values in the prompt and picks among them; else it picks among all possible values.

    Args:
        settings: What is hidden.

    Returns:
        Baselines by metric, for the scores of the settings.
    """
    choices = settings.num_possible_values
    if settings.num_keys > 1:
        choices = settings.num_keys + settings.num_values - 1
    found: dict[str, float] = {}
    if "generation" in settings.scores:
        found["accuracy"] = 1 / math.comb(choices, settings.num_values)
    if "teacher_forced" in settings.scores:
        # The true answer names the values in one order.
        found["key_logprob"] = -math.log(math.perm(choices, settings.num_values))
    return found


def lengths_beyond(context_length: int, settings: NiahSettings) -> list[int]:
    """Return the lengths whose prompts exceed a context together with their answers.

    Args:
        context_length: Tokens the model was made for.
        settings: With `lengths`.

    Returns:
        Lengths, ascending.
    """
    return [length for length in settings.lengths or () if length + settings.answer_tokens > context_length]


def context_notes(context_length: int, settings: NiahSettings) -> list[str]:
    """Say which lengths lie beyond a model's context; arguments as in `lengths_beyond`."""
    beyond = lengths_beyond(context_length, settings)
    if not beyond:
        return []
    what = f"Prompts of {', '.join(f'{length:,}' for length in beyond)} tokens"
    why = f"with {settings.answer_tokens} tokens of answer they exceed the context of {context_length:,} tokens"
    if settings.beyond_context:
        return [f"{what} were measured although {why}."]
    return [f"{what} were not measured: {why}."]
