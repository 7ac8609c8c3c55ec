"""Members of tars are read like files, whatever wrote the tars."""

import io
import os
import resource
import sqlite3
import subprocess
import tarfile
import threading
from multiprocessing import get_context

import pytest

from mask_rcnn_jax.annotations.reader import open_regular, read_regular
from mask_rcnn_jax.tars import index
from mask_rcnn_jax.tars.members import find_members, list_folder, open_member
from tests.tars.making import member, write_tar

LONG = "folder/" + "n" * 150 + "/" + "m" * 200 + ".jpg"
NAMES = ["a.jpg", "sub/b.jpg", "sub/c.json", "sub/deep/d e.png", "grün.jpg", LONG]


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_names_and_contents_are_those_that_were_written(tmp_path, format):
    members = [member(name, name.encode() * 999) for name in NAMES]
    folder = member("sub", type=tarfile.DIRTYPE)
    tar = write_tar(tmp_path / "a.tar", folder, *members, format=format)
    for name in NAMES:
        assert read_regular(tar / name) == name.encode() * 999
    assert find_members(str(tar)) == [(str(tar), name) for name in sorted(NAMES)]
    assert list_folder(str(tar), "") == {"a.jpg": True, "grün.jpg": True}
    assert list_folder(str(tar), "sub") == {"b.jpg": True, "c.json": True}
    assert list_folder(str(tar), "su") == {}


def test_tar_writes_what_is_read(tmp_path):
    (tmp_path / "set").mkdir()
    for name in ("b.jpg", "a.jpg", "grün.jpg"):
        (tmp_path / "set" / name).write_bytes(name.encode())
    for form in ("gnu", "pax", "ustar"):
        tar = tmp_path / f"{form}.tar"
        command = ["tar", "--sort=name", f"--format={form}", "-C", tmp_path / "set", "-cf", tar]
        subprocess.run([*command, "."], check=True)  # the names begin with ./
        for name in ("a.jpg", "./b.jpg", "grün.jpg"):
            assert read_regular(f"{tar}/{name}") == name.removeprefix("./").encode()


def test_a_member_is_a_file_with_an_end(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a", b"0123456789"), member("b", b"next"))
    with open_regular(tar / "a") as file:
        assert file.read(4) == b"0123" and file.tell() == 4
        assert file.seek(-3, os.SEEK_END) == 7 and file.read() == b"789" and file.read() == b""
        assert file.seek(20) == 20 and file.read(1) == b""
        file.seek(2)
        assert file.read(100) == b"23456789"
    with pytest.raises(OSError, match=r"a.tar/a has 10 bytes, at most 9 are read"):
        read_regular(tar / "a", 9)


def test_what_is_not_there_is_named(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    for name in ("b.jpg", "../a.jpg", "a.jpg/b"):
        with pytest.raises(FileNotFoundError, match="no '.*' in .*a.tar"):
            read_regular(f"{tar}/{name}")
    with pytest.raises(FileNotFoundError, match="no tar '.*/b.tar'"):
        read_regular(tmp_path / "b.tar" / "a.jpg")
    os.mkfifo(tmp_path / "c.tar")
    with pytest.raises(OSError, match="c.tar is not a regular file"):
        read_regular(tmp_path / "c.tar" / "a.jpg")


def test_several_tars_are_one_folder(tmp_path):
    write_tar(tmp_path / "a-0.tar", member("x.jpg", b"x"), member("sub/z.jpg", b"z"))
    write_tar(tmp_path / "a-1.tar", member("y.jpg", b"y"))
    for pattern in ("a-{0..1}.tar", "a-*.tar", "{a-0,a-1}.tar"):
        tars = f"{tmp_path}/{pattern}"
        assert [read_regular(f"{tars}/{n}") for n in ("x.jpg", "y.jpg", "sub/z.jpg")] == [
            *(b"x", b"y", b"z")
        ]
        assert list_folder(tars, "") == {"x.jpg": True, "y.jpg": True}
    one, other = (f"{tmp_path}/a-{n}.tar" for n in (0, 1))
    found = find_members(f"{tmp_path}/*.tar")
    assert found == [(one, "sub/z.jpg"), (one, "x.jpg"), (other, "y.jpg")]


def test_a_name_in_two_tars_needs_its_tar(tmp_path):
    for n in (0, 1):
        write_tar(tmp_path / f"{n}.tar", member("a.jpg", b"%d" % n))
    with pytest.raises(ValueError, match=r"'a.jpg' is in .*0.tar and in .*1.tar, expected once;"):
        read_regular(f"{tmp_path}/*.tar/a.jpg")
    assert len(find_members(f"{tmp_path}/*.tar")) == 2
    assert read_regular(tmp_path / "1.tar" / "a.jpg") == b"1"


def test_headers_are_read_once(tmp_path, monkeypatch, home):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    read_regular(tar / "a.jpg")
    monkeypatch.setattr(index, "read_headers", lambda *_: pytest.fail("read again"))
    index.forget()
    assert read_regular(tar / "a.jpg") == b"a"
    assert len(list(home.rglob("*.sqlite"))) == 1 and not list(home.rglob(".part*"))


def test_a_tar_that_changes_is_indexed_anew(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"old"))
    assert read_regular(tar / "a.jpg") == b"old"
    write_tar(tar, member("b.jpg", b"b" * 999), member("a.jpg", b"new"))
    assert read_regular(tar / "a.jpg") == b"new"
    write_tar(tar, member("c.jpg", b"c"))
    with pytest.raises(FileNotFoundError):
        read_regular(tar / "a.jpg")


@pytest.mark.parametrize("spoil", ["delete", "damage"])
def test_a_lost_index_is_made_again(tmp_path, home, spoil):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    read_regular(tar / "a.jpg")
    for path in home.rglob("*.sqlite"):
        path.unlink() if spoil == "delete" else path.write_bytes(b"no database" * 99)
    assert read_regular(tar / "a.jpg") == b"a"
    with sqlite3.connect(next(home.rglob("*.sqlite"))) as database:
        assert database.execute("SELECT count(*) FROM members").fetchone() == (1,)


def test_a_folder_in_which_no_index_can_be_written_is_named(tmp_path, monkeypatch):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    (tmp_path / "file").touch()
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "file"))
    with pytest.raises(OSError, match="no index of .*a.tar can be written .* MASK_RCNN_HOME names"):
        read_regular(tar / "a.jpg")


