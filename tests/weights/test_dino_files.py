"""Files of DINOv2 and DINOv3 under the names of transformers, timm and Meta: the same maps."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.models.build import named_section
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.models.dino import Dino
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify, to_flax
from mask_rcnn_jax.weights.dino_names import joined
from mask_rcnn_jax.weights.expected_model import mismatches
from tests.helpers import load_golden
from tests.weights.dino_files import IMAGES, arrays_of, image

DEPTHS, WIDTH = (1, 2, 1, 1), 4
VIT = dict(width=32, depth=2, num_heads=2, layers=(0, 1))
V2 = dict(patch=14, table_side=5, norm_eps=1e-6)
REGISTERED = V2 | dict(registers=4)
PLAIN = V2 | dict(registers=0)
VITS = {
    "vit3_hf": ({}, "dinov3"),
    "vit3_hf_plus": (dict(gated=True), "dinov3"),
    "vit3_timm": ({}, "dinov3_meta"),
    "vit3_timm_qkvb": (dict(gated=True), "dinov3_meta"),
    "vit3_meta": ({}, "dinov3_meta"),
    "vit3_meta_plus": (dict(gated=True), "dinov3_meta"),
    "vit2_hf": (PLAIN, "dinov2"),
    "vit2_hf_reg": (REGISTERED, "dinov2"),
    "vit2_hf_giant": (PLAIN | dict(gated=True, hidden=88), "dinov2"),
    "vit2_timm_reg_giant": (REGISTERED | dict(gated=True, hidden=85), "dinov2_meta"),
    "vit2_timm_reg": (REGISTERED, "dinov2_meta"),
    "vit2_timm_reg_16": (REGISTERED | dict(patch=16), "dinov2_meta"),
}
CONVNEXTS = {
    "convnext_hf": "dinov3_convnext",
    "convnext_timm": "timm_convnext",
    "convnext_meta": "convnext",
}


def maps_of(case):
    golden = load_golden("dino/features")
    return [golden[name] for name in sorted(golden) if name.startswith(f"{case}/")]


def convnext_config(depths=DEPTHS):
    config = load_tree("coco_convnext")
    config.model.backbone.update(depths=depths, width=WIDTH)
    return config


def started(config, path, case):
    """Parameters of a run's trunk that starts from a case's file; drawn ones are 0.5."""
    config.model.init_from = str(path / "model.safetensors")
    save_file(arrays_of(case), config.model.init_from, metadata={"format": "pt"})
    (path / "config.json").write_text('{"model_type": "dinov3_vit"}')  # as a hub's folder has it
    options = as_recipe(config).model
    trunk = options.backbone.make(dtype=np.float32, remat=False)
    images = np.zeros((1, *IMAGES, 3), np.float32)
    shapes = jax.eval_shape(lambda: trunk.init(jax.random.key(0), images, train=False))
    initial = jax.tree.map(lambda s: np.full(s.shape, 0.5, np.float32), shapes)
    params = {"backbone": initial["params"]}  # the heads start as in any run
    return pretrained.initialize_from({"params": params, "batch_stats": {}}, options)["params"][
        "backbone"
    ]


def layer_norm(x):
    x = x - x.mean(axis=-1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-6)


@pytest.mark.parametrize("case", CONVNEXTS)
def test_every_stage_of_a_convnext_is_theirs(case, tmp_path):
    """Before the norms of the maps, of which files have the last one alone."""
    params = started(convnext_config(), tmp_path, case)
    drawn = {name for name, layer in params.items() if np.all(jax.tree.leaves(layer)[0] == 0.5)}
    assert drawn == {f"output{stage}_norm" for stage in (2, 3, 4)}
    for stage in (2, 3, 4):
        params[f"output{stage}_norm"] = {
            "scale": np.ones(WIDTH * 2 ** (stage - 2), np.float32),
            "bias": np.zeros(WIDTH * 2 ** (stage - 2), np.float32),
        }
    model = ConvNeXt(depths=DEPTHS, width=WIDTH)
    capture = dict(capture_intermediates=lambda module, _: (module.name or "").startswith("res"))
    run = jax.jit(lambda p, x: model.apply({"params": p}, x, train=False, **capture))
    normed, rest = run(params, image(case))
    for stage, theirs in enumerate(maps_of(case), start=2):
        (ours,) = rest["intermediates"][f"res{stage}_{DEPTHS[stage - 2] - 1}"]["__call__"]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
        expected = layer_norm(np.float64(theirs))
        if stage == 5:
            norm = params["output5_norm"]
            expected = expected * norm["scale"] + norm["bias"]
        np.testing.assert_allclose(normed[stage - 2], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("case", "source"), CONVNEXTS.items())
def test_their_names_are_known(case, source):
    names = list(arrays_of(case))
    assert identify(names)[0] == source
    if case == "convnext_hf":  # transformers has this prefix in memory, and old files in part
        inside = [name if name.startswith("layer_norm") else f"model.{name}" for name in names]
        assert identify(inside)[0] == source


def test_a_file_of_another_size_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"does not fit the model: missing 9 \(params/backbone/r"):
        started(convnext_config((1, 2, 2, 1)), tmp_path, "convnext_hf")


def vit_config(**entries):
    config = load_tree("coco_dino:vit_s")
    config.model.backbone = named_section("backbone", "dino", **VIT | entries)
    return config


@pytest.mark.parametrize("case", VITS)
def test_every_layer_of_a_transformer_is_theirs(case, tmp_path):
    """On a map that is not square, larger and smaller than the table of positions."""
    entries, source = VITS[case]
    arrays = joined(arrays_of(case))
    assert identify(list(arrays))[0] == source
    params = started(vit_config(**entries), tmp_path, case)
    drawn = [np.all(leaf == 0.5) for leaf in jax.tree.leaves(params)]
    assert not any(drawn)
    model = Dino(**VIT | entries)
    ours = jax.jit(lambda p, x: model.apply({"params": p}, x, train=False))(params, image(case))
    theirs = maps_of(case)
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)


def test_a_classifier_with_registers_has_the_name_of_its_class_before_others():
    arrays = {f"dinov2_with_registers.{k}": v for k, v in arrays_of("vit2_hf_reg").items()}
    arrays["classifier.weight"] = np.zeros((5, 64), np.float32)
    expected = to_flax(arrays_of("vit2_hf_reg"), norm=None, eps=1e-5)
    jax.tree.map(np.testing.assert_array_equal, to_flax(arrays, norm=None, eps=1e-5), expected)


def test_metas_file_of_vit_g_has_timms_layers_under_other_names():
    """As timm's own conversion renames them."""
    timm = arrays_of("vit2_timm_reg_giant")
    names = {"mlp.fc1": "mlp.w12", "mlp.fc2": "mlp.w3", "reg_token": "register_tokens"}
    meta = {}
    for name, array in timm.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        meta[name] = array
    found, expected = (to_flax(x, norm=None, eps=1e-5) for x in (meta, timm))
    assert found[1] == expected[1] == "dinov2_meta"
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])


