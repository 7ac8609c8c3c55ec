"""launch/slurm.sh on a real Slurm: two nodes train, are interrupted, and end as if they were not.
Also launch/reproduce.sh with a stand-in for its programs.

The program is the real `train` with its loop, checkpoints, signals and exit codes around a stubbed
model, see tests/training/stubbed_run.py; the last test trains a real model.
"""

import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mask_rcnn_jax.formats.shapes import write_shapes
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.commands.command import ROOT, SMALL, config_flags, data_entries, environment
from tests.launch.slurm_cluster import Cluster, can_run, wait_until
from tests.training.stubbed_run import kept, series

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run(), reason="needs slurm-wlm, munge and root"),
]
SCRIPT = ROOT / "launch" / "slurm.sh"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Cluster(tmp_path_factory.mktemp("slurm") / "cluster") as cluster:
        yield cluster


def program(folder: Path, text: str) -> str:
    """The path of a script that stands in for Python."""
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def stubbed(cluster, folder: Path, *options: str, seconds: float = 1.0) -> int:
    """Submit a run of 12 steps of so many seconds each; its workdir is `folder`/run."""
    run = f"tests.training.stubbed_run run wait={seconds} --lost_after=20"
    stub = f"exec {sys.executable} -m {run} $5"
    where = {"PYTHON": program(folder, stub), "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    return cluster.submit(*options, SCRIPT, "train", "--workdir", "run", cwd=folder, **where)


def log(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("*.log"))


def has_saved(folder: Path, step: int):
    return lambda: (folder / "run" / "checkpoints" / str(step)).exists()


@pytest.fixture(scope="module")
def whole(cluster, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert cluster.wait(stubbed(cluster, folder)) == ("COMPLETED", 0, "0:0"), log(folder)
    assert "finished at step 12" in log(folder)
    return folder / "run"


def preempt(cluster, folder, job):
    urgent = cluster.submit("--partition=urgent", "--wrap=sleep 20", cwd=folder)
    assert cluster.wait(urgent)[0] == "COMPLETED"


def kill_node(cluster, folder, job):
    cluster.kill_node("node2", job)


def kill_task(cluster, folder, job):
    (task,) = [
        pid
        for pid in cluster.processes(job, SLURM_PROCID="1")
        if b"stubbed_run" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[2]
    ]
    os.kill(task, signal.SIGKILL)


INTERRUPTIONS = {
    "preempted": ([], preempt, "resuming at step"),
    "preempted with grace time": (["--partition=grace"], preempt, "stopped by SIGTERM"),
    # Of two minutes; Slurm may send the signal a minute early.
    "time limit": (["--time=2", "--signal=TERM@50"], lambda *_: None, "stopped by SIGTERM"),
    "node died": ([], kill_node, "resuming at step"),
    "task killed": ([], kill_task, "requeued at step"),
    "told to stop": (
        [],
        lambda cluster, folder, job: cluster.run("scancel", "--signal=TERM", str(job)),
        "requeued at step",
    ),
}


@pytest.mark.parametrize("name", INTERRUPTIONS)
def test_an_interrupted_run_ends_like_one_that_was_not(name, cluster, whole, tmp_path):
    options, interrupt, said = INTERRUPTIONS[name]
    seconds = 8.0 if name == "time limit" else 1.0
    job = stubbed(cluster, tmp_path, *options, seconds=seconds)
    wait_until(has_saved(tmp_path, 4))
    interrupt(cluster, tmp_path, job)
    state, restarts, code = cluster.wait(job)
    print(f"{name}: {state}, {restarts} restarts, exit code {code}")
    assert (state, code) == ("COMPLETED", "0:0") and restarts >= 1, log(tmp_path)
    assert said in log(tmp_path) and "finished at step 12" in log(tmp_path)
    assert series(tmp_path / "run") == series(whole)
    assert kept(tmp_path / "run") == kept(whole)
    check_same(tmp_path / "run", whole)


def check_same(workdir: Path, other: Path) -> None:
    jax.tree.map(np.testing.assert_array_equal, load_checkpoint(workdir), load_checkpoint(other))


WAITS = "exec sleep 60"  # ended by SIGTERM: 143
IGNORES = "trap '' TERM; sleep 60"  # ended by SIGKILL: 137


@pytest.mark.parametrize(
    "code, save, other, expected, said",
    [
        (75, "", WAITS, ("FAILED", 0, "75:0"), "error: not requeued: no checkpoint after step 0"),
        (2, "mkdir -p run/checkpoints/1;", WAITS, ("FAILED", 0, "2:0"), ""),
        (1, "mkdir -p run/checkpoints/1;", IGNORES, ("FAILED", 0, "1:0"), ""),
        # The second start has no progress.
        (75, "mkdir -p run/checkpoints/1;", WAITS, ("FAILED", 1, "75:0"), "after step 1 since"),
    ],
)
def test_what_cannot_go_on_is_not_started_again(
    code, save, other, expected, said, cluster, tmp_path
):
    """The task that fails decides, and not the other one, which srun ends."""
    python = program(
        tmp_path, f"[ $SLURM_PROCID = 0 ] || {{ {other}; }}\nsleep 1; {save} exit {code}"
    )
    job = cluster.submit(SCRIPT, "train", "--workdir=run", cwd=tmp_path, PYTHON=python)
    assert cluster.wait(job) == expected, log(tmp_path)
    assert said in log(tmp_path)
    assert not list(tmp_path.glob("*.codes"))


def test_scancel_ends_a_run_for_good(cluster, tmp_path):
    text = "trap 'mkdir -p run/checkpoints/2; exit 75' TERM; mkdir -p run/checkpoints/1; "
    python = program(tmp_path, text + "while :; do sleep 0.1; done")
    job = cluster.submit(SCRIPT, "train", "--workdir=run", cwd=tmp_path, PYTHON=python)
    wait_until(has_saved(tmp_path, 1))
    cluster.run("scancel", str(job))
    state, restarts, _ = cluster.wait(job)
    assert (state[:6], restarts) == ("CANCEL", 0)
    assert has_saved(tmp_path, 2)() and "requeued" not in log(tmp_path)


AS_AT_ITS_TIME_LIMIT = ["scancel", "--signal=TERM", "--batch"]
REPRODUCE = """
import os, sys
from benchmarks import reproduce_job
from benchmarks.reproduce_parts import Part
script = '''
[ -e out/runs/a/checkpoints/1 ] && exit 0
mkdir -p out/runs/a/checkpoints
trap '{save} exit 75' TERM
touch started
while :; do sleep 0.1; done
'''
reproduce_job.parts = lambda settings: [Part("data.json", 1, ["sh", "-c", script], dict)]
sys.exit(reproduce_job.main(["--rehearse"], os.environ))
"""


@pytest.mark.parametrize(
    "command, save, expected",
    [
        (["scancel"], "mkdir out/runs/a/checkpoints/1;", ("CANCEL", 0)),
        (AS_AT_ITS_TIME_LIMIT, "mkdir out/runs/a/checkpoints/1;", ("COMPLE", 1)),
        (AS_AT_ITS_TIME_LIMIT, "", ("FAILED", 0)),
    ],
)
def test_reproduce_is_requeued_unless_canceled_or_without_progress(
    command, save, expected, cluster, tmp_path
):
    (tmp_path / "job.py").write_text(REPRODUCE.format(save=save))
    python = program(tmp_path, f"exec {sys.executable} {tmp_path}/job.py")
    script = SCRIPT.with_name("reproduce.sh")
    job = cluster.submit("--nodes=1", script, cwd=tmp_path, PYTHON=python, OUT="out", GPUS="1")
    wait_until((tmp_path / "started").exists, 60)
    cluster.run(*command, str(job))
    state, restarts, _ = cluster.wait(job, 120)
    assert (state[:6], restarts) == expected, log(tmp_path)
    assert (tmp_path / "out/runs/a/checkpoints/1").exists() == bool(save)
    assert "stopped early" in log(tmp_path)


def test_a_real_model_ends_the_same_after_a_preemption(cluster, tmp_path):
    write_shapes(tmp_path / "shapes", train=14, val=4, size=(64, 64))
    pairs = [
        (tmp_path / f"shapes/annotations/instances_{split}.json", tmp_path / "shapes" / split)
        for split in ("train", "val")
    ]
    changes = {"train.steps": 40, "train.checkpoint_every": 2, "train.eval_every": 40}
    flags = config_flags(SMALL | data_entries(*pairs) | changes)
    where = {
        name: value
        for name, value in environment(tmp_path / "compiled", 1).items()
        if name.startswith("JAX_")
    } | {"PYTHON": sys.executable}
    for name in ("whole", "run"):
        command = (SCRIPT, "train", *flags, f"--workdir={name}")
        job = cluster.submit("--partition=grace", *command, cwd=tmp_path, **where)
        if name == "run":
            wait_until(has_saved(tmp_path, 2))
            preempt(cluster, tmp_path, job)
        state, restarts, _ = cluster.wait(job, 3000)
        assert (state, restarts) == ("COMPLETED", int(name == "run")), log(tmp_path)
    assert series(tmp_path / "run") == series(tmp_path / "whole")
    check_same(tmp_path / "run", tmp_path / "whole")
