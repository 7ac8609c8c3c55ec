"""Damage to a checkpoint is noticed wherever it is, named, and does not end the run."""

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.step import make_mesh, replicate
from mask_rcnn_jax.weights.run_checkpoint import find_checkpoint, load_checkpoint
from tests.training.test_checkpoint import state_of

FLIPS = int(os.environ.get("FLIPS", "300"))


def save(workdir, *steps, keep=9):
    checkpoints = Checkpoints(workdir, keep)
    for step in steps:
        checkpoints.save(state_of(step))
    checkpoints.close()
    return workdir


def restore(workdir):
    checkpoints = Checkpoints(workdir, keep=9)
    try:
        return checkpoints.restore(state_of(0))
    finally:
        checkpoints.close()


def files_of(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A workdir with steps 1 and 2, not to be changed."""
    return save(tmp_path_factory.mktemp("two"), 1, 2)


@pytest.fixture
def workdir(two, tmp_path):
    return Path(shutil.copytree(two, tmp_path / "run"))


def test_every_flipped_bit_is_noticed(workdir):
    """A bit of any file below the step, the list of checksums included."""
    folder, rng = workdir / "checkpoints" / "2", np.random.default_rng(0)
    files = files_of(folder)
    sizes = np.array([path.stat().st_size for path in files])
    noticed = 0
    for _ in range(FLIPS):
        position = int(rng.integers(sizes.sum()))
        which = int(np.searchsorted(np.cumsum(sizes), position, side="right"))
        path, offset = files[which], position - int(sizes[:which].sum())
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[offset] ^= 1 << int(rng.integers(8))
        path.write_bytes(flipped)
        try:
            find_checkpoint(folder)
        except ValueError as error:
            noticed += str(folder) in str(error) and "is damaged" in str(error)
        path.write_bytes(whole)
    print(f"{noticed} of {FLIPS} flipped bits noticed")
    assert noticed == FLIPS
    assert find_checkpoint(folder).step == 2


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def without_state(folder):
    shutil.rmtree(folder / "state")


def largest(folder):
    return max(files_of(folder / "state"), key=lambda path: path.stat().st_size)


def cut_off(folder):
    os.truncate(largest(folder), 100)


def deleted(folder):
    largest(folder).unlink()


def cut_off_list(folder):
    os.truncate(folder / "SHA256SUMS", 0)


def list_without_its_last_lines(folder):
    lines = (folder / "SHA256SUMS").read_text().splitlines(keepends=True)
    (folder / "SHA256SUMS").write_text("".join(lines[:3]))


DAMAGES = [emptied, without_state, cut_off, deleted, cut_off_list, list_without_its_last_lines]


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_run_goes_on_from_the_newest_whole_one(damage, workdir, caplog):
    """The damaged one is moved away, so that its step can be saved again."""
    damage(workdir / "checkpoints" / "2")
    with pytest.raises(ValueError, match="checkpoints/2 is (damaged|not a checkpoint)"):
        load_checkpoint(workdir / "checkpoints" / "2")
    with caplog.at_level("WARNING"):
        assert find_checkpoint(workdir).step == 1
        np.testing.assert_array_equal(
            load_checkpoint(workdir)["params"]["head"]["kernel"], np.full((2, 3), 1.0)
        )
    assert "checkpoints/2 is damaged: " in caplog.text and "step 1 is used" in caplog.text
    caplog.clear()

    jax.tree.map(np.testing.assert_array_equal, restore(workdir), state_of(1))
    (line,) = [r.getMessage() for r in caplog.records if "damaged" in r.getMessage()]
    assert line.startswith(f"{workdir}/checkpoints/2 is damaged: ")
    assert line.endswith(f"moved to {workdir}/checkpoints/damaged.2, the run goes on from step 1")
    save(workdir, 2)
    jax.tree.map(np.testing.assert_array_equal, restore(workdir), state_of(2))


@pytest.mark.parametrize("use", [restore, find_checkpoint, load_checkpoint])
def test_where_none_is_whole_nothing_starts_from_scratch(use, workdir):
    cut_off(workdir / "checkpoints" / "1")
    deleted(workdir / "checkpoints" / "2")
    before = sorted(workdir.rglob("*"))
    with pytest.raises(ValueError, match="no whole checkpoint is left, choose another") as error:
        use(workdir)
    assert "\n" not in str(error.value)
    assert "2 is damaged: state/" in str(error.value) and "is missing" in str(error.value)
    assert sorted(workdir.rglob("*")) == before  # they would be overlooked next time


def test_what_lies_beside_checkpoints_does_no_harm(workdir, caplog):
    folder = workdir / "checkpoints"
    for name in ("99", "0099", "1e3", "tmp.5.orbax-checkpoint-tmp", "²"):
        (folder / name).write_text("not a checkpoint")
    (folder / "2" / "notes.txt").write_text("the good one")
    (folder / "2" / "state" / ".nfs000").write_text("")
    (folder / "0007").mkdir()
    assert find_checkpoint(workdir).step == 2
    jax.tree.map(np.testing.assert_array_equal, restore(workdir), state_of(2))
    save(workdir, 99)
    assert "checkpoints/99 was in the way, moved to" in caplog.text
    assert find_checkpoint(workdir).step == 99
    assert (folder / "damaged.99").read_text() == "not a checkpoint"
    assert not (folder / "tmp.5.orbax-checkpoint-tmp").exists()


def test_a_folder_that_appears_in_mid_run_takes_no_place(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(state_of(4))
    checkpoints.wait()
    (tmp_path / "checkpoints" / "99").mkdir()
    checkpoints.save(state_of(8))
    checkpoints.close()
    assert find_checkpoint(tmp_path).step == 8


def test_a_whole_checkpoint_is_read_without_a_warning(workdir, caplog):
    with caplog.at_level("WARNING"):
        restore(workdir)
        load_checkpoint(workdir)
    assert not caplog.records


def as_before(workdir, step, state):
    """Save as earlier versions did: arrays of the devices, and no checksums."""
    state = jax.device_put(state, NamedSharding(make_mesh(), P()))
    with ocp.CheckpointManager(workdir / "checkpoints") as manager:
        manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state)))
    return workdir


def test_a_checkpoint_of_an_earlier_version_is_read(tmp_path, caplog):
    as_before(tmp_path, 3, state_of(3))
    as_before(tmp_path, 4, state_of(4))
    with caplog.at_level("INFO"):
        jax.tree.map(np.testing.assert_array_equal, restore(tmp_path), state_of(4))
    assert f"{tmp_path}/checkpoints/4 has no checksums" in caplog.text
    deleted(tmp_path / "checkpoints" / "4")
    assert find_checkpoint(tmp_path).step == 3
    jax.tree.map(np.testing.assert_array_equal, restore(tmp_path), state_of(3))


ROOT = Path(__file__).parents[2]


def orbax_lines(workdir: Path) -> str:
    """The code of docs/inference.md that needs orbax alone, for a run."""
    page = (ROOT / "docs" / "inference.md").read_text()
    (block,) = [b for b in page.split("```") if "ocp.CheckpointManager" in b]
    return block.removeprefix("python\n").replace("runs/mine", str(workdir))


def check_with_orbax(python: str, workdir: Path, folder: Path) -> None:
    """Run these lines, and the other ways of orbax, where this package is not."""
    program = f"""
        import sys
        class Absent:
            def find_spec(self, name, path=None, target=None):
                assert name.partition(".")[0] != "mask_rcnn_jax"
        sys.meta_path.insert(0, Absent())
        {textwrap.indent(orbax_lines(workdir), " " * 8).strip()}
        import jax, numpy as np
        assert manager.latest_step() == 5 and len(jax.devices()) == 1
        state, args = {str(workdir / "checkpoints" / "5" / "state")!r}, ocp.args
        found = [saved, ocp.StandardCheckpointer().restore(state),
                 ocp.PyTreeCheckpointer().restore(state),
                 manager.restore(5, args=args.Composite(state=args.StandardRestore())).state]
        for tree in found:
            assert tree["step"] == 5 and isinstance(tree["params"]["head"]["kernel"], np.ndarray)
            assert (tree["params"]["head"]["kernel"] == 5.0).all()
    """
    environment = {"PATH": os.environ["PATH"], "JAX_PLATFORMS": "cpu", "HOME": str(folder)}
    command = [python, "-I", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert "WARNING:absl" not in done.stderr


def saved_on_two_devices(workdir: Path) -> None:
    checkpoints = Checkpoints(workdir, keep=1)
    checkpoints.save(replicate(jax.tree.map(jnp.asarray, state_of(5)), make_mesh()))
    checkpoints.close()


def test_orbax_alone_restores_what_two_devices_saved(tmp_path):
    saved_on_two_devices(tmp_path / "run")
    check_with_orbax(sys.executable, tmp_path / "run", tmp_path)


@pytest.mark.slow
def test_an_environment_with_orbax_alone_restores_it(tmp_path):
    saved_on_two_devices(tmp_path / "run")
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
    constraints = ROOT / "constraints.txt"
    install = [python, "-m", "pip", "install", "-q", "-c", constraints, "orbax-checkpoint"]
    done = subprocess.run(install, text=True, capture_output=True)
    if done.returncode:
        pytest.skip(f"orbax cannot be installed here: {done.stderr.splitlines()[-1:]}")
    check_with_orbax(str(python), tmp_path / "run", tmp_path)
