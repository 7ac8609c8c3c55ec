"""The training loop: steps, checkpoints, evaluations, and how it ends."""

import time
from contextlib import closing
from pathlib import Path

import jax
import jax.numpy as jnp
from absl import logging
from ml_collections import ConfigDict

from mask_rcnn_jax.config import check_entries
from mask_rcnn_jax.data.coco import CocoDataset, check_classes
from mask_rcnn_jax.data.loader import TrainLoader
from mask_rcnn_jax.data.options import example_options, has_inclusive_boxes
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.checkpoint import Checkpoints
from mask_rcnn_jax.training.loss_scale import check_scale
from mask_rcnn_jax.training.metrics import MetricWriter, read_metrics
from mask_rcnn_jax.training.optim import (
    build_optimizer,
    count_microbatches,
    make_schedule,
    optim_options,
)
from mask_rcnn_jax.training.processes import StopOnSigterm
from mask_rcnn_jax.training.setup import make_eval_loader, open_workdir, set_steps
from mask_rcnn_jax.training.step import (
    TrainState,
    loss_options,
    make_loss_step,
    make_mesh,
    make_predict_step,
    make_train_step,
    replicate,
    shard_batch,
)
from mask_rcnn_jax.training.step_log import StepLog
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.restore import make_model
from mask_rcnn_jax.weights.run_checkpoint import has_checkpoint


def train_and_evaluate(config: ConfigDict, workdir: str) -> TrainState:
    """Run the recipe from where the workdir stands to its last step; returns the final state."""
    started = time.monotonic()
    mesh = make_mesh()
    check_entries(config)
    optim = config.optim
    check_scale(optim.loss_scale, optim.loss_scale_growth, optim.loss_scale_floor)
    microbatches = count_microbatches(
        config.train.batch_size,
        mesh.size,
        accumulate_steps=optim.accumulate_steps,
        images_per_device=config.train.images_per_device,
    )
    train_set, val_set = load_split(config.data, "train"), load_split(config.data, "val")
    check_classes(val_set, train_set.categories, train_set.json_path)
    set_steps(config, train_set)
    model = make_model(config, len(train_set.class_names), config.train.remat)
    schedule = make_schedule(optim_options(config), config.train.batch_size, config.train.steps)
    resuming = has_checkpoint(workdir)
    open_workdir(workdir, config, train_set.categories, resuming=resuming)
    state, tx = _initial_state(config, model, schedule, resuming=resuming)
    state = replicate(state, mesh)
    # Closed whatever happens: its threads would have the last word after an error.
    with closing(Checkpoints(workdir, config.train.keep_checkpoints)) as checkpoints:
        if resuming:
            state = checkpoints.restore(state)
        start = int(state.step)
        if start and _is_last(config, start, _earlier_evaluation(workdir, start)):
            logging.info("nothing to do: %s is finished at step %d", workdir, start)
            return state
        if start:
            logging.info("resuming at step %d of %d", start, config.train.steps)
        train_step = make_train_step(
            model,
            tx,
            schedule,
            mesh,
            loss=loss_options(config),
            seed=config.train.seed,
            flip_probability=config.data.flip_probability,
            accumulate_steps=microbatches,
        )
        logging.info(
            "a step takes %d images: %d devices, %d at a time on each",
            config.train.batch_size,
            mesh.size,
            config.train.batch_size // (mesh.size * microbatches),
        )
        loader = _train_loader(config, train_set, start)
        writer = MetricWriter(workdir, jax.process_index(), resume_step=start)
        evaluate = _Evaluation(config, val_set, model, mesh, Path(workdir))
        log = StepLog(config, writer, train_set, started)
        stop = StopOnSigterm()
        try:
            for step in range(start + 1, config.train.steps + 1):
                state, metrics = train_step(state, shard_batch(batch := next(loader), mesh))
                log.finish_previous(step, metrics, batch.image_index)
                evaluates = step % config.train.eval_every == 0 or step == config.train.steps
                stops = stop.requested_at(step)
                if not (evaluates or stops or step % config.train.checkpoint_every == 0):
                    continue
                log.finish()  # nothing is saved before its losses are known to be finite
                aps = None
                try:
                    if evaluates and not stops:
                        aps = evaluate(state, writer)
                except BaseException:
                    if jax.process_count() == 1:  # others would not be there to save with
                        checkpoints.save(state)  # a failed evaluation loses no step
                    raise
                checkpoints.save(state, aps)
                log.restart_clock()
                if stops:
                    logging.info("stopped by SIGTERM, saved step %d in %s", step, workdir)
                    break
                if aps and _is_last(config, step, aps):
                    logging.info("finished at step %d", step)
                    break
            if start >= config.train.steps:  # the last evaluation was cut off
                evaluate(state, writer)
        finally:
            loader.close()
            writer.close()
            stop.restore()
    if loader.skipped:
        logging.info("%d images could not be decoded and were skipped", len(loader.skipped))
    return state


