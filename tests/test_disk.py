"""Files that are written whole or not at all."""

import json
import os
import resource
import signal
import stat
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.disk import whole_file, write_whole
from tests.commands.command import check_done, error_line, run_captured
from tests.data.small_set import rectangle


def test_a_file_is_there_once_it_is_whole(tmp_path):
    path = tmp_path / "new" / "a.txt"
    with whole_file(path) as draft:
        draft.write_text("a")
        assert os.listdir(path.parent) == [draft.name] and draft.name.startswith(".a.txt-")
    assert os.listdir(path.parent) == ["a.txt"]
    (tmp_path / "plain").touch()
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, tmp_path / "plain")]
    assert modes[0] == modes[1]
    with pytest.raises(KeyboardInterrupt), whole_file(path) as draft:
        draft.write_text("b")
        raise KeyboardInterrupt
    assert os.listdir(path.parent) == ["a.txt"] and path.read_text() == "a"


def test_what_was_there_keeps_its_mode_and_its_links(tmp_path):
    path, link = tmp_path / "a.txt", tmp_path / "link"
    path.write_text("a")
    path.chmod(0o600)
    link.symlink_to(path)
    with whole_file(link) as draft:
        draft.write_text("b")
    assert link.is_symlink() and path.read_text() == "b"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_device_is_written_to_as_it_is():
    with whole_file("/dev/null") as draft:
        draft.write_text("a")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_drafts_of_killed_processes_are_deleted(tmp_path):
    names = [f".{name}-{age}.tmp" for name in ("a.txt", "b.txt") for age in ("old", "new")]
    for name in names:
        (tmp_path / name).touch()
        if "old" in name:
            os.utime(tmp_path / name, (time.time() - 100_000,) * 2)
    with whole_file(tmp_path / "a.txt"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "a.txt"}


def test_a_file_at_an_address_is_put_whole(tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    address = f"file://{tmp_path}/store/a.txt"
    with whole_file(address) as draft:
        draft.write_text("a")
    with pytest.raises(ValueError), whole_file(address) as draft:
        draft.write_text("b")
        raise ValueError
    assert os.listdir(tmp_path / "store") == ["a.txt"]
    assert (tmp_path / "store" / "a.txt").read_text() == "a"
    assert not os.listdir(tmp_path / "home" / "outputs")


@pytest.fixture
def full(tmp_path):
    """No file may have more than a few bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_keeps_what_was_there(tmp_path, full):
    path = tmp_path / "a.json"
    write_whole(path, "old")
    with pytest.raises(OSError, match="File too large") as raised:
        write_whole(path, "new" * 50)
    assert raised.value.filename == str(path)
    assert os.listdir(tmp_path) == ["a.json"] and path.read_text() == "old"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_may_not_be_written_to_is_named_by_the_file(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(PermissionError) as raised:
        write_whole(tmp_path / "a.json", "")
    assert raised.value.filename == str(tmp_path / "a.json")


COMMANDS = {  # fmt: skip
    "convert": ("--from=labelme", "--input=labelme", "--output=out.json"),
    "repair": ("--json=big.json", "--output=out.json"),
    "merge": (
        "--json=big.json",
        "--json=other.json",
        "--images=labelme",
        "--images=labelme",
        "--output=out.json",
    ),
    "split": ("--json=big.json", "--val=0.5", "--output=."),
    "split --folds": ("--json=big.json", "--folds=2", "--output=."),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_keep_what_was_there(name, tmp_path, monkeypatch, request):
    monkeypatch.chdir(tmp_path)
    Path("labelme").mkdir()
    given = {"big": range(1, 9), "other": range(9, 17)}
    points = {"label": "one", "points": [[1, 1], [9, 1], [9, 9]], "shape_type": "polygon"}
    for file, ids in given.items():
        images = [{"id": k, "file_name": f"{k}.png", "height": 50, "width": 70} for k in ids]
        objects = [rectangle(1, 1, 9, 9, image_id=k) | {"id": k} for k in ids]
        content = {"images": images, "annotations": objects}
        content |= {"categories": [{"id": 3, "name": "one"}]}
        Path(f"{file}.json").write_text(json.dumps(content))
        for k in ids:
            cv2.imwrite(f"labelme/{k}.png", np.zeros((50, 70, 3), np.uint8))
            shapes = {"imagePath": f"{k}.png", "shapes": [points]}
            shapes |= {"imageHeight": 50, "imageWidth": 70}
            Path(f"labelme/{k}.json").write_text(json.dumps(shapes))
    command = ["prepare", name.partition(" ")[0], *COMMANDS[name]]
    check_done(run_captured(*command))
    made = [path for path in Path().rglob("*.json") if path.parent.name != "labelme"]
    made = [path for path in made if path.stem not in given]
    assert made
    for path in made:
        path.write_text("old")
    before = sorted(Path().rglob("*"))
    request.getfixturevalue("full")
    done = run_captured(*command)
    line = error_line(done.returncode, done.stderr)
    assert "File too large" in line and any(f"{path}'" in line for path in made)
    assert all(path.read_text() == "old" for path in made) and sorted(Path().rglob("*")) == before
