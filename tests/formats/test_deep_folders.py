"""Folders in one another by the thousands end in one line, or are read as any other."""

import os
import shutil
import subprocess
import sys

import pytest

from mask_rcnn_jax.formats.image_files import ImageFiles
from mask_rcnn_jax.images.file_names import find_by_name
from mask_rcnn_jax.predict.inputs import find_inputs
from tests.formats.converting import convert_set

DEPTH = 1100  # more than Python's own limit, and with names of one letter below the system's


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    folder = tmp_path_factory.mktemp("deep")
    place = os.open(folder, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("a", dir_fd=place)
        inner = os.open("a", os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    yield folder
    subprocess.run([shutil.which("rm"), "-r", str(folder)], check=True)  # pytest calls itself


def refused(read, folder):
    """On Python 3.11, for its folders; by later ones as any folder in which nothing lies."""
    words = "too many folders in one another" if sys.version_info < (3, 12) else None
    with pytest.raises((ValueError, OSError), match=words) as error:
        read()
    assert str(folder) in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("kind", ["labelme", "masks", "yolo", "cityscapes", "supervisely"])
def test_sets(kind, deep):
    refused(lambda: convert_set(kind, deep, class_name="x", classes=("x",)), deep)


@pytest.mark.parametrize("pattern", ["", "/**"])
def test_inputs(pattern, deep, tmp_path):
    refused(lambda: find_inputs([f"{deep}{pattern}"], tmp_path / "out"), deep)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it is read")
@pytest.mark.parametrize("read", [ImageFiles, lambda folder: find_by_name(["a.png"], folder)])
def test_images(read, deep):
    refused(lambda: read(deep), deep)
