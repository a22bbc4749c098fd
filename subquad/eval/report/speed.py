"""The rows of speed on the first screen: ratios to the teacher, by phase and length."""

from __future__ import annotations

from subquad.eval.records import EvalRecord
from subquad.eval.report.blocks import Cell
from subquad.eval.report.data import ByMetric, ByModel, RunData
from subquad.eval.report.differences import conditions
from subquad.eval.report.rows import Measure, metric_cell
from subquad.eval.speed import Timing, timings_of
from subquad.eval.speed.run import REFERENCE
from subquad.eval.speed.timings import PHASES


def speed_rows(run: RunData, task: str) -> list[Measure]:
    """Return a row for each phase and length, as ratios to the teacher, whose own rate stands in the note.

    Args:
        run: The folder's content.
        task: Name of the task.

    Returns:
        The rows, prefill before decode, short prompts before long ones.

    Raises:
        OutputError: A record has no readable timings.
    """
    by_model = run.by_task[task]
    timings = {model: {timing.metric_name: timing for timing in timings_of(r)} for model, r in by_model.items()}
    every = {name: timing for found in timings.values() for name, timing in found.items() if timing.ratios}
    longest = max((timing.length for timing in every.values()), default=0)
    at = {model: conditions(record) for model, record in by_model.items()}
    rows = []
    for timing in sorted(every.values(), key=lambda timing: (PHASES.index(timing.phase), timing.length)):
        name = timing.metric_name
        values = {model: metric_cell(name, r.metrics[name], 2) for model, r in by_model.items() if name in r.metrics}
        theirs = timings.get(REFERENCE, {}).get(name)
        values |= {} if theirs is None else {REFERENCE: Cell("1", 1.0)}
        what = f"{timing.phase} speed at {timing.length:,} tokens"
        cost = _times_as_fast(by_model, REFERENCE, name, run.costs[task])
        gain = _times_as_fast(by_model, "window_only", name, run.gains[task])
        note = _note(next(iter(by_model.values())), len(timing.ratios), theirs)
        told = what if timing.length == longest else ""
        rows.append(Measure(what.capitalize(), values, note, cost, gain, told, conditions=at))
    return rows


def _note(record: EvalRecord, num_rounds: int, teacher: Timing | None) -> str:
    where = f"{record.settings.get('device')} (threads: {record.settings.get('num_threads')})"
    note = f"times the teacher's, median of {num_rounds} rounds; {where}"
    if teacher is None:
        return note
    # Two digits: a scale for the ratios, no figure to compare with that of another call.
    rounded = float(f"{teacher.tokens_per_second:.2g}")
    return f"{note}; teacher: about {rounded:,.{0 if rounded >= 10 else 1}f} tokens/s"


def _times_as_fast(by_model: ByModel, other: str, name: str, differences: ByMetric) -> Cell | None:
    """Return how many times as fast the student is as another model, marked by what the difference says."""
    if name not in differences:
        return None
    ratio = by_model["student"].metrics[name].value
    if other != REFERENCE:
        ratio /= by_model[other].metrics[name].value
    return Cell(f"{ratio:.2f}× as fast", ratio, differences[name].mark)
