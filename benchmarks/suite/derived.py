"""What follows from several rows: shares of the peaks, crossover lengths, and where the targets stand."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from benchmarks.suite.contenders import SDPA_FLASH
from benchmarks.suite.rows import Row
from benchmarks.suite.speed import BUFFERED, COPY, MATMUL, STEP, SUBQUAD

# On an H200 (bf16, d = 64, G = 4): share of the matmul peak at 32k; speed against flash attention; bandwidth floor.
FLOOR_SHARE, GOAL_SHARE = 0.25, 0.40
LONG_SPEEDUP = 4.0
DECODE_OVER_FLOOR = 1.3

Points = dict[int, float]


class Peaks:
    """The rates measured in the same run, as far as they are known."""

    def __init__(self) -> None:
        self.tflops: float | None = None
        self.gbps: float | None = None

    def complete(self, row: Row) -> None:
        """Learn from a row of the peaks, or add its shares of them to any other row, in place."""
        if row.what == MATMUL and "tflops" in row.metrics:
            self.tflops = row.metrics["tflops"]
        elif row.what == COPY and "gbps" in row.metrics:
            self.gbps = row.metrics["gbps"]
        else:
            if self.tflops and "tflops" in row.metrics:
                row.metrics["share_of_matmul"] = row.metrics["tflops"] / self.tflops
            if self.gbps and "gbps" in row.metrics:
                row.metrics["over_bandwidth_floor"] = self.gbps / row.metrics["gbps"]


def crossover(ratios: Mapping[int, float]) -> float | None:
    """Return the length from which a ratio stays above 1.

    Args:
        ratios: Ratio by length.

    Returns:
        Interpolated between two measured lengths (log-log); the shortest measured length if it is above 1 everywhere;
        None if it is not above 1 at the longest.
    """
    lengths = sorted(ratios)
    if not lengths or ratios[lengths[-1]] <= 1:
        return None
    below = [length for length in lengths if ratios[length] <= 1]
    if not below:
        return float(lengths[0])
    low = below[-1]
    high = lengths[lengths.index(low) + 1]
    gain = math.log(ratios[high]) - math.log(ratios[low])
    return math.exp(math.log(low) + math.log(high / low) * -math.log(ratios[low]) / gain)


def summary_rows(rows: Iterable[Row]) -> list[Row]:
    """Return the crossover lengths and the targets that the rows of a run give.

    Args:
        rows: All rows so far.

    Returns:
        Rows of the section `timings`: `crossover` against flash attention per pass and shape, `switch` where chunks
        become faster than one chunk, `decode crossover`, and `target`.
    """
    good = [row for row in rows if row.section == "timings" and row.status == "ok"]
    speedups = _points(good, SUBQUAD, "speedup_vs_sdpa")
    found = [_length_row("crossover", key, ratios) for key, ratios in speedups.items()]
    found += [_length_row("switch", key, ratios) for key, ratios in _switch_ratios(good).items()]
    found += [_length_row("decode crossover", key, ratios) for key, ratios in _decode_ratios(good).items()]
    found += _targets(good, speedups)
    for row in found:
        row.section, row.case = "timings", "summary"
    return found


def _key(row: Row) -> tuple[str, int, int, int]:
    return row.config["pass"], row.config["head_dim"], row.config["groups"], row.config["batch"]


def _points(rows: Iterable[Row], what: str, metric: str) -> dict[tuple, Points]:
    points: dict[tuple, Points] = defaultdict(dict)
    for row in rows:
        if row.what == what and metric in row.metrics:
            points[_key(row)][row.config["tokens"]] = row.metrics[metric]
    return points


def _switch_ratios(rows: list[Row]) -> dict[tuple, Points]:
    quadratic, chunked = (_points(rows, what, "median_ms") for what in ("quadratic", "chunked"))
    return {
        key: {length: quadratic[key][length] / ms for length, ms in times.items() if length in quadratic[key]}
        for key, times in chunked.items()
    }


def _decode_ratios(rows: list[Row]) -> dict[tuple, Points]:
    """Return, per shape and kind of step, how much longer a key/value cache of each length takes."""
    decoding = [row for row in rows if row.config.get("pass") == "decode"]
    softmax = _points(decoding, SDPA_FLASH, "median_ms")
    ratios = {}
    for what in (STEP, BUFFERED):
        for key, times in _points(decoding, what, "median_ms").items():
            (step_ms,) = times.values()
            ratios[(*key, what)] = {length: ms / step_ms for length, ms in softmax[key].items()}
    return ratios


def _length_row(what: str, key: tuple, ratios: Points) -> Row:
    which, head_dim, groups, batch, *kind = key
    config = {"pass": which, "head_dim": head_dim, "groups": groups, "batch": batch}
    if kind:
        config["kind"] = kind[0]
    return Row(what=what, config=config, metrics={"length": crossover(ratios), "ratios": dict(sorted(ratios.items()))})


def _targets(rows: list[Row], speedups: Mapping[tuple, Points]) -> list[Row]:
    """Return one row per target whose measurement is there. A missed target is a finding, not a failure."""
    shares = _points(rows, SUBQUAD, "share_of_matmul").get(("forward", 64, 4, 1), {})
    trained = speedups.get(("forward_backward", 64, 4, 1), {})
    over = [
        row.metrics["over_bandwidth_floor"]
        for row in rows
        if row.what in (STEP, BUFFERED) and row.config["head_dim"] == 64 and "over_bandwidth_floor" in row.metrics
    ]
    found = []
    if 32768 in shares:
        found.append(_target("forward at 32k, share of the matmul peak: floor", shares[32768], FLOOR_SHARE))
        found.append(_target("forward at 32k, share of the matmul peak: goal", shares[32768], GOAL_SHARE))
    long = [ratio for length, ratio in trained.items() if length >= 8192]
    if long:
        found.append(_target("forward_backward from 8k on, speed against flash", min(long), 1.0))
    if 65536 in trained:
        found.append(_target("forward_backward at 64k, speed against flash", trained[65536], LONG_SPEEDUP))
    if over:
        # As a share, so that more is better here too.
        found.append(_target("decode, share of the copy bandwidth", 1 / min(over), 1 / DECODE_OVER_FLOOR))
    return found


def _target(name: str, value: float, wanted: float) -> Row:
    metrics = {"value": value, "wanted": wanted, "reached": value >= wanted}
    return Row(what="target", config={"target": name}, metrics=metrics)
