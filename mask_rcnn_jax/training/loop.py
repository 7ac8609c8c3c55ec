"""The training call: steps, checkpoints, evaluations, and how a run ends."""

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax import compile_cache, device
from mask_rcnn_jax.config import as_recipe, check_written, write_workdir
from mask_rcnn_jax.data import workers
from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.dataset import Dataset, categories
from mask_rcnn_jax.data.loader import TrainLoader
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.recipe.stopping import Metrics
from mask_rcnn_jax.terminal import console, interrupts
from mask_rcnn_jax.training.batches import abstract_train_batch
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.checks import check_start
from mask_rcnn_jax.training.compiling import compile_canvases
from mask_rcnn_jax.training.ending import by_loggers_alone
from mask_rcnn_jax.training.evaluations import Evaluations
from mask_rcnn_jax.training.lock import locked
from mask_rcnn_jax.training.loggers import Logger, check_loggers, resolve_loggers
from mask_rcnn_jax.training.metrics import FILE_NAME as METRICS_NAME
from mask_rcnn_jax.training.metrics import last_metrics, read_evaluations
from mask_rcnn_jax.training.mirror import Mirror
from mask_rcnn_jax.training.next_steps import next_commands
from mask_rcnn_jax.training.own_losses import OwnLoss
from mask_rcnn_jax.training.planned_memory import log_memory
from mask_rcnn_jax.training.processes import (
    STOPPED_EARLY,
    StopRequests,
    gather,
    on_first,
)
from mask_rcnn_jax.training.reports import NAME as REPORT_NAME
from mask_rcnn_jax.training.reports import write_run_report
from mask_rcnn_jax.training.setup import check_same_run, fingerprint, initial_state, open_workdir
from mask_rcnn_jax.training.step import TrainState, TrainStep, make_mesh, replicate, shard_batch
from mask_rcnn_jax.training.step_log import StepLog
from mask_rcnn_jax.training.work import Work, prepare
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.run_checkpoint import has_checkpoint

RARE = 0.1  # share of the batches; a canvas with less compiles when it is needed


