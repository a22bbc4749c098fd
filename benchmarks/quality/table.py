"""The table of a study of conversions."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.quality.rows import Needle, Row
from subquad.errors import ConfigError
from subquad.eval.niah.stats import mean_and_error
from subquad.eval.style import format_bytes, format_seconds, with_error

_TRAINING = ("calibrate", "stage1", "stage2", "keys")
_MODELS = ("teacher", "window_only", "student")


def render_table(name: str, rows: Sequence[Row]) -> str:
    """Return the study as Markdown, a line for every run.

    Args:
        name: of the study.
        rows: finished runs, at least one.

    Returns:
        The table of losses and bytes, one of means over seeds where there are several, and one of the needle where it
        was measured.
    """
    first = rows[0].results
    length = longest(rows)
    parts = [
        f"# Study {name}",
        f"Held-out text: {first.data}, {first.loss.num_tokens:,} tokens. Losses in nats per token ± standard error "
        f"over rows; student − control on the same rows. The cache is that of one sequence after {length:,} tokens, "
        f"{first.dtype} (the teacher's: {format_bytes(kv_bytes(rows[0], length))}).",
        _losses(rows, length),
    ]
    if len({row.seed for row in rows}) > 1:
        parts += [f"## Means over seeds; difference from {rows[0].label}, paired by seed", _means(rows)]
    if any(row.needle for row in rows):
        parts += ["## Needle: share of exact answers / log probability of the key", _needles(rows)]
    return "\n\n".join(parts) + "\n"


def longest(rows: Sequence[Row]) -> int:
    """Return the longest length at which every row has its cache's bytes."""
    measured = [row.results.cache_bytes for row in rows]
    lengths = [set() if cache is None else set(cache.student) for cache in measured]
    shared: set[int] = set.intersection(*lengths)
    if not shared:
        raise ConfigError("no length has the cache's bytes of every arm; give all arms one eval.memory_lengths")
    return max(shared)


def kv_bytes(row: Row, length: int) -> int:
    """Return the bytes of the teacher's cache at a length that `longest` returned."""
    assert row.results.cache_bytes is not None, "longest saw to it"
    return row.results.cache_bytes.kv[length]


def _losses(rows: Sequence[Row], length: int) -> str:
    texts = sorted({task for row in rows for task in row.texts})
    heads = ["arm", "seed", "teacher", "window only", "student", "student − control", "gap closed"]
    heads += [f"{task}: teacher / control / student" for task in texts]
    heads += ["far part off", "exact heads", "cache", "tokens", "time"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for row in rows:
        loss, tokens = row.results.loss, row.results.tokens
        cells = [row.label, str(row.seed), f"{loss.teacher:.4f}", _number(loss.window_only)]
        cells += [f"{loss.student:.4f}", _difference(row), "–" if row.gap_closed is None else f"{row.gap_closed:.0%}"]
        cells += [_text(row, task) for task in texts]
        cells.append(_number(loss.student_without_far))
        cells.append(str(sum(map(len, row.exact_kv_heads.values()))))
        cells.append(format_bytes(row.cache_bytes(length) or 0))
        cells.append(f"{tokens.stage1 + tokens.stage2:,}")
        cells.append(format_seconds(sum(row.results.wall_seconds.get(step, 0.0) for step in _TRAINING)))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _means(rows: Sequence[Row]) -> str:
    """Return a line per arm: means over its seeds, and the mean difference from the first arm with the same seeds."""
    arms: dict[str, dict[int, Row]] = {}
    for row in rows:
        arms.setdefault(row.arm, {})[row.seed] = row
    base = arms[rows[0].arm]
    heads = ["arm", "seeds", "student", f"− {rows[0].label}", "gap closed", "far part off"]
    lines = ["| " + " | ".join(heads) + " |", "|---" + "|---:" * (len(heads) - 1) + "|"]
    for found in arms.values():
        losses = [row.results.loss for row in found.values()]
        pairs = [
            row.results.loss.student - base[seed].results.loss.student for seed, row in found.items() if seed in base
        ]
        cells = [next(iter(found.values())).label, str(len(found)), f"{fmean(loss.student for loss in losses):.4f}"]
        cells.append("" if found is base or not pairs else with_error(*mean_and_error(pairs), sign="+"))
        gaps = [loss.gap_closed for loss in losses]
        cells.append("–" if None in gaps else f"{fmean(gap for gap in gaps if gap is not None):.0%}")
        without = [loss.student_without_far for loss in losses if loss.student_without_far is not None]
        cells.append(_number(fmean(without) if without else None))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _difference(row: Row) -> str:
    pair = row.results.difference("student", "window_only")
    return "–" if pair is None else with_error(pair.difference, pair.standard_error, sign="+")


def _text(row: Row, task: str) -> str:
    found = row.texts.get(task, {})
    return " / ".join(_number(found[model][0] if model in found else None) for model in _MODELS)


def _needles(rows: Sequence[Row]) -> str:
    lengths = sorted({length for row in rows for model in row.needle.values() for length in model})
    lines = ["| model | " + " | ".join(f"{n:,}" for n in lengths) + " |", "|---" + "|---:" * len(lengths) + "|"]
    named = [("teacher", rows[0].needle.get("teacher", {}))]
    controls: list[dict[int, Needle]] = []
    for row in rows:
        # a record handed over by another arm is no control of a run without a window
        control = row.needle.get("window_only") if row.results.loss.window_only is not None else None
        if control and control not in controls:
            controls.append(control)
            named.append((f"window only, as {row.label}", control))
        named.append((f"{row.label}, seed {row.seed}", row.needle.get("student", {})))
    for name, found in named:
        cells = [_found(found, length) for length in lengths]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _found(found: dict[int, Needle], length: int) -> str:
    if length not in found:
        return "–"
    needle = found[length]
    accuracy = "–" if needle.accuracy is None else f"{needle.accuracy:.2f}"
    return accuracy if needle.key_logprob is None else f"{accuracy} / {needle.key_logprob:.1f}"
