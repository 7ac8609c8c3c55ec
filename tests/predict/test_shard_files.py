"""Files of shards: what they hold comes back, damage is named, and what failed is done again."""

import errno
import json
import os
import threading
import tracemalloc
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath

import cv2
import pytest

from mask_rcnn_jax import stores
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.predict import annotate
from mask_rcnn_jax.predict.annotate import Unavailable, detect_images
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.lists import Images, Shard
from mask_rcnn_jax.predict.merging import merge_shards
from mask_rcnn_jax.predict.shards import (
    check_settings,
    list_shards,
    read_lines,
    read_record,
    settings_of,
    shard_file,
    write_shard,
)
from tests.commands.small_run import RECIPE
from tests.predict.stub_predictor import StubPredictor, image_of

WHOLE = Shard()
TEXTS = ["a.png", "\udcff\udcfe.png", "\ud800", r"\udcff", r"\u005cudcff", "back\\slash", "ü\n日"]


class Predictor(StubPredictor):
    def prepare_large(self, source):
        return None

    def result(self, image, found, source=None):
        return super().result(image, found)


def write(images, output, shard=WHOLE, predictor=None, **settings) -> dict:
    return write_shard(predictor or Predictor(), images, str(output), shard, settings)


def images_in(folder: Path, count: int = 4) -> Images:
    found = []
    for k in range(count):
        cv2.imwrite(str(folder / f"{k}.png"), image_of(k + 1))
        name = PurePosixPath(f"{k}.png")
        found.append(Input(str(folder / name), name, name))
    return Images(found)


def lines_of(output, shard=WHOLE) -> list[dict]:
    path = Path(shard_file(str(output), shard))
    return list(read_lines(path, read_record(path)))


def test_names_that_are_no_utf_8_come_back_as_they_were(tmp_path):
    """One such file must not keep a shard of a million from its end."""
    (tmp_path / "here.png").write_bytes(b"no picture")
    inputs = [Input(str(tmp_path / "here.png"), text, PurePosixPath("x")) for text in TEXTS]
    write(Images(inputs), tmp_path)
    found = lines_of(tmp_path)
    assert [json.dumps(line["file_name"]) for line in found] == list(map(json.dumps, TEXTS))
    assert all(set(line) == {"file_name", "image_id", "skipped"} for line in found)


def test_what_is_skipped_is_named(tmp_path):
    """Python's own errors name no file."""
    names = ["a\0.png", "\ud800"]
    images = [(k, Input(name, name, PurePosixPath("x"))) for k, name in enumerate(names)]
    errors: list[ValueError] = []
    found = detect_images(Predictor(), images, max, lambda *skipped: errors.append(skipped[2]))
    assert not list(found)
    assert [str(error).partition(": ")[0] for error in errors] == names


def test_every_changed_byte_is_damage_and_is_made_again(tmp_path, caplog):
    images, merged = images_in(tmp_path, 2), tmp_path / "merged"
    record = write(images, tmp_path)
    path = tmp_path / "shard-00000-of-00001.jsonl"
    content = path.read_bytes()
    for place in [*range(0, len(content), 7), len(content) - 2]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            read_record(path)
    for cut in (b"", content[:-1], content[: content.rindex(b"{")], b"".join(content.split()[1:])):
        path.write_bytes(cut)
        with pytest.raises(ValueError, match=r"is damaged: .*; run infer --shard i/1 for i = 0$"):
            merge_shards(str(tmp_path), str(merged))
        assert not merged.exists() or not os.listdir(merged)
    assert write(images, tmp_path) == record and path.read_bytes() == content
    assert "is damaged" in caplog.text and "it is made again" in caplog.text


def test_a_long_shard_is_not_held(tmp_path):
    images = images_in(tmp_path, 1)
    write(images, tmp_path)
    path = tmp_path / "shard-00000-of-00001.jsonl"
    line, record, _ = path.read_bytes().splitlines(keepends=True)
    count = (3 << 20) // len(line)
    path.write_bytes(line * count + record)
    tracemalloc.start()
    assert sum(1 for _ in read_lines(path, {"inputs": count})) == count
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_shard_that_is_whole_is_done(tmp_path):
    images = images_in(tmp_path)
    for _ in range(2):
        predictor = Predictor()
        write(images, tmp_path, predictor=predictor)
    assert not predictor.batches