def _train_loader(config: ConfigDict, dataset: CocoDataset, start: int) -> TrainLoader:
    """This process' share of the training batches from step `start` on."""
    return TrainLoader(
        dataset,
        example_options(config),
        seed=config.train.seed,
        start_step=start,
        batch_size=config.train.batch_size // jax.process_count(),
        num_workers=config.data.num_workers,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        keep_empty=config.data.keep_empty,
    )


def _initial_state(config: ConfigDict, model: MaskRCNN, schedule, *, resuming: bool):
    """State of step 0, with the weights of `model.init_from`, and its optimiser."""
    variables = init_variables(model, config.train.seed)
    norm = config.model.backbone.get("norm")
    if not (config.model.init_from or resuming) and norm in ("frozen", "affine"):
        logging.warning(
            "model.backbone.norm is %r and the weights are random: this will hardly learn; set "
            "model.init_from, or model.backbone.norm=group and model.backbone.frozen_stages=0",
            norm,
        )
    if config.model.init_from and not resuming:
        variables = pretrained.initialize_from(variables, config.model)
    tx = build_optimizer(config, schedule, variables["params"], model.backbone)
    state = TrainState(
        step=jnp.int32(0),
        params=variables["params"],
        batch_stats=variables["batch_stats"],
        opt_state=tx.init(variables["params"]),
    )
    return state, tx


def _earlier_evaluation(workdir: str, step: int) -> dict[str, float] | None:
    """What an evaluation of that step found before, None if there was none."""
    path = Path(workdir) / "metrics.jsonl"
    for record in read_metrics(path) if path.exists() else []:
        if record["step"] == step and "ap/box" in record:
            return record
    return None


class _Evaluation:
    """COCO evaluation, validation loss and pictures of the validation set at one step."""

    def __init__(self, config: ConfigDict, val_set: CocoDataset, model, mesh, workdir: Path):
        self._config, self._val_set, self._mesh, self._workdir = config, val_set, mesh, workdir
        self._predict = make_predict_step(model, mesh, detect_options(config))
        self._loss = make_loss_step(model, mesh, loss=loss_options(config), seed=config.train.seed)

    def __call__(self, state: TrainState, writer: MetricWriter) -> dict[str, float]:
        """Scores as `ap/box` and `ap/mask`; everything is written below `eval/<step>/`."""
        config, step = self._config, int(state.step)
        output = self._workdir / "eval" / str(step)
        loader = make_eval_loader(config, self._val_set, config.eval.max_images)
        results = evaluator.detect(
            self._predict,
            state.variables,
            loader,
            self._val_set,
            self._mesh,
            loader.num_images,
            paste=config.eval.paste,
            inclusive_boxes=has_inclusive_boxes(config),
        )
        image_ids = [record.id for record in self._val_set.images[: loader.num_images]]
        metrics = evaluator.score_and_write(self._val_set, results, image_ids, output)
        aps = {"ap/box": metrics["AP"], "ap/mask": metrics["mask_AP"]}
        losses = {}
        if config.eval.loss_images:
            losses = evaluator.mean_losses(
                self._loss,
                state.variables,
                make_eval_loader(config, self._val_set, config.eval.loss_images),
                self._mesh,
            )
        writer.write_scalars(step, {**aps, **losses})
        if config.eval.pictures:
            pictures = evaluator.draw_pictures(
                self._predict,
                state.variables,
                make_eval_loader(config, self._val_set, config.eval.pictures),
                self._val_set,
                self._mesh,
                output / "pictures",
            )
            writer.write_images(step, pictures)
            logging.info("annotated pictures: %s", output / "pictures")
        return aps


def _is_last(config: ConfigDict, step: int, aps: dict[str, float] | None) -> bool:
    """Whether an evaluated step ends the run: the last one, or one that reached the target APs."""
    if aps is None:
        return False
    box, mask = config.train.stop_at_box_ap, config.train.stop_at_mask_ap
    reached = (box > 0 or mask > 0) and aps["ap/box"] >= box and aps["ap/mask"] >= mask
    return step >= config.train.steps or reached