@by_loggers_alone()
def train(
    config: Recipe | ConfigDict | str | Path,
    workdir: str | Path,
    *,
    train_set: Dataset | None = None,
    val_set: Dataset | None = None,
    augment: Kind | Sequence[Kind] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loggers: Logger | str | Sequence[Logger | str] = (),
    losses: Sequence[tuple[str, OwnLoss]] | None = None,
    accept_mismatch: bool = False,
) -> TrainState:
    """Train a recipe from where the workdir stands to its last step.

    The same call again resumes. A logger that raises `StopTraining` ends the run: its state is
    saved, and scores are waited for; the same call goes on from there. SIGTERM saves a checkpoint
    and ends the program with exit code 75; before the first step is done, there is nothing to
    save, and its handler is the caller's.
    Several processes (`jax.distributed`) make the same call on a workdir that they share.

    Args:
        config: a recipe, its name or path, or a ConfigDict, which is not changed.
        workdir: folder of the run, or its address in an object store, such as s3://bucket/run;
            docs/extending.md lists its files.
        train_set: takes the place of `config.data.train_json`.
        val_set: takes the place of `config.data.val_json`; with neither, nothing is evaluated.
        augment: takes the place of `config.data.augment`: functions `augment(example, rng)`, see
            `data.augment.Augment`, and kinds such as `data.geometry.Rotation`; one or several.
        optimizer: takes the place of the config's optimizer and schedule. Frozen parameters, loss
            scaling and the division of the batch stay the config's.
        loggers: `logger(step, metrics, images)`, see `training.loggers`, or names that
            `config.train.loggers` takes, one or several; all come beside metrics.jsonl and
            TensorBoard.
        losses: pairs of a name and a function of (outputs, targets, batch), which returns a number
            to add to the loss; they take the place of `config.loss.own`.
        accept_mismatch: only warn if the weights of `config.model.init_from` state that they were
            trained with other colors or strides.

    Returns:
        The state after the last step, with `metrics`, the last value of each.

    Raises:
        ValueError, OSError: config, data, weights or workdir cannot be used, or `StopTraining` was
            raised by what is no logger.
        FloatingPointError: a loss is not finite.
        SystemExit: SIGTERM stopped the run early; its code is 75 (`os.EX_TEMPFAIL`).
    """
    compile_cache.use_default()
    workers.check_main()
    check_written(workdir, "workdir", is_folder=True, in_store=True)
    started, mirror, mesh = time.monotonic(), Mirror(workdir), make_mesh()
    workdir = mirror.folder
    workers.remove_leftovers()  # of a run that was killed at its end: nothing may be left to train
    recipe = as_recipe(config)
    given = loggers if isinstance(loggers, list | tuple) else [loggers]
    loggers = resolve_loggers([*recipe.train.loggers, *given])  # before minutes of reading data
    on_first(lambda: check_loggers(loggers))
    is_begun = on_first(mirror.has_checkpoint)
    if not is_begun:
        check_start(recipe)
        if weights := recipe.model.weights:
            on_first(lambda: pretrained.check_source(weights))
    work, teacher = prepare(recipe, mesh, (train_set, val_set), augment, optimizer, losses)
    if is_begun and mirror.address:  # a mistake takes nothing from a run that is at work there
        classes = categories(work.train_set)
        on_first(lambda: check_same_run(mirror.address, work.recipe, classes))
    with locked(workdir, mirror.check) as check_lock, mirror.opened():  # nothing is written before
        resuming = on_first(lambda: has_checkpoint(workdir))
        options = dict(resuming=resuming, accept_mismatch=accept_mismatch)
        state, tx, old_steps = _start(work, workdir, optimizer, teacher, **options)
        kept, is_due = work.recipe.train.keep_checkpoints, work.milestones.is_due
        # Closed whatever happens: its thread would have the last word after an error.
        with closing(Checkpoints(workdir, kept, is_due, mirror)) as checkpoints:
            if resuming:
                state = checkpoints.restore(state)
            state, start = replicate(state, mesh), int(state.step)
            _log_extension(work, old_steps, start)
            evaluations = on_first(lambda: read_evaluations(workdir, start))
            checkpoints.evaluated(evaluations)
            aps = next((record for record in evaluations if record["step"] == start), None)
            if start and work.milestones.is_last(start, aps, evaluations):
                logging.info("nothing to do: %s is finished at step %d", workdir, start)
                if not (workdir / REPORT_NAME).exists():
                    _report(work, workdir, start)
                return _measured(state, workdir)
            _log_start(work, workdir, mesh, start)
            with (
                closing(StopRequests()) as stop_requested,
                closing(work.batches(start)) as batches,
                interrupts.cleaning(batches.abandon),
                closing(work.loggers(workdir, loggers, start)) as log,
                closing(
                    Evaluations(evaluations, log, checkpoints, check_lock, stop_requested)
                ) as made,
            ):
                made.validate = work.validation(mesh, workdir, stop_requested)
                tools = batches, work.step_log(log, started), checkpoints, made
                run = _Run(work, mesh, replicate(teacher, mesh), *tools, stop_requested)
                state, finished = run.train(work.step(tx, mesh), state, aps)
                saved, ended = checkpoints.resumes_at, log.why_ended()
            check_lock()
            if finished:
                on_first(lambda: _check_files(work, workdir, start, int(state.step), evaluations))
                why = work.milestones.why(int(state.step), evaluations, ended)
                logging.info("finished at step %d%s", int(state.step), why)
                _report(work, workdir, int(state.step))
            mirror.is_stopped = not finished
    _log_end(work, mirror.address or workdir, saved, len(batches.skipped), finished)
    if not finished:
        raise SystemExit(STOPPED_EARLY)
    return _measured(state, workdir)


