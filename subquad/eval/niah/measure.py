"""Measuring one model on the prompts of a grid."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean

from pydantic import BaseModel, ConfigDict
from transformers.cache_utils import Cache

from subquad.eval.contestants import Contestant
from subquad.eval.niah.answers import share_named
from subquad.eval.niah.cells import Cell
from subquad.eval.niah.prompts import NiahPrompt
from subquad.eval.niah.score import (
    TokenScores,
    batches,
    can_share_prompts,
    generate_answers,
    read_prompts,
    score_answers,
)
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
        prefill_tokens: Tokens of prompts and true answers that were read; a prompt counts as often as it is read.
        generated_tokens: Tokens written one at a time.
        seconds: Wall time of each score, and of `prefill` where the scores share it.
    """

    prompts: int = 0
    prefill_tokens: int = 0
    generated_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the wall time of the `with` block to a part's.

        Args:
            part: Key of `seconds`.

        Yields:
            Nothing.
        """
        started = time.monotonic()
        yield
        self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started


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
    shared = len(settings.scores) > 1 and can_share_prompts(contestant.model)
    with contestant.active():
        for batch in batches(prompts, settings.batch_size, settings.max_tokens_per_batch):
            outcomes += _measure_batch(contestant, batch, settings, cost, shared=shared)
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


def _measure_batch(
    contestant: Contestant, batch: Sequence[NiahPrompt], settings: NiahSettings, cost: Cost, *, shared: bool
) -> list[Outcome]:
    texts: list[str | None] = [None] * len(batch)
    scores: list[TokenScores | None] = [None] * len(batch)
    cache = _read(contestant, batch, cost) if shared else None
    # The true answer goes first, on a copy that is then dropped: while answers are written only one cache is held.
    if "teacher_forced" in settings.scores:
        scores = list(_score(contestant, batch, cost, copy.deepcopy(cache)))
    if "generation" in settings.scores:
        texts = list(_generate(contestant, batch, settings, cost, cache))
    return list(map(_outcome, batch, texts, scores, itertools.repeat(settings.needle)))


def _read(contestant: Contestant, batch: Sequence[NiahPrompt], cost: Cost) -> Cache:
    prompts = [prompt.input_ids for prompt in batch]
    cost.prefill_tokens += sum(map(len, prompts))
    with cost.timed("prefill"):
        return read_prompts(contestant.model, contestant.tokenizer, prompts)


def _generate(
    contestant: Contestant, batch: Sequence[NiahPrompt], settings: NiahSettings, cost: Cost, cache: Cache | None
) -> list[str]:
    prompts = [prompt.input_ids for prompt in batch]
    with cost.timed("generation"):
        written = generate_answers(contestant.model, contestant.tokenizer, prompts, settings.answer_tokens, cache)
    cost.prefill_tokens += sum(map(len, prompts)) if cache is None else 0
    cost.generated_tokens += sum(map(len, written))
    return [contestant.tokenizer.decode(tokens, skip_special_tokens=True) for tokens in written]


def _score(contestant: Contestant, batch: Sequence[NiahPrompt], cost: Cost, cache: Cache | None) -> list[TokenScores]:
    prompts, answers = [prompt.input_ids for prompt in batch], [prompt.answer_ids for prompt in batch]
    cost.prefill_tokens += sum(map(len, answers)) + (sum(map(len, prompts)) if cache is None else 0)
    with cost.timed("teacher_forced"):
        return score_answers(contestant.model, contestant.tokenizer, prompts, answers, cache)


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
