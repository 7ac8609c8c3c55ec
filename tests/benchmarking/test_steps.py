"""Benchmarks of the steps and the kernels: on what they run, and what they report."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.benchmarking import devices, inputs, kernels, steps
from mask_rcnn_jax.config import as_recipe, load_config
from mask_rcnn_jax.data.options import canvas_size
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.memory import peak_rss_mb
from mask_rcnn_jax.models.build import abstract_variables
from tests.commands.command import ROOT, run_inside
from tests.helpers import tiny_config

RECIPES = ["coco", "coco_nvidia_pytorch", "coco_torchvision", "quickstart"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_generated_batches_have_the_shapes_of_a_loaders(recipe):
    recipe = load_config(ROOT / "configs" / f"{recipe}.py")
    options = recipe.data
    loaded = empty_batch(3, canvas_size(options), options)
    batch = inputs.abstract_batch(recipe, 3)
    assert jax.tree.structure(batch) == jax.tree.structure(loaded)
    for made, leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(loaded), strict=True):
        assert (made.shape, made.dtype) == (leaf.shape, leaf.dtype)


def test_generated_objects_are_sound():
    recipe = load_config("coco_nvidia_pytorch", {"model.num_classes": 5})
    targets = inputs.synthetic_batch(recipe, 2).targets
    height, width = canvas_size(recipe.data)
    boxes = targets.boxes[targets.valid]
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= [width, height]).all()
    assert ((boxes[:, 2:] - boxes[:, :2]) >= 8).all()
    assert set(targets.classes[targets.valid]) <= {1, 2, 3, 4, 5}
    assert targets.valid.sum() == 2 * inputs.OBJECTS
    assert (targets.polygons[targets.valid][..., 2] == 0).sum(axis=-1).min() == 32
    assert not targets.masks[~targets.valid].any()
    assert inputs.synthetic_batch(recipe, 2, objects=100).targets.valid.sum() == 2 * 100


@pytest.mark.parametrize("name", [name for name in kernels.names() if "tiny" in name])
def test_a_kernel_is_compared_with_the_code_that_defines_it(name):
    pair = kernels.make_pair(name)
    assert np.isfinite(np.asarray(pair.reference(*pair.args), np.float32)).all()
    assert jax.eval_shape(pair.kernel, *pair.args) == jax.eval_shape(pair.reference, *pair.args)


@pytest.mark.slow
def test_figures_do_without_flops_that_nobody_counts(monkeypatch):
    """A GPU's client counts none before compilation."""
    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", lambda _: None)
    figures = steps.infer(as_recipe(tiny_config()), 1)
    assert figures["gflop_per_image"] is figures["percent_of_peak"] is None


def test_planned_memory_has_what_is_temporary():
    x = np.ones((100, 1000), np.float32)
    compiled = jax.jit(lambda x: (jnp.sort(x, 0) @ jnp.sort(x, 1).T).sum()).lower(x).compile()
    assert steps._planned_bytes(compiled.memory_analysis()) >= 3 * x.nbytes


