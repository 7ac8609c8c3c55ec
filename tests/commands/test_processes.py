"""Several processes on one run, with real collectives: they agree, stop together and end together.

They are started with launch/multinode.sh.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from mask_rcnn_jax.cli.processes import LOST
from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.bounds import kink_bound
from tests.commands.command import (
    ROOT,
    STEPS,
    check_done,
    config_flags,
    environment,
    error_line,
    files_in,
    run,
    run_inside,
)
from tests.helpers import TINY_TERMS, assert_tree_close
from tests.pair import Pair

GLOO = "UNKNOWN: Gloo AllGather failed: Connection closed by peer"


def launched(*arguments, folder: Path, cache: Path, devices: int = 1) -> Pair:
    """Two processes of one command."""

    def start(index, port):
        where = {
            "COORDINATOR": f"localhost:{port}", "PROCESSES": "2", "PROCESS_ID": str(index),
            "PYTHON": sys.executable,
        }  # fmt: skip
        return [ROOT / "launch" / "multinode.sh", *arguments], environment(cache, devices) | where

    return Pair(start, folder)


def losses_of(workdir: Path, last_step: int = STEPS) -> list[dict]:
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in read_metrics(workdir / "metrics.jsonl")
        if record["step"] <= last_step
    ]


def check_same_series(series: list[dict], expected: list[dict], rel: float) -> None:
    """`rel` is for losses; the gradient is cut where ReLUs lie within rounding of 0."""
    assert [record.keys() for record in series] == [record.keys() for record in expected]
    for record, other in zip(series, expected, strict=True):
        for name, value in other.items():
            bound = max(rel, kink_bound(TINY_TERMS)) if name == "grad_norm" else rel
            assert record[name] == pytest.approx(value, rel=bound, abs=1e-6), name


def check_same_results(folder: Path, expected: Path) -> None:
    """Results of boxes and masks. XLA rounds differently in a program for several devices."""
    for kind in ("bbox", "segm"):
        found, others = (
            json.loads((place / f"{kind}_results.json").read_text()) for place in (folder, expected)
        )
        assert len(found) == len(others) > 0
        for entry, other in zip(found, others, strict=True):
            for name in ("image_id", "category_id"):
                assert entry[name] == other[name]
            assert entry["score"] == pytest.approx(other["score"], abs=1e-5)
            if kind == "bbox":
                assert entry["bbox"] == pytest.approx(other["bbox"], abs=1e-2)


@pytest.mark.slow
def test_two_processes_stop_at_one_step_and_one_process_goes_on(trained, tmp_path, cache):
    """SIGTERM goes to the second process alone. The run ends like one that was never stopped and
    had one process only."""
    workdir = tmp_path / "run"
    command = ("train", *trained.flags, "--workdir", workdir)
    with launched(*command, folder=tmp_path, cache=cache) as pair:
        pair.wait_for(workdir / "checkpoints" / "4")
        pair.processes[1].send_signal(signal.SIGTERM)
        assert pair.codes() == [75, 75], pair.said()
    first, second = (log.read_text() for log in pair.logs)
    step = max(int(folder.name) for folder in (workdir / "checkpoints").iterdir())
    assert 4 <= step < STEPS
    assert f"stopped by SIGTERM, saved step {step} in {workdir}" in first
    assert "step 1 of" in first and "step 1 of" not in second
    expected = losses_of(trained.workdir)
    check_same_series(losses_of(workdir), expected[:step], rel=1e-5)

    done = check_done(run(*command, cache=cache))
    assert f"resuming at step {step} of {STEPS}" in done.stderr
    check_same_series(losses_of(workdir), expected, rel=1e-3)
    assert_tree_close(load_checkpoint(workdir), load_checkpoint(trained.workdir), atol=1e-4)


@pytest.mark.slow
def test_two_processes_evaluate_as_one_does(trained, tmp_path, cache):
    out = tmp_path / "out"
    arguments = ("evaluate", *trained.flags, "--workdir", trained.workdir, "--output", out)
    with launched(*arguments, folder=tmp_path, cache=cache) as pair:
        assert pair.codes() == [0, 0], pair.said()
    first, second = (log.read_text() for log in pair.logs)
    assert "AP       IoU 0.50:0.95" in first and "AP" not in second
    written = files_in(out)
    assert set(written) == {"bbox_results.json", "segm_results.json", "metrics.json"}
    expected = trained.workdir / "eval" / str(STEPS)
    check_same_results(out, expected)
    scores, others = (json.loads((f / "metrics.json").read_text()) for f in (out, expected))
    assert scores.pop("per_category").keys() == others.pop("per_category").keys()
    assert scores == pytest.approx(others, abs=1e-6)


@pytest.mark.slow
def test_two_processes_evaluate_tiles_as_one_does(trained, tmp_path, cache):
    """Three images, so that one process has a tile or two while the other has none."""
    limit = "--config.eval.max_images=3"
    flags = [*trained.flags, limit, "--workdir", trained.workdir, "--tile=40", "--output"]
    one, two = tmp_path / "one", tmp_path / "two"
    check_done(run("evaluate", *flags, one, cache=cache, devices=2))
    with launched("evaluate", *flags, two, folder=tmp_path, cache=cache) as pair:
        assert pair.codes() == [0, 0], pair.said()
    check_same_results(two, one)


@pytest.mark.slow
def test_infer_finds_the_same_on_one_two_and_four_devices(trained, tmp_path, cache):
    """Three pictures, so that four devices have one row without any."""
    pictures = sorted((trained.data_dir / "val").iterdir())[:3]
    inputs = [f"--input={picture}" for picture in pictures]
    found = []
    for devices in (1, 2, 4):
        out = tmp_path / str(devices)
        flags = ["--workdir", trained.workdir, "--output", out, "--score_threshold=0.01"]
        check_done(run("infer", *flags, *inputs, "--batch_size=1", cache=cache, devices=devices))
        found.append(json.loads((out / "detections.json").read_text()))
    assert found[0]
    for others in found[1:]:
        for entry, other in zip(found[0], others, strict=True):
            for name in ("file_name", "image_id", "category_id"):
                assert entry[name] == other[name]
            # XLA rounds differently in a program for several devices.
            assert entry["score"] == pytest.approx(other["score"], abs=1e-5)
            assert entry["bbox"] == pytest.approx(other["bbox"], abs=1e-2)


@pytest.mark.slow
def test_two_processes_with_two_devices_equal_one_with_four(trained, tmp_path, cache):
    """SGD, whose steps follow the gradients; three images are evaluated, so that rows are empty."""
    changes = {
        "optim.name": "sgd", "train.batch_size": 8, "train.steps": 4, "train.eval_every": 4,
        "eval.batch_size": 1, "eval.max_images": 3, "optim.warmup_until": 0.25,
    }  # fmt: skip
    flags = trained.changed(changes)
    one, two = tmp_path / "one", tmp_path / "two"
    check_done(run("train", *flags, "--workdir", one, cache=cache, devices=4))
    with launched(
        "train", *flags, "--workdir", two, folder=tmp_path, cache=cache, devices=2
    ) as pair:
        assert pair.codes() == [0, 0], pair.said()
    check_same_series(losses_of(two), losses_of(one), rel=1e-5)
    assert_tree_close(load_checkpoint(two), load_checkpoint(one), atol=1e-6)
    check_same_results(two / "eval" / "4", one / "eval" / "4")
    pictures = [set(path.name for path in (w / "eval/4/pictures").iterdir()) for w in (one, two)]
    assert pictures[0] == pictures[1] and len(pictures[0]) == 2


@pytest.mark.slow
def test_a_run_of_eight_devices_goes_on_on_fewer(trained, tmp_path, cache):
    """The parts of a batch make up for the devices that are gone."""
    changes = {
        "optim.name": "sgd", "train.batch_size": 8, "train.images_per_device": 1,
        "train.steps": 6, "train.checkpoint_every": 3, "train.eval_every": 6,
        # Losses are of full batches, which are smaller on fewer devices.
        "eval.batch_size": 1, "eval.max_images": 1, "eval.loss_images": 0,
    }  # fmt: skip
    flags = trained.changed(changes)
    whole = tmp_path / "whole"
    check_done(run("train", *flags, "--workdir", whole, cache=cache, devices=8))
    for devices in (1, 4):
        workdir = tmp_path / f"on_{devices}"
        shutil.copytree(whole, workdir)
        shutil.rmtree(workdir / "checkpoints" / "6")
        done = check_done(run("train", *flags, "--workdir", workdir, cache=cache, devices=devices))
        assert "resuming at step 3 of 6" in done.stderr
        check_same_series(losses_of(workdir), losses_of(whole), rel=1e-4)
        assert_tree_close(load_checkpoint(workdir), load_checkpoint(whole), atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_process_that_dies_takes_the_other_down(victim, trained, tmp_path, cache):
    workdir = tmp_path / "run"
    flags = trained.changed({"train.steps": 100_000})
    command = ("train", *flags, "--workdir", workdir, "--lost_after=10")
    with launched(*command, folder=tmp_path, cache=cache) as pair:
        pair.wait_for(workdir / "checkpoints" / "4")
        pair.processes[victim].kill()
        assert pair.processes[1 - victim].wait(90) == 1
    said = pair.logs[1 - victim].read_text()
    assert "Traceback" not in said
    assert "error: " in said or "died" in said or "unavailable" in said.lower(), said


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--process_id=1"], "need --coordinator_address"),
        (["--coordinator_address=host"], "expected HOST:PORT or 'auto'"),
        (["--coordinator_address=host:1"], "needs --num_processes and --process_id"),
        (
            ["--coordinator_address=host:1", "--num_processes=2", "--process_id=2"],
            "--process_id is 2, expected 0 to 1",
        ),
    ],
)
def test_processes_that_are_not_described_are_refused(arguments, expected, capsys):
    code = run_inside("train", *config_flags({}), "--workdir=w", *arguments)
    assert expected in error_line(code, capsys.readouterr().err)


def test_no_cluster_to_find_the_others_in_is_said(cache):
    flags = [*config_flags({}), "--workdir=w", "--coordinator_address=auto"]
    done = run("train", *flags, cache=cache)
    line = error_line(done.returncode, done.stderr)
    assert "set it to HOST:PORT, with --num_processes and --process_id" in line


@pytest.mark.parametrize(
    "message, code, kind",
    [
        (GLOO, 1, "ValueError"),
        pytest.param(GLOO, 1, "jax.errors.JaxRuntimeError", marks=pytest.mark.slow),
        pytest.param("UNAVAILABLE: Socket closed", 1, "ValueError", marks=pytest.mark.slow),
        ("UNAVAILABLE: Socket closed", 1, "jax.errors.JaxRuntimeError"),
        ("train.seed is 0", 2, "ValueError"),
        pytest.param("train.seed is 0", 2, "jax.errors.JaxRuntimeError", marks=pytest.mark.slow),
    ],
)
def test_a_failed_collective_is_no_mistake_of_the_user(message, code, kind):
    """JAX raises it as a ValueError, too. The last line is the one of all lost processes."""
    program = f"""
