"""Shards change neither canvases nor batches, so no bit of a result depends on them."""

import json
import signal
import time
from pathlib import Path

import cv2
import numpy as np
import pytest

from mask_rcnn_jax import infer
from mask_rcnn_jax.data import canvases
from mask_rcnn_jax.predict.lists import Images, Shard
from mask_rcnn_jax.predict.merging import merge_shards
from mask_rcnn_jax.predict.shards import read_record
from mask_rcnn_jax.weights.restore import restore
from tests.commands.command import check_done, run_captured, start
from tests.commands.small_run import untrained_run

SHORTEST = {"data.resize": "shortest_edge", "data.image_size": (128, 256)}
SHORTEST |= {"model.input.pad_multiple": 32}
COUNT, SHARDS = 13, 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return untrained_run(tmp_path_factory.mktemp("shortest"), *SHORTEST.items())


@pytest.fixture
def listed(tmp_path, monkeypatch) -> str:
    """Images of sizes that a shard's own images would need other canvases for."""
    monkeypatch.chdir(tmp_path)
    rng, names = np.random.default_rng(1), [f"{n}.png" for n in range(COUNT)]
    for name in names:
        height, width = (64, 60) if Shard(0, SHARDS).has(name) else (64, int(rng.integers(60, 120)))
        cv2.imwrite(name, rng.integers(0, 256, (height, width, 3), dtype=np.uint8))
    Path("list.txt").write_text("\n".join(names))
    return "@list.txt"


@pytest.fixture
def cheap(monkeypatch):
    """Canvases cost nothing to compile, and headers of every third image are read."""
    monkeypatch.setattr(canvases, "COMPILING", {"cpu": 1.0, "gpu": 1.0})
    monkeypatch.setattr(infer, "MOST_HEADERS", COUNT // 3 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 4])
def test_every_shard_has_the_canvases_and_the_batches_of_one_run(
    batch_size, run, listed, cheap, tmp_path
):
    def detect(output, **options):
        given = infer.Options(score_threshold=0.0, batch_size=batch_size, **options)
        infer.infer(None, str(run.workdir), [listed], str(output), given)

    detect(tmp_path / "one", no_images=True)
    for shard in range(SHARDS):
        detect(tmp_path / "shards", shard=f"{shard}/{SHARDS}")
    records = [read_record(path) for path in (tmp_path / "shards").glob("*.jsonl")]
    assert len(records) == SHARDS
    (chosen,) = {json.dumps(record["canvases"]) for record in records}
    assert len(json.loads(chosen)) > 2  # beside landscape and portrait
    recipe, images = restore(None, run.workdir).recipe, Images([], [listed])
    own = [image for _, image in images.share(Shard(0, SHARDS))]
    alone, all_of_them = (infer._with_canvases(recipe, some, 1) for some in (own, images))
    assert alone.data.canvases != all_of_them.data.canvases
    merge_shards(str(tmp_path / "shards"), str(tmp_path / "merged"))
    one, merged = (tmp_path / name / "detections.json" for name in ("one", "merged"))
    assert len(json.loads(one.read_text())) > COUNT and merged.read_bytes() == one.read_bytes()


@pytest.mark.slow
def test_other_canvases_are_a_warning(run, listed, cheap, tmp_path, monkeypatch, caplog):
    """As by a machine with more devices: nothing is lost for a difference in the last digits."""
    for shard in range(2):
        given = infer.Options(score_threshold=0.0, shard=f"{shard}/2")
        infer.infer(None, str(run.workdir), [listed], str(tmp_path), given)
        monkeypatch.setattr(canvases, "COMPILING", {"cpu": 1e12, "gpu": 1e12})
    merge_shards(str(tmp_path), str(tmp_path))
    assert "shards were made on different canvases" in caplog.text


@pytest.mark.slow
def test_killed_shards_end_like_one_run(untrained, tmp_path, cache, monkeypatch):
    """Each is killed while it writes."""
    monkeypatch.chdir(tmp_path)
    rng, names = np.random.default_rng(2), [f"{n}.png" for n in range(320)]
    for name in names:
        cv2.imwrite(name, rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    Path("list.txt").write_text("\n".join(names))
    command = ["--workdir", untrained.workdir, "--input=@list.txt", "--score_threshold=0"]
    check_done(run_captured("infer", *command, "--no_images", "--output", tmp_path / "one"))
    output = tmp_path / "shards"
    for shard in range(2):
        given = [*command, f"--shard={shard}/2", "--output", output]
        process = start("infer", *given, cache=cache)
        drafts = f".shard-0000{shard}-*.tmp"
        while process.poll() is None:
            if any(path.stat().st_size for path in output.glob(drafts)):
                break
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "the shard ended before it was killed"
        assert not list(output.glob(f"shard-0000{shard}-*"))
        check_done(run_captured("infer", *given))
    check_done(run_captured("infer", "--merge", output))
    one, merged = (folder / "detections.json" for folder in (tmp_path / "one", output))
    assert merged.read_bytes() == one.read_bytes()
