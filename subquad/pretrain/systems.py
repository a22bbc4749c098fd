"""Every system as the papers have it, and their memory over length."""

from __future__ import annotations

import dataclasses
import json
import logging
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from subquad.convert.atomic import atomic_file
from subquad.errors import ConfigError, OutputError
from subquad.eval.crossover import (
    HEAD_DIMS,
    LENGTHS,
    LONGEST_MEASURED,
    SystemMemory,
    has_width,
    measure_systems,
    plot_systems,
    systems_table,
)
from subquad.eval.plots import Plot
from subquad.layers.config import MixerConfig
from subquad.layers.presets import PRESETS
from subquad.pretrain.mixers import scratch_mixer
from subquad.recipes.progress import progress_bar

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MemoryReport:
    """Memory of every system over length, and the files about it.

    Attributes:
        systems: What was measured.
        table: Markdown file.
        plot: The plot.
        json: JSON file.
    """

    systems: list[SystemMemory]
    table: Path
    plot: Plot
    json: Path


def pure_systems() -> dict[str, MixerConfig]:
    """Return every preset but softmax as the papers have it (see `scratch_mixer`).

    Of presets that are one system there, such as one with and one without a window, the first is kept.
    """
    found: dict[str, MixerConfig] = {}
    for name in PRESETS:
        mixer = scratch_mixer(name)
        assert isinstance(mixer, MixerConfig), "a preset resolves"
        if mixer.score == "softmax" or mixer in found.values():
            continue
        found[name] = mixer
    return found


def report_memory(
    folder: Path,
    *,
    head_dims: Sequence[int] = HEAD_DIMS,
    lengths: Sequence[int] = LENGTHS,
    dtype: str = "bfloat16",
    longest_measured: int = LONGEST_MEASURED,
) -> MemoryReport:
    """Measure the cache of every system over length and write a table, a plot and JSON.

    Args:
        folder: Where to write `memory.md`, `memory.png` and `memory.json`.
        head_dims: Widths of a head; a width given twice counts once. A system whose learned features are wider is left
            out, which the table notes.
        lengths: Numbers of tokens.
        dtype: `bfloat16` or `float32`, of keys and values.
        longest_measured: Lengths up to this one are run; the others are computed.

    Returns:
        What was measured and where it is written.

    Raises:
        ConfigError: A width is not an even number above 0, a length is below 1, or the data type is another one.
        OutputError: The folder cannot be written.
    """
    problems = [
        f"head_dim must be an even number above 0, got {width}" for width in head_dims if width < 2 or width % 2
    ]
    problems += [f"lengths must be at least 1, got {length}" for length in lengths if length < 1]
    if dtype not in ("bfloat16", "float32"):
        problems.append(f"dtype must be bfloat16 or float32, got {dtype!r}")
    if problems:
        raise ConfigError("; ".join(problems))
    table, data, picture = (folder / f"memory.{suffix}" for suffix in ("md", "json", "png"))
    # before minutes of measuring
    _require_writable(folder)
    widths = list(dict.fromkeys(head_dims))
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    systems = pure_systems()
    with progress_bar("memory of every system", Console(stderr=True)) as advance:
        found = measure_systems(
            systems,
            head_dims=widths,
            lengths=lengths,
            dtype=kind,
            longest_measured=longest_measured,
            progress=advance,
        )
    for each in found:
        if each.differs:
            logger.warning(
                "%s, head_dim %d: the real cache is not what its formula says at %s tokens",
                each.system,
                each.head_dim,
                ", ".join(map(str, each.differs)),
            )
    plot = plot_systems(found, kind, picture)
    notes = _left_out(systems, widths)
    atomic_file(table, "\n".join([systems_table(found), *(f"\n{note}" for note in notes), ""]).encode())
    rows = {"dtype": dtype, "systems": [dataclasses.asdict(each) for each in found]}
    atomic_file(data, json.dumps(rows, indent=1).encode())
    return MemoryReport(found, table, plot, data)


def _left_out(systems: Mapping[str, MixerConfig], widths: Sequence[int]) -> list[str]:
    return [
        f"{name} is left out at head_dim {width}: its feature_dim {mixer.feature_dim} is more than that."
        for width in widths
        for name, mixer in systems.items()
        if not has_width(mixer, width)
    ]


def _require_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OutputError(f"{folder} cannot be written: {error}. Name another folder: -o FOLDER.") from error
