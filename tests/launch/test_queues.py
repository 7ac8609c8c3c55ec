"""What k8s-kueue.yaml and skypilot.yaml say, and that it fits what they start."""

import copy
import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.launch.jobset_schema import errors
from tests.launch.kueue_schema import KUEUE, SCHEMA

ROOT = Path(__file__).resolve().parents[2]
SKYPILOT = ROOT / "launch" / "skypilot.yaml"


@pytest.fixture
def queues() -> dict[str, dict]:
    return {value["kind"]: value for value in yaml.safe_load_all(KUEUE.read_text())}


def test_the_queues_fit_the_published_schemas(queues):
    schemas = json.loads(SCHEMA.read_text())
    assert [errors(value, schemas[kind]) for kind, value in queues.items()] == [[]] * 3
    faults = {
        "unknown 'cohort'": lambda spec: spec.update(cohort="all"),
        "'Always' is none of": lambda spec: spec["preemption"].update(withinClusterQueue="Always"),
        "is no number or text": lambda spec: spec["resourceGroups"][0]["flavors"][0]["resources"][
            0
        ].update(nominalQuota=[]),
    }
    for expected, change in faults.items():
        changed = copy.deepcopy(queues["ClusterQueue"])
        change(changed["spec"])
        (found,) = errors(changed, schemas["ClusterQueue"])
        assert expected in found


def test_a_job_fits_the_queue(queues):
    flavor, cluster, local = (
        queues[kind] for kind in ("ResourceFlavor", "ClusterQueue", "LocalQueue")
    )
    assert local["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    (part,) = group["flavors"]
    assert part["name"] == flavor["metadata"]["name"]
    quota = {entry["name"]: entry["nominalQuota"] for entry in part["resources"]}
    assert group["coveredResources"] == list(quota)
    jobset = yaml.safe_load((ROOT / "launch" / "k8s-jobset.yaml").read_text())
    (job,) = jobset["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    limits = container["resources"]["limits"]
    assert (
        limits["nvidia.com/gpu"] * job["template"]["spec"]["parallelism"] == quota["nvidia.com/gpu"]
    )
    for path in (ROOT / "launch").glob("k8s-*.yaml"):
        asked = re.findall(
            r"^ *(cpu|memory|[\w.-]+/gpu|ephemeral-storage):", path.read_text(), re.M
        )
        assert set(asked) <= set(quota), path.name
    (name,) = re.findall(r"kueue.x-k8s.io/queue-name=(\S+)", KUEUE.read_text())
    assert name == local["metadata"]["name"]


def test_skypilot_starts_each_node_with_its_number(tmp_path):
    task = yaml.safe_load(SKYPILOT.read_text())
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "${JAX_COMPILATION_CACHE_DIR-unset} $*"\n')
    python.chmod(0o755)
    environment = os.environ | {
        "HOME": str(tmp_path),
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        **{name: "s3://mine" for name in task["envs"]},
    }
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    done = subprocess.run(
        ["bash", "-c", task["run"]], cwd=ROOT, env=environment, text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    cache, *command = done.stdout.split()
    assert cache == "unset"  # there is no folder beside a workdir in a bucket
    assert command[:2] == ["-m", "mask_rcnn_jax.train"]
    assert command[command.index("--workdir") + 1] == "s3://mine/runs/coco"
    assert command[-3:] == [
        "--coordinator_address=10.0.0.1:1234", "--num_processes=2", "--process_id=1"
    ]  # fmt: skip
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [os.EX_TEMPFAIL]
    extras = re.findall(r"\.\[([\w,]+)\]", task["setup"])[0].split(",")
    assert all(re.search(f"^{extra} = ", (ROOT / "pyproject.toml").read_text(), re.M)
               for extra in extras)  # fmt: skip


def test_skypilot_reads_its_task(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(ROOT)
    sky = pytest.importorskip("sky")
    config = yaml.safe_load(SKYPILOT.read_text())
    bucket = [("BUCKET", "s3://mine")]
    task = sky.Task.from_yaml_config(copy.deepcopy(config), env_overrides=bucket)
    (resources,) = task.resources
    assert resources.use_spot and resources.accelerators == {"H100": 8}
    assert resources.job_recovery["recover_on_exit_codes"] == [os.EX_TEMPFAIL]
    with pytest.raises(ValueError, match="BUCKET"):
        sky.Task.from_yaml_config(copy.deepcopy(config))
