"""examples/ray_predict.py and ray_evaluate.py on two nodes: each image once, whatever is killed."""

import importlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.formats.shapes import write_shapes
from tests.commands.small_run import untrained_run

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
COUNT = 40
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of Ray


@pytest.fixture(scope="module")
def cluster():
    """Two nodes on this machine, the head first."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("pyarrow")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False}
    two = Cluster(initialize_head=True, connect=True, head_node_args=node)
    two.add_node(num_cpus=1, object_store_memory=100 << 20)
    two.wait_for_nodes()
    yield two
    ray.shutdown()
    two.shutdown()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Of two shapes, and one that is damaged."""
    sets, folder = tmp_path_factory.mktemp("sets"), tmp_path_factory.mktemp("images")
    write_shapes(sets / "wide", train=COUNT // 2, val=1, size=(48, 64))
    write_shapes(sets / "high", train=COUNT // 2, val=1, size=(64, 48))
    for i, path in enumerate(sorted(sets.glob("*/train/*"))):
        path.rename(folder / f"{i:02d}.jpg")
    (folder / "07.jpg").write_bytes(b"no image")
    return folder


@pytest.fixture
def example(monkeypatch):
    """ray_predict.py, whose actors get 4 images at a time and write files of 8."""
    monkeypatch.syspath_prepend(EXAMPLES)
    module = importlib.import_module("ray_predict")
    values = {"ACTORS": 2, "CORES": 1, "IMAGES": 4, "ROWS": 8, "OPTIONS": {"score_threshold": 0.0}}
    for name, value in values.items():
        monkeypatch.setattr(module, name, value)
    sys.modules["ray"].cloudpickle.register_pickle_by_value(module)
    return module


def rows_of(output: Path) -> list[dict]:
    from pyarrow import parquet

    rows = [
        row for path in output.glob("*.parquet") for row in parquet.read_table(path).to_pylist()
    ]
    return sorted(rows, key=lambda row: row["path"])


def ending(example, at: dict, end):
    """An actor that ends once each, in mid-batch, at the images that `at` has a file for."""

    class Ending(example.Detect):
        def __call__(self, batch):
            found = super().__call__(batch)
            for path in batch["path"].to_pylist():
                mark = at.get(os.path.basename(path))
                if mark and not os.path.exists(mark):
                    open(mark, "x").close()
                    end()
            return found

    return Ending


def test_workers_that_are_killed_lose_nothing(cluster, example, run, images, tmp_path, monkeypatch):
    at = {name: str(tmp_path / name) for name in ("05.jpg", "21.jpg")}
    killed = ending(example, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(example, "Detect", killed)
    output = tmp_path / "out"
    command = [str(run.workdir), str(images), str(output)]
    example.main(*command)
    assert all(map(os.path.exists, at.values()))
    rows = rows_of(output)
    assert [Path(row["path"]).name for row in rows] == [f"{i:02d}.jpg" for i in range(COUNT)]
    assert "07.jpg" in rows[7]["error"] and rows[7]["detections"] is None
    predictor = mrcnn.load(run.workdir, **example.OPTIONS)
    for row in (rows[0], rows[-1]):
        expected = predictor(row["path"]).to_coco()
        assert [row["height"], row["width"]] == expected[0]["segmentation"]["size"]
        for name in ("score", "bbox"):
            values = [[one[name] for one in part] for part in (row["detections"], expected)]
            np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-3)
    with pytest.raises(ValueError, match="exist"):
        example.main(*command)  # would write all of it twice
    assert rows_of(output) == rows


def test_detections_in_parts_have_one_score(cluster, example, run, tmp_path, monkeypatch):
    at = {"000001.jpg": str(tmp_path / "mark")}
    killed = ending(example, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
    monkeypatch.setattr(example, "Detect", killed)
    evaluate = importlib.import_module("ray_evaluate")
    sys.modules["ray"].cloudpickle.register_pickle_by_value(evaluate)
    scores = evaluate.main(str(run.workdir), str(tmp_path / "out"))
    expected = mrcnn.evaluate(run.workdir, output=tmp_path / "expected")
    assert scores.pop("per_category") == expected.pop("per_category")
    assert scores == expected and (tmp_path / "out" / "metrics.json").exists()
    assert os.path.exists(at["000001.jpg"])
