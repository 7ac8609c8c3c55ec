"""Slices of the slow tests: together they are all, each takes about the same."""

import pytest

from tests.cpu_seconds import part

SECONDS = {"a": 50, "c": 120, "d": 3, "e": 90, "f": 30}  # and 2 of all others
NAMES = "abcdefghij"


@pytest.mark.parametrize("count", [1, 3, 7, 40])
def test_every_function_is_in_one_slice(count):
    parts = [part([*NAMES], SECONDS, number + 1, count) for number in range(count)]
    assert sorted(name for found in parts for name in found) == sorted(NAMES)


def test_slices_take_about_the_same_and_keep_neighbors():
    first, second, third = (part([*NAMES], SECONDS, number, 3) for number in (1, 2, 3))
    assert (first, second, third) == ({*"ab"}, {*"cd"}, {*"efghij"})


def test_without_any_function_nothing_runs():
    assert part([], SECONDS, 1, 3) == set()
