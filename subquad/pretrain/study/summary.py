"""What a study found: mean and spread of every arm, and how their order compares with the papers'."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from subquad.pretrain.results import PretrainResults
from subquad.pretrain.study.schema import StudyRecipe


@dataclass(frozen=True)
class Spread:
    """A mean over seeds.

    Attributes:
        mean: The mean.
        deviation: Standard deviation over seeds (divisor n - 1); None with one seed.
        values: The value of each seed.
    """

    mean: float
    deviation: float | None
    values: tuple[float, ...]

    @classmethod
    def over(cls, values: Sequence[float]) -> Spread:
        """Return the spread of one value per seed, at least one."""
        deviation = statistics.stdev(values) if len(values) > 1 else None
        return cls(statistics.fmean(values), deviation, tuple(values))


@dataclass(frozen=True)
class ArmSummary:
    """One arm over its finished seeds.

    Attributes:
        arm: Its name.
        label: What the table calls it.
        group: Arms of one group share a colour.
        seeds: The finished seeds.
        loss: Held-out loss in nats per token; None for recall.
        to_reference: Loss minus the reference's of the same seed; None without common seeds, or for recall.
        recall: Row length to accuracy in [0, 1]; empty for text.
        parameters: Parameters of the model.
        cache_bytes: Bytes of its cache after as many tokens as the longest row, in float32.
        kv_bytes: The same for a key/value cache.
        paper_loss: Loss the papers report, at their own size.
        seconds: Mean training time of a seed.
    """

    arm: str
    label: str
    group: str
    seeds: tuple[int, ...]
    loss: Spread | None
    to_reference: Spread | None
    recall: dict[int, Spread]
    parameters: int
    cache_bytes: int
    kv_bytes: int
    paper_loss: float | None
    seconds: float

    @property
    def score(self) -> Spread:
        """What the order is judged by, lower is better: the loss, or 1 - accuracy over all lengths."""
        if self.loss is not None:
            return self.loss
        per_seed = zip(*(spread.values for spread in self.recall.values()), strict=True)
        return Spread.over([1.0 - statistics.fmean(values) for values in per_seed])


@dataclass(frozen=True)
class OrderStep:
    """One step of the papers' order, from an arm with the higher loss to one with the lower.

    Attributes:
        worse: The arm the papers have above.
        better: The arm they have below.
        difference: `score(worse) - score(better)`, paired over common seeds; above 0 agrees with the papers.
        verdict: `agrees`, `reversed`, `equal` where the mean is exactly 0, or `within the spread` where it is within
            one standard deviation of 0; with one seed `agrees (one seed)`, `reversed (one seed)` or `equal (one seed)`.
    """

    worse: str
    better: str
    difference: Spread
    verdict: str


def summarise_arms(study: StudyRecipe, rows: Mapping[str, Mapping[int, PretrainResults]]) -> list[ArmSummary]:
    """Average the finished runs of every arm.

    Args:
        study: the study.
        rows: arm to seed to results; arms and seeds that are not finished are not there.

    Returns:
        One summary per arm with a finished run, in the study's order.
    """
    reference = rows.get(study.reference, {})
    return [_summarise(study, arm, rows[arm], reference) for arm in study.arms if rows.get(arm)]


def _summarise(
    study: StudyRecipe, arm: str, runs: Mapping[int, PretrainResults], reference: Mapping[int, PretrainResults]
) -> ArmSummary:
    results = list(runs.values())
    losses = {seed: run.loss.value for seed, run in runs.items() if run.loss is not None}
    base = {seed: run.loss.value for seed, run in reference.items() if run.loss is not None}
    gaps = [losses[seed] - base[seed] for seed in losses if seed in base]
    lengths = [n for n in results[0].recall if all(n in run.recall for run in results)]
    return ArmSummary(
        arm=arm,
        label=study.label(arm),
        group=study.arms[arm].group,
        seeds=tuple(runs),
        loss=Spread.over(list(losses.values())) if losses else None,
        to_reference=Spread.over(gaps) if gaps and arm != study.reference else None,
        recall={n: Spread.over([run.recall[n].value for run in results]) for n in lengths},
        parameters=results[0].parameters,
        cache_bytes=results[0].cache_bytes,
        kv_bytes=results[0].kv_bytes,
        paper_loss=study.arms[arm].paper_loss,
        seconds=statistics.fmean(run.train_seconds for run in results),
    )


def compare_order(study: StudyRecipe, arms: Sequence[ArmSummary]) -> list[OrderStep]:
    """Compare every step of the papers' order with what was measured.

    Args:
        study: the study, with `expected`.
        arms: what was measured.

    Returns:
        One entry for each pair of arms in neighbouring groups that both have finished, paired over common seeds.
    """
    found = {arm.arm: arm for arm in arms}
    groups = [[arm for arm in group if arm in found] for group in study.expected]
    steps = []
    for above, below in itertools.pairwise([group for group in groups if group]):
        for worse, better in itertools.product(above, below):
            difference = _paired(found[worse], found[better])
            if difference is not None:
                steps.append(OrderStep(worse, better, difference, _verdict(difference)))
    return steps


def _paired(worse: ArmSummary, better: ArmSummary) -> Spread | None:
    first = dict(zip(worse.seeds, worse.score.values, strict=True))
    second = dict(zip(better.seeds, better.score.values, strict=True))
    common = [seed for seed in first if seed in second]
    return Spread.over([first[seed] - second[seed] for seed in common]) if common else None


def _verdict(difference: Spread) -> str:
    direction = "equal" if difference.mean == 0 else "agrees" if difference.mean > 0 else "reversed"
    if difference.deviation is None:
        return f"{direction} (one seed)"
    within = difference.mean != 0 and abs(difference.mean) <= difference.deviation
    return "within the spread" if within else direction
