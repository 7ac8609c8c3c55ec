"""MobileNetV4 against timm 1.0.31: maps and gradients, from a file of its weights."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from safetensors.numpy import save_file

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.models.build import abstract_variables, build_model, named_section
from mask_rcnn_jax.models.mobilenet import MobileNetV4
from mask_rcnn_jax.ops.extent import ValidExtent
from mask_rcnn_jax.weights import pretrained
from mask_rcnn_jax.weights.convert import identify, to_flax
from mask_rcnn_jax.weights.expected_model import mismatches
from tests.helpers import load_golden, tiny_config
from tests.models import mobilenet_case as case

SLOW = [pytest.param(size, marks=pytest.mark.slow) for size in case.SIZES[1:]]


def trunk(size="small", **changes):
    options = dict(multiplier=case.MULTIPLIER, norm="affine", frozen_stages=0)
    return MobileNetV4(size=size, **options | changes)


def variables_of(size, norm="affine"):
    loaded = to_flax(case.arrays(size), norm=norm, eps=1e-5)[0]
    return {part: loaded[part].get("backbone", {}) for part in ("params", "batch_stats")}


def abstract(model):
    images = jax.ShapeDtypeStruct(case.IMAGES, jnp.float32)
    return jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=False), images)


@pytest.mark.parametrize("size", ["small", *SLOW])
def test_maps_and_gradients_are_timm_s(size):
    model, variables = trunk(size), variables_of(size)

    def total(params):
        maps = model.apply({**variables, "params": params}, case.images(), train=False)
        return sum((x * case.weights_of(i, x.shape)).sum() for i, x in enumerate(maps)), maps

    grads, maps = jax.jit(jax.grad(total, has_aux=True))(variables["params"])
    golden = load_golden("timm/mobilenetv4")
    for i, ours in enumerate(maps):
        theirs = golden[f"{size}_{i}"]
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())
    found, params = (flatten_dict(tree, sep="/") for tree in (grads, variables["params"]))
    paths = identify(list(case.shapes(size)))[1]
    expected = json.loads((case.GOLDENS / "mobilenetv4.json").read_text())[size]["grads"]
    assert {paths[name].removeprefix("backbone/") for name in expected} == found.keys()
    for name, (norm, product) in expected.items():
        path = paths[name].removeprefix("backbone/")
        grad = np.float64(found[path])
        assert np.linalg.norm(grad) == pytest.approx(norm, rel=1e-3), name
        limit = 1e-3 * norm * float(np.linalg.norm(params[path]))
        assert (grad * params[path]).sum() == pytest.approx(product, abs=limit), name


# timm's numbers of parameters, less those of the layers for classes: its last stage, a convolution
# to 1280 channels with its norm, and 1000 classes.
@pytest.mark.parametrize(
    ("size", "count", "last"),
    [
        ("small", 3_774_024, 128),
        pytest.param("medium", 9_715_512, 256, marks=pytest.mark.slow),
        pytest.param("large", 32_590_864, 512, marks=pytest.mark.slow),
    ],
)
def test_sizes_are_published(size, count, last):
    params = abstract(MobileNetV4(size=size, norm="affine"))["params"]
    others = last * 960 + 2 * 960 + 960 * 1280 + 2 * 1280 + 1281 * 1000
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == count - others


@pytest.mark.parametrize(
    ("multiplier", "widths"), [(0.35, [16, 24, 32, 48]), (1.5, [48, 96, 144, 192])]
)
def test_multiplied_widths_are_timm_s(multiplier, widths):
    """Rounded, not further down than by a tenth; only above 1 the stem grows, too."""
    model = MobileNetV4(multiplier=multiplier)
    assert [stage[-1].width for stage in model.stages] == widths
    assert model.stem_width == (48 if multiplier > 1 else 32)


@pytest.mark.slow
def test_a_larger_canvas_changes_nothing():
    variables, (_, height, width, _) = variables_of("small"), case.IMAGES
    canvas = np.random.default_rng(7).normal(size=(2, 96, 160, 3)).astype(np.float32)
    canvas[:, :height, :width] = case.images()

    @jax.jit
    def run(variables, canvas, size):
        extent = ValidExtent((96, 160), size)
        return trunk().apply(variables, canvas, train=False, extent=extent)

    maps = run(variables, canvas, jnp.array([height, width]))
    golden = load_golden("timm/mobilenetv4")
    for i, ours in enumerate(maps):
        alone = golden[f"small_{i}"]
        inside = ours[:, : alone.shape[1], : alone.shape[2]]
        np.testing.assert_allclose(inside, alone, rtol=0, atol=1e-5 * np.abs(alone).max())


@pytest.mark.slow
def test_new_weights_keep_the_size_of_what_passes():
    """Depthwise kernels, too: each of their outputs sees one channel."""
    model = trunk(multiplier=1.0)
    variables = jax.jit(lambda: model.init(jax.random.key(0), case.images(), train=False))()
    deviations = [float(x.std()) for x in model.apply(variables, case.images(), train=False)]
    assert 0.05 < min(deviations) and max(deviations) < 50


@pytest.mark.slow
def test_frozen_stages_have_no_gradient_and_the_others_do():
    model, variables = trunk(frozen_stages=2), variables_of("small")

    def total(params):
        maps = model.apply({**variables, "params": params}, case.images(), train=False)
        return sum((x * case.weights_of(i, x.shape)).sum() for i, x in enumerate(maps))

    for name, layer in jax.jit(jax.grad(total))(variables["params"]).items():
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(layer))
        assert (largest == 0) == name.startswith(("stem", "res2")), name
    assert model.frozen == ("stem", "res2")


def test_recomputed_blocks_have_the_same_names():
    shapes = [jax.tree.map(np.shape, abstract(trunk(remat=r))) for r in (False, True)]
    assert shapes[0] == shapes[1]


def test_a_run_starts_from_a_classifier(tmp_path):
    config = tiny_config()
    entries = dict(multiplier=case.MULTIPLIER, norm="frozen")
    config.model.backbone = named_section("backbone", "mobilenetv4", **entries)
    config.model.init_from = str(tmp_path / "model.safetensors")
    save_file(case.arrays("small"), config.model.init_from)
    assert identify(list(case.arrays("small")))[0] == "timm_mobilenetv4"
    initial = jax.tree.map(
        lambda leaf: np.full(leaf.shape, 99.0, np.float32),
        abstract_variables(build_model(config.model)),
    )
    loaded = pretrained.initialize_from(initial, as_recipe(config).model)
    expected = variables_of("small", "frozen")
    for part in ("params", "batch_stats"):
        ours = loaded[part].get("backbone", {})
        assert jax.tree.all(jax.tree.map(np.array_equal, ours, expected[part])), part
    entries = dict(channel_order="rgb", mean=(123.675, 116.28, 103.53), std=(58.395, 57.12, 57.375))
    config.model.input.update(entries)
    assert mismatches("timm_mobilenetv4", config.model) == []


def test_another_trunk_of_timm_is_named():
    names = [name.replace("pw_proj.conv", "pw_proj.se") for name in case.shapes("small")]
    with pytest.raises(ValueError, match="like those of timm's MobileNetV4, but 12 .*pw_proj"):
        identify(names)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"multiplier": 0.0}, "multiplier is 0.0, expected above 0"),
        ({"norm": "group"}, "width of res2_0 is 8, expected a multiple of 32 with norm='group'"),
        ({"widths": (("res9", 8),)}, "widths names 'res9', expected names of"),
    ],
)
def test_no_such_trunk_is_built(fields, message):
    with pytest.raises(ValueError, match=message):
        trunk(**fields)
