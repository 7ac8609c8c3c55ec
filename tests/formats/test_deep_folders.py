"""Folders in one another by the thousands end in one line, or are read as any other."""

import errno
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


KINDS = ["labelme", "masks", "yolo", "cityscapes", "supervisely"]


@pytest.fixture
def closed(tmp_path, monkeypatch):
    """A folder in one of which none may look, whoever runs the tests."""
    (tmp_path / "set" / "closed").mkdir(parents=True)
    listing = os.scandir

    def scandir(place):
        if os.path.basename(os.fspath(place)) in ("closed", "lost+found"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fspath(place))
        return listing(place)

    monkeypatch.setattr(os, "scandir", scandir)
    return tmp_path / "set"


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_may_not_be_listed_is_not_passed_over(kind, closed):
    with pytest.raises(PermissionError, match="set/closed"):
        convert_set(kind, closed, class_name="x", classes=("x",))


def test_inputs_in_a_folder_that_may_not_be_listed_are_not_passed_over(closed, tmp_path):
    (closed / "a.png").write_bytes(b"")
    (closed / "lost+found").mkdir()
    for pattern in ("", "/**", "/**/*.png", "/*/*.png"):
        with pytest.raises(PermissionError, match="set/closed"):
            find_inputs([f"{closed}{pattern}"], tmp_path / "out")
    with pytest.raises(PermissionError, match="set/closed"):
        find_by_name(["b.png"], str(closed))
    with pytest.raises(PermissionError, match="set/closed"):
        ImageFiles(closed)
    (closed / "closed").rmdir()
    for pattern in ("", "/**", "/*.png"):
        assert len(find_inputs([f"{closed}{pattern}"], tmp_path / "out")[0]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_sets(kind, deep):
    refused(lambda: convert_set(kind, deep, class_name="x", classes=("x",)), deep)


@pytest.mark.parametrize("pattern", ["", "/**"])
def test_inputs(pattern, deep, tmp_path):
    refused(lambda: find_inputs([f"{deep}{pattern}"], tmp_path / "out"), deep)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="it is read")
@pytest.mark.parametrize("read", [ImageFiles, lambda folder: find_by_name(["a.png"], folder)])
def test_images(read, deep):
    refused(lambda: read(deep), deep)
