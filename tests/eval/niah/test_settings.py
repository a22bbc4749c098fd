"""Settings of the needle task: defaults, rules, names."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from subquad.eval.niah import NiahSettings, default_lengths


def test_defaults_are_the_common_grid():
    settings = NiahSettings().resolved(longest_context=8192)
    assert settings.lengths == (256, 512, 1024, 2048, 4096, 8182)
    assert settings.depths == (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    assert (settings.key_digits, settings.haystack, settings.paper) == (5, "filler", False)
    assert settings.scores == ("generation", "teacher_forced")
    assert settings.max_new_tokens == 10


@pytest.mark.parametrize(
    "context, lengths",
    [(512, (256, 502)), (2048, (256, 512, 1024, 2038)), (2000, (256, 512, 1024, 1990)), (1100, (256, 512, 1024))],
)
def test_default_lengths_leave_room_for_the_answer(context, lengths):
    assert default_lengths(context, 10) == lengths
    assert max(lengths) + 10 <= context


def test_a_short_context_has_one_length():
    assert default_lengths(128, 10) == (118,)


@pytest.mark.parametrize("depths, expected", [(3, (0, 0.5, 1)), (1, (0.5,)), ((0.2, 0.9), (0.2, 0.9))])
def test_depths_as_a_number_or_a_list(depths, expected):
    assert NiahSettings(depths=depths).depths == pytest.approx(expected)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"lengths": (512, 256)}, "lengths must be ascending"),
        ({"lengths": ()}, "lengths"),
        ({"depths": (0.5, 0.5)}, "depths must be ascending"),
        ({"depths": (1.5,)}, "depths"),
        ({"depths": 0}, "depths"),
        ({"scores": ("generation", "generation")}, "scores must not repeat"),
        ({"haystack": "text"}, "paths belong to haystack: text"),
        ({"paths": ("a.txt",)}, "paths belong to haystack: text"),
        ({"paper": True, "num_keys": 2}, "paper: true"),
        ({"paper": True, "needle": "words"}, "paper: true"),
        ({"key_digits": 1, "num_keys": 5}, "key_digits: 1"),
        ({"sample": 3}, "sample"),
    ],
)
def test_rules(changes, message):
    with pytest.raises(ValidationError, match=message):
        NiahSettings(**changes)


def test_task_names_keep_different_measurements_apart():
    variants = [
        {},
        {"haystack": "embedded"},
        {"haystack": "text", "paths": ("a.txt",)},
        {"needle": "words"},
        {"paper": True},
        {"num_keys": 4},
        {"num_values": 3},
    ]
    names = [NiahSettings(**variant).task for variant in variants]
    assert names[0] == "niah"
    assert len(set(names)) == len(names)


def test_cost_limits_are_no_part_of_what_is_measured():
    assert NiahSettings(batch_size=1, max_tokens_per_batch=9).identity() == NiahSettings().identity()
    assert NiahSettings(seed=1).identity() != NiahSettings().identity()
