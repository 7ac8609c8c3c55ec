"""The job that reproduces published tables: what it starts, repeats and reports."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import reproduce_job
from benchmarks.reproduce import report
from benchmarks.reproduce_job import Programs, Stopped, environments, run_parts
from benchmarks.reproduce_parts import Part, check_weights, parts, read_settings, result_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "RECIPES": "coco_nvidia_pytorch", "PRECISIONS": "tf32", "GPUS": "1 2", "SEEDS": "0 1",
    "DATA": "/their data", "WEIGHTS": "/weights", "OUT": "/out",
}  # fmt: skip


def planned(*arguments, **changes) -> dict[str, Part]:
    return {part.name: part for part in parts(read_settings(arguments, SMALL | changes))}


def test_the_parts_are_the_published_measurements_in_the_order_of_their_cost():
    found = planned()
    folder = "coco_nvidia_pytorch/tf32"
    infer = [f"{folder}/infer-{gpus}-{images}.json" for gpus in (1, 2) for images in (1, 2, 4, 8)]
    runs = [f"{folder}/accuracy-{gpus}-{seed}.json" for gpus, seed in ((1, 0), (2, 0), (2, 1))]
    assert list(found) == ["data.json", f"{folder}/train-12.json", *infer, *runs]
    assert [part.gpus for part in found.values()] == [1, 2, 1, 1, 1, 1, 2, 2, 2, 2, 1, 2, 2]
    everything = [part.name for part in parts(read_settings([], {}))]
    # Per precision: throughputs; accuracies on 1 and 4 GPUs with a seed, on 8 with five.
    assert len(everything) == len(set(everything)) == 1 + 2 * (4 + 3 * (3 + 3 + 4) + 3 * 7)


def test_the_programs_have_the_settings_of_their_part():
    folder = "coco_nvidia_pytorch/tf32"
    recipe = ["--config=coco_nvidia_pytorch", "--platform=gpu", "--config.train.precision=tf32"]
    recipe += ["--config.model.init_from=/weights/R-50.pkl"]
    recipe += ["--config.data.train_images=/their data/train2017", "--config.data.num_workers=3"]
    recipe += ["--config.data.val_json=/their data/annotations/instances_val2017.json"]
    found = planned("--config.data.num_workers=3", STEPS="7")
    for name, module, *own in (
        ("train-12", "benchmark", "train", "--config.train.batch_size=24", "--devices=1,2"),
        ("infer-2-8", "benchmark", "infer", "--config.eval.batch_size=8"),
        ("accuracy-2-1", "train", "--config.train.seed=1"),
    ):
        command = found[f"{folder}/{name}.json"].command
        assert command[:3] == [sys.executable, "-m", f"mask_rcnn_jax.{module}"]
        assert {*recipe, *own} <= set(command)
    assert "--steps=7" in found[f"{folder}/infer-2-8.json"].command
    assert "--workdir=/out/runs/coco_nvidia_pytorch-tf32-2-1" in command
    assert "--config.train.images_per_device=12" in command
    assert found["data.json"].command[3:] == ["coco2017", "--data_dir=/their data"]


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("RECIPES", "coco_tao", "RECIPES has 'coco_tao', expected coco, coco_nvidia_tf1, "),
        ("PRECISIONS", "tf32 half", "PRECISIONS has 'half', expected tf32, "),
        ("GPUS", "two", "GPUS is 'two', expected numbers from 1"),
        ("GPUS", "0 1", "GPUS is '0 1', expected numbers from 1"),
        ("GPUS", " ", "GPUS is ' ', expected numbers from 1"),
        ("SEEDS", "-1", "SEEDS is '-1', expected numbers from 0"),
    ],
)
def test_a_setting_that_has_no_meaning_is_refused(name, value, line):
    with pytest.raises(ValueError, match=line):
        read_settings([], SMALL | {name: value})


def test_weights_must_be_the_whole_file(tmp_path):
    settings = read_settings([], SMALL | {"WEIGHTS": str(tmp_path)})
    (tmp_path / "R-50.pkl.part").touch()
    with pytest.raises(ValueError, match="R-50.pkl is missing, see docs/recipes.md"):
        check_weights(settings)
    (tmp_path / "R-50.pkl").touch()
    check_weights(settings)
    (tmp_path / "nvidia_rn50_tf_amp.data-00000-of-00001").touch()
    with pytest.raises(ValueError, match="nvidia_rn50_tf_amp.index is missing"):
        check_weights(read_settings([], SMALL | {"RECIPES": "coco", "WEIGHTS": str(tmp_path)}))


def test_programs_get_the_first_gpus_and_no_job_starts_with_fewer(monkeypatch):
    settings = read_settings([], SMALL)
    found = environments(settings, {"CUDA_VISIBLE_DEVICES": "5,GPU-8932f937,3", "HOME": "/h"})
    visible = {gpus: one["CUDA_VISIBLE_DEVICES"] for gpus, one in found.items()}
    assert visible == {1: "5", 2: "5,GPU-8932f937"} and found[1]["HOME"] == "/h"
    with pytest.raises(ValueError, match="GPUS has 2, but CUDA_VISIBLE_DEVICES names 1"):
        environments(settings, {"CUDA_VISIBLE_DEVICES": "5"})
    with pytest.raises(ValueError, match="names 0"):
        environments(settings, {"CUDA_VISIBLE_DEVICES": ""})
    listed = "GPU 0: NVIDIA A100 (UUID: GPU-1)\n  MIG 1g.5gb Device 0: (UUID: MIG-1)\n"
    monkeypatch.setattr(reproduce_job, "_output", lambda *command: listed)
    with pytest.raises(ValueError, match="GPUS has 2, but nvidia-smi names 1"):
        environments(settings, {})
    monkeypatch.setattr(reproduce_job, "_output", lambda *command: listed + "GPU 1: NVIDIA A100\n")
    assert environments(settings, {})[2]["CUDA_VISIBLE_DEVICES"] == "0,1"


def test_a_rehearsal_needs_no_gpu_weights_or_data():
    settings = read_settings(["--rehearse", "--debug"], SMALL | {"GPUS": "1 2"})
    check_weights(settings)
    assert environments(settings, {})[2] == {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2"}
    command = list(parts(settings))[-1].command
    assert {"--platform=cpu", "--config.model.rpn.channels=32", "--debug"} <= set(command)
    assert "--config.data.train_images=/out/shapes/train" in command
    assert [flag for flag in command if "init_from" in flag] == ["--config.model.init_from=random"]


def shell(name: str, script: str, **figures) -> Part:
    return Part(name, 1, ["sh", "-c", script], lambda: figures)


def run(out: Path, *todo: Part, programs: Programs | None = None) -> list[str]:
    return run_parts(todo, out, programs or Programs(), {1: dict(os.environ)})


def test_finished_parts_are_kept_and_failed_ones_named_and_repeated(tmp_path, capsys):
    note = f"echo $0 >> {tmp_path}/notes; "
    once = shell("ours/tf32/infer-1-8.json", note, device="A100", jax="1", images_per_s=50.0)
    failing = shell("ours/tf32/train-1.json", note + "exit 3", rows=[])
    last = shell("ours/tf32/infer-1-4.json", note, device="A100", jax="1", images_per_s=40.0)
    assert run(tmp_path, once, failing, last) == [failing.name]
    assert f"FAILED: {failing.name}: exit code 3" in capsys.readouterr().out
    assert run(tmp_path, once, failing, last) == [failing.name]
    assert len((tmp_path / "notes").read_text().splitlines()) == 4
    text = (tmp_path / "report.md").read_text()
    assert "| 1 | 8 | tf32 | 50.0 |  |" in text and "| 1 | 4 | tf32 | 40.0 |  |" in text
    assert len(list((tmp_path / "parts").rglob("*.json*"))) == 2


def test_a_part_on_another_number_of_gpus_is_not_kept(tmp_path, capsys):
    wrong = shell("ours/tf32/infer-1-8.json", "", images_per_s=50.0, devices=4)
    assert run(tmp_path, wrong) == [wrong.name]
    assert "was measured on 4 devices, expected 1" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.json"))


def test_nothing_goes_on_without_the_data(tmp_path):
    after = shell("ours/tf32/train-1.json", f"touch {tmp_path}/started", rows=[])
    assert run(tmp_path, shell("data.json", "exit 1"), after) == ["data.json"]
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    "script",
    [
        "exit 75",  # told to stop by Slurm or a user, without the job
        "kill -TERM $$; sleep 60",
        "kill -TERM $PPID; exec sleep 60",
        "kill -INT $PPID; exec sleep 60",
        "trap 'exit 1' TERM; kill -TERM $PPID; while :; do sleep 0.01; done",
    ],
)
def test_what_is_told_to_stop_ends_the_job_and_its_program(script, tmp_path):
    programs, handler = Programs(), signal.getsignal(signal.SIGINT)
    after = shell("after.json", f"touch {tmp_path}/started")
    with programs.stoppable(), pytest.raises(Stopped):
        run(tmp_path, shell("first.json", script), after, programs=programs)
    told = {"-TERM $PPID": signal.SIGTERM, "-INT": signal.SIGINT}
    assert programs.signal == next((n for word, n in told.items() if word in script), None)
    assert not (tmp_path / "started").exists() and not list(tmp_path.rglob("*.json"))
    assert signal.getsignal(signal.SIGINT) is handler


def test_a_part_that_ends_well_although_told_to_stop_is_kept(tmp_path):
    programs = Programs()
    ending = shell("first.json", "trap 'exit 0' TERM; kill -TERM $PPID; while :; do :; done", a=1)
    with programs.stoppable(), pytest.raises(Stopped):
        run(tmp_path, ending, shell("after.json", ""), programs=programs)
    assert json.loads((tmp_path / "parts" / "first.json").read_text()) == {"a": 1}


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """Stand-ins: `told` has what scontrol was told to do, `state` what it says of the job."""
    show = f"case $1 in show) cat '{tmp_path}/state' ;; *) echo \"$@\" > '{tmp_path}/told' ;; esac"
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{show}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


RUNNING = {"JobState": "RUNNING", "PreemptTime": "None", "BatchFlag": "1"}


SAVE = "mkdir -p {out}/runs/a/checkpoints/20; "


@pytest.mark.parametrize(
    ("change", "script", "code", "requeued"),
    [
        ({}, SAVE + "exit 75", 75, True),
        ({}, "exit 75", 75, False),  # it would come back for ever
        ({}, "mkdir -p {out}/runs/a/checkpoints/20.tmp; exit 75", 75, False),
        ({"PreemptTime": "2026-11-23T00:00:00"}, "exit 75", 75, True),
        ({"JobState": "COMPLETING"}, SAVE + "exit 75", 75, False),  # scancel
        ({"BatchFlag": "0"}, SAVE + "exit 75", 75, False),  # salloc
        ({}, SAVE + "kill -INT $PPID; exec sleep 60", 130, False),
        ({}, SAVE + "exit 1", 1, False),
    ],
)
def test_a_stopped_job_is_requeued_if_slurm_runs_it_and_it_has_gone_on(
    change, script, code, requeued, slurm, monkeypatch
):
    out = slurm / "out"
    (out / "runs/a/checkpoints/10").mkdir(parents=True)
    state = "JobId=7 JobName=a\n   " + " ".join(f"{k}={v}" for k, v in (RUNNING | change).items())
    (slurm / "state").write_text(state)
    one = shell("data.json", script.format(out=out))
    monkeypatch.setattr(reproduce_job, "parts", lambda settings: [one])
    environ = {"OUT": str(out), "SLURM_JOB_ID": "7", "PATH": os.environ["PATH"]}
    assert reproduce_job.main(["--rehearse"], SMALL | environ | {"GPUS": "1"}) == code
    assert (slurm / "told").exists() == requeued
    if requeued:
        assert (slurm / "told").read_text() == "requeue 7\n"


def test_a_finished_part_is_progress(slurm, monkeypatch):
    (slurm / "state").write_text(" ".join(f"{k}={v}" for k, v in RUNNING.items()))
    todo = [shell("data.json", "", a=1), shell("second.json", "exit 75")]
    monkeypatch.setattr(reproduce_job, "parts", lambda settings: todo)
    environ = SMALL | {"OUT": str(slurm / "out"), "SLURM_JOB_ID": "7"}
    environ |= {"PATH": os.environ["PATH"], "GPUS": "1"}
    assert reproduce_job.main(["--rehearse"], environ) == 75
    (slurm / "told").unlink()
    assert reproduce_job.main(["--rehearse"], environ) == 75
    assert not (slurm / "told").exists()


def test_the_result_of_a_run_is_its_last_evaluation_and_the_time_of_its_steps(tmp_path):
    for step, ap in ((2, 0.1), (10, 0.3)):
        (tmp_path / "eval" / str(step)).mkdir(parents=True)
        (tmp_path / "eval" / str(step) / "metrics.json").write_text(f'{{"AP": {ap}}}')
    records = [{"step": 1, "perf/ms_per_step": 5000.0}, {"step": 6, "perf/ms_per_step": 1000.0}]
    records += [{"step": 6, "ap/box": 0.1}, {"step": 10, "perf/ms_per_step": 2000.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    assert result_of(tmp_path) == {"AP": 0.3, "hours": pytest.approx((5 + 5 * 1 + 4 * 2) / 3600)}


def test_a_report_has_the_published_figures_of_the_same_gpus_images_and_precision(tmp_path):
    folder = tmp_path / "ours" / "float16"
    folder.mkdir(parents=True)
    for seed, box_ap in enumerate((0.375, 0.385)):
        result = {"AP": box_ap, "mask_AP": 0.34, "hours": 1.5 + seed}
        (folder / f"accuracy-8-{seed}.json").write_text(json.dumps(result))
    row = {"devices": 8, "images_per_s": 400.04, "efficiency": 0.9}
    about = {"device": "H100", "jax": "0.10.2"}
    (folder / "train-4.json").write_text(json.dumps(about | {"rows": [row, row | {"devices": 4}]}))
    infer = about | {"images_per_s": 90, "devices": 1}
    (folder / "infer-1-12.json").write_text(json.dumps(infer))
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
    (folder / "infer-8-12.json").write_text(json.dumps(infer | {"devices": 4}))
    with pytest.raises(ValueError, match="infer-8-12.json was measured on 4 devices, expected 8"):
        report(tmp_path, {"ours": page})


def start(script: Path, *arguments, cwd: Path, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", script, *arguments], cwd=cwd, env=os.environ | environment,
        text=True, capture_output=True,
    )  # fmt: skip


def test_the_script_names_a_mistake_in_one_line(tmp_path):
    done = start(
        ROOT / "launch" / "reproduce.sh", cwd=tmp_path, GPUS="1", CUDA_VISIBLE_DEVICES="3",
        RECIPES="coco_nvidia_pytorch", WEIGHTS="/nowhere", PYTHON=sys.executable,
    )  # fmt: skip
    line = "error: /nowhere/R-50.pkl is missing, see docs/recipes.md for its address"
    assert (done.returncode, done.stderr.splitlines()) == (2, [line])
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_whole_job_on_a_cpu(tmp_path):
    done = start(
        ROOT / "launch" / "reproduce.sh", "--rehearse", cwd=tmp_path, OUT=str(tmp_path),
        PYTHON=sys.executable, PRECISIONS="tf32", SEEDS="0", GPUS="1 2",
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    text = (tmp_path / "report.md").read_text()
    for recipe in ("coco", "coco_nvidia_tf1", "coco_nvidia_pytorch"):
        section = text.partition(f"## {recipe}\n")[2].partition("\n## ")[0]
        for table, rows in (("Accuracy", 2), ("Training", 2), ("Prediction", 2)):
            lines = section.partition(f"### {table}")[2].partition("\n### ")[0].splitlines()
            assert sum(line.startswith("| ") for line in lines) == rows + 2, section
