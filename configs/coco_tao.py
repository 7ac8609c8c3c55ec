"""Mask R-CNN R-50-FPN on COCO 2017, the TAO Toolkit's recipe (TensorFlow 1 backend).

    python -m mask_rcnn_jax.train --config configs/coco_tao.py --workdir runs/tao

Not measured here. NVIDIA's blog post gives box AP 33.4 and mask AP 30.7 after 100,000 steps on
eight GPUs, from weights trained on an Open Images subset.

Changes the TensorFlow 1 recipe (configs/coco_nvidia_tf1.py) as below, with the blog post's numbers;
`:docs` has those from the documentation's sample. docs/tao_spec.md maps TAO spec fields to entries.
TAO's own weights (.hdf5, .tlt) are not supported. The recipe starts from torchvision's ResNet-50,
and strides in the 3x3 convolution as that does; TAO strides in the first one of a block.
torchvision's learned with padding on both sides and an epsilon of 1e-5. Like TAO's freeze_bn, norms
use stored statistics but train scale and bias.
The precision is float32, as both specs have use_amp: False.
"""

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_nvidia_tf1

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("TAO Toolkit (from Open Images weights)", 33.4, 30.7),
    "docs": ("TAO Toolkit, the sample of its documentation", None, None),
}


def get_config(variant: str = "blog") -> ConfigDict:
    config = coco_nvidia_tf1.get_config()
    config.data.max_instances = 200
    config.model.backbone.update(norm="affine", norm_eps=1e-3, padding="same")
    config.optim.update(learning_rate=0.02, loss_scale=2.0**15, decay_on=("kernel", "scale"))
    config.train.precision = "float32"
    if variant == "blog":
        _schedule(config, batch_size=24, steps=100_000, levels=(0.1, 0.01, 0.001))
        config.optim.update(warmup_until=1000 / 100_000, warmup_factor=1e-4 / 0.02)
        config.optim.update(decay_at=(0.6, 0.8, 0.9), weight_decay=2e-5)
    elif variant == "docs":
        _schedule(config, batch_size=16, steps=120_000, levels=(0.1, 0.02, 0.002))
        config.optim.update(warmup_until=0.0, decay_at=(60 / 120, 80 / 120, 100 / 120))
    else:
        raise ValueError(f"coco_tao:{variant}: expected blog or docs")
    return config


def _schedule(config: ConfigDict, batch_size: int, steps: int, levels: tuple) -> None:
    config.train.update(batch_size=batch_size, steps=steps, eval_every=10_000)
    config.optim.update(reference_batch=batch_size, decay_levels=levels)
