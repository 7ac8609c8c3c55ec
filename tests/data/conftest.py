from functools import partial

import pytest

from tests.data.small_set import write_coco
from tests.formats.file_server import running


@pytest.fixture
def coco_files(tmp_path):
    """`small_set.write_coco` into this test's own folder."""
    return partial(write_coco, tmp_path)


@pytest.fixture
def file_server():
    """A `file_server.FileServer` that this test alone talks to."""
    with running() as server:
        yield server
