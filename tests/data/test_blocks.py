"""Shared memory goes to the reader, comes back, and is used again when nothing of it is left."""

import gc
import pickle
import secrets
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest

from mask_rcnn_jax.data import blocks


@pytest.fixture(autouse=True, scope="module")
def collect_quickly():
    """Look for garbage among new objects alone; those of other tests take a second each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def prefix():
    """Of blocks that are gone after the test."""
    prefix = f"mrcnn-test-{secrets.token_hex(3)}-"
    yield prefix
    gc.collect()
    blocks.forget(prefix)
    for block in [block for block in blocks._own if block.name.startswith(prefix)]:
        blocks._own.remove(block)
        try:
            file = SharedMemory(block.name)
        except FileNotFoundError:
            continue
        file.unlink()
        file.close()


def send(array):
    sent = pickle.loads(pickle.dumps(array))
    return blocks.receive(sent) if isinstance(sent, blocks.Sent) else sent


def test_a_block_is_used_again_once_no_view_is_left(prefix):
    sent = blocks.lent_zeros(prefix, (3, 5, 2), np.float32)
    name = sent.block.name
    sent[...] = np.arange(30).reshape(3, 5, 2)
    received = send(sent)
    assert type(received) is np.ndarray and received.dtype == np.float32
    with pytest.raises(FileNotFoundError):
        SharedMemory(name)  # nothing of it stays behind
    part, parts = received[1, 2:].view(np.uint8), received.reshape(-1)[3:]
    del sent, received
    gc.collect()
    other = blocks.lent_zeros(prefix, (3, 5, 2), np.float32)
    assert other.block.name != name
    np.testing.assert_array_equal(parts, np.arange(3, 30))
    np.testing.assert_array_equal(part.view(np.float32), np.arange(30).reshape(3, 5, 2)[1, 2:])
    del parts
    gc.collect()
    assert blocks.lent_zeros(prefix, (3, 5, 2), np.float32).block.name != name
    del part
    gc.collect()
    again = blocks.lent_zeros(prefix, (31,), np.float32)  # as many bytes, to a power of two
    assert again.block.name == name and not again.any()
    again[:] = 7
    np.testing.assert_array_equal(send(again), np.full(31, 7, np.float32))


def test_an_array_that_is_not_sent_gives_its_block_back(prefix):
    names = set()
    for shape in ((4, 6), (24,), (2, 12), (17, 1)):
        array = blocks.lent_zeros(prefix, shape, np.uint8)
        assert not array.any() and array.flags.c_contiguous and array.ctypes.data % 64 == 0
        array[...] = 1
        names.add(array.block.name)
        del array
        gc.collect()
    assert len(names) == 1


def test_an_array_outlives_its_loan(prefix):
    """A worker has a batch in hand until the next is made, and the reader may be done before."""
    first = blocks.lent_zeros(prefix, (5, 3), np.uint8)
    send(first)
    gc.collect()
    second = blocks.lent_zeros(prefix, (3, 5), np.uint8)
    assert second.block is first.block
    del first
    gc.collect()
    second[:] = 2
    received = send(second)
    third = blocks.lent_zeros(prefix, (15,), np.uint8)
    assert third.block is not second.block and (received == 2).all()


def test_views_are_sent_as_copies(prefix):
    array = blocks.lent_zeros(prefix, (4, 6), np.int16)
    array[2] = 5
    row = send(array[2])
    assert type(row) is np.ndarray and row.tolist() == [5] * 6
    assert not array.block.sent


@pytest.mark.parametrize("shape", [(0, 7), (1,), ()])
def test_small_arrays(prefix, shape):
    array = blocks.lent_zeros(prefix, shape, np.float64)
    received = send(array)
    assert received.shape == shape and received.dtype == np.float64


def test_arrays_outlive_the_loader(prefix):
    array = blocks.lent_zeros(prefix, (9,), np.uint8)
    array[:] = 3
    received = send(array)
    blocks.forget(prefix)
    del array
    gc.collect()
    assert received.tolist() == [3] * 9 and prefix not in "".join(blocks._received)
