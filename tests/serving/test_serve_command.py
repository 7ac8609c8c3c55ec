"""`serve` as a user starts it, from the first line to its end."""

import contextlib
import http.client
import json
import signal

import cv2
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.weights.convert import to_ours_flat
from tests.commands.command import SMALL, config_flags, start
from tests.small_model import random_variables

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_answers_until_it_is_told_to_stop(number, tmp_path):
    changes = SMALL | {"model.num_classes": 3, "eval.score_threshold": 0.0}
    variables = random_variables(load_config("quickstart", changes))
    weights = tmp_path / "weights.safetensors"
    save_file(to_ours_flat(variables), weights)
    image = cv2.imencode(".png", generate_image(0, "val", 0, (60, 90))[0])[1].tobytes()
    before = sorted(tmp_path.rglob("*"))
    flags = [*config_flags(changes), f"--weights={weights}", "--port=0", "--score_threshold=0"]
    process = start("serve", *flags, cache=tmp_path)
    try:
        ready = process.stdout.readline()
        assert ready.startswith("ready: http://127.0.0.1:"), process.communicate()[1]
        port = int(ready.rstrip("/\n").rpartition(":")[2])
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        with contextlib.closing(connection):
            address = "/detect?score_threshold=0"
            connection.request("POST", address, image, {"Content-Type": "image/png"})
            found = json.loads(connection.getresponse().read())
        assert found["image"] == {"width": 90, "height": 60} and found["detections"]
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert said.splitlines()[-1] == "stopping" and "Traceback" not in said
    assert [path for path in sorted(tmp_path.rglob("*")) if "jit_" not in path.name] == before
