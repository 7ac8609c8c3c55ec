"""What each stage of the model costs, each compiled and timed alone on what it would be given.

A whole step is not their sum: XLA joins neighbours, and what one stage hands to the next is not
written out there. They say where to look.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from mask_rcnn_jax.benchmarking import devices, inputs
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.models.mask_rcnn import BOX_SIZE, MASK_SIZE, MaskRCNN
from mask_rcnn_jax.ops.extent import valid_extent
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.training.step import loss_options, loss_terms

RAW_OUTPUTS = ("rpn_logits", "rpn_deltas", "class_logits", "box_deltas", "mask_logits")


def train(config: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """Milliseconds of the stages of a training step on one device, with their gradients.

    `train.batch_size` is the batch of that device. Stages without gradients are run forward.
    """
    model, variables, batch = _problem(config, config.train.batch_size)
    params, run = variables["params"], _runner(model, variables)
    extent = valid_extent(batch.images.shape[1:3], batch.image_sizes, model.input.pad_multiple)
    keys = jax.random.split(jax.random.key(0), len(batch.images))
    time = partial(_time, repeats=repeats)
    most = model.sampling.max_foreground

    def propose(batch, logits, deltas):
        return run(
            params, logits, deltas, batch.image_sizes, extent, train=True, method=MaskRCNN.propose
        )

    def pool(rois, pyramid):
        return tuple(
            run(params, pyramid, boxes, size, extent, method=MaskRCNN.pool)
            for boxes, size in ((rois.boxes, BOX_SIZE), (rois.boxes[:, :most], MASK_SIZE))
        )

    def loss(differentiable, outputs):
        outputs = outputs.replace(**differentiable)
        options = loss_options(config)
        return loss_terms(outputs, options, model.rpn.batch_size_per_image)["loss/total"]

    times = {}
    times["backbone and FPN"], pyramid = time(partial(_trunk, run), params, batch, gradient=(0,))
    times["anchor targets"], (_, sampled, _) = time(
        lambda batch, keys: run(params, batch, keys, extent, method=MaskRCNN.anchor_targets),
        batch,
        keys,
    )
    # As in training, only sampled anchors have a gradient.
    ends = np.cumsum([h * w * model.anchors.per_cell for _, h, w, _ in map(jnp.shape, pyramid)])
    learning = [x.astype(jnp.float32) for x in jnp.split(sampled >= 0, ends[:-1], axis=1)]
    grads = learning, [jnp.repeat(x[..., None], 4, axis=-1) for x in learning]
    times["RPN head"], (logits, deltas) = time(
        partial(run, method=_rpn_head), params, pyramid, gradient=(0, 1), cotangents=grads
    )
    times["proposals"], proposals = time(propose, batch, logits, deltas)
    times["RoI sampling"], rois = time(
        partial(run, params, method=MaskRCNN.sample), proposals, batch, keys
    )
    times["RoIAlign"], (boxed, masked) = time(pool, rois, pyramid, gradient=(1,))
    foreground = jax.tree.map(lambda x: x[:, :most], rois)
    times["box head"], _ = time(partial(run, method=_box_head), params, boxed, gradient=(0, 1))
    times["mask head"], _ = time(
        partial(run, method=_mask_head), params, masked, foreground.classes, gradient=(0, 1)
    )
    times["mask targets"], _ = time(
        partial(run, params, method=MaskRCNN.masks_of), foreground, batch
    )
    outputs = jax.jit(partial(run, train=False, method=MaskRCNN.forward_train))(params, batch, keys)
    times["losses"], _ = time(
        loss, {name: getattr(outputs, name) for name in RAW_OUTPUTS}, outputs, gradient=(0,)
    )
    times["optimizer"] = _optimizer(config, model, params, repeats)
    return times


def infer(config: Mapping[str, Any], repeats: int) -> dict[str, float]:
    """Milliseconds of the stages of a prediction on one device, at `eval.batch_size`."""
    model, variables, batch = _problem(config, config.eval.batch_size)
    params, run = variables["params"], _runner(model, variables)
    extent = valid_extent(batch.images.shape[1:3], batch.image_sizes, model.input.pad_multiple)
    time = partial(_time, repeats=repeats)

    def propose(batch, logits, deltas):
        return run(
            params, logits, deltas, batch.image_sizes, extent, train=False, method=MaskRCNN.propose
        )

    def pool(pyramid, boxes, *, size):
        return run(params, pyramid, boxes, size, extent, method=MaskRCNN.pool)

    def detect(class_logits, box_deltas, proposals, batch):
        return detect_options(config)(
            class_logits,
            box_deltas,
            proposals,
            batch.image_sizes,
            coder=model.box_coder,
            implementation=model.implementation,
        )

    times = {}
    times["backbone and FPN"], pyramid = time(partial(_trunk, run), params, batch)
    times["RPN head"], (logits, deltas) = time(partial(run, method=_rpn_head), params, pyramid)
    times["proposals"], proposals = time(propose, batch, logits, deltas)
    times["RoIAlign of boxes"], boxed = time(partial(pool, size=BOX_SIZE), pyramid, proposals.boxes)
    times["box head"], head = time(partial(run, method=_box_head), params, boxed)
    times["detections"], selected = time(detect, *head, proposals, batch)
    boxes, _, classes, _ = selected
    times["RoIAlign of masks"], masked = time(partial(pool, size=MASK_SIZE), pyramid, boxes)
    times["mask head"], _ = time(partial(run, method=_mask_head), params, masked, classes)
    return times


def _trunk(run: Callable, params, batch: Batch) -> list[jax.Array]:
    return run(params, batch.images, batch.image_sizes, train=False, method=MaskRCNN.pyramid)[0]


def _rpn_head(model, pyramid):
    return model.rpn_head(pyramid)


def _box_head(model, features):
    return model.box_head(features)


def _mask_head(model, features, classes):
    return model.mask_head(features, classes)


def _problem(config: Mapping[str, Any], batch_size: int) -> tuple[MaskRCNN, dict, Batch]:
    model = inputs.recipe_model(config)
    batch = jax.device_put(inputs.synthetic_batch(config, batch_size))
    return model, init_variables(model, config.train.seed), batch


def _runner(model: MaskRCNN, variables: Mapping[str, Any]) -> Callable:
    def run(params, *args, **kwargs):
        with jax.default_matmul_precision(model.matmul_precision):
            return model.apply({**variables, "params": params}, *args, **kwargs)

    return run


def _optimizer(config, model: MaskRCNN, params: dict, repeats: int) -> float:
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    _, tx = inputs.recipe_step(config, model, params, mesh, config.train.batch_size)
    state = tx.init(params)

    def update(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return _time(update, jax.tree.map(jnp.ones_like, params), state, params, repeats=repeats)[0]


def _time(
    function: Callable,
    *args,
    repeats: int,
    gradient: tuple[int, ...] = (),
    cotangents: Any = None,
) -> tuple[float, Any]:
    """Median milliseconds, and the output; with the gradients of the arguments `gradient`.

    cotangents: the gradient of the output; None is 1 everywhere.
    """
    forward = jax.jit(function)
    out = forward(*args)
    if not gradient:
        return devices.summary(devices.time_calls(forward, *args, repeats=repeats))["ms"], out

    def both(cotangents, *args):
        def of_some(*some):
            full = list(args)
            for place, value in zip(gradient, some, strict=True):
                full[place] = value
            return function(*full)

        return jax.vjp(of_some, *(args[i] for i in gradient))[1](cotangents)

    cotangents = jax.tree.map(jnp.ones_like, out) if cotangents is None else cotangents
    times = devices.time_calls(jax.jit(both), cotangents, *args, repeats=repeats)
    return devices.summary(times)["ms"], out
