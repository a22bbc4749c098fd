"""The verdict says plainly whether the student won."""

from __future__ import annotations

import pytest

from subquad.eval.results import PairedDifference
from subquad.eval.verdict import judge, judge_records

from .conftest import make_results
from .report_records import loss_record, niah_record

SUBJECT = "On held-out loss, the distilled student"


def with_differences(start, window, error=0.002):
    values = {"student_start": start, "window_only": window}
    pairs = [
        PairedDifference(first="student", second=name, difference=value, standard_error=error)
        for name, value in values.items()
        if value is not None
    ]
    return judge(make_results(differences=pairs))


@pytest.mark.parametrize(
    "start, window, headline",
    [
        (-0.05, -0.03, "beats its own start and the window-only control."),
        (0.05, 0.03, "does not beat its own start or the window-only control."),
        (-0.05, 0.03, "beats its own start, but does not beat the window-only control."),
        (0.05, -0.03, "does not beat its own start, but beats the window-only control."),
        (-0.05, -0.003, "beats its own start, but ties with the window-only control."),
        (-0.05, None, "beats its own start."),
        (
            None,
            None,
            "The student's loss is not judged: neither its own start nor the window-only control was measured.",
        ),
    ],
)
def test_headline(start, window, headline):
    verdict = with_differences(start, window)
    assert verdict.headline == (headline if headline.startswith("The") else f"{SUBJECT} {headline}")
    assert verdict.success == (headline.startswith("beats") and "but" not in headline)


@pytest.mark.parametrize(
    "records, why",
    [
        ([niah_record("student"), niah_record("teacher")], "it was not measured."),
        ([niah_record("student"), loss_record("teacher")], "it was not measured."),
        ([loss_record("student"), loss_record("teacher")], "that of the window-only control was not measured"),
    ],
)
def test_the_headline_of_records_without_a_pair_of_losses_speaks_of_the_loss_alone(records, why):
    verdict = judge_records(records)
    assert verdict.headline.startswith("The student's loss is not judged: " + why)
    assert not verdict.success


def test_details_carry_the_numbers():
    details = " ".join(judge(make_results()).details)
    assert "lower than that of the window-only control: -0.0278 ± 0.0022 nats per token" in details
    assert "higher than that of the teacher: +0.1243 ± 0.0040 nats per token" in details
    assert "18% of the gap" in details
    assert "Switching its far part off changes its loss by +0.0199 ± 0.0017 nats" in details


def test_a_tie_is_said_to_be_one():
    verdict = with_differences(0.003, -0.003)
    assert "ties with its own start and the window-only control" in verdict.headline
    assert "not clearly different from that of its own start: +0.0030 ± 0.0020" in verdict.details[0]


def test_falling_behind_the_control_is_said():
    loss = make_results().loss.model_copy(update={"gap_closed": -0.25})
    assert any("behind the window-only control by 25%" in line for line in judge(make_results(loss=loss)).details)


def test_what_was_not_measured_is_said():
    assert any("control was not measured" in line for line in with_differences(-0.05, None).details)


def test_a_student_as_good_as_the_teacher_ties_with_it():
    pair = PairedDifference(first="student", second="teacher", difference=-0.001, standard_error=0.0033)
    details = judge(make_results(differences=[pair])).details
    assert any("not clearly different from that of the teacher" in line for line in details)


def test_no_share_of_a_gap_that_may_be_chance():
    loss = make_results().loss.model_copy(update={"gap_closed": None})
    details = judge(make_results(loss=loss)).details
    assert any("not clearly behind the teacher" in line for line in details)
    assert not any("% of the gap" in line for line in details)


def test_one_row_gives_no_standard_error_and_no_win():
    verdict = with_differences(-0.05, -0.03, error=None)
    assert not verdict.success
    assert "ties with its own start and the window-only control" in verdict.headline
    assert "-0.0500 nats" in verdict.details[0]
