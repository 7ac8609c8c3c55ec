"""Evaluate the validation set while training: COCO scores, validation losses and images."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from absl import logging
from jax.sharding import Mesh
from ml_collections import ConfigDict

from mask_rcnn_jax.data.dataset import Dataset
from mask_rcnn_jax.data.options import has_inclusive_boxes
from mask_rcnn_jax.models.detect import detect_options
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.training import evaluator
from mask_rcnn_jax.training.setup import make_eval_loader
from mask_rcnn_jax.training.step import (
    TrainState,
    loss_options,
    make_loss_step,
    make_predict_step,
)

Validation = Callable[[TrainState], tuple[dict[str, float], dict[str, np.ndarray]]]


def make_validation(
    config: ConfigDict, val_set: Dataset, model: MaskRCNN, mesh: Mesh, workdir: Path
) -> Validation:
    """`validate(state) -> (metrics, images)`; everything is also written below `eval/<step>/`.

    metrics: `ap/box`, `ap/mask` and, where asked for, `val_loss/...`. images: by file name, ground
    truth beside detections.
    """
    predict = make_predict_step(model, mesh, detect_options(config))
    loss_step = make_loss_step(model, mesh, loss=loss_options(config), seed=config.train.seed)

    def validate(state: TrainState) -> tuple[dict[str, float], dict[str, np.ndarray]]:
        output = workdir / "eval" / str(int(state.step))
        loader = make_eval_loader(config, val_set, config.eval.max_images)
        results = evaluator.detect(
            predict, state.variables, loader, val_set, mesh, loader.num_images,
            paste=config.eval.paste, inclusive_boxes=has_inclusive_boxes(config),
        )  # fmt: skip
        image_ids = [val_set.images[index].id for index in range(loader.num_images)]
        scores = evaluator.score_and_write(val_set, results, image_ids, output)
        metrics, images = {"ap/box": scores["AP"], "ap/mask": scores["mask_AP"]}, {}
        if config.eval.loss_images:
            batches = make_eval_loader(config, val_set, config.eval.loss_images)
            metrics |= evaluator.mean_losses(loss_step, state.variables, batches, mesh)
        if config.eval.pictures:
            batches, folder = make_eval_loader(config, val_set, config.eval.pictures), "pictures"
            images = evaluator.draw_pictures(
                predict, state.variables, batches, val_set, mesh, output / folder
            )
            logging.info("annotated pictures: %s", output / folder)
        return metrics, images

    return validate
