"""The server of stubbed runs, and a run that nothing interrupted."""

import time

import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from tests.faults.harness import Server, outcome


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    jsons = write_shapes(folder, train=12, val=4, size=(64, 64))
    flags = [f"--config.data.{split}_json={path}" for split, path in jsons.items()]
    flags += [f"--config.data.{split}_images={folder / split}" for split in jsons]
    server = Server(flags)
    yield server
    server.close()


@pytest.fixture(scope="session")
def whole(server, tmp_path_factory):
    """The workdir of an uninterrupted run. It evaluated best early."""
    run = server.start(tmp_path_factory.mktemp("whole") / "run")
    assert run.wait() == 0, run.said()
    assert "step 16 was scored beside the training" in run.said()
    (run.workdir.parent / "seconds").write_text(str(time.monotonic() - run.started))
    return run.workdir


@pytest.fixture(scope="session")
def reference(whole):
    """Its outcome; both tests and runs leave the workdir alone."""
    found = outcome(whole)
    assert list(found["checkpoints"]) == [8, 21, 24]
    assert sorted(found["evaluations"]) == ["16", "24", "8"]
    return found


@pytest.fixture
def figure(request, record_property):
    """Have a text printed after the tests, if they are thorough."""
    if request.config.getoption("--faults"):
        return lambda text: record_property("figure", text)
    return lambda text: None
