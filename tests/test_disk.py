"""Files that are written whole or not at all."""

import os
import stat
import time

import pytest

from mask_rcnn_jax.disk import whole_file


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
    names = (".a.txt-old.draft", ".a.txt-new.draft", ".other-old")
    for name in names:
        (tmp_path / name).touch()
        if "old" in name:
            os.utime(tmp_path / name, (time.time() - 100_000,) * 2)
    with whole_file(tmp_path / "b.txt"):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {*names[1:], "b.txt"}


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
