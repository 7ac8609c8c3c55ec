"""The real `train` with its loader, checkpoints, log and lock, around a model that is a stub.

A step takes no time and adds to an array what it saw of the batch, so that a batch that is missing,
changed or done twice shows in the parameters. An evaluation gives the APs of `APS` in turns.
python -m tests.training.stubbed_run WORKDIR [NAME=VALUE ..] runs it as the command does.
"""

import json
import time
from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax import cli, consent
from mask_rcnn_jax.cli import processes as cli_processes
from mask_rcnn_jax.config import read_workdir
from mask_rcnn_jax.training import loop, metrics, processes, work
from mask_rcnn_jax.training.beside import Pending
from mask_rcnn_jax.training.ending import StopTraining
from mask_rcnn_jax.training.step import TrainState
from tests.memory_set import ShapeSet
from tests.training.own_run import small_config

STEPS = 12
APS = (0.3, 0.5, 0.1, 0.4)  # the second evaluation is the best
EVERY = {"steps": STEPS, "checkpoint_every": 2, "eval_every": 3, "log_every": 1}


def state_of(step: int) -> TrainState:
    params = {"head": {"kernel": np.full((20, 30), 0.5, np.float32)}}
    return TrainState(np.int32(step), params, {}, (np.zeros(3, np.float32),))


def make_step(model, tx, schedule, mesh, *options):
    def step(state: TrainState, batch) -> tuple[TrainState, dict]:
        mean = np.float32(processes.all_rows(batch.images).astype(np.float64).mean())
        params = jax.tree.map(lambda x: np.asarray(x) * np.float32(0.9) + mean, state.params)
        number = np.int32(int(state.step) + 1)
        rate = float(schedule(int(state.step)))
        return TrainState(number, params, {}, state.opt_state), {"loss/total": mean, "lr": rate}

    return step


def validation(seconds: float = 0.0):
    """Takes that long, and looks ten times for a SIGTERM."""

    def make(recipe, val_set, model, mesh, workdir, stop_requested):
        def validate(state: TrainState):
            print(f"evaluating {int(state.step)}", flush=True)
            for _ in range(10):
                if stop_requested():
                    raise processes.Stopped
                time.sleep(seconds / 10)
            ap = APS[int(state.step) // recipe.train.eval_every % len(APS) - 1]
            return {"ap/box": ap, "ap/mask": ap}, {}

        return validate

    return make


class Scripted:
    """A scorer that has its scores once `is_done()`, or at that look of those who wait for them."""

    def __init__(self, scores, is_done=lambda: False, looks=1):
        self.scores, self.is_done, self.looks = scores, is_done, looks

    def result(self, wait_s=None):
        self.looks -= 1
        there = self.looks <= 0 or self.is_done()
        if there and isinstance(self.scores, Exception):
            raise self.scores
        return (self.scores, []) if there else None

    def close(self):
        self.looks = None


def beside(make_scorer=lambda step, scores: Scripted(scores)):
    """As `validation`, with all scores but the last step's by scorers of their own."""

    def make(recipe, *given):
        validate_now = validation()(recipe, *given)

        def validate(state: TrainState):
            step, (scores, images) = int(state.step), validate_now(state)
            if step == recipe.train.steps:
                return scores, images
            start = partial(make_scorer, step, scores)
            return Pending(step, start, lambda *said: None, dict), images

        return validate

    return make


@pytest.fixture
def stubbed(monkeypatch):
    patch(monkeypatch.setattr)


def patch(setattr_, seconds: float = 0.0, make_validation=None) -> None:
    setattr_(work, "make_model", lambda *arguments: None)
    setattr_(loop, "initial_state", lambda *_, **options: (state_of(0), None))
    setattr_(work, "make_train_step", make_step)
    setattr_(work, "make_validation", make_validation or validation(seconds))


def run(workdir, loggers=(), images: int = 10, scoring=(), **changes) -> TrainState:
    config = small_config()
    config.train.update(EVERY | changes)
    config.eval.update(dict(scoring))
    sets = {"train_set": ShapeSet("train", images), "val_set": ShapeSet("val", 4)}
    return jax.device_get(loop.train(config, workdir, loggers=loggers, **sets))


def series(workdir) -> list[dict]:
    """The records of metrics.jsonl without times."""
    return [
        {name: value for name, value in record.items() if not name.startswith("perf/")}
        for record in metrics.read_metrics(workdir / "metrics.jsonl")
    ]


def kept(workdir) -> list[str]:
    return sorted((path.name for path in (workdir / "checkpoints").iterdir()), key=len)


def write_as_before(workdir, *later: str) -> None:
    """Write config.json as earlier versions did: all entries, without those that came later."""
    recipe, categories = read_workdir(workdir)
    config = {
        section: {name: entries[name] for name in entries if f"{section}.{name}" not in later}
        for section, entries in recipe.to_dict().items()
        if section not in later
    }
    content = json.dumps({"config": config, "categories": categories})
    (workdir / "config.json").write_text(content)
    consent.remember(content.encode())  # a run of one's own


def main(arguments) -> None:
    workdir, *pairs = arguments
    changes = {name: json.loads(value) for name, _, value in (p.partition("=") for p in pairs)}
    make_validation = beside() if changes.pop("beside", False) else None
    patch(setattr, changes.pop("seconds", 0.0), make_validation)
    wait = changes.pop("wait", 0.0)  # after each step
    ends_at = changes.pop("ends_at", None)

    def end(step, values, images):
        time.sleep(wait)
        if step == ends_at:
            raise StopTraining("enough")

    print(f"returned step {int(run(workdir, [end], **changes).step)}", flush=True)


if __name__ == "__main__":
    cli.run(main, cli_processes.define_processes, positional=True)
