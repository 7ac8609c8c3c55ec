"""The quickstart recipe with a small backbone and mask head."""

from mask_rcnn_jax.configs import quickstart
from tests import small_trunk


def get_config():
    config = quickstart.get_config()
    config.model.backbone = small_trunk.SECTION
    config.model.mask_head.num_convs = 1
    return config
