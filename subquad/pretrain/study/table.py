"""The table of a study as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from subquad.eval.style import format_bytes, format_seconds, table_cell
from subquad.pretrain.study.schema import StudyRecipe
from subquad.pretrain.study.summary import ArmSummary, OrderStep, Spread


def render_study(
    study: StudyRecipe,
    arms: Sequence[ArmSummary],
    steps: Sequence[OrderStep],
    chance: float | None,
    failed: Sequence[str] = (),
) -> str:
    """Return the study's table, and the order of its arms beside the papers'.

    Args:
        study: the study.
        arms: what was measured.
        steps: the papers' order, step by step.
        chance: accuracy of guessing, for recall; None for text.
        failed: runs whose training failed, as `arm, seed n`.

    Returns:
        Markdown.
    """
    missing = [arm for arm in study.arms if arm not in {found.arm for found in arms}]
    parts = [f"# Study {study.name}", _introduction(study, arms, missing, failed), _table(study, arms)]
    if chance is not None:
        parts.append(f"Guessing one of the values would score {chance:.1%}.")
    if steps:
        parts += ["## Order, beside the papers'", _order_text(), _order_table(study, steps)]
    return "\n\n".join(parts) + "\n"


def format_spread(spread: Spread | None, decimals: int = 3, sign: str = "") -> str:
    """Return `3.210 ± 0.012` (mean and standard deviation over seeds), without the second for one seed."""
    if spread is None:
        return "–"
    deviation = "" if spread.deviation is None else f" ± {spread.deviation:.{decimals}f}"
    return f"{spread.mean:{sign}.{decimals}f}{deviation}"


def _introduction(study: StudyRecipe, arms: Sequence[ArmSummary], missing: Sequence[str], failed: Sequence[str]) -> str:
    seeds = sorted({seed for arm in arms for seed in arm.seeds})
    lines = [
        f"{len(arms)} of {len(study.arms)} arms, seeds {', '.join(map(str, seeds))}: mean ± standard deviation over "
        f"seeds. Differences are to {study.label(study.reference)}, seed by seed."
    ]
    partial = [arm.label for arm in arms if len(arm.seeds) < len(study.seeds)]
    if missing:
        lines.append(f"Not finished: {', '.join(study.label(arm) for arm in missing)}.")
    if partial:
        lines.append(f"Only some of the seeds are finished: {', '.join(partial)}.")
    if failed:
        lines.append(f"Not finished because training failed: {'; '.join(failed)}.")
    return " ".join(lines)


def _table(study: StudyRecipe, arms: Sequence[ArmSummary]) -> str:
    lengths = sorted({length for arm in arms for length in arm.recall})
    papers = any(arm.paper_loss is not None for arm in arms)
    text = any(arm.loss is not None for arm in arms)
    heads = ["arm", *(["loss (nats/token)", f"to {table_cell(study.label(study.reference))}"] if text else [])]
    heads += [f"accuracy at {length}" for length in lengths]
    heads += [*(["papers' loss"] if papers else []), "parameters", "cache", "KV cache", "time a seed"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for arm in arms:
        cells = [table_cell(arm.label)]
        if text:
            cells += [format_spread(arm.loss), format_spread(arm.to_reference, sign="+")]
        cells += [format_spread(arm.recall.get(length)) for length in lengths]
        if papers:
            cells.append("–" if arm.paper_loss is None else f"{arm.paper_loss:.2f}")
        cells += [f"{arm.parameters:,}", format_bytes(arm.cache_bytes), format_bytes(arm.kv_bytes)]
        lines.append("| " + " | ".join([*cells, format_seconds(arm.seconds)]) + " |")
    return "\n".join(lines)


def _order_text() -> str:
    return (
        "Each row is a step of the papers' order, from an arm they have above (worse) to one below (better). A "
        "positive difference is the papers' direction; `within the spread` is a mean within one standard deviation of "
        "zero."
    )


def _order_table(study: StudyRecipe, steps: Sequence[OrderStep]) -> str:
    lines = ["| worse in the papers | better in the papers | difference here | verdict |", "|---|---|---:|---|"]
    for step in steps:
        difference = format_spread(step.difference, sign="+")
        worse, better = (table_cell(study.label(arm)) for arm in (step.worse, step.better))
        lines.append(f"| {worse} | {better} | {difference} | {step.verdict} |")
    agreeing, reversed_, equal = (
        sum(step.verdict.startswith(verdict) for step in steps) for verdict in ("agrees", "reversed", "equal")
    )
    within = len(steps) - agreeing - reversed_ - equal
    lines.append("")
    lines.append(
        f"{len(steps)} steps: in the papers' direction {agreeing}, reversed {reversed_}, within the spread {within}"
        + (f", equal {equal}." if equal else ".")
    )
    return "\n".join(lines)
