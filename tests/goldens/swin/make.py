"""Write swin_maps.npz: what Swin transformers of other libraries compute with random weights.

    python tests/goldens/swin/make.py torchvision timm transformers mmdetection official

in an environment with torch 2.13.0, torchvision 0.28.0, timm 1.0.31, transformers 5.24.0,
mmdet 3.3.0 (mmengine 0.10.7 and mmcv-lite 2.2.0), and for "official" the file
mmdet/models/backbones/swin_transformer.py of github.com/SwinTransformer/
Swin-Transformer-Object-Detection at SWIN_FILE. For each model there are the names and shapes of its
arrays, filled by `tests.models.swin_weights`, and its four maps, each without mean and deviation
where the library has no norm behind it.
"""

import json
import os
import sys
import types
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parents[3]))
from tests.models import swin_weights as case  # noqa: E402

FILE = Path(__file__).with_name("swin_maps.npz")


def image(size=case.SIZE):
    return torch.from_numpy(case.random_image(size).transpose(2, 0, 1)[None].copy())


IMAGE = image()


def fill(model):
    """Fill a model by its names; return their shapes."""
    state = {n: x for n, x in model.state_dict().items() if not n.endswith(case.UNUSED)}
    arrays = {n: torch.from_numpy(case.random_array(n, tuple(x.shape))) for n, x in state.items()}
    model.load_state_dict(arrays, strict=False)
    model.eval()
    return {name: tuple(x.shape) for name, x in state.items()}


def plain(maps):
    """Maps [1, H, W, C], normalized without weights."""
    return [functional.layer_norm(x, x.shape[-1:]) for x in maps]


def of_torchvision(kind, size=case.SIZE):
    from torchvision.models import swin_transformer as swin

    block = dict(v1=None, v2=swin.SwinTransformerBlockV2)[kind]
    merge = dict(v1=swin.PatchMerging, v2=swin.PatchMergingV2)[kind]
    window, depths = [case.WINDOW] * 2, list(case.DEPTHS)
    options = dict(block=block, downsample_layer=merge, num_classes=2)
    model = swin.SwinTransformer([4, 4], case.WIDTH, depths, list(case.HEADS), window, **options)
    shapes, maps, x = fill(model), [], image(size)
    for i, layer in enumerate(model.features):
        x = layer(x)
        if i % 2:
            maps.append(x)
    return shapes, plain(maps)


def of_timm(kind):
    from timm.models import swin_transformer, swin_transformer_v2

    # It shifts a map before it pads it: other maps than the rest where a window does not divide it.
    options = dict(img_size=case.EVEN_SIZE, depths=case.DEPTHS, num_heads=case.HEADS, num_classes=2)
    options |= dict(embed_dim=case.WIDTH, window_size=case.WINDOW)
    if kind == "v1":
        model = swin_transformer.SwinTransformer(**options)
    else:
        options["pretrained_window_sizes"] = (2, 3, 2, 3)
        model = swin_transformer_v2.SwinTransformerV2(**options)
    shapes, maps = fill(model), []
    x = model.patch_embed(image(case.EVEN_SIZE))
    for layer in model.layers:
        x = layer(x)
        maps.append(x)
    return shapes, plain(maps)


def of_transformers(kind):
    from transformers import SwinBackbone, SwinConfig, Swinv2Config, Swinv2Model

    options = dict(image_size=case.SIZE[0], embed_dim=case.WIDTH, depths=list(case.DEPTHS))
    options |= dict(num_heads=list(case.HEADS), window_size=case.WINDOW)
    if kind == "v2":
        model = Swinv2Model(Swinv2Config(**options, pretrained_window_sizes=[2, 3, 2, 3]))
        shapes, maps = fill(model), []
        hook = lambda module, args, out: maps.append((out[1], out[2]))  # noqa: E731
        for layer in model.encoder.layers:
            layer.register_forward_hook(hook)
        model(IMAGE)
        found = [x.reshape(1, *size[:2], -1) for x, size in maps]
        return shapes, plain(found)
    stages = [f"stage{i}" for i in (1, 2, 3, 4)]
    model = SwinBackbone(SwinConfig(**options, out_features=stages))
    shapes = fill(model)
    return shapes, [x.permute(0, 2, 3, 1) for x in model(IMAGE).feature_maps]


def of_mmdetection(kind):
    import mmdet_stub  # noqa: F401  beside this file
    from mmdet.models.backbones.swin import SwinTransformer

    model = SwinTransformer(
        embed_dims=case.WIDTH, depths=case.DEPTHS, num_heads=case.HEADS, window_size=case.WINDOW
    )
    return fill(model), [x.permute(0, 2, 3, 1) for x in model(IMAGE)]


def of_official(kind):
    modules = {name: types.ModuleType(name) for name in ("mmcv_custom", "mmdet.utils", "builder")}
    modules["mmcv_custom"].load_checkpoint = modules["mmdet.utils"].get_root_logger = None
    register = types.SimpleNamespace(register_module=lambda: lambda cls: cls)
    modules["builder"].BACKBONES = register
    sys.modules |= modules
    text = Path(os.environ["SWIN_FILE"]).read_text().replace("..builder", "builder")
    found = {}
    exec(text.replace("timm.models.layers", "timm.layers"), found)
    model = found["SwinTransformer"](
        embed_dim=case.WIDTH, depths=case.DEPTHS, num_heads=case.HEADS, window_size=case.WINDOW
    )
    return fill(model), [x.permute(0, 2, 3, 1) for x in model(IMAGE)]


MAKERS = {
    "torchvision": (of_torchvision, ("v1", "v2", "v1_single", "v2_single")),
    "timm": (of_timm, ("v1", "v2")),
    "transformers": (of_transformers, ("v1", "v2")),
    "mmdetection": (of_mmdetection, ("v1",)),
    "official": (of_official, ("v1",)),
}


def main():
    saved = dict(np.load(FILE)) if FILE.exists() else {}
    for system in sys.argv[1:]:
        make, kinds = MAKERS[system]
        for kind in kinds:
            version, *single = kind.split("_")
            with torch.inference_mode():
                shapes, maps = make(version, case.SINGLE_SIZE) if single else make(version)
            saved[f"{system}_{kind}/shapes"] = np.array(json.dumps(shapes))
            for stage, x in enumerate(maps, start=2):
                saved[f"{system}_{kind}/res{stage}"] = case.thinned(x[0].numpy())
            print(system, kind, [tuple(x.shape) for x in maps], len(shapes))
            np.savez_compressed(FILE, **saved)


if __name__ == "__main__":
    main()
