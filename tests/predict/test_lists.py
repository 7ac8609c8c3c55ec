"""Images named in lists: what is read of each kind, and which share of them a shard has."""

import hashlib
import io
import json
import os
import sys
import tracemalloc
from pathlib import Path, PurePosixPath
from types import SimpleNamespace

import pytest

from mask_rcnn_jax.images.decode import UndecodableImage
from mask_rcnn_jax.predict.inputs import Input, read_image
from mask_rcnn_jax.predict.lists import Images, Shard, find_images, is_list, read_shard
from mask_rcnn_jax.predict.saving import check_replaced

NAMES = ["a.jpg", "deep/b c.png", "/data/ü.jpg", "s3://bucket/x/a.jpg", "https://e.org/a.jpg?x=1"]


def write_list(path: Path, names: list[str], key: str = "file_name") -> str:
    """A list of one of the kinds, by its ending, as `--input` takes it."""
    if path.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        parquet.write_table(pyarrow.table({"id": list(range(len(names))), key: names}), path)
        return str(path)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": 1, key: name}) + "\n" for name in names))
        return str(path)
    path.write_bytes("\n".join(names).encode())
    return f"@{path}"


@pytest.mark.parametrize("name", ["list.txt", "metadata.jsonl", "list.parquet"])
def test_a_list_names_paths_and_addresses(name, tmp_path):
    item = write_list(tmp_path / name, NAMES)
    assert is_list(item)
    images, videos = find_images([item], tmp_path / "out")
    assert len(images) == 5 and not videos
    for _ in range(2):  # each loop reads the list
        assert [one.name for one in images] == NAMES
    folder = "" if name == "list.txt" else f"{tmp_path}/"
    sources = [f"{folder}a.jpg", f"{folder}deep/b c.png", *NAMES[2:]]
    assert [one.source for one in images] == sources
    targets = ["a.jpg", "deep/b c.png", "data/ü.jpg", "bucket/x/a.jpg", "e.org/a.jpg"]
    assert [str(one.target) for one in images] == targets


def test_lines_may_have_blanks_any_bytes_and_the_ends_of_windows(tmp_path, monkeypatch):
    content = b"\xef\xbb\xbfa.jpg\r\n\r\n b.jpg \n\xff.jpg\n#c.jpg"
    (tmp_path / "list").write_bytes(content)
    expected = ["a.jpg", " b.jpg ", os.fsdecode(b"\xff.jpg"), "#c.jpg"]
    images, _ = find_images([f"@{tmp_path}/list"], tmp_path / "out")
    assert [one.name for one in images] == expected
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    images, _ = find_images(["-"], tmp_path / "out")
    for _ in range(2):
        assert [one.name for one in images] == expected


def test_files_come_before_lists_and_no_drawing_replaces_another(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.jpg").touch()
    item = write_list(Path("list.txt"), ["x/a.jpg", "a.jpg", "../a.jpg", "./a.png"])
    images, _ = find_images([item, "a.jpg"], tmp_path / "out")
    assert [str(one.name) for one in images] == [
        "a.jpg", "x/a.jpg", "a.jpg", "../a.jpg", "./a.png",
    ]  # fmt: skip
    assert [str(one.target) for one in images] == [
        "a.jpg", "x/a.jpg", "a_2.jpg", "a_3.jpg", "a_4.png",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="would overwrite 2 files of --input"):
        find_images([item], tmp_path)
    find_images([item], tmp_path, has_targets=False)


@pytest.mark.parametrize(
    "name, content, words",
    [
        (
            "x.jsonl",
            '{"file_name": "a.jpg"}\n{"path": "b.jpg"}\n',
            ["line 2", "'file_name'", "path"],
        ),
        ("x.jsonl", '{"file_name": 3}\n', ["line 1 has no text in 'file_name'", "--input_key"]),
        ("x.jsonl", "[1]\n", ["line 1 has no text"]),
        ("x.jsonl", "a.jpg\n", ["line 1 is no JSON"]),
        ("x.jsonl", "\n", ["names no images"]),
        ("x.txt", "", ["names no images"]),
        ("x.txt", "a" * 70_000, ["line 1 has more than 65,536 bytes"]),
        ("x.parquet", "PAR1", ["x.parquet is no Parquet file"]),
    ],
)
def test_a_list_that_is_none_is_named(name, content, words, tmp_path):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name) as raised:
        find_images([f"@{tmp_path / name}"], tmp_path / "out")
    for word in words:
        assert word in str(raised.value)


def test_the_key_of_the_names_is_given_or_named(tmp_path):
    for name in ("x.jsonl", "x.parquet"):
        item = write_list(tmp_path / name, ["a.jpg"], key="path")
        images, _ = find_images([item], tmp_path / "out", "path")
        assert [one.name for one in images] == ["a.jpg"]
        with pytest.raises(ValueError, match=f"{name}.*file_name.*--input_key"):
            find_images([item], tmp_path / "out")


