from functools import partial

import pytest

from tests.data.small_set import write_coco


@pytest.fixture
def coco_files(tmp_path):
    """`small_set.write_coco` into this test's own folder."""
    return partial(write_coco, tmp_path)
