"""The job that reproduces published tables: what it starts, repeats and reports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.reproduce import report

ROOT = Path(__file__).resolve().parents[2]
# Stands for Python: notes what it was started with, and leaves what the commands leave. Trainings
# stop early once each, the first of seed 1 fails once.
STAND_IN = """#!/bin/sh
case "$2" in
benchmarks.reproduce) exec "$REAL_PYTHON" "$@" ;;
esac
echo "${CUDA_VISIBLE_DEVICES-none} $*" >>"$NOTES"
for argument; do
  case "$argument" in
  --json=*) json=${argument#--json=} ;;
  --config.train.seed=*) seed=${argument##*=} ;;
  esac
done
case "$2 $3" in
"mask_rcnn_jax.benchmark train")
  row='{"devices": 2, "images_per_s": 20.0, "efficiency": 0.5}'
  echo "{\\"device\\": \\"GPU\\", \\"jax\\": \\"1\\", \\"rows\\": [$row]}" >"$json" ;;
"mask_rcnn_jax.benchmark infer")
  echo '{"device": "GPU", "jax": "1", "images_per_s": 50.0}' >"$json" ;;
mask_rcnn_jax.train*)
  run=$6
  [ -d "$run" ] || { mkdir -p "$run"; [ "$seed" = 1 ] && exit 1; exit 75; }
  mkdir -p "$run/eval/2" "$run/eval/10"
  echo '{"AP": 0.1, "mask_AP": 0.1}' >"$run/eval/2/metrics.json"
  echo "{\\"AP\\": 0.3$seed, \\"mask_AP\\": 0.25}" >"$run/eval/10/metrics.json" ;;
esac
"""


def reproduce(*arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", ROOT / "launch" / "reproduce.sh", *arguments],
        env=os.environ | environment, text=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def job(tmp_path) -> dict[str, str]:
    """An environment with a stand-in for Python, one recipe in one precision, and its weights."""
    program = tmp_path / "python"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "R-50.pkl").touch()
    return {
        "PYTHON": str(program), "REAL_PYTHON": sys.executable, "NOTES": str(tmp_path / "notes"),
        "RECIPES": "coco_nvidia_pytorch", "PRECISIONS": "tf32", "GPUS": "1 2", "SEEDS": "0 1",
        "DATA": str(tmp_path / "coco"), "WEIGHTS": str(weights), "OUT": str(tmp_path / "out"),
    }  # fmt: skip


def test_parts_are_done_once_and_what_stopped_or_failed_is_done_again(job, tmp_path):
    first = reproduce("--config.data.num_workers=3", **job)
    failed = "coco_nvidia_pytorch/tf32/accuracy-2-1.json"
    assert first.returncode == 1 and first.stderr.endswith(f"error: failed: {failed}\n")
    notes = (tmp_path / "notes").read_text().splitlines()
    trainings = [line for line in notes if "mask_rcnn_jax.train " in line]
    # Those of seed 0 on one and two GPUs were stopped and started again.
    assert [line.partition(" ")[0] for line in trainings] == ["0", "0", "0,1", "0,1", "0,1"]
    assert "--config.train.images_per_device=12 --config.train.seed=0" in trainings[0]
    assert f"--config.model.init_from={job['WEIGHTS']}/R-50.pkl" in trainings[0]
    assert all(line.endswith("--config.data.num_workers=3") for line in notes if "prep" not in line)
    assert sum("benchmark train" in line for line in notes) == 1
    assert sum("--config.train.batch_size=24 --devices=1,2" in line for line in notes) == 1
    assert sum("benchmark infer" in line for line in notes) == 8

    second = reproduce(**job)
    assert second.returncode == 0, second.stderr
    again = (tmp_path / "notes").read_text().splitlines()[len(notes) :]
    assert len(again) == 1 and "--config.train.seed=1" in again[0]
    text = (tmp_path / "out" / "report.md").read_text()
    assert second.stdout.endswith(f"{tmp_path / 'out' / 'report.md'}\n")
    assert "| 2 | tf32 | 2 | 30.50 ± 0.71 | 25.00 ± 0.00 | 0.00 |" in text
    assert "| 1 | 8 | tf32 | 50.0 | 30 |" in text


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"RECIPES": "coco_tao"}, "error: RECIPES has coco_tao, expected coco, "),
        ({"WEIGHTS": "/nowhere"}, "error: /nowhere/R-50.pkl is missing, see docs/recipes.md"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(change, line, job, tmp_path):
    done = reproduce(**job | change)
    assert done.returncode == 2 and done.stderr.startswith(line)
    assert not (tmp_path / "notes").exists()


def test_a_report_has_the_published_figures_of_the_same_gpus_images_and_precision(tmp_path):
    folder = tmp_path / "ours" / "float16"
    folder.mkdir(parents=True)
    for seed, box_ap in enumerate((0.375, 0.385)):
        (folder / f"accuracy-8-{seed}.json").write_text(json.dumps({"AP": box_ap, "mask_AP": 0.34}))
        (folder / f"accuracy-8-{seed}.seconds").write_text("1800\n5400\n")
    row = {"devices": 8, "images_per_s": 400.04, "efficiency": 0.9}
    about = {"device": "H100", "jax": "0.10.2"}
    (folder / "train-4.json").write_text(json.dumps(about | {"rows": [row, row | {"devices": 4}]}))
    (folder / "infer-1-12.json").write_text(json.dumps(about | {"images_per_s": 90}))
    page = {
        "page": "theirs", "device": "A100",
        "accuracy": [{"gpus": 8, "tf32": [1, 2, 3], "mixed": [37.95, 34.43, 3.77]}],
        "train": [{"gpus": 8, "images": 2, "mixed": 1}, {"gpus": 8, "images": 4, "mixed": 114.5}],
        "infer": [{"gpus": 1, "images": 12, "tf32": 42.6}],
    }  # fmt: skip
    lines = report(tmp_path, {"ours": page}).splitlines()
    assert "Published: theirs, on A100. Ours: H100 with JAX 0.10.2." in lines
    assert (
        "| 8 | float16 | 2 | 38.00 ± 0.71 | 34.00 ± 0.00 | 2.00 | 37.95 | 34.43 | 3.77 |" in lines
    )
    assert "| 8 | 4 | float16 | 400.0 | 0.90 | 114.5 |" in lines
    assert "| 4 | 4 | float16 | 400.0 | 0.90 |  |" in lines
    assert "| 1 | 12 | float16 | 90.0 |  |" in lines


@pytest.mark.slow
def test_the_whole_job_on_a_cpu(tmp_path):
    done = reproduce(
        "--rehearse", OUT=str(tmp_path), PYTHON=sys.executable, PRECISIONS="tf32", SEEDS="0"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "report.md").read_text()
    for recipe in ("coco", "coco_nvidia_tf1", "coco_nvidia_pytorch"):
        section = text.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
        for table, rows in (("Accuracy", 2), ("Training", 2), ("Prediction", 2)):
            lines = section.partition(f"### {table}")[2].partition("\n### ")[0].splitlines()
            assert sum(line.startswith("| ") for line in lines) == rows + 2, section
