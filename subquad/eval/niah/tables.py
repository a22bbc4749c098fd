"""Needle results as tables of text: by length, by depth, and the paired difference of two models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from subquad.errors import ConfigError
from subquad.eval.niah.cells import Axis, CellScore, Group, Mean, Share, cells_of, group_cells, paired_differences
from subquad.eval.records import EvalRecord
from subquad.eval.results import LOSS_LABELS
from subquad.eval.style import with_error

SCORE_LABELS: dict[CellScore, str] = {
    "accuracy": "Exact answers",
    "key_rank1": "Key most likely",
    "key_logprob": "Key log probability",
}
NOT_MEASURED = "not measured"
_AXIS_LABELS: dict[Axis, str] = {"length": "Prompt length (tokens)", "depth": "Depth of the needle"}


class NiahTable(NamedTuple):
    """A table of text.

    Attributes:
        head: Column titles.
        rows: Cells, as many per row as there are titles.
    """

    head: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Return the table in Markdown."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def model_label(name: str) -> str:
    """Return what a model is called in tables and plots."""
    return {str(known): label for known, label in LOSS_LABELS.items()}.get(name, name)


def axis_table(records: Sequence[EvalRecord], axis: Axis, score: CellScore) -> NiahTable:
    """Show a score of several models along one axis of the grid.

    Args:
        records: Records of one task, measured with equal settings.
        axis: What the rows are.
        score: `accuracy` and `key_rank1` are shown with their 95 % Wilson interval, `key_logprob` with its standard
            error over prompts.

    Returns:
        One row per length or depth, one column per model. What was not measured says so.

    Raises:
        ConfigError: The records were measured with different settings.
        OutputError: A record has no cells.
    """
    check_comparable(records)
    columns = [{group.at: group for group in group_cells(cells_of(record), axis)} for record in records]
    rows = [
        [_axis_text(axis, at), *(_score_text(column.get(at), score) for column in columns)]
        for at in records[0].settings["lengths" if axis == "length" else "depths"]
    ]
    return NiahTable([_AXIS_LABELS[axis], *(model_label(record.model) for record in records)], rows)


def difference_table(first: EvalRecord, second: EvalRecord) -> NiahTable:
    """Show how much better one model is than another on the same prompts, by length.

    Args:
        first: Record of one model.
        second: Record of the other.

    Returns:
        One row per length; (first - second) with the standard error of the paired difference.

    Raises:
        ConfigError: They were measured with different settings or on different prompts.
        OutputError: A record has no cells.
    """
    check_comparable([first, second])
    if first.provenance.prompts_hash != second.provenance.prompts_hash:
        raise ConfigError(
            f"{first.model} and {second.model} read different prompts, which cannot be compared one by one "
            "(their tokenizers differ). Compare their tables instead."
        )
    mine, theirs = cells_of(first), cells_of(second)
    columns = {score: paired_differences(mine, theirs, score) for score in SCORE_LABELS}
    rows = [
        [_axis_text("length", length), *(_mean_text(columns[score].get(length), "+") for score in SCORE_LABELS)]
        for length in first.settings["lengths"]
    ]
    return NiahTable([_AXIS_LABELS["length"], *SCORE_LABELS.values()], rows)


def check_comparable(records: Sequence[EvalRecord]) -> None:
    """Refuse to show records beside each other that do not belong together.

    Args:
        records: Records of the needle task.

    Raises:
        ConfigError: No records, or their settings differ.
    """
    if not records:
        raise ConfigError("there are no needle records to show; evaluate a model first")
    other = next((record for record in records if record.settings != records[0].settings), None)
    if other is not None:
        raise ConfigError(
            f"{other.model} and {records[0].model} were measured with different settings, so their needle scores "
            "cannot be compared; evaluate both again with the same ones"
        )


def _axis_text(axis: Axis, at: float) -> str:
    return f"{at:,}" if axis == "length" else f"{at:.2f}"


def _score_text(group: Group | None, score: CellScore) -> str:
    found = None if group is None else getattr(group, score)
    if found is None:
        return NOT_MEASURED
    if isinstance(found, Share):
        return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
    return _mean_text(found, "")


def _mean_text(mean: Mean | None, sign: str) -> str:
    if mean is None:
        return NOT_MEASURED
    return with_error(mean.value, mean.standard_error, decimals=2, sign=sign)
