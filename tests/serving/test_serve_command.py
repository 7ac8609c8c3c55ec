"""`serve` as a user starts it, from the first line to its end."""

import contextlib
import http.client
import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import cv2
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.weights.convert import to_ours_flat
from tests.commands.command import SMALL, config_flags, start
from tests.small_model import random_variables

pytestmark = pytest.mark.slow


@pytest.fixture
def flags(tmp_path) -> list[str]:
    """Of a small model with random weights, on a free port."""
    changes = SMALL | {"model.num_classes": 3, "eval.score_threshold": 0.0}
    weights = tmp_path / "weights.safetensors"
    save_file(to_ours_flat(random_variables(load_config("quickstart", changes))), weights)
    return [*config_flags(changes), f"--weights={weights}", "--port=0", "--score_threshold=0"]


def image() -> bytes:
    return cv2.imencode(".png", generate_image(0, "val", 0, (60, 90))[0])[1].tobytes()


def port_of(process) -> int:
    ready = process.stdout.readline()
    assert ready.startswith("ready: http://127.0.0.1:"), process.communicate()[1]
    return int(ready.rstrip("/\n").rpartition(":")[2])


def ask(port: int, method: str = "POST", path: str = "/detect?score_threshold=0") -> dict:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request(method, path, image(), {"Content-Type": "image/png"})
        return json.loads(connection.getresponse().read())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_answers_until_it_is_told_to_stop(number, flags, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    process = start("serve", *flags, cache=tmp_path)
    try:
        found = ask(port_of(process))
        assert found["image"] == {"width": 90, "height": 60} and found["detections"]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert said.splitlines()[-1] == "stopping" and "Traceback" not in said
    assert [path for path in sorted(tmp_path.rglob("*")) if "jit_" not in path.name] == before


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs a CPU for each worker")
def test_two_workers_answer_as_one(flags, tmp_path):
    process = start("serve", *flags, "--workers=2", cache=tmp_path)
    try:
        port = port_of(process)
        with ThreadPoolExecutor(8) as pool:
            first, *others = pool.map(lambda _: ask(port), range(16))
        assert first["detections"] and all(other == first for other in others)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0 and "Traceback" not in said
    assert said.splitlines()[-2].startswith("2 workers are ready, with ")
    assert said.splitlines()[-1] == "stopping" and said.count("compiling for batches") == 1
