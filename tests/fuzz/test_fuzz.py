"""A mutated file of any kind is accepted and right, or refused in one line that names it.

`pytest tests/fuzz --fuzz=10000` reads so many cases for each parser. What ends badly is kept, and
`python -m tests.fuzz.reader "COCO json" file PATH` reads it again.
"""

import json
import os
import subprocess
import sys

import pytest

from tests.fuzz import reader
from tests.fuzz.parsers import PARSERS

# MiB beyond the decoded image, which is small.
MEMORY = dict.fromkeys(["TIFFs", "texts of TIFFs", "arrays of NumPy", "maps"], 300)
CASES = [15, pytest.param(60, marks=pytest.mark.slow)]  # for each parser, without --fuzz


@pytest.fixture(scope="module")
def read():
    """Cases of a parser, in processes forked from one that has imported everything."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.reader"], text=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip

    def read(name, count):
        process.stdin.write(json.dumps([name, count]) + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    yield read
    process.stdin.close()
    process.stdout.close()
    process.wait(10)


@pytest.mark.parametrize("count", CASES)
@pytest.mark.parametrize("name", PARSERS)
def test_a_mutated_file_is_accepted_or_refused_in_one_line(
    name, count, read, request, record_property
):
    count = request.config.getoption("--fuzz") or count
    found = read(name, count)
    ends = ", ".join(f"{number} {end}" for end, number in sorted(found["ends"].items()))
    text = f"{name}: {ends}; {found['peak']} MiB at most, {found['seconds']} s"
    if request.config.getoption("--fuzz"):
        record_property("figure", text)
    print(text)
    assert found["peak"] <= MEMORY.get(name, 1024), text
    assert not found["bad"], "\n".join(str(bad) for bad in found["bad"][:20])
    # A strategy may run out of new cases, but not this early.
    assert sum(found["ends"].values()) >= min(0.75 * count, 150)
    assert found["ends"].get("accepted") or count < 40  # of few, all may be refused


def test_the_reader_notices_every_bad_end(tmp_path):
    """Or the test above could not fail."""

    def parser(read):
        return reader.Parser(None, None, read)

    path = tmp_path / "case"

    def raises(error):
        def read(path):
            raise error

        return parser(read)

    def dies(path):
        raise AssertionError("wrong")

    assert reader.end_of(parser(lambda path: None), path)[0] == "accepted"
    assert reader.end_of(raises(ValueError(f"{path}: bad")), path)[0] == "refused"
    assert reader.end_of(raises(ValueError("bad")), path)[0] == "unnamed"
    assert reader.end_of(raises(ValueError(f"{path}: {'x' * 5000}")), path)[0] == "long"
    assert reader.end_of(raises(TypeError(f"{path}: bad")), path)[0] == "traceback"
    assert reader.end_of(raises(MemoryError()), path)[0] == "memory"
    assert reader.end_of(raises(reader.Hang()), path)[0] == "hang"
    assert reader.end_of(parser(dies), path)[0] == "wrong"
