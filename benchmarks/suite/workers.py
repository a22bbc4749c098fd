"""Worker processes that run cases, so that a crash, a hang or a broken GPU context costs one case and not the run.

After an illegal memory access a CUDA context stays broken for the life of its process. A worker says so after each
case; then, as when it dies or is stopped at a case's limit, the next case gets a new one.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import NamedTuple

import torch

from benchmarks.suite.cases import Case, Session, run_case
from benchmarks.suite.hardware import open_hardware
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Settings

# Importing torch and transformers and opening the GPU, on a busy machine.
_START_SECONDS = 60.0

CaseFactory = Callable[[Settings], list[Case]]


class Report(NamedTuple):
    """What a worker sends back after a case."""

    rows: list[Row]
    problem: str | None


class Limits(NamedTuple):
    """When, on the monotonic clock, a section stops starting cases and when those still running are stopped."""

    start_until: float
    kill_at: float


def serve(pipe: connection.Connection, settings: Settings, factory: CaseFactory, num_threads: int) -> None:
    """Run the cases whose (section, name) come through the pipe, until it closes or the device is unusable.

    Args:
        pipe: Receives keys, sends `Report`s.
        settings: The run's settings.
        factory: Builds all cases; an importable function, since the worker is a fresh process.
        num_threads: CPU threads PyTorch may use.
    """
    torch.set_num_threads(num_threads)
    # Else every worker starts one compiler process per CPU core.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    session = Session(settings, open_hardware(settings.device))
    cases = {(case.section, case.name): case for case in factory(settings)}
    while True:
        try:
            key = pipe.recv()
        except EOFError:
            return
        rows = run_case(cases[key], session)
        problem = session.hardware.problem() if any(row.failed for row in rows) else None
        pipe.send(Report(rows, problem))
        if problem is not None:
            # Not a return: the interpreter's clean-up can hang on a broken context.
            sys.stderr.flush()
            os._exit(1)
        session.hardware.reset()


class Worker:
    """One process and the case it runs."""

    def __init__(self, settings: Settings, factory: CaseFactory, num_threads: int) -> None:
        """Start the process.

        Args:
            settings: The run's settings.
            factory: Builds all cases.
            num_threads: CPU threads PyTorch may use in it.
        """
        # A forked process cannot use CUDA.
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, settings, factory, num_threads), daemon=True)
        self.process.start()
        theirs.close()
        self.fresh = True
        self.case: Case | None = None
        self.began = self.deadline = 0.0

    def start(self, case: Case, kill_at: float) -> None:
        """Send a case; it must have ended at its own limit or at `kill_at`."""
        self.case, self.began = case, time.monotonic()
        limit = case.limit_s + (_START_SECONDS if self.fresh else 0.0)
        self.deadline = min(self.began + limit, kill_at)
        self.fresh = False
        # A worker that has died meanwhile is noticed when its report is collected.
        with contextlib.suppress(OSError):
            self.pipe.send((case.section, case.name))

    def collect(self) -> Report:
        """Receive the case's report; a process that died is one too."""
        assert self.case is not None, "a worker is asked for a report only while it runs a case"
        case, self.case = self.case, None
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            reason = f"the worker died with exit code {self.process.exitcode}"
            return Report([case.row("error", reason, time.monotonic() - self.began)], reason)

    def give_up(self) -> Report:
        """Stop a case that ran past its limit."""
        assert self.case is not None, "only a running case can be past its limit"
        case, self.case = self.case, None
        seconds = time.monotonic() - self.began
        reason = f"stopped after {seconds:.0f} s"
        return Report([case.row("error", reason, seconds)], reason)

    def stop(self) -> None:
        """End the process at once: it holds nothing that has to be saved."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


class WorkerPool:
    """The workers of a run, used as a context manager so that none of them outlives it."""

    def __init__(self, settings: Settings, factory: CaseFactory) -> None:
        """Start nothing yet.

        Args:
            settings: The run's settings.
            factory: Builds all cases; an importable function.
        """
        self.settings, self.factory = settings, factory
        self.workers: list[Worker] = []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *error: object) -> None:
        self._resize(0, 1)

    def run(self, cases: list[Case], num_workers: int, limits: Limits) -> Iterator[Row]:
        """Run cases, each in one of `num_workers` workers, and yield rows as they come.

        Args:
            cases: In the order in which they are started.
            num_workers: Cases that run at the same time; 1 for anything that is timed.
            limits: The section's.

        Yields:
            Every case's rows, in the order in which they end; `skipped` rows for cases there was no time to start.
        """
        if not cases:
            return
        waiting = deque(cases)
        num_workers = max(1, min(num_workers, len(cases)))
        # This process's number is the cores, or what the user has set; tiny sizes gain nothing from more than one.
        num_threads = 1 if self.settings.toy else max(1, torch.get_num_threads() // num_workers)
        self._resize(num_workers, num_threads)
        while True:
            for index, worker in enumerate(self.workers):
                if worker.case is not None or not waiting or time.monotonic() >= limits.start_until:
                    continue
                if not worker.process.is_alive():
                    worker.stop()
                    worker = self.workers[index] = self._new(num_threads)
                worker.start(waiting.popleft(), limits.kill_at)
            busy = [worker for worker in self.workers if worker.case is not None]
            if not busy:
                break
            yield from self._next_rows(busy)
        for case in waiting:
            yield case.row("skipped", "the section's time was up")

    def _next_rows(self, busy: list[Worker]) -> Iterator[Row]:
        patience = max(0.0, min(worker.deadline for worker in busy) - time.monotonic())
        ready = connection.wait([worker.pipe for worker in busy], patience)
        for worker in busy:
            if worker.pipe in ready:
                report = worker.collect()
            elif time.monotonic() >= worker.deadline:
                report = worker.give_up()
            else:
                continue
            if report.problem is not None:
                worker.process.kill()
                worker.process.join()  # so that `run` sees that it needs another one
            yield from report.rows

    def _resize(self, num_workers: int, num_threads: int) -> None:
        while len(self.workers) > num_workers:
            self.workers.pop().stop()
        while len(self.workers) < num_workers:
            self.workers.append(self._new(num_threads))

    def _new(self, num_threads: int) -> Worker:
        return Worker(self.settings, self.factory, num_threads)
