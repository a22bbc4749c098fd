"""The step that chooses which key/value heads of a run stay softmax, and how many its budget allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from subquad.convert.calibrate import calibrate
from subquad.convert.plan import ConversionPlan
from subquad.convert.surgery import apply_plan
from subquad.distill.heads import HeadRanking, Row, rank_heads, rounds
from subquad.distill.packing import IGNORED_LABEL
from subquad.distill.recall import WEIGHTS_COLUMN, RecallConfig, add_recall
from subquad.errors import ConfigError
from subquad.layers import cache_bytes
from subquad.recipes.progress import progress_bar
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
    length, geometry = section.at_length, plan.geometry
    mixers = list(plan.mixers.values())
    sizes = [cache_bytes(mixer, geometry, 1, length, plan.dtype) for mixer in mixers]
    whole = len(plan.layers) - len(mixers)
    softmax_layer = 2 * length * geometry.num_kv_heads * geometry.head_dim * plan.dtype.itemsize
    total = sum(sizes) + whole * softmax_layer
    assert section.cache_mib is not None, "a budget in bytes is given"
    room = section.cache_mib * _MIB - total
    with_one = [mixer.model_copy(update={"exact_kv_heads": (0,)}) for mixer in mixers]
    added = [
        cache_bytes(mixer, geometry, 1, length, plan.dtype) - size for mixer, size in zip(with_one, sizes, strict=True)
    ]
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
    device = shop.state.device
    if shop.recipe.calibrate.enabled:
        calibrate(model, _batches(shop, shop.recipe.calibrate.tokens, device))
    text = _batches(shop, section.tokens, device)
    recall = _recall_batches(shop, section.recall_tokens, device) if section.recall_tokens else []
    done = 0
    passes = 1 + len(rounds(len(shop.base_plan.mixers) * shop.base_plan.geometry.num_kv_heads, keep))
    total = passes * sum(row["input_ids"].numel() for row in [*text, *recall])
    with progress_bar("choosing exact heads", shop.console) as advance:

        def count(tokens: int) -> None:
            nonlocal done
            done += tokens
            advance(done, total)

        return rank_heads(model, text, recall, keep=keep, recall_weight=section.recall_weight, on_batch=count)


def _batches(shop: Workshop, tokens: int, device: torch.device) -> list[Row]:
    names = ("input_ids", "position_ids", "labels")
    return [{name: row[name][None].to(device) for name in names} for row in shop.rows("heads", tokens)]


def _recall_batches(shop: Workshop, tokens: int, device: torch.device) -> list[Row]:
    """Return rows all of which ask for recall, with the answers alone as labels."""
    rows = add_recall(
        shop.rows("heads", tokens), shop.tokenizer, RecallConfig(share=1.0, answer_weight=_ANSWER), shop.recipe.seed
    )
    batches = []
    for row in rows:
        labels = row["labels"].masked_fill(row[WEIGHTS_COLUMN] != _ANSWER, IGNORED_LABEL)
        batch = {"input_ids": row["input_ids"], "position_ids": row["position_ids"], "labels": labels}
        batches.append({name: value[None].to(device) for name, value in batch.items()})
    return batches
