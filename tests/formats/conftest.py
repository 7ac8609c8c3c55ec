import pytest

from tests.data.conftest import coco_files  # noqa: F401  (a fixture)
from tests.formats.file_server import running


@pytest.fixture
def file_server():
    """A `file_server.FileServer` that this test alone talks to."""
    with running() as server:
        yield server
