"""Check and time the kernels on a GPU in less than 8 minutes; without one, run everything at toy size on the CPU.

    python benchmarks/gpu_suite.py                       # all sections
    python benchmarks/gpu_suite.py timings --quick       # one section, in its short form
    python benchmarks/gpu_suite.py --only 'forward d64*' # some cases
    python benchmarks/gpu_suite.py --toy                 # on the CPU, as the tests run it

Nothing is downloaded. Every result is a row of `benchmarks/results/<gpu>-<commit>-<date>.jsonl`, written as soon as it
is there. A case that fails, hangs or takes its GPU context with it is a row too; the others go on, and the exit code
is 1. `benchmarks/README.md` says what the rows hold.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
import time
from pathlib import Path

import torch

# From a checkout: neither this folder's parent nor an install need be on the path. Workers inherit the path.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.suite.cases import Case
from benchmarks.suite.derived import Peaks, summary_rows
from benchmarks.suite.environment import describe_run
from benchmarks.suite.rows import ResultsFile, Row
from benchmarks.suite.sections import SECTIONS, all_cases
from benchmarks.suite.settings import BUDGETS_S, HARD_LIMIT_S, Mode, Settings
from benchmarks.suite.summary import print_summary
from benchmarks.suite.workers import Limits, WorkerPool

_RESULTS = Path(__file__).resolve().parent / "results"
# Workers that compile at the same time, and the GPU memory that each may need.
_MAX_WORKERS = 14
_BYTES_PER_WORKER = 8 * 2**30
# How long a case may run on after its section's time.
_GRACE_SECONDS = 15.0


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Parse the command line; a wrong section name ends the program with a message that lists the right ones."""
    about = "\n".join(f"  {name:12} {section.about}" for name, section in SECTIONS.items())
    parser = argparse.ArgumentParser(
        prog="gpu_suite.py",
        description=f"{(__doc__ or '').split(chr(10))[0]}\n\nsections:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("sections", nargs="*", metavar="SECTION", help="sections to run; none: all")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--toy", action="store_true", help="tiny sizes on the CPU (the default without a GPU)")
    size.add_argument("--quick", action="store_true", help="about 2 minutes instead of 8")
    parser.add_argument("--only", metavar="PATTERN", help="only cases whose name matches, such as 'decode*'")
    parser.add_argument("--output", type=Path, default=_RESULTS, metavar="FOLDER", help="folder of the results file")
    parser.add_argument("--commit", help="commit to note where the checkout cannot tell, as in an exported tree")
    parser.add_argument("--seed", type=int, default=0, help="seed of all inputs")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    parsed = parser.parse_args(arguments)
    unknown = [name for name in parsed.sections if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(map(repr, unknown))}; the sections are {', '.join(SECTIONS)}")
    if parsed.quick and not torch.cuda.is_available():
        parser.error("--quick needs a CUDA device; on the CPU use --toy")
    return parsed


def choose_mode(parsed: argparse.Namespace) -> Mode:
    """Return the mode that the options and the machine ask for."""
    if parsed.toy or not torch.cuda.is_available():
        return "toy"
    return "quick" if parsed.quick else "full"


def select_cases(settings: Settings, sections: list[str], pattern: str | None) -> dict[str, list[Case]]:
    """Return the cases to run by section, in the suite's order.

    Args:
        settings: The run's settings.
        sections: Names; empty is all.
        pattern: What the cases' names must match, with `*` and `?`; None is all.

    Returns:
        Only sections that have cases.
    """
    selected: dict[str, list[Case]] = {}
    for case in all_cases(settings):
        if sections and case.section not in sections:
            continue
        if pattern is None or fnmatch.fnmatch(case.name, pattern):
            selected.setdefault(case.section, []).append(case)
    return selected


class Recorder:
    """Takes the rows of a run: completes them, writes them, says that they are there."""

    def __init__(self, results: ResultsFile, total: int) -> None:
        """Start empty.

        Args:
            results: Where rows are written.
            total: Cases that will run.
        """
        self.results, self.total = results, total
        self.rows: list[Row] = []
        self._peaks = Peaks()
        self._cases: set[tuple[str, str]] = set()

    def add(self, row: Row) -> None:
        """Take a row."""
        self._peaks.complete(row)
        self.results.add(row)
        self.rows.append(row)
        self._cases.add((row.section, row.case))
        done = min(len(self._cases), self.total)
        reason = f": {row.reason.splitlines()[0][:120]}" if row.reason else ""
        progress = f"[{done}/{self.total}]"
        print(f"{progress} {row.section} / {row.case} / {row.what}: {row.status}{reason}", file=sys.stderr, flush=True)


def run_sections(settings: Settings, selected: dict[str, list[Case]], recorder: Recorder) -> None:
    """Run the sections one after the other, each within its time.

    Args:
        settings: The run's settings.
        selected: Cases by section.
        recorder: Takes the rows.
    """
    hard_limit = time.monotonic() + HARD_LIMIT_S[settings.mode]
    with WorkerPool(settings, all_cases) as pool:
        for name, cases in selected.items():
            start_until = min(time.monotonic() + BUDGETS_S[settings.mode][name], hard_limit)
            limits = Limits(start_until, min(start_until + _GRACE_SECONDS, hard_limit))
            together, alone = [case for case in cases if not case.alone], [case for case in cases if case.alone]
            for part, num_workers in ((together, count_workers(settings)), (alone, 1)):
                for row in pool.run(part, num_workers, limits):
                    recorder.add(row)


def count_workers(settings: Settings) -> int:
    """Return how many cases that are not timed run at the same time: as many as cores and GPU memory allow."""
    if settings.toy:
        return 1
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(_MAX_WORKERS, (os.cpu_count() or 1) - 2, memory // _BYTES_PER_WORKER))


def main(arguments: list[str] | None = None) -> int:
    """Run the suite.

    Args:
        arguments: Command-line arguments; None takes the process's.

    Returns:
        0, or 1 if a check failed or a case ended in an error, or 2 if no case matches.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parsed = parse_arguments(arguments)
    settings = Settings(choose_mode(parsed), parsed.seed)
    selected = select_cases(settings, parsed.sections, parsed.only)
    if not selected:
        print(f"no case matches {parsed.only!r} in these sections; --list prints the names", file=sys.stderr)
        return 2
    if parsed.list:
        print("\n".join(f"{name} / {case.name}" for name, cases in selected.items() for case in cases))
        return 0
    run = describe_run(settings, parsed.commit, ["python", "benchmarks/gpu_suite.py", *arguments])
    recorder = Recorder(ResultsFile(parsed.output, run), sum(map(len, selected.values())))
    run_sections(settings, selected, recorder)
    for row in summary_rows(recorder.rows):
        recorder.add(row)
    print(", ".join(f"{key} {value}" for key, value in run.items() if value is not None and key != "command"))
    print_summary(recorder.rows)
    print(f"rows: {recorder.results.path}")
    return 1 if any(row.failed for row in recorder.rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
