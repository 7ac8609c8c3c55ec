"""`demo`: the model and the images that come with the package."""

import contextlib
import http.client
import json
import re
import signal
import socket

import cv2
import numpy as np
import pytest
from pycocotools import mask as coco_mask

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax import demo
from mask_rcnn_jax.weights.published import SHIPPED, SHIPPED_FOLDER, fetch, find
from tests.commands.command import ROOT, check_done, run_captured, start
from tests.helpers import shared

TRUTH = ROOT / "tests" / "commands" / "nuclei_truth.json"  # run-length codes by image
SIDE = 256  # of the images


def f1_score(found: list[dict], codes: list[str]) -> float:
    """At an IoU of 0.5."""
    truth = [{"size": [SIDE, SIDE], "counts": code} for code in codes]
    fits = coco_mask.iou([one["segmentation"] for one in found], truth, [0] * len(truth)) >= 0.5
    matched = min(fits.any(axis=0).sum(), fits.any(axis=1).sum())
    return 2 * matched / (len(found) + len(truth))


def test_finds_the_nuclei_of_its_images_without_a_network(tmp_path, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)
    monkeypatch.setenv("MASK_RCNN_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    said = check_done(run_captured("demo", "--output=out")).stdout.splitlines()
    found = json.loads((tmp_path / "out" / "detections.json").read_text())
    truth, folders = json.loads(TRUTH.read_text()), (SHIPPED_FOLDER, tmp_path / "out")
    for name, codes in truth.items():
        of_image = [one for one in found if one["file_name"] == name]
        assert len(of_image) > 30 and f1_score(of_image, codes) > 0.75
        colors = (np.ptp(cv2.imread(str(path / name)), axis=2) for path in folders)
        assert [(color > 40).mean() > 0.03 for color in colors] == [False, True]
    assert said[0].startswith(f"{len(found)} nuclei in out/nuclei_1.jpg and out/nuclei_2.jpg; ")
    assert re.search(r"box AP 0\.\d{3} and mask AP 0\.\d{3}", said[0])
    assert said[1].startswith("next: mask-rcnn-jax infer --weights nuclei_resnet10 ")
    assert len(said) == 2 and not (tmp_path / "home").exists()


def test_its_model_is_one_of_any_other_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (name,) = SHIPPED
    assert find(name) == fetch(name, tmp_path) == SHIPPED_FOLDER / f"{name}.safetensors"
    assert [one["name"] for one in mrcnn.load(name).categories] == ["nucleus"]
    (tmp_path / name).mkdir()
    assert find(name) == name


def test_what_is_shipped_is_small_and_names_no_folder_of_ours():
    files = sorted(SHIPPED_FOLDER.iterdir())
    assert sum(path.stat().st_size for path in files) < 10e6
    assert '"/' not in (SHIPPED_FOLDER / "nuclei_resnet10.manifest.json").read_text()
    said = (SHIPPED_FOLDER / "LICENSE").read_text()
    assert [path.name for path in files if path.name not in said] == ["LICENSE"]


@pytest.mark.slow
def test_serves_the_same_model(tmp_path):
    process = start("demo", "--serve", "--port=0", "--output", tmp_path / "out", cache=tmp_path)
    try:
        lines = [process.stdout.readline() for _ in range(3)]
        assert lines[2].startswith("ready: http://127.0.0.1:"), process.communicate()[1]
        port = int(lines[2].rstrip("/\n").rpartition(":")[2])
        image = (SHIPPED_FOLDER / "nuclei_2.jpg").read_bytes()
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as page:
            page.request("POST", "/detect", image, {"Content-Type": "image/jpeg"})
            assert len(json.loads(page.getresponse().read())["detections"]) > 30
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in said


@pytest.mark.slow
def test_measures_what_it_says(tmp_path, monkeypatch):
    data = shared("data/nuclei")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "nuclei").symlink_to(data)
    check_done(run_captured("evaluate", "--config=nuclei", "--weights", demo.MODEL, "--output=out"))
    measured = json.loads((tmp_path / "out" / "metrics.json").read_text())
    said = [float(number) for number in re.findall(r"\d\.\d+", demo.MEASURED)]
    assert said == pytest.approx([measured["AP"], measured["mask_AP"]], abs=0.002)
