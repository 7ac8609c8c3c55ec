"""Shards and parts change neither canvases nor batches, so no bit of a result depends on them."""

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
from mask_rcnn_jax.predict.merging import merge_parts
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
        detect(tmp_path / "parts", shard=f"{shard}/{SHARDS}", part_size=3)
    records = [json.loads(p.read_text()) for p in (tmp_path / "parts").glob("*.json")]
    assert len(records) >= COUNT / 3
    (chosen,) = {json.dumps(record["canvases"]) for record in records}
    assert len(json.loads(chosen)) > 2  # beside landscape and portrait
    recipe, images = restore(None, run.workdir).recipe, Images([], [listed])
    own = [image for _, image in images.share(Shard(0, SHARDS))]
    alone, all_of_them = (infer._with_canvases(recipe, some, 1) for some in (own, images))
    assert alone.data.canvases != all_of_them.data.canvases
    merge_parts(str(tmp_path / "parts"), str(tmp_path / "merged"))
    one, merged = (tmp_path / name / "detections.json" for name in ("one", "merged"))
    assert len(json.loads(one.read_text())) > COUNT and merged.read_bytes() == one.read_bytes()


@pytest.mark.slow
def test_other_canvases_are_a_warning(run, listed, cheap, tmp_path, monkeypatch, caplog):
    """As by a machine with more devices: nothing is lost for a difference in the last digits."""
    for shard in range(2):
        given = infer.Options(score_threshold=0.0, shard=f"{shard}/2")
        infer.infer(None, str(run.workdir), [listed], str(tmp_path), given)
        monkeypatch.setattr(canvases, "COMPILING", {"cpu": 1e12, "gpu": 1e12})
    merge_parts(str(tmp_path), str(tmp_path))
    assert "parts were made on different canvases" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("shards, kills", [(1, 1), (2, 2)])
def test_killed_shards_end_like_one_run(shards, kills, untrained, tmp_path, cache, monkeypatch):
    """Each is killed while it writes a part after one that it has finished."""
    monkeypatch.chdir(tmp_path)
    rng, names = np.random.default_rng(2), [f"{n}.png" for n in range(160 * shards)]
    for name in names:
        cv2.imwrite(name, rng.integers(0, 256, (64, 64, 3), dtype=np.uint8))
    Path("list.txt").write_text("\n".join(names))
    command = ["--workdir", untrained.workdir, "--input=@list.txt", "--score_threshold=0"]
    check_done(run_captured("infer", *command, "--no_images", "--output", tmp_path / "one"))
    output = tmp_path / "parts"
    for shard in range(shards):
        parts = [*command, f"--shard={shard}/{shards}", "--part_size=20", "--output", output]
        for kill in range(1, kills + 1):
            process = start("infer", *parts, cache=cache)
            draft = f".part-0000{shard}-*.tmp"
            while process.poll() is None:
                done = len(list(output.glob(f"part-0000{shard}-*.json")))
                if done >= kill and any(path.stat().st_size for path in output.glob(draft)):
                    break
                time.sleep(0.001)
            process.send_signal(signal.SIGKILL)
            process.communicate()
            assert process.returncode == -signal.SIGKILL, "the shard ended before it was killed"
        done = check_done(run_captured("infer", *parts))
        assert " 0 were there" not in done.stderr
    check_done(run_captured("infer", "--merge", output))
    one, merged = (folder / "detections.json" for folder in (tmp_path / "one", output))
    assert merged.read_bytes() == one.read_bytes()
