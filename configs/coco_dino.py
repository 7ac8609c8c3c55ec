"""Mask R-CNN on the trunks of DINOv3 and DINOv2, on COCO 2017 or, with a frozen trunk, on a small
set of your own.

    python -m mask_rcnn_jax.train --config configs/coco_dino.py --workdir runs/dino \\
        --config.model.init_from=weights/dinov3-convnext-tiny/model.safetensors

Not measured here, and no scores are published. The ConvNeXts are trained as in
configs/coco_convnext.py, the vision transformers as in ViTDet (configs/coco_vitdet.py).

DINOv3's weights are under Meta's own DINOv3 License and behind a form, so that no command fetches
them: accept it at https://huggingface.co/facebook/dinov3-vits16-pretrain-lvd1689m (the other sizes
are beside it) or https://ai.meta.com/dinov3, download the file, and name it as model.init_from.
DINOv2's weights, for `:v2_s` and the like, are under the Apache License 2.0. Files of transformers
and timm (model.safetensors) and Meta's own (.pth) are read. DINOv3's weights of satellite images
have colors of their own: --config.model.input.mean="(109.65,104.805,75.48)"
--config.model.input.std="(54.315,39.78,36.465)" --accept_mismatch.

`:vit_s`, `:vit_splus`, `:vit_b` and `:vit_l` are DINOv3's vision transformers; `:v2_s`, `:v2_b`,
`:v2_l` and `:v2_g` are DINOv2's, also with registers (`:v2_s_reg`). All blocks attend to the whole
map, which takes more time and memory than ViTDet's windows.
Of a frozen trunk: --config.model.backbone.frozen_blocks=12 (fewer freeze the first ones), and for a
ConvNeXt --config.optim.freeze="('backbone/stem_*','backbone/down*','backbone/res*')".
Deliberate differences: positions are not shifted, jittered or rescaled in training; DINOv2's patch
embedding is resampled from 14 to 16 pixels, so that maps have strides of powers of 2.
"""

from typing import Any

from ml_collections import ConfigDict

from mask_rcnn_jax.configs import coco_convnext, coco_vitdet
from mask_rcnn_jax.models.build import named_section

# variant: what it is, and the box and mask AP published for COCO val2017, in percent
SYSTEMS = {
    "": ("DINOv3's ConvNeXt-T", None, None),
    "convnext_s": ("DINOv3's ConvNeXt-S", None, None),
    "convnext_b": ("DINOv3's ConvNeXt-B", None, None),
    "convnext_l": ("DINOv3's ConvNeXt-L", None, None),
    "vit_s": ("DINOv3's ViT-S", None, None),
    "vit_splus": ("DINOv3's ViT-S+", None, None),
    "vit_b": ("DINOv3's ViT-B", None, None),
    "vit_l": ("DINOv3's ViT-L", None, None),
    "v2_s": ("DINOv2's ViT-S", None, None),
    "v2_b": ("DINOv2's ViT-B", None, None),
    "v2_l": ("DINOv2's ViT-L", None, None),
    "v2_g": ("DINOv2's ViT-g", None, None),
    "v2_s_reg": ("DINOv2's ViT-S with registers", None, None),
    "v2_b_reg": ("DINOv2's ViT-B with registers", None, None),
    "v2_l_reg": ("DINOv2's ViT-L with registers", None, None),
    "v2_g_reg": ("DINOv2's ViT-g with registers", None, None),
}

CONVNEXTS: dict[str, dict[str, Any]] = {
    "t": dict(width=96, depths=(3, 3, 9, 3), drop_path=0.4),
    "s": dict(width=96, depths=(3, 3, 27, 3), drop_path=0.6),
    "b": dict(width=128, depths=(3, 3, 27, 3), drop_path=0.7),
    "l": dict(width=192, depths=(3, 3, 27, 3), drop_path=0.7),
}
VITS: dict[str, dict[str, Any]] = {
    "s": dict(width=384, depth=12, num_heads=6, drop_path=0.1),
    "splus": dict(width=384, depth=12, num_heads=6, drop_path=0.1, gated=True),
    "b": dict(width=768, depth=12, num_heads=12, drop_path=0.1),
    "l": dict(width=1024, depth=24, num_heads=16, drop_path=0.4),
    "g": dict(width=1536, depth=40, num_heads=24, drop_path=0.4, gated=True, hidden=4096),
}
V2 = dict(table_side=37, norm_eps=1e-6)
VARIANTS = ("convnext_t", *list(SYSTEMS)[1:])


def get_config(variant: str = "convnext_t") -> ConfigDict:
    if variant not in VARIANTS:
        raise ValueError(f"coco_dino:{variant}: expected one of {list(VARIANTS)}")
    kind, size, *registers = variant.split("_")
    if kind == "convnext":
        config = coco_convnext.get_config()
        config.model.backbone.update(CONVNEXTS[size], layer_scale=1e-6)
        return config
    config = coco_vitdet.get_config("l" if size in ("l", "g") else "b")
    trunk = VITS[size]
    if kind == "v2":
        trunk = trunk | V2 | dict(registers=4 if registers else 0)
    config.model.backbone = named_section("backbone", "dino", **trunk)
    config.optim.decay_on = ("kernel",)
    return config