import sys, jax
from mask_rcnn_jax import cli
def main(_): raise {kind}({message!r})
cli.join_processes, sys.argv = lambda: (0, 2), ["train"]
cli.run(main, lambda: None)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, text=True, capture_output=True)
    if code == 2 and kind != "ValueError":
        code, message = 1, f"JaxRuntimeError: {message} (--debug shows where)"
    elif code == 1:
        assert done.stderr.startswith(f"JAX says: {message}")
        message = LOST
    assert error_line(done.returncode, done.stderr, expected_code=code) == message


def test_processes_that_do_not_find_each_other_say_so():
    """What JAX raises after five minutes, and what it does at the end of the process."""
    program = """
import atexit, sys, jax
from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
def initialize(**flags):
    atexit.register(print, "shut down", file=sys.stderr)
    raise RuntimeError("DEADLINE_EXCEEDED: 1 of 2\\n\\n  tasks registered")
jax.distributed.initialize = initialize
cli.run(lambda _: None, processes.define_processes)
"""
    flags = ["--coordinator_address=host:1", "--num_processes=2", "--process_id=0"]
    command = [sys.executable, "-c", program, *flags]
    done = subprocess.run(command, text=True, capture_output=True)
    line = error_line(done.returncode, done.stderr, expected_code=1)
    where = "--coordinator_address=host:1: the processes did not join."
    assert line == f"{where} JAX says: DEADLINE_EXCEEDED: 1 of 2 tasks registered"


