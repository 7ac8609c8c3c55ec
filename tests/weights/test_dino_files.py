"""Files of DINOv2 and DINOv3 under the names of transformers, timm and Meta: the same maps."""

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from mask_rcnn_jax.config import as_recipe, load_tree
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify
from tests.helpers import load_golden
from tests.weights.dino_files import IMAGES, arrays_of, image

DEPTHS, WIDTH = (1, 2, 1, 1), 4
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
