"""Reading answers, and the statistics of shares."""

from __future__ import annotations

import pytest

from subquad.eval.niah import wilson_interval
from subquad.eval.niah.answers import read_values, share_named
from subquad.eval.niah.stats import mean_and_error


@pytest.mark.parametrize(
    "text, values",
    [
        ("48213. Remember it", ["48213"]),
        (" 48213", ["48213"]),
        (': "48213"', ["48213"]),
        ("482134", ["482134"]),
        ("482 13", ["482", "13"]),
        ("not 48213", []),
        ("48213x", []),
        ("48213, 77777 and 48213.\n55555", ["48213", "77777", "55555"]),
        ("", []),
    ],
)
def test_numbers_at_the_beginning(text, values):
    assert read_values(text, "digits") == values


def test_words_are_read_without_case():
    assert read_values(" Spoon, river and apple.", "words") == ["spoon", "river", "apple"]
    assert share_named("Spoon. Remember it", "words", ["spoon"]) == 1
    assert share_named("5 spoons", "words", ["spoon"]) == 0


@pytest.mark.parametrize(
    "text, share",
    [
        ("11111 and 22222", 1),
        ("22222, 11111", 1),
        ("11111, 33333, 22222", 0.5),  # naming more than asked for is no way to score
        ("33333", 0),
    ],
)
def test_several_values_count_in_any_order(text, share):
    assert share_named(text, "digits", ["11111", "22222"]) == share


def test_an_exact_match_is_exact():
    assert share_named("48213", "digits", ["48213"]) == 1
    for wrong in ("48214", "4821", "482130", "048213"):
        assert share_named(wrong, "digits", ["48213"]) == 0


@pytest.mark.parametrize(
    "successes, num, low, high",
    # Agresti & Coull 1998 and R's prop.test(correct = FALSE)
    [
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        (1, 1, 0.2065493, 1.0),
        (15, 148, 0.0624, 0.1605),
    ],
)
def test_wilson_interval(successes, num, low, high):
    assert wilson_interval(successes, num) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_narrows_with_samples_and_widens_with_confidence():
    def width(*args):
        low, high = wilson_interval(*args)
        return high - low

    assert width(50, 100) < width(5, 10) < width(5, 10, 0.99)


def test_standard_error_is_that_of_the_mean():
    mean, error = mean_and_error([1.0, 0.0, 1.0, 1.0])
    assert (mean, error) == (0.75, pytest.approx(0.25))
    assert mean_and_error([3.0]) == (3.0, None)
