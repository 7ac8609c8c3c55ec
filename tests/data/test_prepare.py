"""`prepare` through the real command line."""

import json
import subprocess
import sys

import pytest

from tests.data.small_set import rectangle


def prepare(*arguments):
    command = [sys.executable, "-m", "mask_rcnn_jax.prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_shapes_then_check(tmp_path):
    arguments = ["shapes", "--data_dir", tmp_path, "--train=6", "--val=2"]
    for _ in range(2):
        done = prepare(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
    assert "instances_train.json: 6 images in" in done.stdout
    done = prepare("check", "--data_dir", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "instances_train.json: no problem in 6 images" in done.stdout
    assert "instances_val.json: no problem in 2 images" in done.stdout


def test_check_prints_every_problem_and_fails(coco_files):
    bad = rectangle(1, 1, 0, 5)
    json_path, image_dir = coco_files(
        sizes=[(40, 60)] * 2, annotations=[bad, rectangle(1, 1, 5, 5)]
    )
    content = json.loads(json_path.read_text())
    content["annotations"][1]["segmentation"] = [[1, 2]]
    json_path.write_text(json.dumps(content))
    (image_dir / "002.png").write_bytes(b"nothing")
    done = prepare("check", "--json", json_path, "--images", image_dir)
    assert done.returncode == 2
    for words in ("annotation 1 of image 1: box", "annotation 2 of image 1: polygon", "002.png"):
        assert words in done.stdout
    assert done.stderr == "error: 3 problems found, see the lines above\n"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["bogus"], "expected one of ['shapes', 'check', 'weights', 'coco2017', 'tfds']"),
        (["coco2017"], "prepare coco2017 needs --data_dir"),
        (["tfds"], "prepare tfds needs --data_dir"),
        (["shapes"], "prepare shapes needs --data_dir"),
        (["check", "--json", "a.json"], "--json together with --images"),
        (["check", "--json", "a.json", "--images", "b"], "no annotation file 'a.json'"),
        (["check", "--data_dir", "nowhere"], "no json in nowhere"),
    ],
)
def test_mistake_is_one_line_with_exit_code_2(arguments, words):
    done = prepare(*arguments)
    assert done.returncode == 2
    assert words in done.stderr and done.stderr.count("\n") == 1