def taps(size, kernel, stride):
    """How often a kernel along one axis meets a pixel, and not padding."""
    starts = range(-(kernel // 2), size - kernel // 2, stride)
    return sum(0 <= start + tap < size for start in starts for tap in range(kernel))


def pixels_seen(names, kernel, config):
    """The products with one weight of a layer: with pixels, RoIs or the pixels of RoIs."""
    height, width = config.data.image_size
    detections, side = config.eval.detections_per_image, kernel.shape[0]

    def convolution(down, stride=1):
        return taps(height // down, side, stride) * taps(width // down, side, stride) / side**2

    if names[1] == "stem_conv":
        # GPUs convolve 4 x 4 blocks of 2 x 2 pixels: 192 weights instead of 147.
        return convolution(1, 2) * 192 / 147
    if names[0] == "backbone":  # the first of two convolutions, and the shortcut, has the stride
        stage = int(names[1][3])
        is_first = stage > 2 and names[2] != "conv2"
        return convolution(2**stage // (1 + is_first), 1 + is_first)
    if names[0] == "fpn":
        return convolution(2 ** int(names[1][-1]))
    if names[0] == "rpn_head":
        return sum(convolution(2**level) for level in range(2, 7))
    if names[0] == "box_head":
        return config.model.rpn.post_nms_topk_test
    if names[1] == "mask_predictor":  # of one class
        return detections * 28 * 28 / kernel.shape[-1]
    return detections * (taps(14, 3, 1) ** 2 / 9 if side == 3 else 14 * 14)


@pytest.mark.slow
def test_operations_of_a_prediction_are_those_of_its_layers():
    """Also of those that a CPU computes in a loop, here masks of 40 RoIs, 16 at a time."""
    config = tiny_config()
    config.data.image_size, config.eval.detections_per_image = (64, 128), 40
    params = abstract_variables(inputs.recipe_model(as_recipe(config)))["params"]
    total = 0
    for path, kernel in jax.tree_util.tree_leaves_with_path(params):
        if kernel.ndim > 1:
            names = [part.key for part in path]
            total += 2 * kernel.size * pixels_seen(names, kernel, config)
    # The rest is RoIAlign, NMS and what belongs to single elements.
    assert 1 < inputs.infer_flops(as_recipe(config)) / total < 1.03


@pytest.mark.slow
def test_figures_of_the_steps(monkeypatch):
    """Also where JAX is allowed to use GPUs only, so that it has no CPU devices to name."""
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda backend="cuda": {"cuda": devices}[backend]())
    recipe, saved = as_recipe(tiny_config()), []
    train = steps.train(recipe, calls=3, save=lambda figures: saved.append(dict(figures)))
    infer = steps.infer(recipe, calls=3)
    assert saved[-1] == train  # and before that all but the FLOPs
    assert saved[0] == {key: train[key] for key in saved[0]} and "ms_per_step" in saved[0]
    for figures, batch_size in ((train, 4), (infer, 2)):
        assert figures["steps"] == 3 and figures["batch_size"] == batch_size
        assert figures["images_per_s"] == pytest.approx(
            batch_size / figures["ms_per_step"] * 1e3, rel=1e-2
        )
        assert 0 < figures["ms_per_step_25"] <= figures["ms_per_step"] <= figures["ms_per_step_75"]
        assert figures["planned_peak_memory_mb"] > 0 and figures["image_size"] == [64, 64]
        assert figures["peak_memory_mb"] is None and figures["percent_of_peak"] is None  # of a CPU
        assert figures["peak_rss_mb"] > 100
    # A step does the work of a prediction forward, and about twice that backward.
    assert 2 < train["gflop_per_image"] / infer["gflop_per_image"] < 5


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        (lambda x: x + 1, None),
        (lambda x: x + 1.1, "differs from the plain code by 0.1"),
        (lambda x: x / 0, "values are not finite"),
    ],
)
def test_a_wrong_kernel_is_found(kernel, problem):
    pair = kernels.Pair("a kernel", jax.jit(kernel), lambda x: x + 1, (jnp.arange(4.0),), 1e-6)
    found = kernels.compare(pair)
    assert found is problem or problem in found


def test_a_kernel_that_changes_from_run_to_run_is_found():
    runs = iter((0.0, 1e-6))
    pair = kernels.Pair("a", lambda x: x + next(runs), lambda x: x, (jnp.zeros(4),), 1.0)
    assert kernels.compare(pair).startswith("two runs differ by up to 1e-06")


def test_times_of_calls():
    times = devices.time_calls(jax.jit(lambda x: x + 1), jnp.zeros(3), repeats=5, budget_s=0.2)
    assert 3 <= len(times) <= 5 and min(times) > 0
    assert devices.summary([1e-3, 2e-3, 3e-3]) == {"ms": 2.0, "ms_25": 1.5, "ms_75": 2.5}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", ""),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", ""),
        ("NVIDIA GeForce RTX 5090", "RTX 5090"),
        ("Tesla T4", "T4"),
        ("TPU v5 lite", "TPU v5 lite"),
        ("TPU v5", ""),
        ("cpu", ""),
    ],
)
def test_peaks_are_found_by_whole_words(kind, name):
    assert devices.peaks_of(kind) is devices.PEAKS.get(name)


def test_peak_memory_of_the_process_is_in_megabytes():
    held = np.ones(25_000_000)  # 200 MB
    assert held.nbytes / 1e6 < peak_rss_mb() < 50_000


def test_a_kernel_is_saved_as_soon_as_it_is_measured(monkeypatch, tmp_path, capsys):
    def make_pair(name):
        if name == "broken":
            raise RuntimeError("illegal memory access")
        one = 1.0 + (name == "wrong")
        return kernels.Pair(
            name, lambda x: x + one, lambda x: x + 1, (jnp.zeros(3),), 0, "t" in name
        )

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "names", lambda: ["tiny", "wrong", "broken"])
    monkeypatch.setattr(kernels, "make_pair", make_pair)
    path = tmp_path / "new" / "kernels.json"
    assert run_inside("benchmark", "kernels", "--json", path) == 1
    figures = json.loads(path.read_text())
    assert figures["kernels"]["tiny"] == {} and figures["kernels"]["wrong"]["kernel"]["ms"] > 0
    assert list(figures["kernels"]) == ["tiny", "wrong"] and list(figures["failures"]) == ["wrong"]
    assert list(path.parent.iterdir()) == [path]
    assert re.search(r"^tiny +right$", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", kernels.names())
def test_kernels_on_the_device(name):
    assert kernels.compare(kernels.make_pair(name)) is None