def test_rotary_transformers_of_other_kinds_are_refused():
    """timm's vit_small_patch16_rope_224 has names of its DINOv3, and rotates in another way."""
    arrays = {n: array for n, array in arrays_of("vit3_timm").items() if n != "reg_token"}
    with pytest.raises(ValueError, match=r"blocks\.0\.gamma_1.* have no counterpart"):
        to_flax(arrays, norm=None, eps=1e-5)


@pytest.mark.parametrize("case", ["vit3_hf", "vit2_hf"])
def test_a_file_without_keys_is_refused(case):
    arrays = {name: array for name, array in arrays_of(case).items() if ".k" not in name}
    with pytest.raises(ValueError, match=r"(k_proj|key).weight is not in the file"):
        to_flax(arrays, norm=None, eps=1e-5)


@pytest.mark.parametrize("case", ["convnext_timm", "convnext_meta", "vit2_timm_reg", "vit3_hf"])
def test_a_trunk_may_have_been_a_models_attribute(case):
    arrays = arrays_of(case)
    inside = to_flax({f"backbone.{n}": a for n, a in arrays.items()}, norm=None, eps=1e-5)
    expected = to_flax(arrays, norm=None, eps=1e-5)
    jax.tree.map(np.testing.assert_array_equal, inside, expected)


@pytest.mark.parametrize("case", ["vit3_meta", "vit3_hf"])
def test_biases_of_rotated_keys_are_refused(case):
    """Meta's code has them by default; its published models mask them, transformers' lack them."""
    arrays = {n: array for n, array in arrays_of(case).items() if not n.endswith("bias_mask")}
    arrays |= {n.replace("q_proj", "k_proj"): a for n, a in arrays.items() if "q_proj.b" in n}
    with pytest.raises(ValueError, match=r"0\.att.*\.bias is not 0 for keys"):
        to_flax(arrays, norm=None, eps=1e-5)
    for name, array in arrays.items():
        if name.endswith(("qkv.bias", "k_proj.bias")):
            keys = np.arange(len(array)) // (len(array) // 3) == 1
            arrays[name] = np.where(keys | (len(array) == 32), 0, array)
    to_flax(arrays, norm=None, eps=1e-5)


def test_other_generations_are_told_apart(tmp_path):
    """A file of DINOv2 does not fit a trunk of DINOv3, nor colors of another kind its weights."""
    with pytest.raises(ValueError, match="unexpected 1 .params/backbone/pos_embed"):
        started(vit_config(), tmp_path, "vit2_hf_reg")
    model = load_tree("coco_dino:vit_s").model
    assert mismatches("dinov3", model) == []
    assert "backbone.norm_eps is 1e-05" in mismatches("dinov2", model)[0]
    assert mismatches("dinov2_meta", load_tree("coco_dino:v2_b_reg").model) == []
