import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mask_rcnn_jax.deploy.pipeline import Line, map_in_order, prefetch, take_turns


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() == before


def counting(stop, made=None, error=None):
    try:
        for number in range(stop):
            if made is not None:
                made.append(number)
            yield number
        if error:
            raise error
    finally:
        if made is not None:
            made.append("closed")


def test_prefetch_gives_the_same_items():
    assert list(prefetch(range(100), 3)) == [*range(100)]
    assert list(prefetch([], 3)) == []


def test_prefetch_is_so_many_items_ahead_and_no_more():
    made = []
    items = prefetch(counting(100, made), 3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one taken, three in the queue, one waits for a place
    items.close()
    assert made[-1] == "closed" and len(made) < 10


def test_prefetch_carries_an_error_over_after_the_items_before_it():
    items = prefetch(counting(2, error=KeyError("x")), 5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(KeyError, match="x"):
        next(items)


@pytest.mark.parametrize("ahead", [1, 4])
def test_map_in_order_keeps_the_order(ahead):
    def slow_first(number):
        time.sleep(0.002 * (number % 3 == 0))
        return number * number

    with ThreadPoolExecutor(4) as pool:
        results = list(map_in_order(pool, slow_first, range(20), ahead))
    assert results == [n * n for n in range(20)]


def test_map_in_order_raises_what_the_function_raises_and_takes_no_more():
    made = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(ZeroDivisionError):
        list(map_in_order(pool, lambda n: 1 // (n - 3), counting(100, made), 2))
    assert made[-1] == "closed" and len(made) < 10


def test_turns_go_round_and_a_new_source_begins_where_one_ends():
    sources = [iter("abc"), iter("d"), iter(""), iter("ef")]
    assert "".join(take_turns(sources, 2)) == "adbecf"
    assert "".join(take_turns([iter("ab"), iter("cd")], 1)) == "abcd"
    assert list(take_turns([], 3)) == []


def test_turns_close_what_is_running():
    made = [[], []]
    turns = take_turns([counting(9, one) for one in made], 2)
    assert [next(turns) for _ in range(3)] == [0, 0, 1]
    turns.close()
    assert [one[-1] for one in made] == ["closed", "closed"]


def test_line_works_in_order_and_close_waits_for_all():
    done = []
    line = Line(lambda item: (time.sleep(0.001), done.append(item)), lambda: done.append("end"), 2)
    for number in range(10):
        line.put(number)
    line.close()
    assert done == [*range(10), "end"]
    line.close()


def test_line_raises_what_its_work_raises_and_still_finishes():
    finished = []
    line = Line(lambda item: 1 // item, lambda: finished.append(True), 1)
    line.put(1)
    line.put(0)
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):  # however full the line is, it does not block for ever
            line.put(1)
            time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        line.close()
    assert finished == [True]
