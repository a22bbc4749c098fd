"""The sections of the suite, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.suite.cases import Case
from benchmarks.suite.end_to_end import end_to_end_cases
from benchmarks.suite.model_check import model_cases
from benchmarks.suite.op_check import correctness_cases
from benchmarks.suite.settings import Settings
from benchmarks.suite.speed import timing_cases
from benchmarks.suite.speed_checks import check_cases
from benchmarks.suite.window_check import window_cases


class Section(NamedTuple):
    """What a section runs.

    Attributes:
        about: One line for the help text.
        cases: Build its cases.
    """

    about: str
    cases: tuple[Callable[[Settings], list[Case]], ...]


SECTIONS: Mapping[str, Section] = {
    "correctness": Section(
        "the op and the window against float64, with every gradient", (correctness_cases, window_cases)
    ),
    "models": Section("converted models: logits on the GPU and on the CPU, decoding and prefill", (model_cases,)),
    "timings": Section("passes, decoding, chunk sizes against PyTorch's attention", (check_cases, timing_cases)),
    "end_to_end": Section("training step and generation of a 1B model, teacher and student", (end_to_end_cases,)),
}


def all_cases(settings: Settings) -> list[Case]:
    """Return the cases of all sections, in their order.

    Args:
        settings: The run's settings.

    Returns:
        The cases.
    """
    return [case for section in SECTIONS.values() for build in section.cases for case in build(settings)]
