"""Files of parts: whole or not there, readable by others, and damaged ones are named."""

import os
import stat
import time
import tracemalloc

import pytest

from mask_rcnn_jax.predict.lists import Shard
from mask_rcnn_jax.predict.part_files import (
    FORMATS,
    PartFile,
    delete_drafts,
    list_parts,
    read_lines,
    whole_file,
    write_lines,
)

LINES = [
    {
        "file_name": "ü/a b.jpg", "image_id": 3, "height": 4, "width": 5,
        "detections": [
            {
                "category": "cat", "image_id": 3, "category_id": 17, "score": 0.1 + 0.2,
                "bbox": [0.0, 1.001, 2.0, 3.0],
                "segmentation": {"size": [4, 5], "counts": "0d0"},
            },
            {
                "category": "cat", "image_id": 3, "category_id": 17, "score": 1e-9,
                "bbox": [0.0, 1.0, 2.0, 3.0],
            },
            {
                "category": "cat", "image_id": 3, "category_id": 17, "score": 0.5,
                "bbox": [0.0, 1.0, 2.0, 3.0], "keypoints": [1.5, 2.0, 1.0],
                "keypoint_scores": [0.25], "segmentation": {"size": [4, 5], "counts": "0d0"},
            },
        ],
    },
    {"file_name": "b.jpg", "image_id": 7, "height": 4, "width": 5, "detections": []},
    {"file_name": "c.jpg", "image_id": 8, "skipped": "damaged"},
]  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
def test_what_is_read_is_what_was_written(form, tmp_path):
    """With and without masks, and of an image that was skipped; keys in the same order."""
    if form == "parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"a.{form}"
    for lines in ([], LINES, LINES * 300):
        write_lines(path, iter(lines), form)
        assert [repr(line) for line in read_lines(path)] == [repr(line) for line in lines]
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match=f"a.{form} is damaged: "):
        list(read_lines(path))


def test_a_long_part_is_not_held(tmp_path):
    write_lines(tmp_path / "a.jsonl", (LINES[0] | {"image_id": n} for n in range(9000)), "jsonl")
    assert (tmp_path / "a.jsonl").stat().st_size > 2 << 20
    tracemalloc.start()
    assert sum(1 for _ in read_lines(tmp_path / "a.jsonl")) == 9000
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 1 << 20


def test_a_file_is_there_once_it_is_whole(tmp_path):
    folder = str(tmp_path / "new")
    with whole_file(folder, "a.txt") as draft:
        draft.write_text("a")
        assert os.listdir(folder) == [draft.name] and draft.name.startswith(".a.txt-")
    assert os.listdir(folder) == ["a.txt"]
    mode = os.stat(f"{folder}/a.txt").st_mode
    (tmp_path / "plain").touch()
    assert stat.S_IMODE(mode) == stat.S_IMODE(os.stat(tmp_path / "plain").st_mode)
    with pytest.raises(KeyboardInterrupt), whole_file(folder, "a.txt") as draft:
        draft.write_text("b")
        raise KeyboardInterrupt
    assert os.listdir(folder) == ["a.txt"] and (tmp_path / "new" / "a.txt").read_text() == "a"


def test_drafts_of_killed_processes_are_deleted(tmp_path):
    names = [
        f".part-{shard:05}-of-00002-000000.jsonl-{age}.tmp" for shard in (0, 1) for age in "ab"
    ]
    for name in names:
        (tmp_path / name).touch()
        if name.endswith("a.tmp"):
            os.utime(tmp_path / name, (time.time() - 4000,) * 2)
    delete_drafts(str(tmp_path), Shard(1, 2))
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {names[2]}


def test_parts_are_known_by_their_names(tmp_path):
    assert list_parts(str(tmp_path / "absent")) == set()
    part = PartFile(3, 12, 45, "jsonl")
    assert part.name == "part-00003-of-00012-000045.jsonl"
    for name in (part.name, f".{part.name}-x.tmp", "detections.json", f"{part.name}.gz"):
        (tmp_path / name).touch()
    assert list_parts(str(tmp_path)) == {part}