def _measured(state: TrainState, workdir: Path) -> TrainState:
    return state.with_metrics(on_first(lambda: last_metrics(workdir)))


def _start(
    work: Work,
    workdir: Path,
    optimizer: optax.GradientTransformation | None,
    teacher: tuple[dict, ...],
    *,
    resuming: bool,
    accept_mismatch: bool,
) -> tuple[TrainState, optax.GradientTransformation, int]:
    """Open the workdir; return the first state, the optimizer, and the steps planned before."""
    recipe, classes = work.recipe, categories(work.train_set)
    now: dict[str, Any] = dict(
        resuming=resuming, train_set=fingerprint(work.train_set, recipe.data)
    )
    old_steps = on_first(lambda: open_workdir(workdir, recipe, classes, **now))
    with console.lasting("preparing the model"):
        given = work.model, work.schedule, optimizer
        options: dict[str, Any] = dict(resuming=resuming, accept_mismatch=accept_mismatch)
        return *initial_state(recipe, *given, *teacher, **options), old_steps


def _check_files(work: Work, workdir: Path, start: int, step: int, evaluations: list[dict]) -> None:
    """Write config.json again, and name other files that someone deleted since step `start`.

    Raises OSError if that is the last checkpoint, without which the run is not finished.
    """
    config = workdir / "config.json"
    if not config.exists():
        data = fingerprint(work.train_set, work.recipe.data)
        write_workdir(workdir, work.recipe, categories(work.train_set), data)
        logging.warning("%s was deleted while the run was at work, and is written again", config)
    folders = [workdir / "eval" / str(r["step"]) for r in evaluations if r["step"] > start]
    patterns = [(f, name) for f in folders for name in ("bbox_results.json", "metrics.json")]
    for folder, name in [*patterns, (workdir, "events.out.tfevents.*")]:
        if not any(folder.glob(name)):
            logging.warning("%s was deleted while the run was at work", folder / name)
    if not (last := workdir / "checkpoints" / str(step)).exists():
        raise OSError(f"{last} was deleted while the run was at work; start it again to go on")


def _report(work: Work, workdir: Path, step: int) -> None:
    if jax.process_index() == 0:  # the others need not wait for it
        write_run_report(work.recipe.eval, workdir, step, work.val_set)


