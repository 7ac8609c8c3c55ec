"""COCO 2017 in miniature, from a server that does everything wrong that a server can."""

import hashlib
import io
import json
import shutil
import stat
import zipfile
from dataclasses import replace

import numpy as np
import pytest

from mask_rcnn_jax.formats import coco2017
from mask_rcnn_jax.formats.coco2017 import COCO2017, Archive, Release, Split, prepare_release
from mask_rcnn_jax.formats.unpack import unpack
from tests.commands.command import error_line, run_inside

BIG = 1_500_000  # bytes of an image, more than a download must bring to go on by itself
IMAGES = {"train": ["000.jpg", "001.jpg", "002.jpg"], "val": ["100.jpg", "101.jpg"]}
ANNOTATIONS = "annotations_trainval2017.zip"


def image_bytes(name):
    size = BIG if name == "001.jpg" else 1000
    return np.random.default_rng(int(name[:3])).integers(0, 256, size, dtype=np.uint8).tobytes()


def annotations_of(split):
    images = [{"id": k, "file_name": name} for k, name in enumerate(IMAGES[split])]
    return json.dumps({"images": images, "annotations": [{}] * 5})


def zipped(files):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def contents():
    """Name of each archive -> its bytes."""
    found = {
        f"{split}2017.zip": zipped(
            {f"{split}2017/": ""} | {f"{split}2017/{name}": image_bytes(name) for name in names}
        )
        for split, names in IMAGES.items()
    }
    found[ANNOTATIONS] = zipped(
        {f"annotations/{kind}_{split}2017.json": annotations_of(split)
         for kind in ("instances", "captions", "person_keypoints") for split in IMAGES}
    )  # fmt: skip
    return found


def release_of(server, archives):
    """The table for these archives, which the server gets."""
    server.files = {f"/{name}": content for name, content in archives.items()}
    table = {
        name: Archive(server.url(f"/{name}"), len(content), hashlib.md5(content).hexdigest())
        for name, content in archives.items()
    }
    splits = {
        split: Split(
            archive=table[f"{split}2017.zip"],
            json=f"annotations/instances_{split}2017.json",
            images=f"{split}2017",
            num_images=len(IMAGES[split]),
            num_annotations=5,
        )
        for split in ("val", "train")
    }
    return Release(annotations=table[ANNOTATIONS], splits=splits)


@pytest.fixture
def release(file_server):
    return release_of(file_server, contents())


def prepare(release, folder, splits=("train", "val"), delete_zips=False):
    return prepare_release(
        release, folder, splits, delete_zips=delete_zips, make_progress=lambda total: lambda n: None
    )


def assert_whole(folder, splits=("train", "val")):
    """Every file of those splits with the right content, and no other but the zips."""
    expected = {}
    for split in splits:
        expected[f"annotations/instances_{split}2017.json"] = annotations_of(split).encode()
        expected |= {f"{split}2017/{name}": image_bytes(name) for name in IMAGES[split]}
    files = {path for path in folder.rglob("*") if path.is_file() and path.suffix != ".zip"}
    assert {str(path.relative_to(folder)): path.read_bytes() for path in files} == expected


def test_brings_everything_and_then_does_nothing(release, file_server, tmp_path):
    folder = tmp_path / "new" / "coco"
    zips = prepare(release, folder)
    assert_whole(folder)
    assert sorted(path.name for path in zips) == sorted(contents())
    times = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    file_server.requests.clear()
    assert prepare(release, folder) == zips
    assert file_server.requests == []
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == times


