"""Which checkpoints stay, what is in them, and when a run ends."""

import dataclasses
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.recipe.options import TrainOptions
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.loss_scale import LossScaleState
from mask_rcnn_jax.training.step import TrainState
from mask_rcnn_jax.training.work import Milestones
from mask_rcnn_jax.weights.run_checkpoint import find_checkpoint, load_checkpoint
from tests.helpers import assert_tree_close


def state_of(step: int) -> TrainState:
    return TrainState(
        step=jnp.int32(step),
        params={"head": {"kernel": jnp.full((2, 3), float(step))}},
        batch_stats={"norm": {"scale": jnp.full(3, -float(step))}},
        opt_state=(jnp.full((2, 3), 10.0 * step), jnp.int32(step)),
    )


@pytest.fixture
def saved(tmp_path):
    """A workdir in which eight steps were saved, every second one with its mask AP."""
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, ap in zip(range(1, 9), (0, 0.2, 0, 0.6, 0, 0.3, 0, 0.4), strict=True):
        checkpoints.save(state_of(step))
        if ap:
            checkpoints.evaluated([{"step": step, "ap/box": 0.9, "ap/mask": ap}])
    checkpoints.close()
    return tmp_path


def test_the_last_two_and_the_best_stay(saved):
    steps = sorted(int(folder.name) for folder in (saved / "checkpoints").iterdir())
    assert steps == [4, 7, 8]


def test_restoring_gives_the_latest_state_bit_for_bit(saved):
    checkpoints = Checkpoints(saved, keep=2)
    restored = checkpoints.restore(state_of(0))
    checkpoints.close()
    for a, b in zip(jax.tree.leaves(restored), jax.tree.leaves(state_of(8)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_loss_scale_comes_and_goes_with_the_precision(tmp_path):
    """A run with `train.precision` "auto" moves from a T4 to an H100, and back."""
    plain = state_of(3)
    fresh = LossScaleState(jnp.float32(64), jnp.int32(0), jnp.int32(0), plain.opt_state)
    old = fresh._replace(scale=jnp.float32(8), skipped=jnp.int32(5))
    wanted = {"scaled": (old, plain.opt_state), "plain": (plain.opt_state, fresh)}
    wanted["both"] = old, old
    for name, (before, now) in wanted.items():
        checkpoints = Checkpoints(tmp_path / name, keep=2)
        checkpoints.save(dataclasses.replace(plain, opt_state=before))
        other = fresh if name == "both" else now
        zeros = jax.tree.map(jnp.zeros_like, plain)
        if isinstance(other, LossScaleState):
            other = other._replace(inner=zeros.opt_state)
        restored = checkpoints.restore(dataclasses.replace(zeros, opt_state=other))
        checkpoints.close()
        assert jax.tree.structure(restored.opt_state) == jax.tree.structure(now)
        assert_tree_close(restored, dataclasses.replace(plain, opt_state=now), atol=0)


@pytest.mark.parametrize(("path", "step"), [("", 8), ("checkpoints/4", 4)])
def test_parameters_load_without_model_and_optimizer(saved, path, step):
    loaded = load_checkpoint(saved / path)
    assert set(loaded) == {"params", "batch_stats"}
    np.testing.assert_array_equal(loaded["params"]["head"]["kernel"], np.full((2, 3), step))
    np.testing.assert_array_equal(loaded["batch_stats"]["norm"]["scale"], np.full(3, -step))


def test_a_snapshot_is_not_changed_by_the_next_step(tmp_path):
    """The state is donated to the next step while it is still being written."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    state = state_of(1).replace(params={"head": {"kernel": jnp.ones((512, 1024))}})
    advance = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    checkpoints.save(state)
    for _ in range(3):
        state = advance(state)
    jax.block_until_ready(state)
    checkpoints.close()
    kernel = load_checkpoint(tmp_path)["params"]["head"]["kernel"]
    np.testing.assert_array_equal(kernel, np.ones((512, 1024)))


def large_state(step: int) -> TrainState:
    """16 MiB that do not compress."""
    kernel = jax.random.normal(jax.random.key(step), (4096, 1024))
    return state_of(step).replace(params={"head": {"kernel": kernel}})


def save_and_die(workdir: Path) -> None:
    """Steps 1 and 2; the process is killed while the second is being written."""
    checkpoints = Checkpoints(workdir, keep=2)
    checkpoints.save(state_of(1))
    checkpoints.wait()
    checkpoints.save(large_state(2))
    os.kill(os.getpid(), signal.SIGKILL)


def save_where_a_disk_is_full(workdir: Path) -> None:
    """The same with files of at most a mebibyte; prints the error."""
    checkpoints = Checkpoints(workdir, keep=2)
    checkpoints.save(state_of(1))
    checkpoints.wait()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        checkpoints.save(large_state(2))
        checkpoints.close()
    except OSError as error:
        print("OSError:", error, flush=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="module")
def failed(tmp_path_factory):
    """A folder of both workdirs, and what was printed: one process, as the second save kills it."""
    folder = tmp_path_factory.mktemp("failed")
    program = f"""
from pathlib import Path
from tests.training.test_checkpoint import save_and_die, save_where_a_disk_is_full
save_where_a_disk_is_full(Path({str(folder)!r}) / "full")
save_and_die(Path({str(folder)!r}) / "killed")
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    return folder, done.stdout


def test_a_full_disk_is_named(failed):
    folder, said = failed
    assert f"OSError: {folder}/full/checkpoints: a checkpoint could not be written" in said
    assert "File too large" in said


@pytest.mark.parametrize("name", ["full", "killed"])
def test_a_save_that_fails_leaves_the_one_before(name, failed):
    workdir = failed[0] / name
    assert find_checkpoint(workdir).step == 1
    checkpoints = Checkpoints(workdir, keep=2)
    restored = checkpoints.restore(state_of(0))
    jax.tree.map(np.testing.assert_array_equal, restored, state_of(1))
    checkpoints.save(large_state(2))
    checkpoints.close()
    assert find_checkpoint(workdir).step == 2
    assert sorted(folder.name for folder in (workdir / "checkpoints").iterdir()) == ["1", "2"]


@pytest.mark.parametrize("path", ["", "checkpoints/3", "elsewhere"])
def test_what_is_no_checkpoint_is_refused(tmp_path, path):
    (tmp_path / "checkpoints").mkdir()
    with pytest.raises(ValueError, match="no checkpoint|not a checkpoint"):
        find_checkpoint(tmp_path / path)


@pytest.mark.parametrize(
    ("targets", "step", "aps", "last"),
    [
        ((0, 0), 8, (0.1, 0.1), True),
        ((0, 0), 4, (0.9, 0.9), False),
        ((0.3, 0.2), 4, (0.3, 0.2), True),
        ((0.3, 0.2), 4, (0.4, 0.1), False),
        ((0.3, 0), 4, (0.4, 0.1), True),
        ((0.3, 0.2), 8, None, False),
    ],
)
def test_a_run_ends_at_its_last_step_or_at_both_targets(targets, step, aps, last):
    options = TrainOptions(steps=8, stop_at_box_ap=targets[0], stop_at_mask_ap=targets[1])
    aps = aps and {"ap/box": aps[0], "ap/mask": aps[1]}
    assert Milestones(options, evaluates=True).is_last(step, aps) == last
