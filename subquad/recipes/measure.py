"""The measurements of a run, in the form in which they are kept between its stages."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedModel

from subquad.convert.modelcard import ModelCard
from subquad.convert.plan import ConversionPlan, mixer_label
from subquad.eval.generate import generate_sample
from subquad.eval.loss import POSITION_BUCKETS, LossResult, Row, evaluate_loss
from subquad.eval.modes import EvalMode
from subquad.eval.results import LOSS_LABELS, LossName, Results, Sample
from subquad.recipes.progress import progress_bar
from subquad.recipes.workshop import Workshop


def measure_loss(
    shop: Workshop, model: PreTrainedModel, mode: EvalMode, title: str, rows: Sequence[Row] | None = None
) -> LossResult:
    """Measure a loss as the recipe says, with a progress bar.

    Args:
        shop: the run.
        model: a converted model.
        mode: what to measure.
        title: what the bar says.
        rows: rows to measure on; None is all held-out rows.

    Returns:
        The sums per row and position bucket.
    """
    settings = shop.recipe.eval
    with progress_bar(title, shop.console) as advance:
        return evaluate_loss(
            model,
            shop.held_out_rows if rows is None else rows,
            mode=mode,
            position_buckets=settings.position_buckets or POSITION_BUCKETS,
            batch_size=settings.batch_size,
            progress=advance,
        )


def write_sample(shop: Workshop, model: PreTrainedModel, name: LossName, mode: EvalMode) -> list[Sample]:
    """Let a model continue the recipe's prompt.

    Args:
        shop: the run.
        model: a converted model.
        name: which model of the run this is.
        mode: attention mode.

    Returns:
        One sample, or none where the recipe asks for no tokens.
    """
    settings = shop.recipe.eval
    if not settings.generate_tokens:
        return []
    text = generate_sample(
        model, shop.tokenizer, settings.generate_prompt, max_new_tokens=settings.generate_tokens, mode=mode
    )
    return [Sample(model=name, prompt=settings.generate_prompt, text=text)]


def mixer_counts(plan: ConversionPlan) -> dict[str, int]:
    """Return how many layers each mixer has, by its label; which heads of a layer stay softmax makes no difference."""
    counts: dict[str, int] = {}
    for layer in plan.layers:
        exact = len(layer.mixer.exact_kv_heads)
        label = mixer_label(layer.mixer.model_copy(update={"exact_kv_heads": ()}))
        if exact:
            label += f" beside {exact} softmax key/value head{'s' if exact > 1 else ''}"
        counts[label] = counts.get(label, 0) + 1
    return counts


def model_card(results: Results) -> ModelCard:
    """Return the content of the student's model card, with everything that was measured."""
    cache = results.cache_bytes
    return ModelCard(
        name=results.name,
        teacher=results.source,
        mixers=results.mixers,
        losses={LOSS_LABELS[name]: loss for name, loss in results.loss.measured().items()},
        loss_data=results.data,
        cache_bytes={} if cache is None else {n: (cache.student[n], cache.kv[n]) for n in cache.student},
        training_tokens={"stage 1": results.tokens.stage1, "stage 2": results.tokens.stage2},
        command=results.command,
        versions=results.versions,
        notes=tuple(results.notes),
    )
