"""`export` through the command line: what it writes is read back, and what it refuses."""

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mask_rcnn_jax.training.checkpoint import load_checkpoint
from mask_rcnn_jax.training.run import load_config, load_variables, make_model
from mask_rcnn_jax.training.step import abstract_variables
from mask_rcnn_jax.training.weight_names import to_flax, to_ours_flat, to_torchvision
from tests.commands.command import ROOT, error_line, run_inside

RECIPE = f"{ROOT}/configs/coco_torchvision.py"
# A small model of torchvision's kind.
SMALL = {
    "model.depth": 10,
    "model.fpn_channels": 8,
    "model.rpn_channels": 8,
    "model.box_channels": 8,
    "model.mask_channels": 8,
    "model.num_classes": 3,
}


def small_config(**changes):
    return load_config(RECIPE, SMALL | {f"model.{name}": value for name, value in changes.items()})


def small_flags(**changes):
    overrides = SMALL | {f"model.{name}": value for name, value in changes.items()}
    return [
        f"--config={RECIPE}",
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]


def random_variables(config):
    rng = np.random.default_rng(0)
    abstract = abstract_variables(make_model(config, 3))
    return jax.tree.map(lambda leaf: rng.uniform(0.5, 1, leaf.shape).astype(np.float32), abstract)


@pytest.fixture
def weights(tmp_path):
    """A file of weights in our names, and its variables."""
    variables = random_variables(small_config())
    path = tmp_path / "ours.safetensors"
    save_file(to_ours_flat(variables), path)
    return path, variables


@pytest.mark.parametrize("names", ["safetensors", "torchvision"])
def test_file_is_read_back_as_it_was(names, weights, tmp_path, capsys, caplog):
    path, variables = weights
    target = tmp_path / "new" / "out.safetensors"
    arguments = ["--weights", path, f"--format={names}", "--output", target]
    assert run_inside("export", *small_flags(), *arguments) == 0
    arrays = load_file(target)
    assert (
        capsys.readouterr().out
        == f"{target}: {len(arrays)} arrays in the names of --format={names}\n"
    )
    assert "WARNING" not in {record.levelname for record in caplog.records}
    again, source = to_flax(arrays, norm="frozen", eps=1e-5)
    assert source == {"safetensors": "ours", "torchvision": "torchvision"}[names]
    jax.tree.map(np.testing.assert_array_equal, again, variables)
    assert [file.name for file in target.parent.iterdir()] == [target.name]
    # The commands read it too.
    jax.tree.map(np.testing.assert_array_equal, load_variables(target, small_config()), variables)


def test_epsilon_of_the_config_is_converted(tmp_path):
    config = small_config(norm="affine", norm_eps=1e-3)
    variables = random_variables(config)
    save_file(to_ours_flat(variables), tmp_path / "ours.safetensors")
    arguments = ["--weights", tmp_path / "ours.safetensors", "--format=torchvision"]
    target = tmp_path / "out.safetensors"
    flags = small_flags(norm="affine", norm_eps=1e-3)
    assert run_inside("export", *flags, *arguments, "--output", target) == 0
    expected = to_torchvision(variables, norm_eps=1e-3)
    arrays = load_file(target)
    assert arrays.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def test_what_torchvision_has_otherwise_is_listed(weights, tmp_path, caplog):
    target = tmp_path / "out.safetensors"
    arguments = ["--weights", weights[0], "--format=torchvision", "--output", target]
    flags = small_flags(padding="same", roi_sampling=1, norm_eps=1e-3)  # the last is converted
    assert run_inside("export", *flags, *arguments) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "model.padding is 'same', torchvision's Mask R-CNN has 'torch'",
        "model.roi_sampling is 1, torchvision's Mask R-CNN has 2",
    ]


def test_run_in_our_own_names(trained, tmp_path):
    target = tmp_path / "run.safetensors"
    arguments = ["--workdir", trained.workdir, "--format=safetensors", "--output", target]
    assert run_inside("export", *arguments) == 0
    again, _ = to_flax(load_file(target), norm="group", eps=1e-5)
    expected = load_checkpoint(trained.workdir)
    jax.tree.map(np.testing.assert_array_equal, again, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "group"}, "model.norm is 'group', torchvision's ResNet has batch normalisation"),
        ({"depth": 50, "stride_in": "1x1"}, "model.stride_in is '1x1', torchvision's ResNet"),
        ({"num_classes": 4}, "has 3 classes, expected 4"),
    ],
)
def test_model_that_torchvision_does_not_have(changes, message, weights, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    arguments = ["--weights", weights[0], "--format=torchvision", "--output", target]
    code = run_inside("export", *small_flags(**changes), *arguments)
    assert message in error_line(code, capsys.readouterr().err)
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export needs exactly one of --workdir and --weights"),
        (["--workdir", "a", "--weights", "b"], "export needs exactly one of"),
        (["--weights", "file.pth"], "--weights file.pth is no run: it needs --config"),
        (["--weights", "w.pth", "--output=model.pth"], "ends in .safetensors"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    fixed = ["--format=safetensors", "--output=model.safetensors"]
    code = run_inside("export", *fixed, *arguments)
    assert message in error_line(code, capsys.readouterr().err)


def test_format_must_be_one(capsys):
    code = run_inside("export", "--workdir=a", "--format=onnx", "--output=a.safetensors")
    assert "torchvision" in error_line(code, capsys.readouterr().err)
