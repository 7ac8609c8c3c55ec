"""Parts and their records: what they hold comes back, and what is damaged is named."""

import json
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.predict.annotate import detect_images
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.lists import Images, Shard
from mask_rcnn_jax.predict.merging import merge_parts
from mask_rcnn_jax.predict.part_files import PartFile, list_parts, read_lines, write_lines
from mask_rcnn_jax.predict.parts import Parts, check_settings, settings_of, write_parts
from tests.commands.small_run import RECIPE
from tests.predict.stub_predictor import StubPredictor, image_of

TEXTS = ["a.png", "\udcff\udcfe.png", "\ud800", r"\udcff", r"\u005cudcff", "back\\slash", "ü\n日"]


class Predictor(StubPredictor):
    def prepare_large(self, source):
        return None

    def result(self, image, found, source=None):
        return super().result(image, found)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_names_that_are_no_utf_8_come_back_as_they_were(form, tmp_path):
    """One such file must not keep a shard of a million from its end."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    lines: list[dict] = [{"file_name": t, "image_id": 1, "skipped": t} for t in TEXTS]
    for text in TEXTS:
        found = {"category": text, "image_id": 2, "category_id": 1, "score": 0.5, "bbox": [1.0]}
        line = {"file_name": text, "image_id": 2, "height": 1, "width": 1, "detections": [found]}
        lines.append(line)
    write_lines(tmp_path / f"a.{form}", lines, form)
    assert list(map(json.dumps, read_lines(tmp_path / f"a.{form}"))) == list(map(json.dumps, lines))


def test_what_is_skipped_is_named(tmp_path):
    """Python's own errors name no file."""
    names = ["a\0.png", "\ud800"]
    images = [(k, Input(name, name, PurePosixPath("x"))) for k, name in enumerate(names)]
    errors: list[ValueError] = []
    found = detect_images(Predictor(), images, max, lambda *skipped: errors.append(skipped[2]))
    assert not list(found)
    assert [str(error).partition(": ")[0] for error in errors] == names


def images_in(folder: Path, count: int = 4) -> Images:
    found = []
    for k in range(count):
        cv2.imwrite(str(folder / f"{k}.png"), image_of(k + 1))
        name = PurePosixPath(f"{k}.png")
        found.append(Input(str(folder / name), name, name))
    return Images(found)


@pytest.mark.parametrize(
    "line", [3, None, {}, {"image_id": 2}, {"file_name": "x", "image_id": "2"}]
)
def test_lines_of_others_are_damage(line, tmp_path):
    path = tmp_path / "part-00000-of-00001-000000.jsonl"
    path.write_text(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=f"{path} is damaged: "):
        list(read_lines(path))
    path.write_text(json.dumps({"file_name": "x", "image_id": 1, "detections": [line]}))
    if not isinstance(line, dict):
        with pytest.raises(ValueError, match=f"{path} is damaged: image 1 has no list"):
            list(read_lines(path))


def test_damaged_parquet_is_named_whatever_pyarrow_raises(tmp_path):
    pytest.importorskip("pyarrow")
    path, rng = tmp_path / "a.parquet", np.random.default_rng(0)
    lines = [{"file_name": f"{k}.png", "image_id": k, "skipped": "no"} for k in range(50)]
    write_lines(path, lines, "parquet")
    content, refused = path.read_bytes(), 0
    for place in rng.integers(4, len(content), 200):
        path.write_bytes(content[:place] + b"\xff\xff" + content[place + 2 :])
        try:
            list(read_lines(path))
        except ValueError as error:
            assert str(error).startswith(f"{path} is damaged: ")
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    "entry", [{"settings": []}, {"settings": 3}, {"inputs": "many"}, {"done": None}]
)
def test_damaged_records_are_named(entry, tmp_path):
    output = str(tmp_path / "out")
    write_parts(Predictor(), images_in(tmp_path), output, Parts(size=2, settings={"a": 1}))
    record = tmp_path / "out" / "part-00000-of-00001-000001.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | entry))
    with pytest.raises(ValueError, match="part-00000-of-00001-000001.json"):
        merge_parts(output, output)


def test_a_record_without_its_part_is_gone_before_the_part_is_written(tmp_path, monkeypatch):
    """Or a kill between the two would leave a part with the record of another."""
    output, images = str(tmp_path / "out"), images_in(tmp_path)
    parts = Parts(size=2, settings={"a": 1})
    write_parts(Predictor(), images, output, parts)
    part = tmp_path / "out" / "part-00000-of-00001-000001.jsonl"
    part.unlink()

    class Broken(Predictor):
        def stream(self, images):
            assert not part.with_suffix(".json").exists()
            raise MemoryError

    with pytest.raises(MemoryError):
        write_parts(Broken(), images, output, parts)
    assert len(list_parts(output)) == 2
    write_parts(Predictor(), images, output, parts)
    assert len(list_parts(output)) == 4


def test_other_numbers_of_digits_are_no_parts(tmp_path):
    """Nor would a merge look for a thousand million shards."""
    for name in ("part-0-of-1-0.jsonl", "part-000000000-of-999999999-000000.jsonl"):
        (tmp_path / name).touch()
    assert not list_parts(str(tmp_path))
    last = PartFile(*Shard(99_998, 99_999), 1_000_000, "jsonl")
    (tmp_path / last.name).touch()
    assert list_parts(str(tmp_path)) == {last}


def test_parts_in_other_batches_are_a_warning(tmp_path, caplog):
    """Their last digits differ."""
    output, images = str(tmp_path / "out"), images_in(tmp_path)
    for shard, size in ((0, 4), (1, 4)):
        write_parts(Predictor(size), images, output, Parts(Shard(shard, 2)))
    merge_parts(output, output)
    assert "other batches" not in caplog.text
    for path in (tmp_path / "out").glob("part-00001*"):
        path.unlink()
    write_parts(Predictor(1), images, output, Parts(Shard(1, 2)))
    merge_parts(output, output)
    assert "in other batches, as with --batch_size" in caplog.text


def test_another_engine_is_another_setting():
    """Of one file, onnxruntime and OpenVINO, or OpenVINO in bfloat16, find other boxes."""
    recipe, categories = load_config(RECIPE), [{"id": 1, "name": "one"}]
    engines = ["openvino", "openvino (bfloat16)", "onnxruntime"]
    models = [Exported(recipe, categories, 1, (), "", engine=engine) for engine in engines]
    found = [settings_of(recipe, model, 0, 0.2) for model in models]
    assert [one["engine"] for one in found] == engines
    with pytest.raises(ValueError, match="made with engine openvino, not onnxruntime"):
        check_settings("part", found[0], found[2])
