"""A tiny file about an image of the largest size takes no more memory or time than an image or two.

`pytest tests/fuzz --fuzz=10000` converts the worst set of each format at that size.
"""

import json
import os
import subprocess
import sys

import pytest

from mask_rcnn_jax.annotations.checks import MAX_PIXELS
from tests.fuzz.largest import SETS

MEMORY = 300  # MiB over one decoded image
CPU_SECONDS = 40
SIDE = int(MAX_PIXELS**0.5)
# Those that once took gigabytes or an hour; sizes are enough for that.
QUICK = {
    "Cityscapes json, few": (4000, 5000),
    "labelme json": (4000, 4000),
    "label image": (4000, 5000),
    "label image, scattered": (1500, 1500),
    "VOC image": (4000, 5000),
    "CVAT XML": (SIDE, SIDE),
    "Label Studio json": (SIDE, SIDE),
    "TFRecords": (SIDE, SIDE),
}
REFUSED = {
    "Cityscapes json, zigzags": "characters of run-length codes",
    "label image, checkers": "runs of equal pixels down the columns, is it a mask?",
    "CVAT XML, stripes": "runs of equal pixels down the columns, is it a mask?",
    "Label Studio json, stripes": "runs of equal pixels down the columns, is it a mask?",
}


@pytest.fixture(scope="module")
def convert():
    """Convert a set in a process forked from one that has imported everything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.largest"], text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    def convert(name, height, width):
        process.stdin.write(json.dumps([name, height, width]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield convert
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.slow if n == "label image, scattered" else ())
        for n in SETS
    ],
)
def test_a_tiny_file_takes_the_memory_and_time_of_an_image_or_two(
    name, convert, request, record_property
):
    thorough = request.config.getoption("--fuzz")
    if not thorough and name not in QUICK:
        pytest.skip("--fuzz converts all sets")
    found = convert(name, *((SIDE, SIDE) if thorough else QUICK[name]))
    text = f"{name}, {found['bytes']:,} bytes: {found['memory']} MiB, {found['seconds']} s"
    if thorough:
        record_property("figure", text)
    assert found["memory"] <= MEMORY and found["seconds"] <= CPU_SECONDS, text
    if name in REFUSED and thorough:
        assert REFUSED[name] in found["end"] and "\n" not in found["end"]
        assert found["end"].startswith("/"), "names the file"
    else:
        assert found["end"] == "converted"


@pytest.mark.parametrize("name", [name for name in REFUSED if "zigzags" not in name])
def test_what_lies_just_below_the_bounds_is_converted(name, convert, request):
    if not request.config.getoption("--fuzz"):
        pytest.skip("takes seconds")
    found = convert(name, 2400, 2400)
    assert found["end"] == "converted" and found["memory"] <= MEMORY, found