def test_nothing_is_left_of_a_shard_that_ended_early(tmp_path):
    images = images_in(tmp_path)

    class Broken(Predictor):
        def stream(self, images):
            next(images)
            raise MemoryError

    with pytest.raises(MemoryError):
        write(images, tmp_path / "out", predictor=Broken())
    assert not os.listdir(tmp_path / "out")


def test_files_of_other_names_are_no_shards(tmp_path):
    """Nor would a merge look for a thousand million shards."""
    assert list_shards(str(tmp_path / "absent")) == set()
    last = Shard(99_998, 99_999)
    names = ("shard-0-of-1.jsonl", "shard-000000000-of-999999999.jsonl", ".shard-00000-of-00001")
    for name in (*names, "detections.json", Path(shard_file("", last)).name):
        (tmp_path / name).touch()
    assert list_shards(str(tmp_path)) == {last}


def test_shards_in_other_batches_are_a_warning(tmp_path, caplog):
    """Their last digits differ."""
    images, output = images_in(tmp_path), str(tmp_path / "out")
    for shard in range(2):
        write(images, output, Shard(shard, 2), Predictor(4))
    merge_shards(output, output)
    assert "other batches" not in caplog.text
    os.unlink(shard_file(output, Shard(1, 2)))
    write(images, output, Shard(1, 2), Predictor(1))
    merge_shards(output, output)
    assert "in other batches, as with --batch_size" in caplog.text


def test_another_engine_is_another_setting():
    """Of one file, onnxruntime and OpenVINO, or OpenVINO in bfloat16, find other boxes."""
    recipe, categories = load_config(RECIPE), [{"id": 1, "name": "one"}]
    engines = ["openvino", "openvino (bfloat16)", "onnxruntime"]
    models = [Exported(recipe, categories, 1, (), "", engine=engine) for engine in engines]
    found = [settings_of(recipe, model, 0, 0.2) for model in models]
    assert [one["engine"] for one in found] == engines
    with pytest.raises(ValueError, match="made with engine openvino, not onnxruntime"):
        check_settings("a.jsonl", found[0], found[2])


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(stores, "PAUSES", (0.0, 0.0))


@pytest.fixture
def server(tmp_path, monkeypatch):
    """Serves a picture at any path; answers the first requests of each as `answers` says."""
    cv2.imwrite(str(tmp_path / "a.png"), image_of(7))
    content = (tmp_path / "a.png").read_bytes()
    answers: dict[str, list] = {}
    asked = Counter[str]()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked[self.path] += 1
            given = answers.get(self.path, [])
            answer = given.pop(0) if given else 200
            if answer == "close":
                self.connection.close()
                return
            self.send_response(answer if isinstance(answer, int) else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[:20] if answer == "short" else content)

        def log_message(self, *_):
            pass

    started = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=started.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{started.server_port}", answers, asked
    started.shutdown()
    started.server_close()


def web_images(address: str, names) -> Images:
    return Images([Input(f"{address}/{n}.png", f"{n}.png", PurePosixPath(n)) for n in names])


MOMENTS = [429, 500, 503, "close", "short"]


def test_what_fails_for_a_moment_is_tried_again(server, at_once, tmp_path):
    address, answers, asked = server
    names = [str(k) for k in range(len(MOMENTS))]
    answers |= {f"/{n}.png": [moment] * 2 for n, moment in zip(names, MOMENTS, strict=True)}
    record = write(web_images(address, names), tmp_path)
    assert (record["done"], record["skipped"], record["failed"]) == (5, 0, 0)
    assert set(asked.values()) == {3}


