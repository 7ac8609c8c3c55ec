"""Files at addresses: fetched once, or again when they have changed."""

import json
import os
import socket
import threading
import time
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax import store_folders, stores
from mask_rcnn_jax.annotations.reader import read_regular
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.coco import check_coco, load_coco
from mask_rcnn_jax.data.unused import unused_of_files
from mask_rcnn_jax.images.bands import Bands
from mask_rcnn_jax.images.decode import decode_image
from mask_rcnn_jax.images.parts import read_part
from mask_rcnn_jax.predict.inputs import find_inputs, read_image
from mask_rcnn_jax.weights import published
from mask_rcnn_jax.weights.restore import load_variables
from tests.commands.command import check_done, run_captured
from tests.commands.small_run import untrained_run
from tests.data.small_set import rectangle, write_coco
from tests.tars.making import tar_folder

ANNOTATIONS = [rectangle(3, 4, 20, 10)]


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def bucket():
    """Of a server that speaks S3: fsspec's options are in the environment, as for a user."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    names = {
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    host, port = server.get_host_and_port()
    names["AWS_ENDPOINT_URL"] = names["FSSPEC_S3_ENDPOINT_URL"] = f"http://{host}:{port}"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        import fsspec

        store = fsspec.filesystem("s3", endpoint_url=names["AWS_ENDPOINT_URL"])
        store.mkdir("sets")
        yield store
    server.stop()


@pytest.fixture(params=["file", "s3"])
def put(request, tmp_path):
    """A function that puts a folder into a store, and returns its address."""
    if request.param == "file":
        return lambda folder: f"file://{folder}"
    store = request.getfixturevalue("bucket")

    def upload(folder):
        target = f"sets/{tmp_path.name}/{folder.name}"
        for path in filter(Path.is_file, folder.rglob("*")):
            store.put_file(str(path), f"{target}/{path.relative_to(folder)}")
        return f"s3://{target}"

    return upload


def test_a_set_at_an_address_is_that_of_its_files(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    paths = write_coco(folder, ((40, 60), (50, 30)), ANNOTATIONS)
    address = put(folder)
    local = load_coco(*paths)
    found = load_coco(f"{address}/instances.json", f"{address}/images")
    assert found.json_path == f"{address}/instances.json"
    for index in range(2):
        assert found.images[index].file_name == local.images[index].file_name
        np.testing.assert_array_equal(found.decode(index), local.decode(index))
    assert found.image_path(1) == f"{address}/images/002.png"
    np.testing.assert_array_equal(decode_image(found.image_path(1)), local.decode(1))


def test_images_are_fetched_once_and_annotations_when_they_change(tmp_path, put, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    write_coco(folder, ((40, 60),), ANNOTATIONS)
    address = put(folder)
    fetched = []
    fetch = stores._fetched
    monkeypatch.setattr(
        stores,
        "_fetched",
        lambda store, inside, to: fetched.append(inside) or fetch(store, inside, to),
    )
    for _ in range(2):
        found = load_coco(f"{address}/instances.json", f"{address}/images")
        found.decode(0)
    assert [os.path.basename(path) for path in fetched] == ["instances.json", "001.png"]
    write_coco(folder, ((40, 60),), ANNOTATIONS * 2)
    put(folder)
    assert (
        len(load_coco(f"{address}/instances.json", f"{address}/images").images[0].annotations) == 2
    )
    assert len(fetched) == 3
    assert len(list((stores.home() / "objects").rglob("*.json"))) == 1


def test_tars_at_an_address_are_fetched_whole_and_once(tmp_path, put, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    path, images = write_coco(folder, ((40, 60), (50, 30), (20, 20)), ANNOTATIONS)
    (folder / "tars").mkdir()
    tar_folder(images, folder / "tars" / "a-0.tar", folder / "tars" / "a-1.tar")
    address = f"{put(folder / 'tars')}"
    fetched = []
    fetch = stores._fetched
    monkeypatch.setattr(
        stores, "_fetched", lambda store, *to: fetched.append(to[0]) or fetch(store, *to)
    )
    local = load_coco(path, images)
    for pattern in ("a-{0..1}.tar", "*.tar", "a-{0..1}.tar"):
        found = load_coco(path, f"{address}/{pattern}")
        for index in range(3):
            np.testing.assert_array_equal(found.decode(index), local.decode(index))
    assert sorted(map(os.path.basename, fetched)) == ["a-0.tar", "a-1.tar"]
    found, _ = find_inputs([f"{address}/*.tar"], tmp_path / "out")
    assert [(one.source, str(one.name)) for one in found] == [
        (f"{address}/a-0.tar/001.png", "a-0.tar/001.png"),
        (f"{address}/a-0.tar/003.png", "a-0.tar/003.png"),
        (f"{address}/a-1.tar/002.png", "a-1.tar/002.png"),
    ]
    assert read_image(found[1].source).shape == (20, 20, 3)
    with pytest.raises(FileNotFoundError, match=f"{address}/b-0.tar: "):
        load_coco(path, f"{address}/b-{{0..1}}.tar")
    with pytest.raises((OSError, ValueError), match="a store, whose address is not checked"):
        find_inputs([f"{address}/*.tar"], tmp_path / "out", public_only=True)


def test_a_full_disk_keeps_no_tar(tmp_path, put, monkeypatch):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.png").write_bytes(b"a")
    (tmp_path / "tars").mkdir()
    tar_folder(tmp_path / "set", tmp_path / "tars" / "a.tar")
    address = put(tmp_path / "tars")
    monkeypatch.setattr(stores, "FREE", 1 << 60)
    with pytest.raises(OSError, match=f"{address}/a.tar .*GiB are free in .*, where it is kept"):
        read_regular(f"{address}/a.tar/a.png")


def test_a_path_of_an_address_has_lost_slashes(tmp_path, put):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "a.txt").write_text("a")
    address = f"{put(tmp_path / 'set')}/a.txt"
    assert stores.local_file(Path(address)) == stores.local_file(address)
    assert store_folders.full(Path(address)) == address


def test_what_is_absent_is_named_by_its_address(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    write_coco(folder, ((40, 60), (50, 30)), ANNOTATIONS)
    (folder / "images" / "002.png").unlink()
    address = put(folder)
    with pytest.raises(FileNotFoundError, match=f"{address}/other.json: no such file"):
        load_coco(f"{address}/other.json", f"{address}/images")
    with pytest.raises(ValueError, match=f"002.png.* is listed but not in {address}/images"):
        load_coco(f"{address}/instances.json", f"{address}/images")
    with pytest.raises(ValueError, match=f"001.png.* is listed but not in {address}/pictures"):
        load_coco(f"{address}/instances.json", f"{address}/pictures")
    with pytest.raises(OSError, match=f"{address}/images is a folder, expected a file"):
        stores.local_file(f"{address}/images")


def test_a_copy_keeps_the_name_of_its_file(tmp_path):
    (tmp_path / "my weights.pth").write_bytes(b"a")
    address = f"file://{tmp_path}/my weights.pth"
    assert stores.local_file(address).name.endswith("-my_weights.pth")
    with pytest.raises(ValueError, match="-my_weights.pth: unknown format"):
        load_variables(address, load_config("coco_torchvision"))


def test_check_decodes_the_images_of_an_address(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    path, images = write_coco(folder, ((40, 60), (50, 30)), ANNOTATIONS)
    (images / "001.png").write_bytes((images / "001.png").read_bytes()[:-20])
    address = f"{put(folder)}/images"
    assert check_coco(path, address) == [f"{address}/001.png: truncated or damaged"]
    content = json.loads(path.read_text())
    content["images"][1]["file_name"] = "3.png"
    path.write_text(json.dumps(content))
    problems = check_coco(path, address)
    assert len(problems) == 2 and f"'3.png' is listed but not in {address}" in problems[0]


@pytest.mark.parametrize("variable", ["AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST"])
def test_another_server_has_other_files_under_the_same_address(variable, tmp_path, monkeypatch):
    """As a bucket of tests and one of production, both called `data`."""
    address = f"file://{tmp_path}/a.png"
    for content in (b"first", b"second"):
        (tmp_path / "a.png").write_bytes(content)
        monkeypatch.setenv(variable, f"http://{content.decode()}")
        for _ in range(2):
            with stores.open_file(address) as file:
                assert file.read() == content
    monkeypatch.setenv(variable, "http://first")
    with stores.open_file(address) as file:
        assert file.read() == b"first"


def test_a_full_disk_keeps_no_image(tmp_path, put, monkeypatch):
    folder = tmp_path / "set"
    folder.mkdir()
    write_coco(folder, ((40, 60),), ANNOTATIONS)
    address = f"{put(folder)}/images/001.png"
    monkeypatch.setattr(stores, "FREE", 1 << 60)
    for _ in range(2):
        assert decode_image(address).shape == (40, 60, 3)
    assert not list((stores.home() / "objects").rglob("*.*"))


def test_arrays_and_bands_are_read(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    array = np.arange(4 * 5 * 2, dtype=np.uint8).reshape(4, 5, 2)
    np.save(folder / "a.npy", array)
    bands = Bands(names=("x", "y"))
    address = f"{put(folder)}/a.npy"
    np.testing.assert_array_equal(bands.read(address), array)
    by_image, window = replace(bands, scale="image"), (1, 1, 4, 3)
    expected = read_part(str(folder / "a.npy"), "a", window, by_image)
    np.testing.assert_array_equal(read_part(address, "a", window, by_image), expected)


def test_what_is_not_used_of_images_is_said_of_an_address(tmp_path, put):
    (tmp_path / "set").mkdir()
    pixels = np.full((20, 30, 3), 3000, np.uint16)
    cv2.imwrite(str(tmp_path / "set" / "a.png"), pixels)
    address = f"{put(tmp_path / 'set')}/a.png"
    assert "all but 8 of 16 bits in 1" in unused_of_files([address])[0]


def _decode(address, results):
    results.put(decode_image(address).shape)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.slow
def test_other_processes_and_threads_read_the_same_store(tmp_path, put, method):
    folder = tmp_path / "set"
    folder.mkdir()
    write_coco(folder, ((40, 60), (50, 30)), ANNOTATIONS)
    address = put(folder)
    decode_image(f"{address}/images/001.png")  # this process knows the store
    shapes = []
    threads = [
        threading.Thread(
            target=lambda: shapes.append(decode_image(f"{address}/images/002.png").shape)
        )
        for _ in range(4)
    ]
    context = get_context(method)
    results = context.Queue()
    process = context.Process(target=_decode, args=(f"{address}/images/002.png", results))
    process.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results.get(timeout=60) == (50, 30, 3)
    process.join(60)
    assert shapes == [(50, 30, 3)] * 4 and process.exitcode == 0
    assert not list((stores.home() / "objects").rglob(".part*"))


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("nothing://a/b.json", "nothing://a/b.json: Protocol not known"),
        ("nothing:/a/b.json", "nothing://a/b.json: Protocol not known"),
        (
            "http://127.0.0.1:9/a.json",
            "http://127.0.0.1:9/a.json(: Cannot connect| needs a package)",
        ),
    ],
)
def test_a_store_that_cannot_be_had_is_named(address, message):
    with pytest.raises((OSError, ValueError), match=message):
        stores.local_file(address)


@pytest.mark.parametrize("path", ["a/b.json", "/a", "C:/a", "a:b", "instances.json"])
def test_paths_are_no_addresses(path):
    assert not stores.is_address(path)
    assert str(stores.local_file(path)) == path


def test_a_silent_web_server_is_given_up(monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(stores, "SILENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:  # which never answers
        address = f"http://127.0.0.1:{server.getsockname()[1]}/a.json"
        with pytest.raises(OSError, match=f"{address}.* Timeout on reading"):
            stores.local_file(address)


def test_an_address_leads_to_no_other_store(tmp_path):
    (tmp_path / "secret.png").touch()
    for address in (f"file:///none/a::file://{tmp_path}/secret.png", "s3://bucket/a::b.png"):
        for read in (stores.open_file, stores.local_file, stores.list_folder, stores.find_files):
            with pytest.raises(ValueError, match=f"{address}: expected an address without '::'"):
                read(address)


def test_parts_of_files_that_a_killed_process_left_are_deleted(tmp_path):
    (tmp_path / "a.png").write_bytes(b"a")
    folder = stores._place(f"file://{tmp_path}/a.png").parent
    folder.mkdir(parents=True)
    for name, age in ((".partold", 100_000), (".partnew", 10)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age,) * 2)
    stores.open_file(f"file://{tmp_path}/a.png").close()
    assert sorted(path.suffix or path.name for path in folder.iterdir()) == [".partnew", ".png"]


def test_names_of_a_store_stay_in_the_output_folder(tmp_path, monkeypatch):
    keys = ["a/../../../x.png", "../x.png", "a//y.png", "./z.png"]
    found = sorted(f"memory://set/{key}" for key in keys)
    monkeypatch.setattr(stores, "find_files", lambda _: found)  # of any store: some take all names
    images, _ = find_inputs(["memory://set"], tmp_path / "out")
    assert {str(one.name) for one in images} == {"x.png", "a/x.png", "a/y.png", "z.png"}


def test_a_file_may_have_a_name_like_a_pattern(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    write_coco(folder, ((40, 60), (50, 30)))
    (folder / "images" / "001.png").rename(folder / "images" / "a[1].png")
    ((one,), _) = find_inputs([f"{put(folder)}/images/a[1].png"], tmp_path / "out")
    assert str(one.name) == "a[1].png"


def test_infer_finds_images_and_videos_of_a_store(tmp_path, put):
    folder = tmp_path / "set"
    (folder / "images" / "more").mkdir(parents=True)
    write_coco(folder, ((40, 60), (50, 30)))
    (folder / "images" / "002.png").rename(folder / "images" / "more" / "b.png")
    for name in ("a.mp4", "notes.txt", "._001.png"):
        (folder / "images" / name).touch()
    address = f"{put(folder)}/images"
    images, videos = find_inputs([address], tmp_path / "out")
    assert [(one.source, str(one.name)) for one in images] == [
        (f"{address}/001.png", "001.png"),
        (f"{address}/more/b.png", "more/b.png"),
    ]
    assert [(one.source, str(one.target)) for one in videos] == [(f"{address}/a.mp4", "a.mp4")]
    assert read_image(images[1].source).shape == (50, 30, 3)
    (one,), _ = find_inputs([f"{address}/*/*.png"], tmp_path / "out")
    assert (one.source, str(one.name)) == (f"{address}/more/b.png", "b.png")
    (one,), _ = find_inputs([f"{address}/001.png"], tmp_path / "out")
    assert str(one.name) == "001.png"
    for absent in ("none", "*.gif"):
        with pytest.raises((ValueError, OSError), match=f"{address}/.*(no such file|no images)"):
            find_inputs([f"{address}/{absent}"], tmp_path / "out")
    with pytest.raises(ValueError, match="a store, whose address is not checked"):
        find_inputs([address], tmp_path / "out", public_only=True)


@pytest.mark.slow
def test_a_run_is_scored_and_infers_on_a_bucket(bucket, tmp_path):
    """By commands, which are other processes."""
    run = untrained_run(tmp_path)
    address = f"s3://sets/{tmp_path.name}"
    for path in filter(Path.is_file, run.data_dir.rglob("*")):
        bucket.put_file(str(path), f"{address}/{path.relative_to(run.data_dir)}")
    places = {
        "val_json": f"{address}/annotations/instances_val.json",
        "val_images": f"{address}/val",
    }
    flags = [f"--config.data.{name}={place}" for name, place in places.items()]
    scores, found = [], []
    for name, more, images in (("a", [], run.data_dir / "val"), ("b", flags, f"{address}/val")):
        command = ["--workdir", run.workdir, "--output", tmp_path / f"scores_{name}", *more]
        check_done(run_captured("evaluate", *command))
        scores.append(json.loads((tmp_path / f"scores_{name}" / "metrics.json").read_text()))
        command = ["--workdir", run.workdir, "--input", images, "--output", tmp_path / name]
        check_done(run_captured("infer", *command, "--score_threshold=0", "--save=csv"))
        found.append(json.loads((tmp_path / name / "detections.json").read_text()))
    assert scores[0] == scores[1] and found[0] == found[1] and len(found[0]) > 1


def test_a_file_is_written_whole_to_an_address(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.txt").write_text("before")
    address = put(folder)
    for name in ("a.txt", "new/b.txt"):
        (tmp_path / "draft").write_text(name)
        stores.put_file(tmp_path / "draft", f"{address}/{name}")
        assert stores.local_file(f"{address}/{name}").read_text() == name
    assert stores.list_folder(address) == {"a.txt": True, "new": False}
    assert stores.list_folder(f"{address}/new") == {"b.txt": True}


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(OSError, match=f"file://{tmp_path}/file/a.txt cannot be written: "):
        stores.put_file(tmp_path / "file", f"file://{tmp_path}/file/a.txt")


@pytest.mark.slow
def test_shards_are_written_to_a_store_and_merged_from_there(tmp_path, put):
    run = untrained_run(tmp_path)
    images = put(run.data_dir / "val")
    (tmp_path / "out").mkdir()
    output = f"{put(tmp_path / 'out')}/results"
    names = "".join(f"{images}/{n:06}.jpg\n" for n in range(4))
    (tmp_path / "list.txt").write_text(names)
    given = ["--workdir", run.workdir, f"--input=@{tmp_path}/list.txt", "--score_threshold=0"]
    check_done(run_captured("infer", *given, "--output", tmp_path / "one", "--no_images"))
    for shard in (0, 1, 1):
        flags = ["--output", output, f"--shard={shard}/2"]
        done = check_done(run_captured("infer", *given, *flags))
    assert "shard-00001-of-00002.jsonl is there" in done.stderr
    check_done(run_captured("infer", "--merge", output))
    check_done(run_captured("infer", "--merge", output, "--output", tmp_path / "two"))
    one = (tmp_path / "one" / "detections.json").read_bytes()
    assert (tmp_path / "two" / "detections.json").read_bytes() == one
    assert stores.local_file(f"{output}/detections.json").read_bytes() == one


def test_weights_at_an_address_are_those_of_the_file(tmp_path, put):
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"weights")
    found = published.local(f"{put(folder)}/a.safetensors")
    assert Path(found).suffix == ".safetensors" and Path(found).read_bytes() == b"weights"
    with pytest.raises(OSError, match="/none.pth: no such file"):
        published.local(f"{put(folder)}/none.pth")


def test_two_processes_may_put_the_same_file(tmp_path, monkeypatch):
    """One is done while the other writes: neither meets half of a file."""
    from fsspec.implementations.local import LocalFileSystem

    address, put = f"file://{tmp_path}/out/part", LocalFileSystem.put_file
    for name in ("one", "two"):
        (tmp_path / name).write_text(name)

    def slowly(self, path, target, **options):
        put(self, path, target, **options)
        if path.endswith("one"):
            stores.put_file(tmp_path / "two", address)
            assert (tmp_path / "out" / "part").read_text() == "two"

    monkeypatch.setattr(LocalFileSystem, "put_file", slowly)
    stores.put_file(tmp_path / "one", address)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["part"]
    assert (tmp_path / "out" / "part").read_text() == "one"
