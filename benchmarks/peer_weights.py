"""Make weights of torchvision's maskrcnn_resnet50_fpn that find objects without being trained.

    python benchmarks/peer_weights.py --image photo.jpg --output calibrated.safetensors
    python benchmarks/peer_weights.py --image photo.jpg --output calibrated.safetensors \
        --backbone resnet50.pth

For `peers_files.py`, where nothing trained is at hand. Random heads give all boxes the same score.
Here, the last layer of each is scaled and shifted so that in this image, logits and deltas vary
about as much as a trained model's do, and a few RoIs score above 0.5: the parts of both programs
behind the network have as much to do as usual. What is found means nothing.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from mask_rcnn_jax.benchmarking import inputs
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.images.decode import decode_image
from mask_rcnn_jax.models.build import init_variables
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops.extent import valid_extent
from mask_rcnn_jax.weights.convert import to_torchvision
from mask_rcnn_jax.weights.pretrained import initialize_from

RECIPE = Path(__file__).resolve().parents[1] / "configs" / "coco_torchvision.py"
CONFIDENT = 0.01  # of the RoIs score above 0.5; NMS leaves a third of them


def main(arguments: argparse.Namespace) -> None:
    entries = {"data.image_size": tuple(map(int, arguments.size.split(",")))}
    entries["model.init_from"] = arguments.backbone or ""
    recipe = load_config(RECIPE, entries)
    model = inputs.recipe_model(recipe)
    variables = init_variables(model, arguments.seed)
    if arguments.backbone:
        variables = initialize_from(variables, recipe.model)
    options, image = recipe.data, decode_image(arguments.image)
    plan = resize_plan(*image.shape[:2], options)
    canvas, size = resize_image(image, plan, options)[None], np.array([plan.size], np.int32)
    calibrate(model, variables, canvas, size, recipe.eval)
    arrays = to_torchvision(variables, norm_eps=recipe.model.backbone.norm_eps)
    save_file(arrays, arguments.output)


def calibrate(model: MaskRCNN, variables: dict, images, image_sizes, detect) -> None:
    """Replace the last layers of the heads in `variables`, for images [B, H, W, 3] on a canvas."""
    params = variables["params"]
    extent = valid_extent(images.shape[1:3], image_sizes, model.input.pad_multiple)

    def run(method: str | Callable, *arrays, **options):
        """Call a method of the model in a program that takes the weights as they are now."""

        def call(variables, *arrays):
            return model.apply(variables, *arrays, method=method, **options)

        return jax.jit(call)(variables, *arrays)

    def maps(model: MaskRCNN, images: jax.Array, image_sizes: jax.Array) -> list[jax.Array]:
        return model.pyramid(images, image_sizes, train=False)[0]

    pyramid = run(maps, images, image_sizes)
    per_cell, head = model.anchors.per_cell, params["rpn_head"]
    logits, deltas = (jnp.concatenate(rows, axis=1) for rows in run("rpn_head", pyramid))
    standardize(head["objectness_logits"], logits.reshape(-1, per_cell), deviation=2.0)
    standardize(head["anchor_deltas"], deltas.reshape(-1, 4 * per_cell), deviation=0.2)
    outputs = run("rpn_head", pyramid)
    proposals = run("propose", *outputs, image_sizes, extent=extent, train=False)
    boxed = run("pool", pyramid, proposals.boxes, size=model.box_roi_size, extent=extent)
    logits, deltas = run("box_head", boxed)
    head = params["box_head"]
    standardize(head["cls_score"], logits.reshape(-1, logits.shape[-1]), deviation=3.0)
    standardize(head["bbox_pred"], deltas.reshape(-1, 4 * deltas.shape[-2]), deviation=0.5)
    logits, _ = run("box_head", boxed)
    # An object scores above 0.5 if its class outweighs the background and the other classes.
    best = jnp.quantile(jnp.max(logits[..., 1:], axis=-1), 1 - CONFIDENT)
    head["cls_score"]["bias"][0] = best
    logits, deltas = run("box_head", boxed)
    boxes, _, classes, _ = detect(logits, deltas, proposals, image_sizes, coder=model.box_coder)
    pooled = run("pool", pyramid, boxes, size=model.roi_size("mask"), extent=extent)
    masks = run("mask_head", pooled, classes)[classes > 0]
    standardize(params["mask_head"]["mask_predictor"], masks.reshape(-1, 1), deviation=2.0)


def standardize(layer: dict, outputs: jax.Array, *, deviation: float) -> None:
    """Scale and shift a layer, so that its outputs [N, channels] have mean 0 and that deviation."""
    outputs = np.asarray(outputs)
    mean = outputs.mean(axis=0)
    scale = deviation / np.std(outputs - mean)
    layer["kernel"] = np.asarray(layer["kernel"]) * scale
    layer["bias"] = (np.asarray(layer["bias"]) - mean) * scale


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--image", required=True, help="a photo that objects are to be found in")
    parser.add_argument("--output", required=True, help="a .safetensors file")
    parser.add_argument("--backbone", help="weights of a ResNet-50, as for model.init_from")
    parser.add_argument("--size", default="800,1333", help="short side, longest side")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
