"""What a command computes with, which it says at its start."""

import jax
from absl import logging

from mask_rcnn_jax.models.build import AUTO_PRECISION, resolve_precision


def log_precision(precision: str) -> None:
    """Log what `train.precision` "auto" stands for here."""
    if precision == AUTO_PRECISION:
        kind = jax.devices()[0].device_kind
        logging.info("train.precision=auto is %s on %s", resolve_precision(precision), kind)