def test_one_split_without_its_zips(release, file_server, tmp_path):
    assert prepare(release, tmp_path, ["val"], delete_zips=True) == []
    assert_whole(tmp_path, ["val"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["annotations", "val2017"]
    file_server.requests.clear()
    prepare(release, tmp_path, ["val"], delete_zips=True)
    assert file_server.requests == []


def test_goes_on_after_breaks(release, file_server, tmp_path):
    file_server.cut = 1_200_000
    prepare(release, tmp_path)
    assert_whole(tmp_path)
    assert "bytes=1200000-" in file_server.requests


@pytest.mark.parametrize("ranges", [True, False])
def test_breaks_at_once_and_the_next_call_goes_on(release, file_server, tmp_path, ranges):
    prepare(release, tmp_path, ["val"])
    file_server.cut, file_server.ranges = 500, ranges
    with pytest.raises(OSError, match=r"train2017.zip: the connection ended after 500 of \d+") as c:
        prepare(release, tmp_path)
    assert "\n" not in str(c.value)
    file_server.cut = None
    file_server.requests.clear()
    prepare(release, tmp_path)
    assert_whole(tmp_path)
    assert file_server.requests == ["bytes=500-"]


@pytest.mark.parametrize("lie", [-7, 7])
def test_lie_about_the_length_is_found_out_at_once(release, file_server, tmp_path, lie):
    prepare(release, tmp_path, ["val"])
    real = release.splits["train"].archive.size
    file_server.length = real + lie
    with pytest.raises(OSError, match=f"train2017.zip: the server offers {real + lie} bytes"):
        prepare(release, tmp_path)
    assert not list(tmp_path.glob("train2017*"))
    file_server.length = None
    prepare(release, tmp_path)
    assert_whole(tmp_path)


def test_corrupt_bytes_are_thrown_away(release, file_server, tmp_path):
    right = file_server.files["/val2017.zip"]
    file_server.files["/val2017.zip"] = right[:-900] + bytes(9) + right[-891:]
    with pytest.raises(ValueError, match=r"val2017.zip has md5 \w+, expected \w+; deleted"):
        prepare(release, tmp_path, ["val"])
    assert not list(tmp_path.glob("val2017*"))
    file_server.files["/val2017.zip"] = right
    prepare(release, tmp_path, ["val"])
    assert_whole(tmp_path, ["val"])


def test_missing_server_or_file_is_named(release, file_server, tmp_path):
    del file_server.files["/val2017.zip"]
    with pytest.raises(OSError, match="val2017.zip: HTTP Error 404"):
        prepare(release, tmp_path, ["val"])


def test_what_was_unpacked_in_part_or_badly_is_done_again(release, file_server, tmp_path):
    prepare(release, tmp_path)
    images = tmp_path / "train2017"
    (images / "000.jpg").unlink()
    (images / "000.jpg.part").write_bytes(b"killed while it was written")
    (images / "001.jpg").write_bytes(image_bytes("001.jpg")[:-1])
    (images / "002.jpg").write_bytes(bytes(1000))
    kept = (tmp_path / "val2017" / "100.jpg").stat().st_mtime_ns
    file_server.requests.clear()
    prepare(release, tmp_path)
    assert_whole(tmp_path)
    assert file_server.requests == []  # from the zip that is there
    assert (tmp_path / "val2017" / "100.jpg").stat().st_mtime_ns == kept


def test_empty_file_counts_as_missing(release, tmp_path):
    prepare(release, tmp_path, delete_zips=True)
    (tmp_path / "val2017" / "101.jpg").write_bytes(b"")
    prepare(release, tmp_path)
    assert_whole(tmp_path)


def test_counts_are_compared(release, file_server, tmp_path):
    val = release.splits["val"]
    for wrong, words in (
        (replace(val, num_annotations=6), "has 5 annotations, expected 6; delete it"),
        (replace(val, num_images=3), "has 2 images, expected 3; delete it"),
    ):
        with pytest.raises(ValueError, match=f"instances_val2017.json {words}"):
            prepare(replace(release, splits={"val": wrong}), tmp_path, ["val"])
    archives = contents()
    archives["val2017.zip"] = zipped({"val2017/100.jpg": image_bytes("100.jpg")})
    with pytest.raises(ValueError, match=r"val2017.zip lacks 1 of the 2 images .* '101.jpg'"):
        prepare(release_of(file_server, archives), tmp_path, ["val"])


@pytest.mark.parametrize("content", ['{"images": [], "annotations": []}', '{"images": ', "[]"])
def test_annotations_of_something_else_stay(release, file_server, tmp_path, content):
    path = tmp_path / "annotations" / "instances_train2017.json"
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(ValueError, match=r"instances_train2017.json .*; delete it to unpack"):
        prepare(release, tmp_path, ["train"])
    assert file_server.requests == []
    prepare(release, tmp_path, ["val"])
    assert path.read_text() == content


NAMES = ["../out", "/out", "val2017/../../out", "a\\..\\out", "C:/out", "//server/share/out"]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_lead_out_are_refused(tmp_path, name):
    archive, folder = tmp_path / "a.zip", tmp_path / "in" / "side"
    archive.write_bytes(zipped({"val2017/100.jpg": b"x", name: b"x"}))
    with pytest.raises(ValueError, match="a.zip: unsafe name .* nothing is unpacked"):
        unpack(archive, folder, prefix="", make_progress=lambda total: lambda n: None)
    assert list(tmp_path.iterdir()) == [archive]


@pytest.mark.parametrize("name", ["a/" * 2000 + "b.jpg", "a" * 5000])
def test_long_names_are_refused_in_a_short_line(tmp_path, name):
    archive, folder = tmp_path / "a.zip", tmp_path / "in"
    archive.write_bytes(zipped({"val2017/100.jpg": b"x", name: b"x"}))
    with pytest.raises(ValueError, match="a.zip: .* more than 100 folders or 1,000 c") as error:
        unpack(archive, folder, prefix="", make_progress=lambda total: lambda n: None)
    assert len(str(error.value)) < 400 and list(tmp_path.iterdir()) == [archive]


def test_links_are_refused(tmp_path):
    link = zipfile.ZipInfo("val2017/link")
    link.external_attr = (stat.S_IFLNK | 0o777) << 16
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr(link, "/etc")
    with pytest.raises(ValueError, match="unsafe name 'val2017/link'"):
        unpack(archive, tmp_path, prefix="val2017/", make_progress=lambda total: lambda n: None)


def test_a_compression_that_is_not_known_is_said(tmp_path):
    archive = tmp_path / "a.zip"
    with zipfile.ZipFile(archive, "w") as content:
        content.writestr("val2017/1.jpg", "picture")
    written, entry = bytearray(archive.read_bytes()), archive.read_bytes().index(b"PK\x01\x02")
    written[8:10] = written[entry + 10 : entry + 12] = bytes([97, 0])  # WavPack
    archive.write_bytes(written)
    with pytest.raises(ValueError, match="a.zip cannot be unpacked: .* method is not supported"):
        unpack(archive, tmp_path, prefix="val2017/", make_progress=lambda total: lambda n: None)


def broken(content):
    """The same archive with other bytes in its last image, whose CRC is then wrong."""
    position = content.index(image_bytes("101.jpg"))
    return content[:position] + bytes(10) + content[position + 10 :]


@pytest.mark.parametrize(
    "damage, words",
    [(broken, "is damaged: Bad CRC-32"), (lambda c: c[: len(c) // 2], "is damaged: File is not")],
)
def test_damage_inside_a_zip_is_one_line(file_server, tmp_path, damage, words):
    """With a checksum that is right, as where it was taken of the damaged file."""
    archives = contents()
    archives["val2017.zip"] = damage(archives["val2017.zip"])
    with pytest.raises(ValueError, match=f"val2017.zip {words}") as caught:
        prepare(release_of(file_server, archives), tmp_path, ["val"])
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "val2017" / "101.jpg").exists()
    assert not list(tmp_path.rglob("*.part"))


def test_full_disk_is_one_line_and_no_half_file_stays(release, tmp_path, monkeypatch):
    images = tmp_path / "val2017"
    images.mkdir()
    (images / "101.jpg.part").symlink_to("/dev/full")  # a device on which every write fails
    with pytest.raises(OSError, match="val2017/101.jpg: No space left on device"):
        prepare(release, tmp_path, ["val"])
    assert [path.name for path in images.iterdir()] == ["100.jpg"]
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: usage)
        with pytest.raises(OSError, match="1,000 bytes are needed, 10 are free"):
            prepare(release, tmp_path, ["val"])
    prepare(release, tmp_path, ["val"])
    assert_whole(tmp_path, ["val"])


def test_command(release, file_server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coco2017, "COCO2017", release)
    flags = ["coco2017", "--data_dir", tmp_path, "--split=val"]
    file_server.cut = 500
    code = run_inside("prepare", *flags)
    line = error_line(code, capsys.readouterr().err)
    assert line.startswith(file_server.url(f"/{ANNOTATIONS}: the connection ended after 500 of"))
    file_server.cut = None
    assert run_inside("prepare", *flags) == 0
    assert_whole(tmp_path, ["val"])
    out = capsys.readouterr().out
    assert f"instances_val2017.json: 2 images in {tmp_path}/val2017" in out
    assert f"no longer needed: {tmp_path}/{ANNOTATIONS}, {tmp_path}/val2017.zip" in out
    assert run_inside("prepare", *flags, "--delete_zips") == 0
    assert "no longer" not in capsys.readouterr().out
    assert not list(tmp_path.glob("*.zip"))


def test_command_unpacks_keypoints_beside_what_is_there(release, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(coco2017, "COCO2017", replace(release))
    flags = ["coco2017", "--data_dir", tmp_path, "--split=val"]
    assert run_inside("prepare", *flags) == 0
    monkeypatch.setattr(coco2017, "_PEOPLE", {"val": 5, "train": 5})
    assert run_inside("prepare", *flags, "--keypoints") == 0
    assert "person_keypoints_val2017.json: 2 images in" in capsys.readouterr().out
    found = sorted(path.name for path in (tmp_path / "annotations").iterdir())
    assert found == ["instances_val2017.json", "person_keypoints_val2017.json"]
    monkeypatch.setattr(coco2017, "_PEOPLE", {"val": 6, "train": 5})
    assert run_inside("prepare", *flags, "--keypoints") == 2
    assert "has 5 annotations, expected 6" in capsys.readouterr().err


def test_the_table_is_complete():
    archives = [COCO2017.annotations, *(split.archive for split in COCO2017.splits.values())]
    for archive in archives:
        assert archive.url.startswith("http://images.cocodataset.org/")
        assert len(archive.md5) == 32 and archive.size > 2e8
    assert {name: s.num_images for name, s in COCO2017.splits.items()} == {
        "val": 5_000, "train": 118_287,
    }  # fmt: skip