@dataclass(frozen=True)
class _Run:
    """The steps of a run, with what they need."""

    work: Work
    mesh: Mesh
    teacher: tuple[dict, ...]  # its variables, if there is one
    batches: TrainLoader
    steps: StepLog
    checkpoints: Checkpoints
    made: Evaluations
    stops: StopRequests

    def train(
        self, train_step: TrainStep, state: TrainState, aps: Metrics | None
    ) -> tuple[TrainState, bool]:
        """Go on from a state, with its metrics if it was evaluated.

        Returns the last state, and whether the run is finished, or was ended by a logger. It is
        saved then, and unless the run was stopped while an earlier state was scored.
        """
        marks, steps, made, stops = self.work.milestones, self.steps, self.made, False
        ended = made.log.why_ended
        step = start = int(state.step)
        if start and aps is None and marks.is_evaluated(start):
            logging.info("the evaluation of step %d was cut off and is made up for", start)
            aps, stops = made.make(state)
        if not (stops or ended() or marks.is_last(step, aps, made.known)):
            train_step = self._compiled(train_step, state)
        while not (stops or ended() or marks.is_last(step, aps, made.known)):
            step, aps, batch = step + 1, None, next(self.batches)
            with steps.dispatching(batch):
                state, metrics = train_step(state, shard_batch(batch, self.mesh), *self.teacher)
            if step == start + 1:
                jax.block_until_ready(metrics)
                self.stops.begin()  # before loggers, which may take long
            steps.finish_previous(step, metrics, batch.image_index)
            stops = made.stop_requested()
            if step % self.work.recipe.train.log_every == 0:
                made.poll()
            if not (stops or ended() or marks.is_due(step)):
                continue
            steps.finish()  # nothing is saved before its losses are known to be finite
            made.check_lock()
            # What is saved while scores are pending does not count after the run has ended.
            is_evaluated = marks.is_evaluated(step) and not ended()
            if (stops or ended() or is_evaluated) and not made.finish(stops=stops):
                stops = True
                break
            self.checkpoints.save(state)
            if is_evaluated and not (stops or ended()):
                aps, stops = made.make(state)
            steps.restart_clock()
        made.finish(stops=True)
        self.checkpoints.wait()
        is_ended = bool(ended()) and not (stops or made.stop_requested())
        return state, marks.is_last(step, aps, made.known) or is_ended

    def _compiled(self, train_step: TrainStep, state: TrainState) -> TrainStep:
        """The step, compiled for several canvases: or one would compile in mid-training. Rare ones
        do all the same: compiling each costs a minute and memory on a CPU."""
        shares, data = self.batches.canvases, self.work.recipe.data
        canvases = [canvas for canvas, share in shares.items() if share >= RARE]
        for canvas in (canvas for canvas in shares if canvas not in canvases):
            text = "images of %d x %d are %.1f%%: the step compiles for them when they first come"
            logging.info(text, *canvas, 100 * shares[canvas])
        recipe = self.work.recipe
        rows, largest = recipe.train.batch_size, max(shares, key=math.prod)
        shapes = {c: abstract_train_batch(data, rows, c, self.mesh) for c in shares}
        arguments = state, shapes[largest], *self.teacher
        log_memory(recipe, train_step, arguments, largest, self.mesh)
        if len(canvases) <= 1:
            return train_step
        with self.steps.compiling(canvases):
            shapes = {canvas: shapes[canvas] for canvas in canvases}
            return compile_canvases(train_step, state, shapes, *self.teacher)


def _log_start(work: Work, workdir: Path, mesh: Mesh, start: int) -> None:
    train = work.recipe.train
    if start:
        logging.info("resuming at step %d of %d", start, train.steps)
    elif (workdir / METRICS_NAME).exists():
        text = "%s has no checkpoint: the run starts from the first step, %s is written anew"
        logging.warning(text, workdir, METRICS_NAME)
    size, devices = train.batch_size, mesh.size
    device.log_devices()
    text = "a step takes %d images: %d devices, %d at a time on each"
    logging.info(text, size, devices, size // (devices * work.microbatches))
    device.log_precision(train.precision, gather)
    device.check_kernels(train.implementation, gather)


def _log_extension(work: Work, old_steps: int, start: int) -> None:
    """Log how the learning rate changes because a run is longer than when it was started."""
    train = work.recipe.train
    if train.steps <= old_steps:
        return
    effect = "the schedule of your own optimizer does not know"
    if work.schedule is not None:
        before = work.recipe.optim.rates(train.batch_size, old_steps)
        rates = float(before(start)), float(work.schedule(start))
        effect = "warm-up and decay are fractions of it, so that the learning rate of step %d is "
        effect = (effect + "%.3g instead of %.3g") % (start + 1, rates[1], rates[0])
    logging.info("train.steps is %d, this run had %d: %s", train.steps, old_steps, effect)


def _log_end(
    work: Work, workdir: Path | str, saved: int | None, skipped: int, finished: bool
) -> None:
    if skipped:
        logging.info("%d images could not be decoded and were skipped", skipped)
    if finished:
        commands = next_commands(workdir, work.train_set if work.val_set is None else work.val_set)
        logging.info("%s", "\n  ".join(["next:", *commands]))
    else:
        text = "stopped by SIGTERM, saved step %d in %s (exit code %d: start it again to go on)"
        logging.info(text, saved, workdir, STOPPED_EARLY)
