"""Scripts that start shards of `infer`: what each task is told, and when it is started again."""

import copy
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.jobset_schema import JOB, SCHEMA, errors, with_job

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ["--workdir", "a b", "--input", "@list.txt", "--output", "out"]
ARRAY = {"TASK_ID": "3", "TASK_MIN": "0", "TASK_MAX": "7", "TASK_COUNT": "8"}


@pytest.fixture
def array(tmp_path, monkeypatch):
    """Starts the script as Slurm does, from a copy, in an array with this change; stand-ins for
    Slurm's commands write what `scontrol` is told to the file `told`."""
    name = "slurm_array_infer.sh"
    scripts = {
        "srun": 'exec "$@"',
        "scontrol": f'case $1 in show) echo "   Command={ROOT}/launch/{name} --x=/{name}"; '
        f'echo "PreemptTime=${{PREEMPTED-None}}" ;; *) echo "$@" >> {tmp_path}/told ;; esac',
        "python": 'echo "$*"; eval "${DOES:-:}"',
    }
    for command, text in scripts.items():
        (tmp_path / command).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / command).chmod(0o755)
    script = shutil.copy(ROOT / "launch" / name, tmp_path / "slurm_script")

    def start(*flags, **environment):
        variables = {f"SLURM_ARRAY_{key}": value for key, value in ARRAY.items()}
        variables |= {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
        variables |= {"PYTHON": str(tmp_path / "python")} | environment
        done = subprocess.run(
            ["bash", script, *flags], cwd=tmp_path, text=True, env=os.environ | variables,
            capture_output=True,
        )  # fmt: skip
        told = tmp_path / "told"
        return done, told.read_text() if told.exists() else ""

    return start


def test_a_task_has_the_share_of_its_number(array):
    done, told = array(*FLAGS)
    expected = "-m mask_rcnn_jax.infer --workdir a b --input @list.txt --output out --shard=3/8"
    assert (done.returncode, done.stdout.strip(), told) == (0, expected, ""), done.stderr
    some = {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "5", "SLURM_ARRAY_TASK_COUNT": "2"}
    done, _ = array(*FLAGS, SHARDS="8", **some)
    assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    "changed",
    [
        {"SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_COUNT": "5"},
        {"SLURM_ARRAY_TASK_COUNT": "4"},  # --array=0-7:2, and 7
    ],
)
def test_an_array_that_is_not_of_all_shards_is_refused(changed, array):
    done, _ = array(*FLAGS, **changed)
    assert (done.returncode, done.stdout) == (2, "")
    assert "error: --array is not from 0 to n - 1: set SHARDS" in done.stderr
    done, _ = array()
    assert done.returncode == 2 and "needs the flags of infer" in done.stderr
    done, _ = array(*FLAGS, SLURM_ARRAY_TASK_ID="")
    assert done.returncode != 0 and "SLURM_ARRAY_TASK_ID: is not set" in done.stderr


@pytest.mark.parametrize(
    "code, environment, requeued",
    [
        (75, {"PREEMPTED": "2026-11-23T00:00:00"}, True),
        (137, {"PREEMPTED": "2026-11-23T00:00:00"}, True),
        (75, {}, False),
        (137, {}, False),
        (0, {}, False),
        (2, {"PREEMPTED": "2026-11-23T00:00:00"}, False),
    ],
)
def test_what_was_preempted_is_started_again(code, environment, requeued, array):
    """What meets the time limit would do so for ever."""
    done, told = array(*FLAGS, DOES=f"exit {code}", **environment)
    assert told == ("requeue 7\n" if requeued else "")
    assert done.returncode == (0 if requeued else code), done.stderr
    assert ("error: stopped early, not preempted" in done.stderr) is (code > 2 and not requeued)


def test_the_job_is_whole():
    job = yaml.safe_load(JOB.read_text())
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] <= spec["completions"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {entry["name"]: entry for entry in container["env"]}
    assert int(environment["SHARDS"]["value"]) == spec["completions"]
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert environment["SHARD"]["valueFrom"]["fieldRef"]["fieldPath"] == index
    assert "--shard=$(SHARD)/$(SHARDS)" in container["args"]
    assert (ROOT / container["command"][0]).stat().st_mode & 0o111
    volume = container["volumeMounts"][0]["mountPath"]  # outlives a pod
    paths = [part for part in container["args"] if part[:2] == "--" and "/" in part]
    assert all(f"{volume}/" in path for path in paths if "shard=" not in path)
    assert environment["JAX_COMPILATION_CACHE_DIR"]["value"].startswith(f"{volume}/")
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # podFailurePolicy needs it
    stopped, evicted, wrong = spec["podFailurePolicy"]["rules"]
    assert stopped["action"] == evicted["action"] == "Ignore" and wrong["action"] == "FailIndex"
    assert stopped["onExitCodes"]["values"] == [os.EX_TEMPFAIL]
    assert wrong["onExitCodes"]["values"] == [2]
    for rule in (stopped, wrong):
        assert rule["onExitCodes"]["containerName"] == container["name"]


def test_the_job_fits_the_published_schema():
    job, schema = yaml.safe_load(JOB.read_text()), json.loads(SCHEMA.read_text())
    assert errors(with_job(job), schema) == []
    faults = {
        "unknown 'backoffLimitPerindex'": {"backoffLimitPerindex": 1},
        "backoffLimitPerIndex: 'ten' is no integer": {"backoffLimitPerIndex": "ten"},
        "must be made anew for 'maxFailedIndexes'": {"maxFailedIndexes": 1},
    }
    for expected, change in faults.items():
        changed = copy.deepcopy(job)
        changed["spec"] |= change
        (found,) = errors(with_job(changed), schema)
        assert expected in found
