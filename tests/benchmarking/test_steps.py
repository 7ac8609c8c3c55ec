"""Benchmarks of the steps and the kernels: on what they run, and what they report."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mask_rcnn_jax.benchmarking import devices, inputs, kernels, steps
from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.data.options import canvas_size, example_options
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.memory import peak_rss_mb
from tests.commands.command import ROOT, run_inside
from tests.helpers import tiny_config

RECIPES = ["coco", "coco_nvidia_pytorch", "coco_torchvision", "quickstart"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_generated_batches_have_the_shapes_of_a_loaders(recipe):
    config = load_config(ROOT / "configs" / f"{recipe}.py")
    options = example_options(config)
    loaded = empty_batch(3, canvas_size(options), options)
    batch = inputs.abstract_batch(config, 3)
    assert jax.tree.structure(batch) == jax.tree.structure(loaded)
    for made, leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(loaded), strict=True):
        assert (made.shape, made.dtype) == (leaf.shape, leaf.dtype)


def test_generated_objects_are_sound():
    config = load_config(ROOT / "configs" / "coco_nvidia_pytorch.py")
    config.model.num_classes = 5
    targets = inputs.synthetic_batch(config, 2).targets
    height, width = canvas_size(example_options(config))
    boxes = targets.boxes[targets.valid]
    assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] <= [width, height]).all()
    assert ((boxes[:, 2:] - boxes[:, :2]) >= 8).all()
    assert set(targets.classes[targets.valid]) <= {1, 2, 3, 4, 5}
    assert targets.valid.sum() == 2 * inputs.OBJECTS
    assert (targets.polygons[targets.valid][..., 2] == 0).sum(axis=-1).min() == 32
    assert not targets.masks[~targets.valid].any()


def test_planned_memory_has_what_is_temporary():
    x = np.ones((100, 1000), np.float32)
    compiled = jax.jit(lambda x: (jnp.sort(x, 0) @ jnp.sort(x, 1).T).sum()).lower(x).compile()
    assert steps._planned_bytes(compiled.memory_analysis()) >= 3 * x.nbytes


@pytest.mark.slow
def test_figures_of_the_steps(monkeypatch):
    """Also where JAX is allowed to use GPUs only, so that it has no CPU devices to name."""
    devices = jax.devices
    monkeypatch.setattr(jax, "devices", lambda backend="cuda": {"cuda": devices}[backend]())
    config, saved = tiny_config(), []
    train = steps.train(config, calls=3, save=lambda figures: saved.append(dict(figures)))
    infer = steps.infer(config, calls=3)
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
