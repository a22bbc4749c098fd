"""Cases that go wrong in every way, for workers, which import them by name."""

import os
import time

from benchmarks.suite.cases import Case, Session
from benchmarks.suite.rows import Row
from benchmarks.suite.settings import Settings


def build(settings: Settings) -> list[Case]:
    behaviours = {"fine": _fine, "raises": _raises, "fine again": _fine, "hangs": _hangs, "dies": _dies, "last": _fine}
    return [Case("section", name, run, limit_s=2.0 if name == "hangs" else 60.0) for name, run in behaviours.items()]


def _fine(session: Session) -> list[Row]:
    return [Row(what="one", metrics={"process": os.getpid()}), Row(what="two")]


def _raises(session: Session) -> list[Row]:
    raise ValueError("an error of the case")


def _dies(session: Session) -> list[Row]:
    os._exit(7)


def _hangs(session: Session) -> list[Row]:
    time.sleep(600)
    return []
