"""A small command for `test_two_processes.py`, which starts it twice: collectives without a model.

python -m tests.training.two_processes MODE WORKDIR --coordinator_address=... ; MODE is "run" or
"late".
"""

import time
from contextlib import closing

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax import lax
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes as cli_processes
from mask_rcnn_jax.terminal.progress import Progress
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.step import TrainState, make_mesh, replicate, shard_batch


def tell() -> None:
    """Every way of telling; fails where something arrives that was not sent."""
    mesh, index = make_mesh(), jax.process_index()
    own = {"x": np.arange(8.0).reshape(4, 2) + 100 * index, "n": np.arange(4) - index}
    both = {"x": np.concatenate([own["x"] % 100, own["x"] % 100 + 100])}
    both["n"] = np.concatenate([np.arange(4), np.arange(4) - 1])
    placed = shard_batch(own, mesh)
    assert placed["x"].shape == (8, 2)
    jax.tree.map(np.testing.assert_array_equal, processes.local_rows(placed), own)
    jax.tree.map(np.testing.assert_array_equal, processes.all_rows(placed), both)
    jax.tree.map(np.testing.assert_array_equal, processes.all_rows(own), both)
    said = {"from": index, "text": "ü" * (5 * index), "ap": 0.1 + 1e-17 * index}
    others = [{"from": i, "text": "ü" * (5 * i), "ap": 0.1 + 1e-17 * i} for i in range(2)]
    assert processes.gather(said) == others
    assert processes.from_first(said if index == 0 else None) == others[0]
    Progress("told", 1).advance(1)  # only the first process says so
    logging.warning("every process says this")


def run(workdir: str) -> None:
    """Steps until a SIGTERM, each with an all-reduce; then a checkpoint."""
    tell()
    mesh = make_mesh()
    mean = jax.shard_map(
        lambda x, y: x + lax.pmean(y.mean(), "data"), mesh=mesh, in_specs=(P(), P("data")),
        out_specs=P(), check_vma=False,
    )  # fmt: skip

    @jax.jit
    def advance(state, rows):
        return state.replace(step=state.step + 1, params={"x": mean(state.params["x"], rows)})

    state = replicate(
        TrainState(step=jnp.int32(0), params={"x": jnp.zeros(())}, batch_stats={}, opt_state=()),
        mesh,
    )
    checkpoints = Checkpoints(workdir, keep=2)
    rows = shard_batch(np.full(4, 1.0 + jax.process_index(), np.float32), mesh)
    with closing(processes.StopRequests()) as stop_requested:
        for step in range(1, 100_000):
            state = advance(state, rows)
            stop_requested.begin()
            if step == 3:
                checkpoints.save(state)
            if stop_requested():
                checkpoints.save(state)
                checkpoints.close()
                checkpoints = Checkpoints(workdir, keep=2)
                restored = jax.device_get(checkpoints.restore(state))
                checkpoints.close()
                print(f"stopped at {restored.step} with {restored.params['x']}", flush=True)
                return
            time.sleep(0.02)


def late(_: str) -> None:
    """The first process has something left to do, as it has with a long report."""
    jax.devices()
    if jax.process_index() == 0:
        time.sleep(320)
    print("ended", flush=True)


MODES = {"run": run, "late": late}


def main(arguments) -> None:
    mode, workdir = arguments
    MODES[mode](workdir)


if __name__ == "__main__":
    cli.run(main, cli_processes.define_processes, positional=True)
