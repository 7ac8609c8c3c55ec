"""Images from many threads share batches, and each gets what is its own."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mask_rcnn_jax.serving.batching import Batcher
from tests.predict.stub_predictor import StubPredictor, image_of

TIMEOUT = 30.0


def prepared(predictor, value, width=8):
    return predictor.prepare(image_of(value, width))


@pytest.fixture
def stub():
    return StubPredictor(batch_size=4)


@pytest.fixture
def batcher(stub):
    batcher = Batcher(stub, max_delay=0.02)
    yield batcher
    batcher.close()


def test_an_image_alone_waits_no_longer_than_it_must(stub, batcher):
    found = batcher.detect(prepared(stub, 7), TIMEOUT)
    assert found.classes.tolist() == [7] and stub.batches == [1]


def test_a_full_batch_does_not_wait(stub):
    batcher = Batcher(stub, max_delay=3600.0)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda v: batcher.detect(prepared(stub, v), TIMEOUT), range(4)))
    assert [one.classes.tolist() for one in found] == [[0], [1], [2], [3]]
    assert stub.batches == [4]
    batcher.close()


def test_images_that_come_during_a_batch_share_the_next(stub, batcher):
    stub.hold.clear()
    with ThreadPoolExecutor(9) as pool:
        first = pool.submit(batcher.detect, prepared(stub, 0), TIMEOUT)
        stub.started.wait(TIMEOUT)
        others = [pool.submit(batcher.detect, prepared(stub, v), TIMEOUT) for v in range(1, 9)]
        while sum(map(len, batcher._waiting.values())) < 8:
            time.sleep(0.001)
        stub.hold.set()
        assert [one.result().classes.tolist() for one in (first, *others)] == [
            [value] for value in range(9)
        ]
    assert stub.batches == [1, 4, 4]


def test_other_canvases_have_other_batches_and_none_starves(stub):
    """One wide image among tall ones, which come in full batches all the time."""
    batcher = Batcher(stub, max_delay=0.05)
    end = threading.Event()

    def tall():
        while not end.is_set():
            batcher.detect(prepared(stub, 1), TIMEOUT)

    with ThreadPoolExecutor(9) as pool:
        for _ in range(8):
            pool.submit(tall)
        found = batcher.detect(prepared(stub, 2, width=16), TIMEOUT)
        end.set()
    assert found.classes.tolist() == [2]
    assert stub.mixed == 0
    batcher.close()


def test_an_image_nobody_waits_for_is_left_out(stub, batcher):
    stub.hold.clear()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(batcher.detect, prepared(stub, 0), TIMEOUT)
        stub.started.wait(TIMEOUT)
        with pytest.raises(TimeoutError):
            batcher.detect(prepared(stub, 1), 0.01)
        stub.hold.set()
        first.result()
    batcher.detect(prepared(stub, 2), TIMEOUT)
    assert stub.values == [0, 2]


def test_nor_one_whose_client_has_gone(stub, batcher):
    with pytest.raises(ConnectionError):
        batcher.detect(prepared(stub, 1), TIMEOUT, lambda: True)
    batcher.detect(prepared(stub, 2), TIMEOUT, lambda: False)
    assert stub.values == [2] and stub.batches[-1] == 1


def test_a_failure_reaches_those_of_its_batch_alone(stub, batcher):
    stub.error = RuntimeError("out of memory")
    with pytest.raises(RuntimeError, match="out of memory"):
        batcher.detect(prepared(stub, 1), TIMEOUT)
    stub.error = None
    assert batcher.detect(prepared(stub, 2), TIMEOUT).classes.tolist() == [2]


def test_close_keeps_nobody_waiting(stub):
    batcher = Batcher(stub, max_delay=3600.0)
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(batcher.detect, prepared(stub, v), TIMEOUT) for v in (1, 2)]
        while sum(map(len, batcher._waiting.values())) < 2:
            time.sleep(0.001)
        batcher.close()
        for one in waiting:
            with pytest.raises(RuntimeError, match="closed"):
                one.result()
    with pytest.raises(RuntimeError, match="closed"):
        batcher.detect(prepared(stub, 3), TIMEOUT)
    assert stub.batches == []
