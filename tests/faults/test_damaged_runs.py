"""Damaged files of a run, disks that are full, and a second run on the same workdir."""

import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from contextlib import contextmanager, suppress

import jax
import jax.numpy as jnp
import pytest

from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.step import TrainState
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.faults.harness import (
    assert_one_line,
    assert_same,
    copy_of,
    digest,
    largest_file,
    wait_until,
)

FLIPS = 10  # without --faults


def newest(workdir):
    return workdir / "checkpoints" / "21"


def flip(path, place, bit=6):
    data = bytearray(path.read_bytes())
    data[place] ^= 1 << bit
    path.write_bytes(data)


def append(path, data):
    path.write_bytes(path.read_bytes() + data)


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


CHECKPOINTS = {
    "data truncated": lambda w: os.truncate(largest_file(newest(w)), 1000),
    "data deleted": lambda w: largest_file(newest(w)).unlink(),
    "one bit flipped": lambda w: flip(largest_file(newest(w)), 5000),
    "metadata deleted": lambda w: (newest(w) / "state" / "_METADATA").unlink(),
    "metadata truncated": lambda w: os.truncate(newest(w) / "state" / "_METADATA", 100),
    "folder emptied": lambda w: emptied(newest(w)),
    "stray folder": lambda w: (w / "checkpoints" / "99").mkdir(),
    "stray file": lambda w: (w / "checkpoints" / "99").write_text(""),
    "stray copy": lambda w: shutil.copytree(newest(w), w / "checkpoints" / "0099"),
    "temporary folder": lambda w: (w / "checkpoints" / "22.orbax-checkpoint-tmp").mkdir(),
}
SERIES = {
    "half a line": lambda path: os.truncate(path, path.stat().st_size - 20),
    "zeros at the end": lambda path: append(path, bytes(4096)),
    "a step that is text": lambda path: append(path, b'{"step": "17"}\n'),
    "a step that is null": lambda path: append(path, b'{"step": null}\n'),
    "a list": lambda path: append(path, b"[1]\n"),
}
CONFIGS = {
    "truncated": lambda path: os.truncate(path, 100),
    "empty": lambda path: os.truncate(path, 0),
    "a list": lambda path: path.write_text("[]"),
    "a list inside": lambda path: path.write_text('{"config": [], "categories": []}'),
    "deleted": lambda path: path.unlink(),
}


@pytest.fixture
def half(whole, reference, tmp_path):
    """A copy of the uninterrupted run without its last checkpoint."""
    workdir = copy_of(whole, tmp_path / "run")
    shutil.rmtree(workdir / "checkpoints" / "24")
    return workdir


@pytest.mark.faults
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_damaged_checkpoint_is_passed_over(name, server, half, reference):
    CHECKPOINTS[name](half)
    run = server.start(half)
    assert run.wait() == 0, run.last_line()
    shutil.rmtree(half / "checkpoints" / "0099", ignore_errors=True)
    assert_same(half, reference)
    if name.startswith(("data", "one bit", "metadata", "folder")):
        assert "checkpoints/21" in run.said()


@pytest.mark.faults
@pytest.mark.parametrize(
    "file_name, damage",
    [("metrics.jsonl", name) for name in SERIES] + [("config.json", name) for name in CONFIGS],
)
def test_a_damaged_file_is_replaced_or_named(file_name, damage, server, half, reference):
    (SERIES if file_name == "metrics.jsonl" else CONFIGS)[damage](half / file_name)
    run = server.start(half)
    if run.wait() == 0:
        assert_same(half, reference)
    else:
        assert_one_line(run)
        assert run.code == 2 and file_name in run.last_line()


def small_state(step):
    key = jax.random.key(step)
    params = {"fc": {"kernel": jax.random.normal(key, (200, 150)), "bias": jnp.zeros(150)}}
    opt_state = jax.tree.map(lambda x: 0.1 * x, params), jnp.int32(step)
    return TrainState(jnp.int32(step), params, {"norm": {"mean": jnp.ones(9)}}, opt_state)


def test_a_flipped_bit_is_noticed(tmp_path, request, figure):
    """By training, which goes on from the checkpoint before, and by what reads parameters."""
    wanted = 2 * request.config.getoption("--faults") or FLIPS
    whole = tmp_path / "whole"
    checkpoints = Checkpoints(whole, keep=2)
    for step in (12, 16):
        checkpoints.save(small_state(step))
    checkpoints.close()
    states, loaded = digest(small_state(16)), digest(load_checkpoint(whole / "checkpoints" / "16"))
    files = sorted(p.relative_to(whole) for p in whole.glob("checkpoints/16/**/*") if p.is_file())
    sizes = [(whole / path).stat().st_size for path in files]
    files, sizes = zip(*((p, n) for p, n in zip(files, sizes, strict=True) if n), strict=True)
    rng, ends, wrong = random.Random(2026), Counter(), []
    for number in range(wanted):
        # Most bits are in the data, most mistakes in the rest.
        (path,) = rng.choices(files, sizes) if number % 2 else [rng.choice(files)]
        workdir = copy_of(whole, tmp_path / "flipped")
        place, bit = rng.randrange((whole / path).stat().st_size), rng.randrange(8)
        flip(workdir / path, place, bit)
        kind = worst_end(end_of_load(workdir, loaded), end_of_restore(workdir, states))
        ends[kind] += 1
        if kind in ("traceback", "silent"):
            wrong.append((kind, str(path), place, bit))
    parts = ", ".join(f"{ends[kind]} {kind}" for kind in ENDS)
    figure(f"flipped bits of a checkpoint, {wanted}: {parts}")
    assert not wrong


