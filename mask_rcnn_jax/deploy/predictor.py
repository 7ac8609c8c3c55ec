"""A trained model as a function from a picture to its detections."""

from functools import partial

import jax
import numpy as np
from ml_collections import ConfigDict

from mask_rcnn_jax.data.options import example_options
from mask_rcnn_jax.data.resize import resize_image, resize_plan
from mask_rcnn_jax.models.mask_rcnn import build_model, predict_options
from mask_rcnn_jax.structures import Detections


class Predictor:
    """Detections of single pictures of any size, in their own pixels.

    Compiles once for each canvas of the recipe (one, or one for landscape and one for portrait).
    """

    def __init__(self, config: ConfigDict, variables: dict):
        self._options = example_options(config.data)
        self._variables = jax.device_put(variables)
        # The weights know what a recipe leaves to the annotations.
        num_classes = variables["params"]["box_head"]["cls_score"]["bias"].shape[0] - 1
        model = build_model(
            {**config.model, "num_classes": num_classes},
            precision=config.train.precision,
            implementation=config.train.implementation,
        )
        self._predict = jax.jit(
            partial(model.apply, method="predict", **predict_options(config.eval))
        )

    def __call__(self, image: np.ndarray) -> Detections:
        """uint8 [H, W, 3] RGB to numpy `Detections` with boxes in pixels of `image`, clipped to it.

        Masks are probabilities on a 28 x 28 grid over the box; `evaluation.paste.paste_mask` puts
        one into the picture. Raises ValueError for another shape or dtype.
        """
        if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
            raise ValueError(f"image is {image.dtype} {image.shape}, expected uint8 [H, W, 3] RGB")
        height, width = image.shape[:2]
        plan = resize_plan(height, width, self._options)
        resized = resize_image(image, plan, self._options)
        detections = self._predict(self._variables, resized[None], np.array([plan.size], np.int32))
        detections = jax.tree.map(lambda leaf: leaf[0], jax.device_get(detections))
        scale_y, scale_x = plan.scale
        boxes = detections.boxes / np.array([scale_x, scale_y, scale_x, scale_y], np.float32)
        limits = np.array([width, height, width, height], np.float32)
        return detections.replace(boxes=np.clip(boxes, 0, limits))