def test_names_that_no_file_has_are_left_to_the_reader(tmp_path, monkeypatch):
    """One line of a million, or an address longer than a name may be, ends nothing."""
    monkeypatch.chdir(tmp_path)
    os.symlink("loop.png", "loop.png")
    long = f"https://e.org/{'ü' * 300}.png"
    names = ["a\0b.png", "\ud800.png", "loop.png", "x" * 300, long]
    images, _ = find_images([write_list(tmp_path / "x.jsonl", names)], tmp_path / "out")
    assert [one.name for one in images] == names
    for one in images:
        drawing = tmp_path / "out" / one.target
        drawing.parent.mkdir(parents=True, exist_ok=True)
        drawing.touch()
    check_replaced([one.source for one in images], images, tmp_path / "out", ["yolo"])


def test_what_is_not_drawn_may_be_where_the_output_is(tmp_path):
    (tmp_path / "a.jpg").touch()
    with pytest.raises(ValueError, match="would overwrite 1 files"):
        find_images([str(tmp_path)], tmp_path)
    images, _ = find_images([str(tmp_path)], tmp_path, has_targets=False)
    assert [str(one.name) for one in images] == ["a.jpg"]
    (tmp_path / "b.mp4").touch()  # whose copy is always written
    with pytest.raises(ValueError, match="would overwrite 1 files"):
        find_images([str(tmp_path)], tmp_path, has_targets=False)


def test_standard_input_is_read_once(tmp_path):
    with pytest.raises(ValueError, match="--input - is given twice"):
        find_images(["-", "-"], tmp_path / "out")


def test_absent_and_private_lists(tmp_path):
    for item in ("@none.txt", "none.jsonl", f"@{tmp_path}"):
        with pytest.raises(ValueError, match=f"--input {item}: no such list"):
            find_images([item], tmp_path / "out")
    (tmp_path / "x.txt").write_text("memory://set/a.jpg\n")
    with pytest.raises(ValueError, match="--public_addresses_only"):
        find_images([f"@file://{tmp_path}/x.txt"], tmp_path / "out", public_only=True)
    images, _ = find_images([f"@{tmp_path}/x.txt"], tmp_path / "out", public_only=True)
    (one,) = images
    with pytest.raises(UndecodableImage, match="not checked to be public"):
        read_image(one.source, one.public_only)


def test_a_list_at_an_address_has_its_relative_paths_there(tmp_path):
    write_list(tmp_path / "metadata.jsonl", NAMES)
    images, _ = find_images([f"file://{tmp_path}/metadata.jsonl"], tmp_path / "out")
    assert [one.source for one in images][:2] == [
        f"file://{tmp_path}/a.jpg", f"file://{tmp_path}/deep/b c.png",
    ]  # fmt: skip


def test_shards_are_a_function_of_the_name(tmp_path):
    names = [f"photos/{n}.jpg" for n in range(200)]
    item = write_list(tmp_path / "list.txt", names)
    found = [Input("first.jpg", PurePosixPath("first.jpg"), PurePosixPath("first.jpg"))]
    images = Images(found, [item])
    shares = [list(images.share(Shard(i, 3))) for i in range(3)]
    numbered = sorted((number, str(one.name)) for share in shares for number, one in share)
    assert numbered == list(enumerate(["first.jpg", *names], start=1))
    for i, share in enumerate(shares):
        assert 40 < len(share) == images.count(Shard(i, 3)) < 95
        assert [number for number, _ in share] == sorted(number for number, _ in share)
        for _, one in share:
            digest = hashlib.sha256(str(one.name).encode()).digest()
            assert int.from_bytes(digest[:8], "big") % 3 == i
    assert len(list(images.share(Shard()))) == images.count(Shard()) == len(images) == 201


def test_a_shard_is_read_from_its_flag():
    assert read_shard("0/1") == (0, 1) and read_shard(" 7/8") == (7, 8)
    for text in ("8/8", "1", "-1/8", "0/0", "a/b", "1/2/3", "", "0/100000"):
        with pytest.raises(ValueError, match=r"--shard is .*expected i/n"):
            read_shard(text)


def test_a_list_takes_no_memory(tmp_path):
    item = write_list(tmp_path / "list.txt", [f"photos/{n}.jpg" for n in range(20_000)])
    images, _ = find_images([item], tmp_path / "out", has_targets=False)
    tracemalloc.start()
    assert len(images) == sum(1 for _ in images) == 20_000
    assert sum(1 for _ in images.share(Shard(0, 2))) > 9000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 300_000
