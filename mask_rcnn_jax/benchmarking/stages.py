"""Time each model stage, compiled alone on the inputs it would receive.

The stages do not add up to a step: XLA fuses across stage boundaries and stores no values there.
They show where to look.

Each stage has its median `ms`; on a CPU also `cpu_ms`, milliseconds of its cores, and `gflop`,
billions of operations before optimization.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mask_rcnn_jax.benchmarking import devices, inputs
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.task_heads import run_head
from mask_rcnn_jax.ops.extent import ValidExtent, valid_extent
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training.step import loss_terms

Figures = dict[str, dict[str, float]]  # by stage
Save = Callable[[Figures], object]  # receives the figures after each stage
RAW_OUTPUTS = ("rpn_logits", "rpn_deltas", "class_logits", "box_deltas")


def train(recipe: Recipe, repeats: int, save: Save = lambda figures: None) -> Figures:
    """Return the figures of each training stage on one device, gradients included.

    That device gets the whole `train.batch_size`. Stages without gradients run forward only.
    """
    made = inputs.synthetic_batch(recipe, recipe.train.batch_size, training=True)
    model, params, run, batch, extent = _setup(recipe, made)
    keys = jax.random.split(jax.random.key(0), len(batch.images))
    times: Figures = {}
    stage = partial(_stage, times, repeats, save)

    def pool(rois, task_rois, pyramid):
        size = model.box_roi_size
        pooled = [run(params, pyramid, rois.boxes, size, extent, method=MaskRCNN.pool)]
        for task in model.tasks:
            given = pyramid, task_rois, extent, model.roi_size(task.name)
            pooled.append(run(params, *given, method=MaskRCNN.pool_rois))
        return tuple(pooled)

    def loss(differentiable, logits, outputs):
        tasks = {name: own.replace(logits=logits[name]) for name, own in outputs.tasks.items()}
        outputs = outputs.replace(**differentiable, tasks=tasks)
        options = recipe.loss
        return loss_terms(outputs, options, model.rpn.batch_size_per_image)["loss/total"]

    def anchor_targets(batch, keys):
        return run(params, batch, keys, extent, method=MaskRCNN.anchor_targets)

    pyramid = stage("backbone and FPN", partial(_trunk, run), params, batch, gradient=(0,))
    _, sampled, _ = stage("anchor targets", anchor_targets, batch, keys)
    # As in training, only sampled anchors have a gradient.
    ends = np.cumsum([h * w * model.anchors.per_cell for _, h, w, _ in map(jnp.shape, pyramid)])
    learning = [x.astype(jnp.float32) for x in jnp.split(sampled >= 0, ends[:-1], axis=1)]
    grads = learning, [jnp.repeat(x[..., None], 4, axis=-1) for x in learning]
    rpn_head = partial(run, method="rpn_head")
    logits, deltas = stage("RPN head", rpn_head, params, pyramid, gradient=(0, 1), cotangents=grads)
    propose = partial(_propose, run, params, extent, train=True)
    proposals = stage("proposals", propose, batch, logits, deltas)
    sample = partial(run, params, method=MaskRCNN.sample)
    rois = stage("RoI sampling", sample, proposals, batch, keys)
    task_rois, _ = model.sampling.mask_rois(rois)
    boxed, *of_tasks = stage("RoIAlign", pool, rois, task_rois, pyramid, gradient=(2,))
    stage("box head", partial(run, method="box_head"), params, boxed, gradient=(0, 1))
    rows = pyramid, task_rois.boxes[None], task_rois.images[None]
    own_keys = task_rois.keys(keys, len(keys))[None]
    for task, pooled in zip(model.tasks, of_tasks, strict=True):
        head = _task_head(run, task.name, *rows, keys=own_keys)
        given = params, pooled, task_rois.classes[None]
        found = stage(f"{task.name} head", head, *given, gradient=(0, 1))
        logits = jax.tree.map(lambda x: x[0], found)
        stage(f"{task.name} targets", task.targets, batch, task_rois, logits)
    outputs = jax.jit(partial(run, train=False, method=MaskRCNN.forward_train))(params, batch, keys)
    raw = {name: getattr(outputs, name) for name in RAW_OUTPUTS}
    logits = {name: own.logits for name, own in outputs.tasks.items()}
    stage("losses", loss, raw, logits, outputs, gradient=(0, 1))
    times["optimizer"] = _optimizer(recipe, model, params, repeats)
    save(times)
    return times


def infer(recipe: Recipe, repeats: int, save: Save = lambda figures: None) -> Figures:
    """Return the figures of each prediction stage on one device, at `eval.batch_size`."""
    made = inputs.synthetic_batch(recipe, recipe.eval.batch_size)
    model, params, run, batch, extent = _setup(recipe, made)
    times: Figures = {}
    stage = partial(_stage, times, repeats, save)

    def pool(pyramid, boxes, *, size):
        return run(params, pyramid, boxes, size, extent, method=MaskRCNN.pool)

    detect = partial(recipe.eval, coder=model.box_coder, implementation=model.implementation)
    pyramid = stage("backbone and FPN", partial(_trunk, run), params, batch)
    logits, deltas = stage("RPN head", partial(run, method="rpn_head"), params, pyramid)
    propose = partial(_propose, run, params, extent, train=False)
    proposals = stage("proposals", propose, batch, logits, deltas)
    pool_boxes = partial(pool, size=model.box_roi_size)
    boxed = stage("RoIAlign of boxes", pool_boxes, pyramid, proposals.boxes)
    head = stage("box head", partial(run, method="box_head"), params, boxed)
    selected = stage("detections", detect, *head, proposals, batch.image_sizes)
    boxes, _, classes, _ = selected
    for task in model.tasks:
        name, pool_boxes = task.name, partial(pool, size=model.roi_size(task.name))
        pooled = stage(f"RoIAlign of {name}s", pool_boxes, pyramid, boxes)
        stage(f"{name} head", _task_head(run, name, pyramid, boxes), params, pooled, classes)
    return times


def _stage(times: dict, repeats: int, save: Save, name: str, function: Callable, *args, **options):
    """Time a stage as `_time` does, save the times so far, and return the stage's output."""
    times[name], out = _time(function, *args, repeats=repeats, **options)
    save(times)
    return out


