"""Small models with random weights that produce detections, and images for them."""

import json
from functools import partial

import jax
import numpy as np
import pytest

from mask_rcnn_jax import consent
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.exporting import artifact
from mask_rcnn_jax.exporting.images import on_canvas
from mask_rcnn_jax.exporting.manifest import make_manifest
from mask_rcnn_jax.exporting.options import ArtifactOptions
from mask_rcnn_jax.formats.shapes import generate_image
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.weights.restore import make_model
from tests import small_trunk
from tests.commands.command import ROOT

SMALL = {
    "model.backbone.depth": 10,
    "model.num_classes": 3,
    "model.fpn.channels": 16,
    "model.rpn.channels": 16,
    "model.box_head.channels": 32,
    "model.box_head.conv_channels": 32,
    "model.mask_head.channels": 8,
    "model.anchors.sizes": (16.0, 32.0, 64.0, 128.0, 256.0),
    "model.rpn.pre_nms_topk_test": 100,
    "model.rpn.post_nms_topk_test": 30,
    "train.precision": "float32",
    "eval.pre_nms_topk": 60,
    "eval.detections_per_image": 12,
    "eval.score_threshold": 0.05,
}
CATEGORIES = [{"id": 10 * k, "name": f"class {k}"} for k in (1, 2, 3)]
SMALL_TRUNK = {"model__backbone": small_trunk.SECTION}  # for `small_config`
# Gains that make random outputs vary as much as trained ones.
GAINS = {"objectness_logits": 1.0, "anchor_deltas": 0.3, "cls_score": 2.0, "bbox_pred": 1.0}


def small_config(recipe: str, size: tuple[int, int], **changes):
    """A recipe for small images. `size` is its data.image_size."""
    overrides = {"data.short_sides": (), "data.image_size": size}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    name, colon, variant = recipe.partition(":")
    path = f"{ROOT}/configs/{name}.py{colon}{variant}"
    return load_config(path, SMALL | overrides | changes)


def random_variables(config) -> dict:
    rng = np.random.default_rng(0)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        if name.endswith("['var']") or name.endswith("['scale']"):
            return rng.uniform(0.8, 1.2, leaf.shape).astype(np.float32)
        if not name.endswith("['kernel']"):
            return rng.normal(0, 0.1, leaf.shape).astype(np.float32)
        inputs = leaf.shape[-1] if "mask_deconv" in name else np.prod(leaf.shape[:-1])
        gain = next((GAINS[layer] for layer in GAINS if layer in name), 1.2)
        if "stem_conv" in name:
            gain *= np.mean(config.model.input.std) / 57.0  # some recipes only subtract the mean
        return rng.normal(0, gain / np.sqrt(inputs), leaf.shape).astype(np.float32)

    model = make_model(config, config.model.num_classes)
    return jax.tree_util.tree_map_with_path(fill, abstract_variables(model))


def predict_function(config):
    """Return the model and a function (variables, images, image_sizes) -> `Detections`."""
    model = make_model(config, config.model.num_classes)
    return model, partial(model.apply, detect=config.eval, method="predict")


def generated(config, sizes, canvas, fixed_size=None):
    """Generate images with these sizes as model inputs."""
    drawn = [generate_image(0, "val", i, size)[0] for i, size in enumerate(sizes)]
    return list(on_canvas(drawn, config.data, canvas, fixed_size))


def write_artifact(folder, model, format, **options):
    """Write what `export` does, without its self-check, which compiles the model."""
    config, variables = model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(artifact, "_check", lambda *arguments: None)
        options = ArtifactOptions(**options)
        made = artifact.build_artifact(config, variables, CATEGORIES, format, options, folder)
    names, interface = sorted(made.files), made.interface
    about = dict(format=format, files=names, interface=interface, details=made.details)
    manifest = json.dumps(make_manifest(config, CATEGORIES, **about))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {**made.files, "manifest.json": manifest.encode()}.items():
        (folder / name).write_bytes(content)
    consent.remember(manifest.encode())
    return folder