ENDS = ("without effect", "noticed", "traceback", "silent")


def worst_end(*ends):
    return max(ends, key=ENDS.index)


def end_of_load(workdir, expected):
    try:
        tree = load_checkpoint(workdir / "checkpoints" / "16")
    except (ValueError, OSError):
        return "noticed"
    except Exception:
        return "traceback"
    return "without effect" if digest(tree) == expected else "silent"


def end_of_restore(workdir, expected):
    checkpoints = Checkpoints(workdir, keep=2)
    try:
        state = checkpoints.restore(small_state(0))
    except (ValueError, OSError):
        return "noticed"
    except Exception:
        return "traceback"
    finally:
        checkpoints.close()
    if digest(state) == digest(small_state(12)):
        return "noticed"
    return "without effect" if digest(state) == expected else "silent"


@pytest.mark.faults
def test_a_second_run_harms_nothing(server, reference, tmp_path):
    first = server.start(tmp_path / "run")
    assert wait_until(lambda: first.has_saved(6)), first.said()
    second = server.start(tmp_path / "run")
    assert second.wait() == 2, second.said()
    assert_one_line(second)
    assert first.wait() == 0, first.said()
    assert_same(tmp_path / "run", reference)


@contextmanager
def small_disk(folder, size):
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs root and a tmpfs")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def remount(folder, options):
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.mark.faults
@pytest.mark.parametrize("checkpoints", [0.5, 1.5, 2.6])
def test_a_full_disk_loses_nothing_that_was_saved(checkpoints, server, whole, reference, tmp_path):
    files = (path for path in (whole / "checkpoints" / "24").rglob("*") if path.is_file())
    size = int(checkpoints * sum(path.stat().st_size for path in files)) + 60_000
    with small_disk(tmp_path / "disk", size):
        workdir = tmp_path / "disk" / "run"
        run = server.start(workdir, log=tmp_path / "log")
        assert run.wait() == 2, run.said()
        assert_one_line(run)
        remount(tmp_path / "disk", "size=200m")
        again = server.start(workdir, log=tmp_path / "again")
        assert again.wait() == 0, again.said()
        assert_same(workdir, reference)


@pytest.mark.faults
def test_a_disk_that_cannot_be_written_is_named(server, tmp_path):
    with small_disk(tmp_path / "disk", "20m"):
        remount(tmp_path / "disk", "ro")
        run = server.start(tmp_path / "disk" / "run", log=tmp_path / "log")
        assert run.wait() == 2, run.said()
        assert_one_line(run)


@pytest.mark.faults
def test_a_workdir_removed_in_mid_run_is_noticed(server, tmp_path):
    run = server.start(tmp_path / "run", log=tmp_path / "log")
    assert wait_until(lambda: run.has_saved(6)), run.said()
    shutil.rmtree(run.workdir, ignore_errors=True)
    assert run.wait() in (1, 2), run.said()
    assert_one_line(run)


@pytest.mark.faults
@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "events.*", "eval/8", "eval/8/*"])
def test_a_file_deleted_in_mid_run_is_written_again_or_named(name, server, reference, tmp_path):
    run = server.start(tmp_path / "run", log=tmp_path / "log")
    assert wait_until(lambda: run.has_saved(9)), run.said()
    for path in run.workdir.glob(name):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert run.wait() == 0, run.said()
    assert "was deleted while the run was at work" in run.said()
    kept = {n: v for n, v in reference.items() if not name.startswith("eval") or n != "evaluations"}
    assert_same(run.workdir, kept)
    assert (run.workdir / "config.json").exists()


@pytest.mark.faults
@pytest.mark.parametrize("step", [1, 7, 8, 20])
@pytest.mark.parametrize("room", [0, 20_000])  # bytes
def test_a_disk_filled_in_mid_run_is_named(room, step, server, reference, tmp_path):
    with small_disk(tmp_path / "disk", "60m"):
        run = server.start(tmp_path / "disk" / "run", log=tmp_path / "log")
        assert wait_until(lambda: f"step {step} of" in run.said()), run.said()
        os.kill(run.pid, signal.SIGSTOP)  # it would end before the disk is full
        filler, disk = tmp_path / "disk" / "filler", os.statvfs(tmp_path / "disk")
        with suppress(OSError), open(filler, "wb", 0) as file:
            file.write(bytes(disk.f_bavail * disk.f_frsize - room))
        os.kill(run.pid, signal.SIGCONT)
        assert run.wait() == 2, run.said()
        assert_one_line(run)
        assert str(run.workdir) in run.last_line()
        filler.unlink()
        again = server.start(run.workdir, log=tmp_path / "again")
        assert again.wait() == 0, again.said()
        assert_same(run.workdir, reference)