def test_what_failed_is_told_apart_and_done_again(server, at_once, tmp_path, caplog):
    address, answers, asked = server
    answers |= {"/b.png": [503] * 3, "/c.png": [404], "/d.png": ["close"] * 3}
    images = web_images(address, "abcd")
    record = write(images, tmp_path)
    assert (record["done"], record["skipped"], record["failed"]) == (1, 1, 2)
    states = [set(line) - {"file_name", "image_id"} for line in lines_of(tmp_path)]
    assert states[1:] == [{"failed"}, {"skipped"}, {"failed"}] and asked["/c.png"] == 1
    assert "2 images could not be had; the same command does them again" in caplog.text
    merge_shards(str(tmp_path), str(tmp_path))
    left = [json.loads(line) for line in (tmp_path / "skipped.jsonl").read_text().splitlines()]
    assert [one["file_name"] for one in left] == ["b.png", "c.png", "d.png"]
    assert "infer --shard i/1 for i = 0 does those that failed again" in caplog.text
    before = Counter(asked)
    record = write(images, tmp_path)
    assert (record["done"], record["skipped"], record["failed"]) == (3, 1, 0)
    assert asked - before == {"/b.png": 1, "/d.png": 1}
    assert [line["image_id"] for line in lines_of(tmp_path)] == [1, 2, 3, 4]


def test_a_server_that_is_away_is_not_waited_for_image_by_image(server, at_once, tmp_path):
    address, answers, asked = server
    names = [f"{k:03}" for k in range(200)]
    answers |= {f"/{name}.png": [503] * 9 for name in names[20:180]}
    record = write(web_images(address, names), tmp_path)
    assert (record["done"], record["failed"]) == (40, 160)
    tries = [asked[f"/{name}.png"] for name in names]
    assert set(tries[20:38]) == {3} and set(tries[60:180]) == {1}
    answers |= {"/199.png": [503] * 2}  # there was one: it is waited for again
    assert write(web_images(address, names[198:]), tmp_path / "anew")["failed"] == 0


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_disk_that_fails_is_tried_again(number, at_once, tmp_path, monkeypatch):
    images, read = images_in(tmp_path), annotate.read_image
    fails = Counter({f"{tmp_path}/1.png": 2, f"{tmp_path}/2.png": 100})

    def failing(source, *given):
        fails[source] -= 1
        if fails[source] >= 0:
            raise OSError(number, os.strerror(number), source)
        return read(source, *given)

    monkeypatch.setattr(annotate, "read_image", failing)
    write(images, tmp_path)
    found = lines_of(tmp_path)
    assert [line.get("failed") for line in found] == [None, None, os.strerror(number), None]
    assert "detections" in found[1]


def test_a_full_disk_is_no_image(at_once, tmp_path, monkeypatch):
    def failing(source, *given):
        raise OSError(errno.ENOSPC, "No space left on device", source)

    monkeypatch.setattr(annotate, "read_image", failing)
    with pytest.raises(OSError, match="No space left"):
        write(images_in(tmp_path), tmp_path / "out")


def test_errors_of_a_store_are_not_the_images(at_once, tmp_path, monkeypatch):
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    from fsspec.implementations.local import LocalFileSystem

    images_in(tmp_path)
    tried = Counter[str]()

    def failing(self, path, target, **options):
        tried[Path(path).name] += 1
        if path.endswith("0.png"):
            raise PermissionError("Access Denied")
        raise RuntimeError("SlowDown")

    monkeypatch.setattr(LocalFileSystem, "get_file", failing)
    names = ["0.png", "1.png", "none.png"]
    images = [
        (k, Input(f"file://{tmp_path}/{n}", n, PurePosixPath(n))) for k, n in enumerate(names)
    ]
    errors = {}
    assert not list(detect_images(Predictor(), images, max, lambda k, _, e: errors.update({k: e})))
    assert isinstance(errors[0], Unavailable) and "Access Denied" in str(errors[0])
    assert isinstance(errors[1], Unavailable) and "SlowDown" in str(errors[1])
    assert (tried["0.png"], tried["1.png"]) == (1, 3)
