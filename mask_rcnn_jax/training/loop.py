"""The training call: steps, checkpoints, evaluations, and how a run ends."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import jax
import optax
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax.config import check_entries
from mask_rcnn_jax.data.augment import Augment
from mask_rcnn_jax.data.coco import CocoDataset
from mask_rcnn_jax.data.dataset import Dataset, categories
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.evaluator import Validation, make_validation
from mask_rcnn_jax.training.loggers import Logger, Loggers, open_loggers, resolve_loggers
from mask_rcnn_jax.training.metrics import FILE_NAME, read_metrics
from mask_rcnn_jax.training.optim import count_microbatches, make_schedule, optim_options
from mask_rcnn_jax.training.processes import stop_on_sigterm
from mask_rcnn_jax.training.setup import (
    initial_state,
    make_train_loader,
    open_datasets,
    open_workdir,
    resolve_config,
    set_steps,
)
from mask_rcnn_jax.training.step import (
    TrainState,
    loss_options,
    make_mesh,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.training.step_log import StepLog
from mask_rcnn_jax.weights.restore import make_model
from mask_rcnn_jax.weights.run_checkpoint import has_checkpoint


def train(
    config: ConfigDict | str | Path,
    workdir: str | Path,
    *,
    train_set: Dataset | None = None,
    val_set: Dataset | None = None,
    augment: Augment | None = None,
    optimizer: optax.GradientTransformation | None = None,
    loggers: Sequence[Logger | str] = (),
) -> TrainState:
    """Train a recipe from where the workdir stands to its last step.

    The same call again resumes. SIGTERM saves a checkpoint and returns. Several processes
    (`jax.distributed`) make the same call on a workdir that they share.

    Args:
        config: a recipe's name or path, or a config, which is not changed.
        workdir: folder of the run; docs/extending.md lists its files.
        train_set: takes the place of `config.data.train_json`.
        val_set: takes the place of `config.data.val_json`.
        augment: `augment(example, rng) -> example`, on the host, see `data.augment.Augment`.
        optimizer: takes the place of the config's optimizer and schedule. Frozen parameters, loss
            scaling and the division of the batch stay the config's.
        loggers: `logger(step, metrics, images)`, see `training.loggers`, or names that
            `config.train.loggers` takes; all come beside metrics.jsonl and TensorBoard.

    Returns:
        The state after the last step.

    Raises:
        ValueError, OSError: config, data, weights or workdir cannot be used.
        FloatingPointError: a loss is not finite.
    """
    started = time.monotonic()
    config, workdir, mesh = resolve_config(config), Path(workdir), make_mesh()
    microbatches = _check(config, mesh, optimizer)
    loggers = resolve_loggers([*config.train.get("loggers", ()), *loggers])
    train_set, val_set = open_datasets(config, train_set, val_set)
    set_steps(config, train_set)
    model = make_model(config, len(train_set.class_names), config.train.remat)
    schedule = make_schedule(config) if optimizer is None else None
    resuming = has_checkpoint(workdir)
    open_workdir(workdir, config, categories(train_set), resuming=resuming)
    state, tx = initial_state(config, model, schedule, optimizer, resuming=resuming)
    state = replicate(state, mesh)
    # Closed whatever happens: its threads would have the last word after an error.
    with closing(Checkpoints(workdir, config.train.keep_checkpoints)) as checkpoints:
        if resuming:
            state = checkpoints.restore(state)
        start = int(state.step)
        if start and _is_last(config, start, _earlier_evaluation(workdir, start)):
            logging.info("nothing to do: %s is finished at step %d", workdir, start)
            return state
        _log_start(config, mesh, microbatches, start)
        options = {"seed": config.train.seed, "flip_probability": config.data.flip_probability}
        options |= {"loss": loss_options(config), "accumulate_steps": microbatches}
        train_step = make_train_step(model, tx, schedule, mesh, **options)
        validate = make_validation(config, val_set, model, mesh, workdir)
        with (
            stop_on_sigterm() as stop_requested,
            closing(make_train_loader(config, train_set, start, augment)) as batches,
            closing(open_loggers(workdir, config.to_dict(), loggers, resume_step=start)) as log,
        ):
            steps, stops = StepLog(config, log, train_set, started), False
            for step in range(start + 1, config.train.steps + 1):
                batch = next(batches)
                with steps.dispatching(batch):
                    state, metrics = train_step(state, shard_batch(batch, mesh))
                steps.finish_previous(step, metrics, batch.image_index)
                stops = stop_requested(step)
                evaluates = step % config.train.eval_every == 0 or step == config.train.steps
                if not (stops or evaluates or step % config.train.checkpoint_every == 0):
                    continue
                steps.finish()  # nothing is saved before its losses are known to be finite
                finished = evaluates and not stops
                aps = _evaluate(validate, state, log, checkpoints) if finished else None
                checkpoints.save(state, aps)
                steps.restart_clock()
                if stops:
                    logging.info("stopped by SIGTERM, saved step %d in %s", step, workdir)
                    break
                if _is_last(config, step, aps):
                    logging.info("finished at step %d", step)
                    break
            if start >= config.train.steps:  # the last evaluation was cut off
                _evaluate(validate, state, log, checkpoints)
    if batches.skipped:
        logging.info("%d images could not be decoded and were skipped", len(batches.skipped))
    if not stops:
        _say_next(workdir, val_set)
    return state


def _check(config: ConfigDict, mesh: Mesh, optimizer: optax.GradientTransformation | None) -> int:
    """The number of microbatches of a device; ValueError for a faulty config."""
    check_entries(config)
    optim_options(config)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, expected an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    return count_microbatches(config, config.train.batch_size, mesh.size)


def _log_start(config: ConfigDict, mesh: Mesh, microbatches: int, start: int) -> None:
    if start:
        logging.info("resuming at step %d of %d", start, config.train.steps)
    size, devices = config.train.batch_size, mesh.size
    text = "a step takes %d images: %d devices, %d at a time on each"
    logging.info(text, size, devices, size // (devices * microbatches))


def _evaluate(
    validate: Validation, state: TrainState, log: Loggers, checkpoints: Checkpoints
) -> dict[str, float]:
    """Evaluate and log; returns the APs that were scored. A failed evaluation loses no step."""
    try:
        metrics, images = validate(state)
        log(int(state.step), metrics, images)
    except BaseException:
        if jax.process_count() == 1:  # others would not be there to save with
            checkpoints.save(state)
        raise
    return {name: metrics[name] for name in ("ap/box", "ap/mask") if name in metrics}


def _say_next(workdir: Path, val_set: Dataset) -> None:
    evaluate = f"python -m mask_rcnn_jax.evaluate --workdir {workdir} --report"
    if not isinstance(val_set, CocoDataset):  # a command cannot be given it
        evaluate = f"mask_rcnn_jax.evaluate({str(workdir)!r}, val_set=..., report=True)"
    logging.info("next: tensorboard --logdir %s (curves), %s (report.html)", workdir, evaluate)


def _earlier_evaluation(workdir: Path, step: int) -> dict[str, float] | None:
    """The record of an earlier evaluation of that step, None if there was none."""
    path = workdir / FILE_NAME
    records = read_metrics(path) if path.exists() else []
    return next((r for r in records if r["step"] == step and "ap/box" in r), None)


def _is_last(config: ConfigDict, step: int, aps: dict[str, float] | None) -> bool:
    """Whether an evaluated step ends the run: the last one, or one that reached the target APs."""
    if aps is None:
        return False
    box, mask = config.train.stop_at_box_ap, config.train.stop_at_mask_ap
    reached = (box > 0 or mask > 0) and aps["ap/box"] >= box and aps.get("ap/mask", 0) >= mask
    return step >= config.train.steps or reached