def joining(address: str, index: int, seconds: int, **environment) -> subprocess.CompletedProcess:
    """One of two processes that wait so long for each other; without an address by the cluster."""
    program = f"""
from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
processes.JOIN_S, processes.TRY_S = {seconds}, 0.5
cli.run(lambda _: None, processes.define_processes)
"""
    flags = [f"--coordinator_address={address}"]
    if address != "auto":
        flags += ["--num_processes=2", f"--process_id={index}"]
    command = [sys.executable, "-c", program, *flags]
    return subprocess.run(command, env=os.environ | environment, text=True, capture_output=True)


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


@pytest.mark.parametrize(
    "host, why",
    [
        ("no-such-host.invalid", "the name cannot be resolved"),
        ("localhost", "the connection is refused"),
        pytest.param("[::1]", "the connection is refused", marks=pytest.mark.slow),
    ],
)
def test_a_first_process_that_cannot_be_reached_is_named(host, why):
    address = f"{host}:{closed_port()}"
    done = joining(address, 1, 1)
    line = error_line(done.returncode, done.stderr, expected_code=1)
    expected = f"process 1 cannot reach the first process at {address}: {why}"
    assert line.startswith(f"--coordinator_address={address}: {expected}")
    assert line.endswith("tried for 1 seconds")