def _read(tars, names, results):
    results.put([read_regular(f"{tars}/{name}") for name in names])


def test_parts_of_indexes_that_killed_processes_left_are_deleted(tmp_path, home):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    read_regular(tar / "a.jpg")
    (kept,) = home.rglob("*.sqlite")
    (kept.parent / ".partold").touch()
    os.utime(kept.parent / ".partold", (0, 0))
    kept.unlink()
    read_regular(tar / "a.jpg")
    assert list(kept.parent.iterdir()) == [kept]


def test_a_disk_that_is_full_is_named(tmp_path):
    write_tar(tmp_path / "a.tar", *(member(f"{n:0>90}", b"a") for n in range(500)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match=f"no index of {tmp_path}/a.tar can be written .*HOME"):
            find_members(f"{tmp_path}/a.tar")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_threads_and_processes_read_the_same_tars(tmp_path, method, home):
    names = [f"{n:03}.jpg" for n in range(100)]
    for n in range(2):
        write_tar(tmp_path / f"{n}.tar", *(member(x, x.encode() * 500) for x in names[n::2]))
    tars, expected = f"{tmp_path}/{{0..1}}.tar", [name.encode() * 500 for name in names]
    context, found = get_context(method), []
    results = context.Queue()
    processes = [context.Process(target=_read, args=(tars, names, results)) for _ in range(2)]
    threads = [
        threading.Thread(target=lambda: found.append([read_regular(f"{tars}/{n}") for n in names]))
        for _ in range(4)
    ]
    for worker in (*processes, *threads):
        worker.start()
    assert [results.get(timeout=60) for _ in processes] == [expected] * 2
    for worker in (*processes, *threads):
        worker.join(60)
    assert found == [expected] * 4 and not list(home.rglob(".part*"))


def test_no_file_is_left_open(tmp_path):
    tar = write_tar(tmp_path / "a.tar", member("a.jpg", b"a"))
    open_member(str(tar), "a.jpg").close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with open_member(str(tar), "a.jpg") as file:
            assert isinstance(file, io.BufferedReader)
    assert len(os.listdir("/proc/self/fd")) == before
