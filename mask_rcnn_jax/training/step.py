"""The jitted steps: train, validation loss and prediction, each one XLA program on all devices."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.outputs import TrainOutputs
from mask_rcnn_jax.models.protocols import BackboneLike, ability
from mask_rcnn_jax.ops import losses
from mask_rcnn_jax.ops.losses import LossOptions
from mask_rcnn_jax.ops.low_rank import merge
from mask_rcnn_jax.recipe.averaging import NO_AVERAGE, WeightAverage
from mask_rcnn_jax.structures import Batch, Detections
from mask_rcnn_jax.training.distill import Distillation
from mask_rcnn_jax.training.flip import random_flip
from mask_rcnn_jax.training.freezing import apply_updates, trained_leaves, with_frozen
from mask_rcnn_jax.training.loss_scale import LossScaleState
from mask_rcnn_jax.training.optim import injected_rate
from mask_rcnn_jax.training.own_losses import add_losses
from mask_rcnn_jax.training.state import TrainState as TrainState


@dataclass(frozen=True)
class StepOptions:
    """What a training step computes.

    Attributes:
        seed: random numbers are a function of (seed, step, image) alone and do not depend on the
            number of devices; samples do where a recipe looks at a device's batch (pad_multiple,
            post_nms_scope).
        flip_probability: of an image.
        accumulate_steps: a device takes its images in that many parts, one after the other. Losses
            are normalized over one part, gradients averaged over all: k parts on n devices equal
            one part on k * n devices, except where norms look at all devices: sync_batch and
            naive_sync_batch take their statistics from one part of the n devices.
        freeze: patterns of parameters without a gradient, see `recipe.optimizer.Optimizer`.
        keypoint_mirror: see `training.flip.random_flip`.
    """

    loss: LossOptions
    seed: int
    flip_probability: float
    accumulate_steps: int = 1
    averaging: WeightAverage = NO_AVERAGE
    freeze: tuple[str, ...] = ()
    keypoint_mirror: tuple[int, ...] = ()


# Of a state, a batch and, with a teacher, its variables.
TrainStep = Callable[..., tuple[TrainState, dict[str, jax.Array]]]

# A step takes replicated variables or a state, and its share of a batch.
sharded = partial(jax.shard_map, in_specs=(P(), P("data")), check_vma=False)


def make_mesh() -> Mesh:
    """All devices on one axis, `data`."""
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def shard_batch(batch: Batch, mesh: Mesh) -> Batch:
    """This process' rows of a batch, spread over its devices."""
    sharding = NamedSharding(mesh, P("data"))
    return jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), batch)


def replicate(tree, mesh: Mesh):
    """The same tree on every device."""
    return jax.device_put(tree, NamedSharding(mesh, P()))


