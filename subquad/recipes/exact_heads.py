"""The step that chooses which key/value heads of a run stay softmax, and how many its budget allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from subquad.convert.calibrate import calibrate
from subquad.convert.plan import ConversionPlan
from subquad.convert.surgery import apply_plan
from subquad.distill.heads import HeadRanking, Row, rank_heads, rounds
from subquad.distill.packing import IGNORED_LABEL
from subquad.distill.recall import WEIGHTS_COLUMN, RecallConfig, add_recall
from subquad.errors import ConfigError
from subquad.layers import MixerConfig, cache_bytes
from subquad.recipes.progress import token_bar
from subquad.recipes.sections import ExactHeadsSection

if TYPE_CHECKING:
    from subquad.recipes.workshop import Workshop

_MIB = 2**20
# an answer is recognised by its weight, which differs from that of text
_ANSWER = 2.0


def count_exact_heads(section: ExactHeadsSection, plan: ConversionPlan) -> int:
    """Return how many key/value heads a recipe's budget keeps exact.

    Args:
        section: the budget.
        plan: the conversion without exact heads.

    Returns:
        At least 1, and fewer than are converted.

    Raises:
        ConfigError: the budget keeps every head, or none.
    """
    total = len(plan.mixers) * plan.geometry.num_kv_heads
    if section.count is not None:
        count, asked = section.count, f"count {section.count}"
    elif section.share is not None:
        count, asked = max(1, round(section.share * total)), f"share {section.share}"
    else:
        assert section.cache_mib is not None, "one of the three is given"
        count, asked = _count_within(section, plan), f"cache_mib {section.cache_mib}"
    if not 1 <= count < total:
        raise ConfigError(
            f"convert.exact_heads: {asked} keeps {count} of {total} key/value heads softmax; give a budget for at "
            f"least 1 and at most {total - 1}"
        )
    return count


def _count_within(section: ExactHeadsSection, plan: ConversionPlan) -> int:
    """Return how many heads fit; of layers with different mixers, the costliest change counts for all."""
    assert section.cache_mib is not None, "a budget in bytes is given"
    length = section.at_length

    def size(mixer: MixerConfig) -> int:
        return cache_bytes(mixer, plan.geometry, 1, length, plan.dtype)

    room = section.cache_mib * _MIB - sum(size(layer.mixer) for layer in plan.layers)
    mixers = plan.mixers.values()
    added = [size(mixer.model_copy(update={"exact_kv_heads": (0,)})) - size(mixer) for mixer in mixers]
    costliest = max(added)
    if costliest <= 0:
        raise ConfigError(
            f"convert.exact_heads: at {length} tokens an exact head takes no more bytes than a converted one, so "
            "cache_mib sets no limit; give a count or a share, or a larger at_length"
        )
    return int(room // costliest)


def choose_heads(shop: Workshop) -> HeadRanking:
    """Convert the teacher as the recipe says, calibrate it, and rank its heads.

    Args:
        shop: the run.

    Returns:
        The ranking.

    Raises:
        ConfigError: a budget that keeps no head or all, or rows too short for recall.
        DataError: too little text.
    """
    section = shop.recipe.convert.exact_heads
    assert section is not None, "the recipe asks for a choice"
    keep = count_exact_heads(section, shop.base_plan)
    model = apply_plan(shop.load_teacher().model, shop.base_plan).eval()
    if shop.recipe.calibrate.enabled:
        rows = shop.batches("calibrate", shop.recipe.calibrate.tokens)
        calibrate(model, rows, key_rows=shop.key_batches(), fit_maps=shop.recipe.calibrate.fit_maps)
    text = shop.batches("heads", section.tokens)
    recall = _recall_batches(shop, section.recall_tokens) if section.recall_tokens else []
    passes = 1 + len(rounds(len(shop.base_plan.mixers) * shop.base_plan.geometry.num_kv_heads, keep))
    total = passes * sum(row["input_ids"].numel() for row in [*text, *recall])
    with token_bar("choosing exact heads", total, shop.console) as count:
        return rank_heads(model, text, recall, keep=keep, recall_weight=section.recall_weight, on_batch=count)


def _recall_batches(shop: Workshop, tokens: int) -> list[Row]:
    """Return rows all of which ask for recall, with the answers alone as labels."""
    config = RecallConfig(share=1.0, answer_weight=_ANSWER)
    rows = add_recall(shop.rows("heads", tokens), shop.tokenizer, config, shop.recipe.seed)
    batches = shop.as_batches(rows)
    for batch in batches:
        batch["labels"] = batch["labels"].masked_fill(batch.pop(WEIGHTS_COLUMN) != _ANSWER, IGNORED_LABEL)
    return batches
