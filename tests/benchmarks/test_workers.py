"""Cases that crash, hang or raise cost themselves and nothing else."""

import time

import pytest

from benchmarks.suite.cases import Case, Session, run_case
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Settings
from benchmarks.suite.workers import Limits, WorkerPool
from tests.benchmarks import crashing_cases
from tests.benchmarks.fakes import FakeHardware

# Workers are new processes, which import torch.
pytestmark = pytest.mark.slow

TOY = Settings("toy")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    now = time.monotonic()
    with WorkerPool(TOY, crashing_cases.build) as pool:
        found = list(pool.run(crashing_cases.build(TOY), 1, Limits(now + 300, now + 300)))
        workers = list(pool.workers)
    assert all(not worker.process.is_alive() for worker in workers)
    return found


def _of(rows: list[Row], case: str) -> list[Row]:
    return [row for row in rows if row.case == case]


def test_every_case_has_its_rows_in_order(rows):
    cases = ["fine", "fine", "raises", "fine again", "fine again", "hangs", "dies", "last", "last"]
    assert [row.case for row in rows] == cases
    assert {row.section for row in rows} == {"section"}


def test_an_exception_becomes_a_row_and_the_worker_lives(rows):
    (row,) = _of(rows, "raises")
    assert (row.status, row.reason) == ("error", "ValueError: an error of the case")
    assert "in _raises" in row.metrics["traceback"]
    processes = {part.metrics["process"] for name in ("fine", "fine again") for part in _of(rows, name)[:1]}
    assert len(processes) == 1


def test_a_worker_that_dies_is_replaced(rows):
    (row,) = _of(rows, "dies")
    assert (row.status, row.reason) == ("error", "the worker died with exit code 7")


def test_a_case_past_its_limit_is_stopped(rows):
    (row,) = _of(rows, "hangs")
    assert row.status == "error"
    assert row.reason.startswith("stopped after")
    assert [row.status for row in _of(rows, "last")] == ["ok", "ok"]


def test_no_case_is_started_when_the_time_is_up():
    past = time.monotonic() - 1
    with WorkerPool(TOY, crashing_cases.build) as pool:
        rows = list(pool.run(crashing_cases.build(TOY), 1, Limits(past, past + 60)))
    assert [(row.status, row.reason) for row in rows] == [("skipped", "the section's time was up")] * 6


def test_rows_get_section_case_and_seconds():
    case = Case("section", "name", lambda session: [Row(what="x")])
    (row,) = run_case(case, Session(TOY, FakeHardware()))
    assert (row.section, row.case) == ("section", "name")
    assert row.seconds >= 0
