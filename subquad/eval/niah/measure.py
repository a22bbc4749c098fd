"""Measuring one model on the prompts of a grid."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from pydantic import BaseModel, ConfigDict

from subquad.eval.contestants import Contestant
from subquad.eval.niah.answers import share_named
from subquad.eval.niah.cells import Cell
from subquad.eval.niah.prompts import NiahPrompt
from subquad.eval.niah.score import TokenScores, batches, generate_answers, score_answers
from subquad.eval.niah.settings import NiahSettings

_DECIMALS = 4


class Outcome(BaseModel):
    """What one model made of one prompt; a line of the samples file.

    Attributes:
        length: Tokens of the prompt.
        depth: Where the first needle stands.
        sample: Number of the prompt within its cell.
        values: What was to be named.
        generated: What the model wrote; None where it did not generate.
        share_named: Share of the values it named; 1 is an exact match.
        log_probs: Log probability of each token of the key, nats; None where it was not scored.
        ranks: Rank of each token of the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    length: int
    depth: float
    sample: int
    values: tuple[str, ...]
    generated: str | None = None
    share_named: float | None = None
    log_probs: tuple[float, ...] | None = None
    ranks: tuple[int, ...] | None = None


@dataclass
class Cost:
    """What a measurement took.

    Attributes:
        prompts: Prompts measured.
        prefill_tokens: Tokens of all forwards over prompts; a prompt counts once per score.
        generated_tokens: Tokens written one at a time.
        seconds: Wall time of each score.
    """

    prompts: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def measure(
    contestant: Contestant, prompts: Sequence[NiahPrompt], settings: NiahSettings, advance: Callable[[int], None]
) -> tuple[list[Outcome], Cost]:
    """Run a model over prompts.

    Args:
        contestant: The model.
        prompts: What to ask it, by length.
        settings: Scores, limits of a batch, tokens of an answer.
        advance: Called with the number of prompts done, after each batch.

    Returns:
        One outcome per prompt, in order, and the cost.
    """
    outcomes: list[Outcome] = []
    cost = Cost(prompts=len(prompts), seconds=dict.fromkeys(settings.scores, 0.0))
    with contestant.active():
        for batch in batches(prompts, settings.batch_size, settings.max_tokens_per_batch):
            texts: list[str | None] = [None] * len(batch)
            scores: list[TokenScores | None] = [None] * len(batch)
            for score in settings.scores:
                started = time.monotonic()
                if score == "generation":
                    texts = list(_generate(contestant, batch, settings, cost))
                else:
                    scores = list(_score(contestant, batch, cost))
                cost.seconds[score] += time.monotonic() - started
            outcomes += map(_outcome, batch, texts, scores, itertools.repeat(settings.needle))
            advance(len(batch))
    return outcomes, cost


def make_cells(prompts: Sequence[NiahPrompt], outcomes: Sequence[Outcome]) -> list[Cell]:
    """Gather outcomes into the cells of the grid.

    Args:
        prompts: By length, then depth.
        outcomes: One per prompt.

    Returns:
        The cells, in the prompts' order.
    """
    grid: dict[tuple[int, float], list[tuple[NiahPrompt, Outcome]]] = {}
    for prompt, outcome in zip(prompts, outcomes, strict=True):
        grid.setdefault((prompt.length, prompt.depth), []).append((prompt, outcome))
    return [
        _cell(length, depth, [prompt for prompt, _ in pairs], [outcome for _, outcome in pairs])
        for (length, depth), pairs in grid.items()
    ]


def _cell(length: int, depth: float, prompts: Sequence[NiahPrompt], outcomes: Sequence[Outcome]) -> Cell:
    named = [outcome.share_named for outcome in outcomes if outcome.share_named is not None]
    log_probs = [outcome.log_probs for outcome in outcomes if outcome.log_probs is not None]
    ranks = [outcome.ranks for outcome in outcomes if outcome.ranks is not None]
    return Cell(
        length=length,
        depth=depth,
        distance=fmean(prompt.distance for prompt in prompts),
        exact="".join(str(int(share == 1)) for share in named) or None,
        rank1="".join(str(int(max(found) == 1)) for found in ranks) or None,
        log_probs=tuple(round(sum(found), _DECIMALS) for found in log_probs) or None,
        reciprocal_rank=fmean(map(mean_reciprocal_rank, ranks)) if ranks else None,
    )


def mean_reciprocal_rank(ranks: Sequence[int]) -> float:
    """Return the mean of 1 / rank."""
    return fmean(1 / rank for rank in ranks)


def _generate(contestant: Contestant, batch: Sequence[NiahPrompt], settings: NiahSettings, cost: Cost) -> list[str]:
    prompts = [prompt.input_ids for prompt in batch]
    written = generate_answers(contestant.model, contestant.tokenizer, prompts, settings.answer_tokens)
    cost.prefill_tokens += sum(map(len, prompts))
    cost.generated_tokens += sum(map(len, written))
    return [contestant.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]


def _score(contestant: Contestant, batch: Sequence[NiahPrompt], cost: Cost) -> list[TokenScores]:
    prompts, answers = [prompt.input_ids for prompt in batch], [prompt.answer_ids for prompt in batch]
    cost.prefill_tokens += sum(map(len, prompts)) + sum(map(len, answers))
    return score_answers(contestant.model, contestant.tokenizer, prompts, answers)


def _outcome(prompt: NiahPrompt, text: str | None, scores: TokenScores | None, kind: str) -> Outcome:
    log_probs = ranks = None
    if scores is not None:
        # Commas and "and" of an answer with several values are given, not asked for.
        log_probs = tuple(itertools.compress(scores.log_probs, prompt.key_mask))
        ranks = tuple(itertools.compress(scores.ranks, prompt.key_mask))
    return Outcome(
        length=prompt.length,
        depth=prompt.depth,
        sample=prompt.sample,
        values=prompt.values,
        generated=text,
        share_named=None if text is None else share_named(text, kind, prompt.values),
        log_probs=log_probs,
        ranks=ranks,
    )
