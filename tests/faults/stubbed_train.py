"""The real command `train` with a stubbed model, forked from one process that has imported it.

Loop, loader, checkpoints, writers, evaluation, signals and exit codes are the product's. Stubs are
the first parameters and what the model computes in a step, a prediction and a loss: functions of
parameters and batch that take milliseconds, so that a run of 24 steps takes a second. All scores
but the last step's come from a process of their own.

Reads lines of json from stdin, {"arguments": [..], "environment": {..}, "log": path}; each starts
a run, whose output goes to the log. Answers with its pid; the exit code is written to `log`.exit.
"""

import importlib
import json
import os
import signal
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax import cli, store_folders
from mask_rcnn_jax.structures import Detections
from mask_rcnn_jax.terminal import interrupts
from mask_rcnn_jax.training import setup, step, validation, work
from mask_rcnn_jax.training.step import TrainState

STEP_SECONDS = 0.01
PREDICT_SECONDS = 0.05


def first_variables(model, seed, given=None):
    kernel = np.random.default_rng(seed).standard_normal((300, 400))
    head = {"kernel": jnp.asarray(kernel, jnp.float32), "bias": jnp.zeros(50)}
    return {"params": {"box_head": {"fc": head}}, "batch_stats": {"norm": {"mean": jnp.zeros(5)}}}


def make_train_step(model, tx, schedule, mesh, *options):
    """Gradients that depend on the parameters, the images and the objects, over all devices."""
    nan_at = int(os.environ.get("NAN_AT", "-1"))

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def advance(state, batch):
        seen = batch.images.mean(dtype=jnp.float32) / 255 + batch.targets.boxes.mean()
        grads = jax.tree.map(lambda p: 0.1 * p + seen, state.params)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        norms = jax.tree.map(lambda x: 0.9 * x + seen, state.batch_stats)
        loss = jnp.where(state.step + 1 == nan_at, jnp.nan, seen)
        metrics = {"loss/total": loss, "grad_norm": optax.tree.norm(grads)}
        metrics["lr"] = jnp.asarray(schedule(state.step), jnp.float32)
        return TrainState(state.step + 1, params, norms, opt_state), metrics

    def slowly(state, batch):
        time.sleep(STEP_SECONDS)
        return advance(state, batch)

    return slowly


def make_predict_step(model, mesh, detect):
    """The objects of the ground truth, with boxes that are wrong by what the parameters say.

    So the APs rise and fall, and the best checkpoint is not the last.
    """

    @partial(jax.jit, out_shardings=NamedSharding(mesh, P("data")))
    def predict(variables, batch):
        truth, bias = batch.targets, variables["params"]["box_head"]["fc"]["bias"].mean()
        width, height = (truth.boxes[..., 2:] - truth.boxes[..., :2]).transpose(2, 0, 1)
        moved = jnp.abs(jnp.sin(20 * bias)) / 2 * jnp.stack([width, height] * 2, axis=-1)
        shape = (*truth.valid.shape, 28, 28)
        return Detections(
            boxes=truth.boxes + moved,
            scores=jnp.where(truth.valid, 0.5 + 0.4 * jnp.cos(truth.boxes[..., 0]), 0.0),
            classes=truth.classes,
            masks=jnp.where(truth.valid[..., None, None], jnp.full(shape, 0.9), 0.0),
            valid=truth.valid,
        )

    def slowly(variables, batch):
        time.sleep(PREDICT_SECONDS)
        return predict(variables, batch)

    return slowly


def make_loss_step(model, mesh, *, loss, seed):
    mean = jax.jit(
        lambda images: images.mean(dtype=jnp.float32), out_shardings=NamedSharding(mesh, P())
    )
    return lambda variables, batch: {"loss/total": mean(batch.images)}


def stub() -> None:
    setup.init_variables = first_variables
    setup.abstract_variables = lambda model: jax.eval_shape(lambda: first_variables(model, 0))
    work.make_train_step = make_train_step
    step.make_predict_step = make_predict_step
    step.make_loss_step = make_loss_step


def die_in_store_call(number: int) -> None:
    """Have this process killed in mid-call, of those that write to an object store or fetch."""
    calls = count(1)

    def dying(call):
        def run(address, names, *rest):
            names = list(names)
            if next(calls) < number:
                return call(address, names, *rest)
            call(address, names[: len(names) // 2], *rest)
            os.kill(os.getpid(), signal.SIGKILL)

        return run

    for name in ("get_files", "put_files", "delete"):
        setattr(store_folders, name, dying(getattr(store_folders, name)))


def serve() -> bool:
    """Fork for every line of stdin; returns True in a run, which is to be done, False at the end.

    Between the two stands a process that waits for the run.
    """
    # A background job ignores the one, a job below nohup the other.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupts.begin()
    for line in sys.stdin:
        wanted = json.loads(line)
        _reap()
        if os.fork():
            continue
        run = os.fork()
        if run:
            print(json.dumps(run), flush=True)
            exit_code = os.waitstatus_to_exitcode(os.waitpid(run, 0)[1])
            draft = Path(wanted["log"] + ".exit.tmp")
            draft.write_text(str(exit_code))
            draft.rename(wanted["log"] + ".exit")
            os._exit(0)
        os.setsid()
        output = os.open(wanted["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.environ.update(wanted["environment"])
        sys.argv = ["train", *wanted["arguments"]]
        return True
    return False


def _reap() -> None:
    """Forget the children that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    stub()
    # `mask_rcnn_jax.train` is also the name of a function.
    command = importlib.import_module("mask_rcnn_jax.train")
    if serve():
        if number := os.environ.get("DIE_IN_STORE_CALL"):
            die_in_store_call(int(number))
        validation.FEWEST_BESIDE = int(os.environ.get("FEWEST_BESIDE", "1"))
        cli.run(command.main, command._define_flags)
