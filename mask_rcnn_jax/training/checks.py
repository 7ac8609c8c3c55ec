"""Checks on a run's config, before any work."""

import optax
from ml_collections import ConfigDict

from mask_rcnn_jax.config import check_entries
from mask_rcnn_jax.data.dataset import Dataset, is_boxes_only
from mask_rcnn_jax.data.source import learns_boxes_only
from mask_rcnn_jax.training.averaging import weight_average
from mask_rcnn_jax.training.distill import distill_options
from mask_rcnn_jax.training.optim import count_microbatches, optim_options
from mask_rcnn_jax.training.setup import view_sizes
from mask_rcnn_jax.training.stopping import stop_rule


def check_config(config: ConfigDict, devices: int, optimizer: object) -> int:
    """The number of microbatches of a device; ValueError for a faulty config.

    optimizer: a user's own, or None.
    """
    check_entries(config)
    optim_options(config)
    distill_options(config)
    weight_average(config)
    stop_rule(config)
    view_sizes(config)
    if optimizer is not None and not isinstance(optimizer, optax.GradientTransformation):
        raise ValueError(
            f"optimizer is {type(optimizer).__name__}, expected an optax transformation, such as "
            "optax.adamw(1e-3)"
        )
    return count_microbatches(config, config.train.batch_size, devices)


def check_evaluated(config: ConfigDict, val_set: Dataset | None) -> None:
    """Raise ValueError if a run is to stop by an AP that nothing would measure."""
    rule = stop_rule(config)
    if not config.data.val_json:
        for name, value in rule.needs_evaluation().items():
            text = "needs an evaluation: set data.val_json and data.val_images"
            raise ValueError(f"train.{name} is {value:g}, which {text}")
    has_masks = val_set is not None and not is_boxes_only(val_set) and not learns_boxes_only(config)
    if rule.stop_at_mask_ap > 0 and not has_masks:
        expected = "expected 0 where no masks are scored"
        raise ValueError(f"train.stop_at_mask_ap is {rule.stop_at_mask_ap:g}, {expected}")
