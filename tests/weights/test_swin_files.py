"""Files of Swin: the same maps as the library that a file is of."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from mask_rcnn_jax.models.swin import Swin
from mask_rcnn_jax.models.swin_v2 import SwinV2
from mask_rcnn_jax.weights.convert import identify, to_flax
from tests.models import swin_weights as case

GOLDENS = Path(__file__).parents[1] / "goldens/swin"
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes far longer than running
SIZES = dict(depths=case.DEPTHS, width=case.WIDTH, num_heads=case.HEADS, windows=(case.WINDOW,) * 4)
LEARNED = (2, 3, 2, 3)  # of the second version in timm and transformers
# golden: source, model
SYSTEMS = {
    "official_v1": ("swin", Swin(**SIZES)),
    "timm_v1": ("timm_swin", Swin(**SIZES)),
    "torchvision_v1": ("torchvision_swin", Swin(**SIZES)),
    "transformers_v1": ("transformers_swin", Swin(**SIZES)),
    "mmdetection_v1": ("mmpretrain_swin", Swin(**SIZES)),
    "torchvision_v2": ("torchvision_swin", SwinV2(**SIZES)),
    "timm_v2": ("timm_swin", SwinV2(**SIZES, pretrained_windows=LEARNED)),
    "transformers_v2": ("transformers_swin", SwinV2(**SIZES, pretrained_windows=LEARNED)),
    # One window covers the height of a map.
    "torchvision_v1_single": ("torchvision_swin", Swin(**SIZES, shift_single=False)),
    "torchvision_v2_single": ("torchvision_swin", SwinV2(**SIZES)),
}


@pytest.fixture(scope="module")
def goldens():
    with np.load(GOLDENS / "swin_maps.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def programs():
    """One program for all models with the same layers."""
    made = {}

    def run(model, params, size):
        image = case.random_image(size)[None]
        shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), image, train=False))["params"]
        for name in shapes.keys() - params.keys():  # norms of maps
            assert name.startswith("output"), name
            plain = {"scale": np.ones, "bias": np.zeros}
            params = params | {name: {k: v(shapes[name][k].shape) for k, v in plain.items()}}
        assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
        if (model, size) not in made:
            apply = lambda p: model.apply({"params": p}, image, train=False)  # noqa: E731
            made[model, size] = jax.jit(apply, compiler_options=QUICK)
        return made[model, size](jax.tree.map(np.float32, params))

    return run


@pytest.mark.parametrize("system", SYSTEMS)
def test_maps_are_those_of_the_library(system, goldens, programs):
    expected_source, model = SYSTEMS[system]
    shapes = json.loads(str(goldens[f"{system}/shapes"]))
    arrays = {name: case.random_array(name, shape) for name, shape in shapes.items()}
    loaded, source = to_flax(arrays, norm=None, eps=1e-5)
    assert source == expected_source and not loaded["batch_stats"]
    size = case.EVEN_SIZE if system.startswith("timm") else case.SIZE
    size = case.SINGLE_SIZE if system.endswith("single") else size
    maps = programs(model, loaded["params"]["backbone"], size)
    for stage, ours in enumerate(maps, start=2):
        theirs = goldens[f"{system}/res{stage}"]
        found = case.thinned(np.asarray(ours)[0])
        np.testing.assert_allclose(found, theirs, rtol=0, atol=1e-4 * np.abs(theirs).max())


def test_files_of_transformers_have_older_names(goldens):
    """Those that version 5 renames on loading, and with the name of the model before them."""
    names = list(json.loads(str(goldens["transformers_v1/shapes"])))
    changes = {f"{k[0]}_proj": f"self.{k}" for k in ("query", "key", "value")}
    changes |= {"o_proj": "output.dense", "mlp.fc1": "intermediate.dense"}
    changes |= {"mlp.fc2": "output.dense", "relative_position_bias.": "self."}
    older = names
    for new, old in changes.items():
        older = [name.replace(new, old) for name in older]
    assert list(identify(older)[1].values()) == list(identify(names)[1].values())
    classifier = [name for name in older if "hidden_states_norms" not in name]
    source, paths = identify([*classifier, "classifier.weight", "classifier.bias"])
    assert source == "transformers_swin" and "backbone/stem_conv/kernel" in paths.values()