def make_train_step(
    model: MaskRCNN,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule | None,
    mesh: Mesh | AbstractMesh,
    options: StepOptions,
    distillation: Distillation | None = None,
) -> TrainStep:
    """`step(state, batch) -> (state, metrics)`; the old state's buffers are reused.

    schedule: gives the metric `lr`; without one the rate that `optax.inject_hyperparams` keeps in
    the state is taken, if any.
    distillation: adds losses, for `step(state, batch, teacher)` with the teacher's variables.
    """
    mutable = ["batch_stats"] if model.trains_batch_stats else []
    stages = ability(model.backbone, BackboneLike, "frozen")
    forward = partial(model.apply, method="forward_train", train=True, mutable=mutable)
    box_offset, whole_masks = model.box_coder.iou_offset, model.mask_targets.kind == "whole"
    flip = partial(random_flip, box_offset=box_offset, whole_masks=whole_masks)

    def part_gradients(state: TrainState, teacher: Any, batch: Batch):
        flip_keys, model_keys = _image_keys(options.seed, state.step, batch)
        mirror = options.keypoint_mirror
        batch = flip(batch, flip_keys, options.flip_probability, keypoint_mirror=mirror)

        def loss_fn(trained):
            params = merge(with_frozen(trained, state.params))
            variables = {"params": params, "batch_stats": state.batch_stats}
            outputs, updated = forward(variables, batch, model_keys)
            terms = _terms(model, options.loss, outputs, batch)
            if distillation is not None:
                terms = distillation.add(terms, teacher, batch, outputs, state.step)
            return state.loss_scale * terms["loss/total"], (terms, updated.get("batch_stats"))

        trained = trained_leaves(state.params, options.freeze, stages)
        grads, (terms, batch_stats) = jax.grad(loss_fn, has_aux=True)(trained)
        # Changes, so that averaging leaves fixed statistics exactly as they are.
        moved = optax.tree.sub(batch_stats, state.batch_stats) if batch_stats else None
        return grads, terms, moved

    def step(state: TrainState, batch: Batch, teacher: Any = None):
        gradients = partial(part_gradients, state, teacher)
        local = _mean_over_parts(gradients, batch, options.accumulate_steps)
        # Under check_vma=False the gradients are this device's own: average them exactly once.
        grads, terms, moved = lax.pmean(local, "data")
        state, metrics = _update(state, grads, moved, tx, schedule, options.averaging)
        return state, terms | metrics

    specs = (P(), P("data")) if distillation is None else (P(), P("data"), P())
    program = sharded(step, mesh=mesh, in_specs=specs, out_specs=(P(), P()))
    return jax.jit(program, donate_argnums=0, compiler_options=compiler_options(mesh))


