import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mask_rcnn_jax.predict.pipeline import BackgroundWriter, map_in_order, prefetch, round_robin


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


def test_prefetch_yields_the_same_items():
    assert list(prefetch(range(100), 3)) == [*range(100)]
    assert list(prefetch([], 3)) == []


def test_prefetch_stays_within_its_lead():
    made = []
    items = prefetch(counting(100, made), 3)
    assert next(items) == 0
    deadline = time.monotonic() + 5
    while len(made) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    assert made == [0, 1, 2, 3, 4]  # one taken, three queued, one waiting for space
    items.close()
    assert made[-1] == "closed" and len(made) < 10


def test_prefetch_raises_after_preceding_items():
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


def test_map_in_order_raises_and_stops():
    made = []
    with ThreadPoolExecutor(2) as pool, pytest.raises(ZeroDivisionError):
        list(map_in_order(pool, lambda n: 1 // (n - 3), counting(100, made), 2))
    assert made[-1] == "closed" and len(made) < 10


def test_round_robin_replaces_exhausted_sources():
    sources = [iter("abc"), iter("d"), iter(""), iter("ef")]
    assert "".join(round_robin(sources, 2)) == "adbecf"
    assert "".join(round_robin([iter("ab"), iter("cd")], 1)) == "abcd"
    assert list(round_robin([], 3)) == []


def test_round_robin_closes_open_sources():
    made = [[], []]
    turns = round_robin([counting(9, items) for items in made], 2)
    assert [next(turns) for _ in range(3)] == [0, 0, 1]
    turns.close()
    assert [items[-1] for items in made] == ["closed", "closed"]


def test_background_writer_keeps_order_and_close_waits():
    done = []

    def work(item):
        time.sleep(0.001)
        done.append(item)

    writer = BackgroundWriter(work, lambda: done.append("end"), 2)
    for number in range(10):
        writer.put(number)
    writer.close()
    assert done == [*range(10), "end"]
    writer.close()


def test_background_writer_raises_and_still_finishes():
    finished = []
    writer = BackgroundWriter(lambda item: 1 // item, lambda: finished.append(True), 1)
    writer.put(1)
    writer.put(0)
    with pytest.raises(ZeroDivisionError):
        for _ in range(1000):  # never blocks forever, however full the queue is
            writer.put(1)
            time.sleep(0.001)
    with pytest.raises(ZeroDivisionError):
        writer.close()
    assert finished == [True]
