"""The training call: steps, checkpoints, evaluations, and how a run ends."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax.data.augment import Kind
from mask_rcnn_jax.data.dataset import Dataset, categories
from mask_rcnn_jax.data.kinds import resolve_augment
from mask_rcnn_jax.data.loader import TrainLoader
from mask_rcnn_jax.terminal import console
from mask_rcnn_jax.training.averaging import weight_average
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.checks import check_config, check_evaluated
from mask_rcnn_jax.training.evaluator import Validation, make_validation
from mask_rcnn_jax.training.lock import locked
from mask_rcnn_jax.training.loggers import Logger, Loggers, open_loggers, resolve_loggers
from mask_rcnn_jax.training.metrics import FILE_NAME as METRICS_NAME
from mask_rcnn_jax.training.metrics import read_evaluations
from mask_rcnn_jax.training.next_steps import next_commands
from mask_rcnn_jax.training.optim import make_schedule
from mask_rcnn_jax.training.processes import STOPPED_EARLY, Stopped, on_first, stop_on_sigterm
from mask_rcnn_jax.training.reports import NAME as REPORT_NAME
from mask_rcnn_jax.training.reports import write_run_report
from mask_rcnn_jax.training.setup import (
    abstract_train_batch,
    check_processes,
    image_counts,
    initial_state,
    log_extension,
    make_train_loader,
    open_datasets,
    open_workdir,
    resolve_config,
    set_steps,
)
from mask_rcnn_jax.training.step import (
    TrainState,
    TrainStep,
    compile_canvases,
    loss_options,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.training.step_log import StepLog
from mask_rcnn_jax.training.stopping import Metrics, main_ap, stop_rule
from mask_rcnn_jax.training.teacher import open_teacher
from mask_rcnn_jax.weights.restore import make_model
from mask_rcnn_jax.weights.run_checkpoint import has_checkpoint


def train(
    config: ConfigDict | str | Path,
    workdir: str | Path,
    *,
    train_set: Dataset | None = None,
    val_set: Dataset | None = None,
    augment: Kind | Sequence[Kind] | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loggers: Sequence[Logger | str] = (),
) -> TrainState:
    """Train a recipe from where the workdir stands to its last step.

    The same call again resumes. SIGTERM saves a checkpoint and ends the program with exit code 75.
    Several processes (`jax.distributed`) make the same call on a workdir that they share.

    Args:
        config: a recipe's name or path, or a config, which is not changed.
        workdir: folder of the run; docs/extending.md lists its files.
        train_set: takes the place of `config.data.train_json`.
        val_set: takes the place of `config.data.val_json`; with neither, nothing is evaluated.
        augment: takes the place of `config.data.augment`: functions `augment(example, rng)`, see
            `data.augment.Augment`, and kinds such as `data.geometry.Rotation`; one or several.
        optimizer: takes the place of the config's optimizer and schedule. Frozen parameters, loss
            scaling and the division of the batch stay the config's.
        loggers: `logger(step, metrics, images)`, see `training.loggers`, or names that
            `config.train.loggers` takes; all come beside metrics.jsonl and TensorBoard.

    Returns:
        The state after the last step.

    Raises:
        ValueError, OSError: config, data, weights or workdir cannot be used.
        FloatingPointError: a loss is not finite.
        SystemExit: SIGTERM stopped the run early; its code is 75 (`os.EX_TEMPFAIL`).
    """
    started = time.monotonic()
    config, workdir, mesh = resolve_config(config), Path(workdir), make_mesh()
    microbatches = check_config(config, mesh.size, optimizer)
    kinds = resolve_augment(config, augment)
    loggers = resolve_loggers([*config.train.loggers, *loggers])
    with console.lasting("reading the data"):
        train_set, val_set = open_datasets(config, train_set, val_set)
    check_evaluated(config, val_set)
    if not config.data.val_json:
        logging.info("data.val_json is empty: nothing is evaluated, the last checkpoints are kept")
    set_steps(config, train_set)
    counts = image_counts(config, train_set)
    model = make_model(config, len(train_set.class_names), config.train.remat, counts)
    schedule = make_schedule(config) if optimizer is None else None
    distillation, teacher = open_teacher(config, model, train_set.class_names)
    check_processes(config, train_set)
    with locked(workdir) as check_lock:  # nothing is written before
        resuming = on_first(lambda: has_checkpoint(workdir))
        classes = categories(train_set)
        old_steps = on_first(lambda: open_workdir(workdir, config, classes, resuming=resuming))
        with console.lasting("preparing the model"):
            state, tx = initial_state(
                config, model, schedule, optimizer, *teacher, resuming=resuming
            )
        is_due = partial(_is_due, config)
        # Closed whatever happens: its thread would have the last word after an error.
        with closing(Checkpoints(workdir, config.train.keep_checkpoints, is_due)) as checkpoints:
            if resuming:
                state = checkpoints.restore(state)
            state, start = replicate(state, mesh), int(state.step)
            teacher = replicate(teacher, mesh)
            if config.train.steps > old_steps:
                log_extension(config, schedule, old_steps, start)
            evaluations = on_first(lambda: read_evaluations(workdir, start))
            checkpoints.evaluated({r["step"]: main_ap(r) for r in evaluations})
            aps = next((record for record in evaluations if record["step"] == start), None)
            if start and _is_last(config, start, aps, evaluations):
                logging.info("nothing to do: %s is finished at step %d", workdir, start)
                if jax.process_index() == 0 and not (workdir / REPORT_NAME).exists():
                    write_run_report(config, workdir, start, val_set)
                return state
            _log_start(config, workdir, mesh, microbatches, start)
            options = {"seed": config.train.seed, "flip_probability": config.data.flip_probability}
            options |= {"loss": loss_options(config), "accumulate_steps": microbatches}
            options |= {"averaging": weight_average(config), "distillation": distillation}
            train_step = make_train_step(model, tx, schedule, mesh, **options)
            with (
                stop_on_sigterm() as stop_requested,
                closing(make_train_loader(config, train_set, start, kinds)) as batches,
                closing(open_loggers(workdir, config.to_dict(), loggers, resume_step=start)) as log,
            ):
                validate = None
                if val_set is not None:
                    given = config, val_set, model, mesh, workdir, stop_requested
                    validate = make_validation(*given)
                steps = StepLog(config, log, train_set, started)
                parts = config, mesh, teacher, batches, steps, log, checkpoints, validate
                run = _Run(*parts, evaluations, check_lock, stop_requested)
                state, finished = run.train(train_step, state, start, aps)
            check_lock()
            if finished:
                why = _why(config, int(state.step), evaluations)
                logging.info("finished at step %d%s", int(state.step), why)
                if jax.process_index() == 0:  # the others need not wait for it
                    write_run_report(config, workdir, int(state.step), val_set)
    if batches.skipped:
        logging.info("%d images could not be decoded and were skipped", len(batches.skipped))
    if not finished:
        text = "stopped by SIGTERM, saved step %d in %s (exit code %d: start it again to go on)"
        logging.info(text, int(state.step), workdir, STOPPED_EARLY)
        raise SystemExit(STOPPED_EARLY)
    commands = next_commands(workdir, train_set if val_set is None else val_set)
    logging.info("%s", "\n  ".join(["next:", *commands]))
    return state


@dataclass(frozen=True)
class _Run:
    """The steps of a run, with what they need; `data.val_json` says whether it evaluates."""

    config: ConfigDict
    mesh: Mesh
    teacher: tuple[dict, ...]  # its variables, if there is one
    batches: TrainLoader
    steps: StepLog
    log: Loggers
    checkpoints: Checkpoints
    validate: Validation | None
    evaluations: list[dict]  # all so far; `train` adds its own
    check_lock: Callable[[], None]
    stop_requested: Callable[[], bool]

    def train(
        self, train_step: TrainStep, state: TrainState, start: int, aps: Metrics | None
    ) -> tuple[TrainState, bool]:
        """Go on from a step, with its metrics if it was evaluated.

        Returns the last state, which is saved, and whether the run is finished.
        """
        config, steps, step, stops = self.config, self.steps, start, False
        if start and aps is None and _is_evaluated(config, start):
            logging.info("the evaluation of step %d was cut off and is made up for", start)
            aps, stops = self._evaluate(state)
        canvases, is_last = self.batches.canvases, partial(_is_last, config)
        ends = stops or is_last(step, aps, self.evaluations)
        if len(canvases) > 1 and not ends:  # or one would compile in mid-training
            shapes = {c: abstract_train_batch(config, c, self.mesh) for c in canvases}
            with steps.compiling(canvases):
                train_step = compile_canvases(train_step, state, shapes, *self.teacher)
        while not (stops or is_last(step, aps, self.evaluations)):
            step, aps, batch = step + 1, None, next(self.batches)
            with steps.dispatching(batch):
                state, metrics = train_step(state, shard_batch(batch, self.mesh), *self.teacher)
            steps.finish_previous(step, metrics, batch.image_index)
            stops = self.stop_requested()
            if not (stops or _is_due(config, step)):
                continue
            steps.finish()  # nothing is saved before its losses are known to be finite
            self.check_lock()
            self.checkpoints.save(state)
            if _is_evaluated(config, step) and not stops:
                aps, stops = self._evaluate(state)
            steps.restart_clock()
        self.checkpoints.wait()
        return state, is_last(step, aps, self.evaluations)

    def _evaluate(self, state: TrainState) -> tuple[Metrics | None, bool]:
        """Evaluate and log; returns the metrics, None where a SIGTERM came in between, and whether
        to stop.

        The state has been saved: an evaluation that is cut off is made up for after a restart.
        """
        assert self.validate is not None  # `_is_evaluated`
        step = int(state.step)
        try:
            metrics, images = self.validate(state)
        except Stopped:
            return None, True
        self.check_lock()
        self.log(step, metrics, images)
        self.checkpoints.evaluated({step: main_ap(metrics)})
        self.evaluations.append({"step": step, **metrics})
        return metrics, self.stop_requested()


def _log_start(
    config: ConfigDict, workdir: Path, mesh: Mesh, microbatches: int, start: int
) -> None:
    if start:
        logging.info("resuming at step %d of %d", start, config.train.steps)
    elif (workdir / METRICS_NAME).exists():
        text = "%s has no checkpoint: the run starts from the first step, %s is written anew"
        logging.warning(text, workdir, METRICS_NAME)
    size, devices = config.train.batch_size, mesh.size
    text = "a step takes %d images: %d devices, %d at a time on each"
    logging.info(text, size, devices, size // (devices * microbatches))


def _why(config: ConfigDict, step: int, evaluations: list[dict]) -> str:
    """Why a run ended before its last step, for the log."""
    rule = stop_rule(config)
    if step >= config.train.steps or not rule.is_stalled(evaluations):
        return ""
    best, at = max((np.nan_to_num(main_ap(r), nan=-1.0), r["step"]) for r in evaluations)
    found = f"the best AP is {best:.4f}, of step {at}"
    return f": {rule.patience} evaluations in a row improved nothing, {found}"


def _is_evaluated(config: ConfigDict, step: int) -> bool:
    if not config.data.val_json:
        return False
    return step % config.train.eval_every == 0 or step == config.train.steps


def _is_due(config: ConfigDict, step: int) -> bool:
    """Whether a step is saved even if nothing stops the run."""
    is_saved = step % config.train.checkpoint_every == 0 or step == config.train.steps
    return is_saved or _is_evaluated(config, step)


def _is_last(
    config: ConfigDict, step: int, aps: Metrics | None, evaluations: Sequence[Metrics] = ()
) -> bool:
    """Whether a step ends the run: the last one, or one after which `StopRule` stops.

    If there is a set to evaluate, such a step has been evaluated. evaluations: all so far.
    """
    if aps is None:
        return not config.data.val_json and step >= config.train.steps
    rule = stop_rule(config)
    return step >= config.train.steps or rule.is_reached(aps) or rule.is_stalled(evaluations)
