"""From a run, or a recipe and weights, to a predictor."""

import os
from pathlib import Path

import jax
from ml_collections import ConfigDict

from mask_rcnn_jax.config import load_config, recipe_names
from mask_rcnn_jax.deploy.predictor import Predictor
from mask_rcnn_jax.formats.download import download_weights, weight_names
from mask_rcnn_jax.weights.restore import restore


def load(
    model: str | os.PathLike,
    weights: str | os.PathLike | None = None,
    *,
    score_threshold: float = 0.5,
    batch_size: int = 1,
    tile: int = 0,
    overlap: float = 0.2,
) -> Predictor:
    """Load a trained model, ready to predict.

    Args:
        model: a run (its workdir or one of its checkpoints/<step>); or, with `weights`, a recipe as
            for `load_config`.
        weights: a weights file, a run, or one of `prepare weights`' names: such a file is
            downloaded once, to `cache_folder()`.
        score_threshold: lowest score of what is found.
        batch_size: images at a time on each device.
        tile: side of the tiles of large images, see `Predictor`; 0 cuts none.
        overlap: smallest overlap of neighboring tiles, as a fraction of their side.

    Raises:
        ValueError: the weights do not fit, or are unknown.
        OSError: a file cannot be read or downloaded.
    """
    if weights is None:
        if str(model).partition(":")[0] in recipe_names():
            raise ValueError(f"{model} is a recipe, expected weights as well, or a run")
        restored = restore(None, model)
    else:
        if str(weights) in weight_names() and not os.path.exists(weights):
            weights = download_weights(str(weights), cache_folder())
        restored = restore(load_config(str(model)), weights)
    set_score_threshold(restored.config, score_threshold)
    given = restored.config, restored.variables, batch_size, restored.categories
    return Predictor(*given, tile, overlap)


def cache_folder() -> Path:
    """Return the folder of downloaded weights: mask_rcnn_jax in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mask_rcnn_jax"


def default_batch_size() -> int:
    """Return how many images to predict at a time on each device.

    One image keeps a CPU busy; a batch would only use more memory.
    """
    return 1 if jax.default_backend() == "cpu" else 8


def set_score_threshold(config: ConfigDict, score: float) -> None:
    """Set the lowest score of what is found, after soft-NMS, too, which lowers scores."""
    config.eval.score_threshold = score
    config.eval.soft_min_score = max(config.eval.soft_min_score, score)
