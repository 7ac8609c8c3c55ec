"""A file that cannot be written is named, also where the system does not say which it was."""

import json
import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from mask_rcnn_jax.cli.written_file import name_file
from mask_rcnn_jax.training.loggers import tensorboard_logger
from mask_rcnn_jax.weights import checksums

FULL = "/dev/full"  # Linux: no byte of what is written has room


def at_the_end_of_the_block():
    with open(FULL, "w") as file:
        file.write("text")


def as_json():
    with open(FULL, "w", 1) as file:
        json.dump(["text" * 10_000], file)


def without_a_buffer():
    with open(FULL, "wb", 0) as file:
        file.write(b"text")


def as_numpy():
    with open(FULL, "wb") as file:
        np.save(file, np.zeros(10_000))


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs Linux")
@pytest.mark.parametrize(
    "write",
    [
        lambda: Path(FULL).write_text("text"),
        at_the_end_of_the_block,
        as_json,
        without_a_buffer,
        as_numpy,
    ],
)
def test_a_full_disk_is_said_with_the_file(write):
    with pytest.raises(OSError) as error:
        write()
    assert error.value.filename is None
    name_file(error.value)
    assert str(error.value) == f"[Errno 28] No space left on device: '{FULL}'"


@pytest.mark.skipif(not os.path.exists(FULL), reason="needs Linux")
def test_one_that_only_a_library_knows_is_said_by_our_own_path(tmp_path, monkeypatch):
    """And nothing waits for it: of TensorBoard's events."""
    record_writer = pytest.importorskip("tensorboardX.record_writer")
    file = open(FULL, "wb")
    monkeypatch.setattr(record_writer, "open", lambda *_: file, raising=False)
    with pytest.raises(OSError) as error, tensorboard_logger(tmp_path, 0) as log:
        log(1, {"loss": 1.0}, {})
    name_file(error.value)
    assert error.value.filename in (FULL, str(tmp_path / "events"))
    with suppress(OSError):
        file.close()


def test_a_failed_flush_to_the_disk_is_said_with_the_file(tmp_path, monkeypatch):
    def fsync(descriptor):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    (tmp_path / "data").write_text("text")
    with pytest.raises(OSError) as error:
        checksums.write_checksums(tmp_path)
    name_file(error.value)
    assert error.value.filename == str(tmp_path / "data")


def test_an_error_of_a_connection_names_no_file():
    with pytest.raises(OSError) as error, open(os.devnull, "w"):
        raise ConnectionResetError(104, "Connection reset by peer")
    name_file(error.value)
    assert error.value.filename is None