def _update(
    state: TrainState,
    grads: dict,
    moved: dict | None,
    tx: optax.GradientTransformation,
    schedule: optax.Schedule | None,
    averaging: WeightAverage,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The state after a step, and its metrics; moved: what batch statistics change by.

    With `loss_scale.dynamic_loss_scale` as `tx`, a step that overflows changes neither parameters
    nor optimizer nor batch statistics nor the average; `grad_norm` is not finite then. `step`
    counts it all the same, because its images are used up; schedule and average do not.
    """
    batch_stats = optax.tree.add(state.batch_stats, moved) if moved else state.batch_stats
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    metrics, updates_done = {"grad_norm": optax.tree.norm(grads) / state.loss_scale}, state.step
    scaling = isinstance(state.opt_state, LossScaleState)
    if scaling:
        # The gradients are averaged before anybody looks at them, so all devices agree.
        skipped = opt_state.skipped > state.opt_state.skipped
        batch_stats = optax.tree.where(skipped, state.batch_stats, batch_stats)
        updates_done = state.step - state.opt_state.skipped
        metrics |= {"loss_scale": state.loss_scale, "skipped_steps": opt_state.skipped}
    rate = injected_rate(opt_state) if schedule is None else schedule(updates_done)
    if rate is not None:
        metrics["lr"] = jnp.asarray(rate, jnp.float32)
    params = apply_updates(state.params, updates)
    new = TrainState(state.step + 1, params, batch_stats, opt_state, state.average)
    average = averaging.update(state.average, new.variables, updates_done)
    if scaling:
        average = optax.tree.where(skipped, state.average, average)
    return replace(new, average=average), metrics


def compiler_options(mesh: Mesh | AbstractMesh) -> dict[str, Any] | None:
    """Return XLA's options for a training step on these devices: on CPUs, 40 % less memory."""
    if isinstance(mesh, AbstractMesh) or mesh.devices.flat[0].platform != "cpu":
        return None
    return {
        # By default, XLA for CPUs starts what it can as early as it can.
        "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        # It would also remove optimization barriers before fusing, see `models.relu`.
        "xla_disable_hlo_passes": "cse_barrier_expander",
    }


def make_loss_step(
    model: MaskRCNN, mesh: Mesh, *, loss: LossOptions, seed: int
) -> Callable[[dict, Batch], dict[str, jax.Array]]:
    """`loss(variables, batch) -> losses` without flips, gradients or batch statistics updates."""

    def step(variables: dict, batch: Batch):
        _, keys = _image_keys(seed, jnp.int32(0), batch)
        outputs: Any = model.apply(variables, batch, keys, train=False, method="forward_train")
        terms = _terms(model, loss, outputs, batch)
        return lax.pmean(terms, "data")

    return jax.jit(sharded(step, mesh=mesh, out_specs=P()))


def make_predict_step(
    model: MaskRCNN, mesh: Mesh | AbstractMesh, detect: Detect
) -> Callable[[dict, Batch], Detections]:
    """`predict(variables, batch) -> Detections`."""

    def step(variables: dict, batch: Batch):
        return model.apply(variables, batch.images, batch.image_sizes, detect, method="predict")

    return jax.jit(sharded(step, mesh=mesh, out_specs=P("data")))


def _terms(
    model: MaskRCNN, loss: LossOptions, outputs: TrainOutputs, batch: Batch
) -> dict[str, jax.Array]:
    terms = loss_terms(outputs, loss, model.rpn.batch_size_per_image)
    return add_losses(terms, loss.added, outputs, batch) if loss.added else terms


def loss_terms(
    outputs: TrainOutputs, options: LossOptions, anchors_per_image: int
) -> dict[str, jax.Array]:
    """The losses, four and those of the model's tasks, and their weighted sum.

    With them, `dropped_masks` of the outputs, where the rows of the tasks' heads are limited.
    anchors_per_image: `model.rpn.batch_size_per_image`.
    """
    rpn_cls, rpn_box = losses.rpn_losses(
        outputs.rpn_logits,
        outputs.rpn_deltas,
        outputs.sampled_labels,
        outputs.anchor_labels,
        outputs.anchor_deltas,
        options,
        batch_per_image=anchors_per_image,
    )
    box_cls: Any = 0.0
    box_reg: Any = 0.0
    for stage, drawn in zip(outputs.box_stages, outputs.drawn_classes, strict=True):
        of_stage = losses.box_losses(
            stage.class_logits,
            stage.box_deltas,
            stage.rois.classes,
            stage.rois.deltas,
            stage.rois.valid,
            options,
            partial(outputs.classifier.loss, drawn=drawn),
        )
        box_cls, box_reg = box_cls + of_stage[0], box_reg + of_stage[1]
    terms = {
        "loss/rpn_cls": rpn_cls,
        "loss/rpn_box": options.rpn_box_weight * rpn_box,
        "loss/box_cls": box_cls,
        "loss/box_reg": options.box_reg_weight * box_reg,
    }
    for name, own in outputs.tasks.items():
        weight: float = getattr(options, f"{name}_weight")
        for term, value in own.task.losses(outputs, options).items():
            terms[f"loss/{term}"] = weight * value
    dropped = outputs.dropped_masks
    counts = {} if dropped is None else {"dropped_masks": dropped}
    return {"loss/total": sum(terms.values()), **terms, **counts}


def _image_keys(seed: int, step: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Two keys for every image, from its place in the data set."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    keys = jax.vmap(lambda i: jax.random.split(jax.random.fold_in(key, i)))(batch.image_index)
    return keys[:, 0], keys[:, 1]


def _mean_over_parts(function: Callable[[Batch], Any], batch: Batch, parts: int):
    """The mean of `function` over equal parts of the rows, one part at a time in memory."""
    if parts == 1:
        return function(batch)
    split = jax.tree.map(lambda x: x.reshape(parts, len(x) // parts, *x.shape[1:]), batch)
    of_part = jax.eval_shape(function, jax.tree.map(lambda x: x[0], split))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), of_part)

    def add(total, part):
        return optax.tree.add(total, function(part)), None

    total, _ = lax.scan(add, zeros, split)
    return jax.tree.map(lambda x: x / parts, total)