def test_what_the_cluster_says_is_named():
    """Of Slurm, whose variables JAX reads."""
    slurm = {
        "SLURM_JOB_ID": "71", "SLURM_STEP_NODELIST": "no-such-host.invalid", "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_NODES": "2",
    }  # fmt: skip
    done = joining("auto", 1, 1, **slurm)
    line = error_line(done.returncode, done.stderr, expected_code=1)
    expected = "--coordinator_address=auto: process 1 cannot reach the first process at "
    assert line.startswith(f"{expected}no-such-host.invalid:") and "cannot be resolved" in line


@pytest.mark.slow
def test_hosts_of_a_tpu_slice_find_each_other():
    """As on GKE, whose variables JAX reads where it sees a TPU; here each has a CPU."""
    program = """
import jax
from jax._src.clusters import cloud_tpu_cluster
from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes
cloud_tpu_cluster.running_in_cloud_tpu_vm = True
main = lambda _: print(jax.process_index(), jax.process_count(), jax.device_count())
cli.run(main, processes.define_processes)
"""
    slices = {
        "TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost,localhost",
        "MEGASCALE_NUM_SLICES": "1", "MEGASCALE_SLICE_ID": "0",
        "MEGASCALE_COORDINATOR_ADDRESS": "localhost", "JAX_COORDINATOR_PORT": str(closed_port()),
        "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1",
    }  # fmt: skip
    command = [sys.executable, "-c", program, "--coordinator_address=auto"]
    hosts = [
        subprocess.Popen(
            command, env=os.environ | slices | {"TPU_WORKER_ID": str(index)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for index in range(2)
    ]  # fmt: skip
    try:
        said = [host.communicate(timeout=120) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    assert [out for out, _ in said] == ["0 2 2\n", "1 2 2\n"], said


@pytest.mark.slow
def test_a_process_that_is_missing_is_said_with_what_jax_says():
    port = closed_port()
    done = joining(f"localhost:{port}", 0, 1)
    line = error_line(done.returncode, done.stderr, expected_code=1)
    assert f"did not join, though process 0 has reached the first one at localhost:{port}" in line
    assert "JAX says: DEADLINE_EXCEEDED" in line
