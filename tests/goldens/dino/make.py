"""Make features.npz and names.json: maps of DINOv2 and DINOv3 with drawn weights.

    python tests/goldens/dino/make.py DINOV3_CHECKOUT

Ran with transformers 5.24.0, timm 1.0.31, torch 2.13.0 (CPU) and facebookresearch/dinov3 6876159.
Every array is drawn from its name and shape, see `tests.weights.dino_files`, so that the goldens
hold names, shapes and maps alone.
"""

import json
import sys
from pathlib import Path

import numpy as np
import timm
import torch
import transformers
from safetensors.torch import load_file
from timm.models import vision_transformer

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[2]), *sys.argv[1:]]
from tests.weights.dino_files import IMAGES, draw, image  # noqa: E402

DIMS, DEPTHS = (4, 8, 16, 32), (1, 2, 1, 1)
VIT3 = dict(
    hidden_size=32,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_register_tokens=4,
    out_indices=[1, 2],
)
VIT2 = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=70)
TIMM = dict(embed_dim=32, depth=2, num_heads=2, num_classes=0)
META = dict(patch_size=16, embed_dim=32, depth=2, num_heads=2, n_storage_tokens=4,
            layerscale_init=1e-5, mask_k_bias=True, pos_embed_rope_dtype="fp32",
            norm_layer="layernormbf16")  # fmt: skip


def saved_names(model, folder) -> dict:
    """{name: shape} of the file that transformers writes."""
    model.save_pretrained(folder)
    return {k: tuple(v.shape) for k, v in load_file(folder / "model.safetensors").items()}


def huggingface(kind: str, config: str, **entries):
    model = getattr(transformers, f"{kind}Backbone")(getattr(transformers, config)(**entries))
    folder = HERE / "tmp"
    arrays = {name: draw(name, shape) for name, shape in saved_names(model, folder).items()}
    from safetensors.numpy import save_file

    save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    model = type(model).from_pretrained(folder).eval()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    return arrays, lambda x: model(x).feature_maps


def drawn(model) -> dict:
    return {name: draw(name, tuple(t.shape)) for name, t in model.state_dict().items()}


def load(model, arrays):
    model.load_state_dict({name: torch.from_numpy(a) for name, a in arrays.items()})
    return model.eval()


def timm_vit(name: str, **entries):
    model = timm.create_model(name, **TIMM, **entries)
    arrays = drawn(model)
    load(model, arrays)
    return arrays, lambda x: model.forward_intermediates(x, norm=True, intermediates_only=True)


def timm_resampled():
    """DINOv2 with registers, of patches of 14 pixels, in a model of 16."""
    entries = TIMM | dict(dynamic_img_size=True)
    name = "vit_small_patch14_reg4_dinov2"
    arrays = drawn(timm.create_model(name, **entries, img_size=70))
    model = timm.create_model(name, **entries, img_size=80, patch_size=16)
    state = {name: torch.from_numpy(a) for name, a in arrays.items()}
    model.load_state_dict(vision_transformer.checkpoint_filter_fn(state, model))
    model.eval()
    return arrays, lambda x: model.forward_intermediates(x, norm=True, intermediates_only=True)


def meta(**entries):
    from dinov3.models.vision_transformer import DinoVisionTransformer

    model = DinoVisionTransformer(**META | entries)
    model.init_weights()
    arrays = drawn(model)
    for name, array in model.state_dict().items():
        if name.endswith(("periods", "bias_mask")):
            arrays[name] = array.numpy()
    load(model, arrays)
    return arrays, lambda x: model.get_intermediate_layers(x, n=[0, 1], reshape=True)


def meta_convnext():
    from dinov3.models.convnext import ConvNeXt

    model = ConvNeXt(depths=DEPTHS, dims=DIMS)
    arrays = drawn(model)
    arrays |= {f"norms.3.{leaf}": arrays[f"norm.{leaf}"] for leaf in ("weight", "bias")}
    load(model, arrays)
    return arrays, lambda x: model.get_intermediate_layers(
        x, n=[0, 1, 2, 3], reshape=True, norm=False
    )


def timm_convnext():
    model = timm.create_model("convnext_tiny", depths=DEPTHS, dims=DIMS, num_classes=0)
    arrays = drawn(model)
    load(model, arrays)
    return arrays, lambda x: model.forward_intermediates(x, intermediates_only=True)


def main() -> None:
    convnext = dict(hidden_sizes=[*DIMS], depths=[*DEPTHS], out_indices=[1, 2, 3, 4])
    gated = VIT3 | dict(use_gated_mlp=True, hidden_act="silu")
    both = dict(VIT2, out_indices=[1, 2])
    small, plus = "vit_small_patch16_dinov3", "vit_small_plus_patch16_dinov3"
    of_14 = dict(img_size=70, dynamic_img_size=True)
    cases = {
        "convnext_hf": huggingface("DINOv3ConvNext", "DINOv3ConvNextConfig", **convnext),
        "convnext_timm": timm_convnext(),
        "convnext_meta": meta_convnext(),
        "vit3_hf": huggingface("DINOv3ViT", "DINOv3ViTConfig", **VIT3),
        "vit3_hf_plus": huggingface("DINOv3ViT", "DINOv3ViTConfig", **gated),
        "vit3_timm": timm_vit(small),
        "vit3_timm_qkvb": timm_vit(f"{plus}_qkvb"),
        "vit3_meta": meta(),
        "vit3_meta_plus": meta(ffn_layer="swiglu", ffn_ratio=6),
        "vit2_hf": huggingface("Dinov2", "Dinov2Config", patch_size=14, **both),
        "vit2_hf_reg": huggingface(
            "Dinov2WithRegisters", "Dinov2WithRegistersConfig", patch_size=14, **both
        ),
        "vit2_hf_giant": huggingface(
            "Dinov2", "Dinov2Config", patch_size=14, use_swiglu_ffn=True, **both
        ),
        "vit2_timm_reg_giant": timm_vit("vit_giant_patch14_reg4_dinov2", **of_14),
        "vit2_timm_reg": timm_vit("vit_small_patch14_reg4_dinov2", **of_14),
        "vit2_timm_reg_16": timm_resampled(),
    }
    names, maps = {}, {}
    for case, (arrays, run) in cases.items():
        with torch.no_grad():
            found = run(torch.from_numpy(image(case).transpose(0, 3, 1, 2)))
        names[case] = {name: list(array.shape) for name, array in arrays.items()}
        for i, x in enumerate(found):
            maps[f"{case}/{i}"] = np.asarray(x, np.float32).transpose(0, 2, 3, 1)
    (HERE / "names.json").write_text(json.dumps(names) + "\n")
    np.savez_compressed(HERE / "features.npz", **maps)
    print({name: x.shape for name, x in maps.items()}, IMAGES)


if __name__ == "__main__":
    main()
