"""What grows in a long run, a long `infer` and many evaluations: nothing.

`pytest tests/soak --soak=10000` takes so many steps, a fifth as many images, as many requests, and
evaluates once for 500 steps. Everything is real; the model is the smallest.
"""

import ctypes
import gc
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import cv2
import numpy as np
import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.models.build import build_model, init_variables
from mask_rcnn_jax.predict.annotate import annotate_images
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.saving import KINDS, ResultFiles
from mask_rcnn_jax.training.loop import train
from tests.helpers import tiny_config
from tests.serving.asking import HEAD, ask, opened, serving

pytestmark = [
    pytest.mark.soak,
    # Orbax leaves a thread's event loop to the collector of garbage.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
NAMES = ("memory in MiB", "open files", "threads", "shared memory")
# Largest growth over the whole run: of what the allocator keeps, and of counts.
BOUNDS = (64.0, 2.0, 2.0, 2.0)


def held() -> tuple[float, ...]:
    """Memory, open files, threads and objects in shared memory of this process."""
    gc.collect()
    # glibc keeps what was freed, up to a gigabyte at times; have it given back first.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    maps = Path("/proc/self/maps").read_text()
    shared = {line.split()[-1] for line in maps.splitlines() if "/dev/shm/" in line}
    memory = pages * os.sysconf("SC_PAGESIZE") / 2**20
    return memory, len(os.listdir("/proc/self/fd")), threading.active_count(), len(shared)


def assert_level(what: str, unit: str, rows: list[tuple[int, ...]], record_property) -> None:
    """The line through the second half of the rows (number, *held) is level."""
    table = np.array(rows, float)
    half = table[len(table) // 2 :]
    assert len(half) >= 5
    slopes = [np.polyfit(half[:, 0], column, 1)[0] for column in half.T[1:]]
    texts = [f"{name} {1000 * slope:+.3f}" for name, slope in zip(NAMES, slopes, strict=True)]
    record_property("figure", f"{what}, {len(rows)} samples, growth in 1,000 {unit}: "
                    f"{', '.join(texts)}; {half[-1, 1]:.0f} MiB at the end")  # fmt: skip
    for name, slope, bound in zip(NAMES, slopes, BOUNDS, strict=True):
        assert slope * table[-1, 0] < bound, f"{what}: {name} grow"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    return folder, write_shapes(folder, train=64, val=8, size=(64, 64))


def test_steps_and_evaluations(shapes, tmp_path, request, record_property):
    steps = request.config.getoption("--soak")
    folder, jsons = shapes
    config = tiny_config()
    for split, path in jsons.items():
        config.data.update({f"{split}_json": str(path), f"{split}_images": str(folder / split)})
    config.model.num_classes = 0
    config.data.update(num_workers=1, max_instances=6)
    config.train.update(
        steps=steps, log_every=50, checkpoint_every=max(1, steps // 40),
        eval_every=max(1, steps // 20),
    )  # fmt: skip
    config.eval.update(loss_images=4, pictures=2)
    rows, evaluations = [], []

    def watch(step, metrics, images):
        if "ap/box" in metrics:
            evaluations.append(step)
        elif step % max(1, steps // 100) == 0:
            rows.append((step, *held()))

    train(config, tmp_path / "run", loggers=[watch])
    assert len(evaluations) == 20
    assert_level(f"{steps} steps with 20 evaluations", "steps", rows, record_property)


def test_images(shapes, tmp_path, request, record_property):
    """As `infer` does, files are read, decoded, annotated and written."""
    count, (folder, _) = max(200, request.config.getoption("--soak") // 5), shapes
    config = tiny_config()
    variables = init_variables(build_model(config.model), 0)
    predictor = Predictor(config, variables, batch_size=4)
    sources = sorted((folder / "train").iterdir())
    targets = [PurePosixPath(f"{i}.jpg") for i in range(10)]
    images = [
        Input(str(sources[i % len(sources)]), targets[i % 10], targets[i % 10])
        for i in range(count)
    ]
    skipped, rows = [], []
    with ResultFiles(tmp_path, KINDS) as files:
        found = annotate_images(predictor, images, tmp_path, files, {}, skipped.append)
        for number, records in enumerate(found, start=1):
            files.add(records)
            if number % (count // 50) == 0:
                rows.append((number, *held()))
    assert number == count and not skipped
    assert_level(f"{count} images", "images", rows, record_property)


def upload(size: tuple[int, int], ending: str) -> bytes:
    pixels = np.random.default_rng(size).integers(0, 256, (*size, 3), np.uint8)
    return cv2.imencode(ending, pixels)[1].tobytes()


def test_requests(request, record_property):
    """Of all kinds, good and bad, from four clients."""
    count = max(400, request.config.getoption("--soak"))
    config = tiny_config()
    predictor = Predictor(config, init_variables(build_model(config.model), 0), batch_size=4)
    images = [upload((60 + 8 * i, 90 - 7 * i), [".png", ".jpg"][i % 2]) for i in range(6)]
    good = [("POST", "/detect", image, 200) for image in images]
    bad = [
        ("POST", "/detect", images[1][:300], 400),
        ("POST", "/detect", b"no image", 400),
        ("POST", "/detect", b"", 400),
        ("GET", "/absent", None, 404),
        ("GET", "/health", None, 200),
        ("GET", "/model", None, 200),
        ("PUT", "/detect", images[0], 405),
    ]
    kinds, rows = good + bad, []
    with serving(predictor) as server, ThreadPoolExecutor(4) as clients:

        def one(number: int) -> None:
            method, path, body, status = kinds[number % len(kinds)]
            if number % 50 == 0:  # and one that goes away in its upload
                opened(server, HEAD + b"Content-Length: 10000\r\n\r\nx").close()
            assert ask(server, method, path, body).status == status, (method, path)

        for start in range(0, count, count // 50):
            list(clients.map(one, range(start, start + count // 50)))
            rows.append((start, *held()))
    assert_level(f"{count} requests", "requests", rows, record_property)