def _trunk(run: Callable, params, batch: Batch) -> list[jax.Array]:
    return run(params, batch.images, batch.image_sizes, train=False, method=MaskRCNN.pyramid)[0]


def _task_head(run: Callable, task: str, *rows: Any, **training: Any) -> Callable:
    """Return a function of params, RoI features and classes; the others as of `run_head`."""

    def head(model: MaskRCNN, pooled: jax.Array, classes: jax.Array) -> Any:
        return run_head(model, task, pooled, classes, *rows, **training)

    return partial(run, method=head)


def _propose(run: Callable, params, extent: ValidExtent, batch: Batch, logits, deltas, *, train):
    sizes = batch.image_sizes
    return run(params, logits, deltas, sizes, extent, train=train, method=MaskRCNN.propose)


def _setup(recipe: Recipe, made: Batch) -> tuple[MaskRCNN, dict, Callable, Batch, ValidExtent]:
    """Return the model, its params, `run(params, *args, method=...)`, the batch and its extent."""
    model = inputs.recipe_model(recipe)
    batch = jax.device_put(made)
    variables = jax.device_put(init_variables(model, recipe.train.seed))  # they are numpy's
    extent = valid_extent(batch.images.shape[1:3], batch.image_sizes, model.input.pad_multiple)

    def run(params, *args, **kwargs):
        with jax.default_matmul_precision(model.precision.matmul):
            return model.apply({**variables, "params": params}, *args, **kwargs)

    return model, variables["params"], run, batch, extent


def _optimizer(recipe: Recipe, model: MaskRCNN, params: dict, repeats: int) -> dict[str, float]:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    _, tx = inputs.recipe_step(recipe, model, params, mesh, recipe.train.batch_size)
    state = tx.init(params)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _time(update, jax.tree.map(jnp.ones_like, params), state, params, repeats=repeats)[0]


def _time(
    function: Callable, *args, repeats: int, gradient: tuple[int, ...] = (), cotangents: Any = None
) -> tuple[dict[str, float], Any]:
    """Return the figures of a function and its output.

    gradient: argument positions whose gradients are timed too. cotangents: output gradient; None
    is 1 everywhere.
    """
    forward = jax.jit(function)
    out = forward(*args)
    if not gradient:
        return _figures(forward, *args, repeats=repeats), out

    def forward_and_backward(cotangents, *args):
        def of_differentiated(*values):
            full = list(args)
            for place, value in zip(gradient, values, strict=True):
                full[place] = value
            return function(*full)

        return jax.vjp(of_differentiated, *(args[i] for i in gradient))[1](cotangents)

    cotangents = jax.tree.map(jnp.ones_like, out) if cotangents is None else cotangents
    return _figures(jax.jit(forward_and_backward), cotangents, *args, repeats=repeats), out


def _figures(compiled: Any, *args, repeats: int) -> dict[str, float]:
    def clocks() -> np.ndarray:
        return np.array([time.perf_counter(), time.process_time()])

    times = devices.time_calls(compiled, *args, repeats=repeats, clock=clocks)
    elapsed, cpu = np.transpose(times)
    figures = {"ms": devices.summary(elapsed)["ms"]}
    if jax.default_backend() == "cpu":
        # In the GPU program, as in `inputs.train_flops`; both are XLA's where there is no GPU.
        lowered = compiled.trace(*args).lower(lowering_platforms=("cuda",))
        figures["cpu_ms"] = devices.summary(cpu)["ms"]
        figures["gflop"] = round(1e-9 * lowered.cost_analysis().get("flops", 0.0), 3)
    return figures
