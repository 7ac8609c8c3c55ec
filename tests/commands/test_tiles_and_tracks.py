"""`--tile` and `--track` in whole commands, with a small trained model."""

import json

import pytest

from mask_rcnn_jax.annotations.reader import read_json
from tests.commands.command import check_done, run
from tests.video.videos import write_video

pytestmark = pytest.mark.slow


def test_infer_cuts_images_and_follows_objects(trained, tmp_path, cache):
    clip = write_video(tmp_path / "clip.mp4", 8)
    arguments = ["--workdir", trained.workdir, "--score_threshold=0.01", "--track", "--tile=40"]
    arguments += ["--input", trained.data_dir / "val", "--input", clip, "--save=masks,crops,csv"]
    out = tmp_path / "out"
    check_done(run("infer", *arguments, "--output", out, cache=cache))
    entries = read_json(out / "detections.json")
    assert len({entry["file_name"] for entry in entries}) == 4
    assert {tuple(entry["segmentation"]["size"]) for entry in entries} == {(64, 64)}
    assert not any("track_id" in entry for entry in entries), "images have no tracks"
    lines = [json.loads(line) for line in (out / "clip.jsonl").read_text().splitlines()]
    tracks = [[entry["track_id"] for entry in line["detections"]] for line in lines]
    assert len(tracks) == 8 and any(tracks)
    assert all(len(set(ids)) == len(ids) and min(ids, default=1) >= 1 for ids in tracks)


def test_evaluate_cuts_images(trained, tmp_path, cache):
    arguments = ["--workdir", trained.workdir, "--tile=40", "--overlap=0.3", "--output", tmp_path]
    done = check_done(run("evaluate", *arguments, cache=cache))
    assert "tiles: 20 of 20" in done.stderr  # of each of four images four, and the whole
    assert 0 <= read_json(tmp_path / "metrics.json")["AP"] <= 1
    assert {entry["image_id"] for entry in read_json(tmp_path / "bbox_results.json")} <= {
        1,
        2,
        3,
        4,
    }
