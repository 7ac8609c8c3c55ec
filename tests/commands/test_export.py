"""`export` on the command line: reading back its output, and its error messages."""

import configparser
import json
import os
from functools import partial

import cv2
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mask_rcnn_jax.config import load_config
from mask_rcnn_jax.exporting.weight_file import check_system
from mask_rcnn_jax.models.build import abstract_variables
from mask_rcnn_jax.models.quantization import trained_ranges
from mask_rcnn_jax.parts import to_section
from mask_rcnn_jax.version import __version__
from mask_rcnn_jax.weights.convert import to_flax, to_ours_flat, to_torchvision
from mask_rcnn_jax.weights.pretrained import load_weights
from mask_rcnn_jax.weights.restore import load_variables, make_model, restore
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint
from tests.commands.command import ROOT, error_line, run_inside
from tests.commands.small_run import untrained_run
from tests.exporting.nvinfer import build

RECIPE = f"{ROOT}/configs/coco_torchvision.py"
# A small model with torchvision's layers.
SMALL = {
    "model.backbone.depth": 10,
    "model.fpn.channels": 8,
    "model.rpn.channels": 8,
    "model.box_head.channels": 8,
    "model.mask_head.channels": 8,
    "model.num_classes": 3,
}


def small_config(**changes):
    return load_config(
        RECIPE, SMALL | {f"model.backbone.{name}": value for name, value in changes.items()}
    )


def small_flags(**changes):
    overrides = SMALL | {f"model.{name.replace('__', '.')}": v for name, v in changes.items()}
    return [
        f"--config={RECIPE}",
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]


def random_variables(config):
    rng = np.random.default_rng(0)
    abstract = abstract_variables(make_model(config, 3))
    return jax.tree.map(lambda leaf: rng.uniform(0.5, 1, leaf.shape).astype(np.float32), abstract)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A weight file with our names, and its variables."""
    variables = random_variables(small_config())
    path = tmp_path_factory.mktemp("weights") / "ours.safetensors"
    save_file(to_ours_flat(variables), path)
    return path, variables


@pytest.mark.parametrize("names", ["safetensors", "torchvision"])
def test_weights_are_read_back_unchanged(names, weights, tmp_path, capsys, caplog):
    path, variables = weights
    target = tmp_path / "new" / "out.safetensors"
    arguments = ["--weights", path, f"--format={names}", "--output", target]
    target.parent.mkdir()
    target.write_bytes(b"of an earlier export")
    assert run_inside("export", *small_flags(), *arguments) == 0
    arrays = load_file(target)
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"{target}: {len(arrays)} arrays in the names of --format={names}",
        "self-check: read back, the largest difference is 0",
    ]
    assert "WARNING" not in {record.levelname for record in caplog.records}
    restored, source = to_flax(arrays, norm="frozen", eps=1e-5)
    assert source == {"safetensors": "ours", "torchvision": "torchvision"}[names]
    jax.tree.map(np.testing.assert_array_equal, restored, variables)
    written = sorted(file.name for file in target.parent.iterdir())
    assert written == ["out.manifest.json", "out.safetensors"]
    manifest = json.loads((target.parent / "out.manifest.json").read_text())
    assert manifest["preprocessing"]["image_size"] == [800, 1333]
    assert [entry["class"] for entry in manifest["classes"]] == [1, 2, 3]
    # Commands can read it, too.
    jax.tree.map(np.testing.assert_array_equal, load_variables(target, small_config()), variables)


def test_epsilon_of_the_config_is_converted(tmp_path):
    config = small_config(norm="affine", norm_eps=1e-3)
    variables = random_variables(config)
    save_file(to_ours_flat(variables), tmp_path / "ours.safetensors")
    arguments = ["--weights", tmp_path / "ours.safetensors", "--format=torchvision"]
    target = tmp_path / "out.safetensors"
    flags = small_flags(backbone__norm="affine", backbone__norm_eps=1e-3)
    assert run_inside("export", *flags, *arguments, "--output", target) == 0
    expected = to_torchvision(variables, norm_eps=1e-3)
    arrays = load_file(target)
    assert arrays.keys() == expected.keys()
    for name in expected:
        np.testing.assert_array_equal(arrays[name], expected[name], err_msg=name)


def test_differences_from_torchvision_are_listed(weights, tmp_path, caplog):
    target = tmp_path / "out.safetensors"
    arguments = ["--weights", weights[0], "--format=torchvision", "--output", target]
    flags = small_flags(
        backbone__padding="same", backbone__norm_eps=1e-3
    )  # the second is converted
    flags += ["--config.model.roi_align.sampling_ratio=1"]
    assert run_inside("export", *flags, *arguments) == 0
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "model.backbone.padding is 'same', torchvision's Mask R-CNN has 'torch'",
        "model.roi_align.sampling_ratio is 1, torchvision's Mask R-CNN has 2",
    ]


@pytest.mark.parametrize("norm", ["group", "frozen"])
def test_an_epsilon_that_no_statistics_absorb_is_a_difference(norm, caplog):
    """detectron2's group norm has 1e-5."""
    strides = {"group": "3x3", "frozen": "1x1"}  # of its models with either
    changes = {"norm": norm, "norm_eps": 1e-3, "stride_in": strides[norm]}
    overrides = {f"model.backbone.{name}": value for name, value in changes.items()}
    check_system(load_config("coco_detectron2:gn_3x", overrides).model, "detectron2")
    expected = ["model.backbone.norm_eps is 0.001, detectron2's Mask R-CNN has 1e-05"]
    assert [r.getMessage() for r in caplog.records] == (expected if norm == "group" else [])


@pytest.mark.parametrize(
    "format",
    ["safetensors", "torchvision", pytest.param("detectron2", marks=pytest.mark.slow)],
)
def test_weights_that_were_trained_in_int8(format, tmp_path, capsys, caplog):
    """Our names keep the ranges, in a file that is read; the other systems have none."""
    config = load_config(RECIPE, SMALL | {"model.quantization.int8": True})
    variables = random_variables(config)
    target, source = tmp_path / "new.safetensors", tmp_path / "ours.safetensors"
    save_file(to_ours_flat(variables), source)
    if format == "detectron2":
        target = tmp_path / "new.pkl"
    arguments = ["--weights", source, f"--format={format}", "--output", target]
    flags = small_flags(quantization__int8=True)
    assert run_inside("export", *flags, *arguments) == 0
    assert "the largest difference is 0\n" in capsys.readouterr().out
    kept, left_out = {}, f"{len(trained_ranges(variables))} ranges of int8 left out: {format} has"
    if format == "safetensors":
        kept = trained_ranges(variables)
        jax.tree.map(np.testing.assert_array_equal, load_variables(target, config), variables)
    assert (left_out in caplog.text) == (not kept)
    assert trained_ranges(load_weights(target, to_section(config.model))[0]) == kept


def test_run_exports_our_names(untrained, tmp_path):
    target = tmp_path / "run.safetensors"
    arguments = ["--workdir", untrained.workdir, "--format=safetensors", "--output", target]
    assert run_inside("export", *arguments) == 0
    restored, _ = to_flax(load_file(target), norm="group", eps=1e-5)
    expected = load_checkpoint(untrained.workdir)
    jax.tree.map(np.testing.assert_array_equal, restored, expected)


def test_float16_halves_a_file_which_keeps_the_names_of_its_classes(untrained, tmp_path, capsys):
    sizes, recipe = [], load_config(untrained.workdir, {"data.val_json": ""})
    for flag in ("--nofloat16", "--float16"):
        target = tmp_path / "run.safetensors"
        arguments = ["--workdir", untrained.workdir, "--format=safetensors", "--output", target]
        assert run_inside("export", *arguments, flag) == 0
        sizes.append(target.stat().st_size)
    assert 0.49 < sizes[1] / sizes[0] < 0.6
    restored, of_run = restore(recipe, target), restore(None, untrained.workdir)
    assert restored.categories == of_run.categories
    assert restored.categories[0]["name"] not in ("class 1", "person")
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(close, restored.variables, of_run.variables)

    arrays = load_file(target)
    name = next(name for name in arrays if "kernel" in name)
    save_file(arrays | {name: np.full(arrays[name].shape, 1e6, np.float32)}, target)
    arguments = ["--config", untrained.workdir, "--weights", target, "--format=safetensors"]
    code = run_inside("export", *arguments, "--float16", "--output", tmp_path / "b.safetensors")
    message = f"{name} has 1e+06, too large for --float16"
    assert error_line(code, capsys.readouterr().err) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ["backbone.norm=group"],
            "model.backbone.norm is 'group', torchvision's ResNet has batch normalization",
        ),
        (
            ["backbone.depth=50", "backbone.stride_in=1x1"],
            "model.backbone.stride_in is '1x1', torchvision's ResNet",
        ),
        (["backbone.norm=layer"], "model.backbone.norm is 'layer', torchvision's ResNet has"),
        (
            ["box_head.num_convs=2", "box_head.num_fcs=1"],
            "model.box_head.num_convs and num_fcs are 2 and 1, torchvision has 0 and 2, or 4 and 1",
        ),
        (
            ["box_head.class_agnostic=True"],
            "model.box_head.class_agnostic is True, torchvision has boxes for each class only",
        ),
        (["num_classes=4"], "has 3 classes, expected 4"),
        (
            ["fpn.widths=(('fpn_lateral',4),)"],
            "model.fpn.widths is (('fpn_lateral', 4),), torchvision has no pruned models",
        ),
    ],
)
def test_models_that_torchvision_lacks_are_rejected(changes, message, weights, tmp_path, capsys):
    target = tmp_path / "out.safetensors"
    arguments = ["--weights", weights[0], "--format=torchvision", "--output", target]
    changed = [f"--config.model.{change}" for change in changes]
    code = run_inside("export", *small_flags(), *changed, *arguments)
    assert message in error_line(code, capsys.readouterr().err)
    assert not target.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "export needs exactly one of --workdir and --weights"),
        (["--workdir", "a", "--weights", "b"], "export needs exactly one of"),
        (["--weights", "file.pth"], "file.pth: no such file or run, and no name of"),
        (["--weights", "w.pth", "--output=model.pth"], "ends in .safetensors"),
        (["--workdir=a", "--batch=2"], "--batch does not apply to --format=safetensors"),
        (["--workdir=a", "--static"], "--static does not apply to --format=safetensors"),
        (["--workdir=a", "--int8"], "--int8 does not apply to --format=safetensors"),
        (["--workdir=a", "--format=stablehlo", "--opset=17"], "--opset does not apply to"),
        (
            ["--workdir=a", "--format=stablehlo", "--picture_size=4,4"],
            "--picture_size does not apply to --format=stablehlo",
        ),
        (
            ["--workdir=a", "--format=stablehlo", "--int8", "--calibrator=entropy"],
            "--calibrator=entropy does not apply to --format=stablehlo",
        ),
        (["--workdir=a", "--format=onnx", "--int8"], "--int8 needs --calibration"),
        (
            ["--workdir=a", "--format=onnx", "--int8", "--float16"],
            "--float16 and --int8 are different models",
        ),
        (["--workdir=a", "--format=stablehlo", "--float16"], "--float16 does not apply to"),
        (["--workdir=a", "--format=onnx", "--calibration=b"], "--calibration needs --int8"),
        (["--workdir=a", "--format=onnx", "--int8_for=cpu"], "--int8_for needs --int8"),
        (["--workdir=a", "--format=onnx", "--int8_budget=0.1"], "--int8_budget needs --int8"),
        (
            ["--workdir=a", "--format=onnx", "--int8", "--int8_budget=-1"],
            "--int8_budget is -1.0, expected an AP of 0 to 1",
        ),
        (
            ["--workdir=a", "--format=stablehlo", "--int8_for=cpu"],
            "--int8_for does not apply to --format=stablehlo",
        ),
        (["--workdir=a", "--format=onnx", "--deepstream"], "--deepstream needs --picture_size"),
        (["--workdir=a", "--format=onnx", "--picture_size=4"], "expected HEIGHT,WIDTH in pixels"),
        (["--workdir=a", "--format=onnx", "--batch=0"], "--batch=0"),
    ],
)
def test_mistakes_are_one_line(arguments, message, capsys):
    fixed = ["--format=safetensors", "--output=model.safetensors"]
    code = run_inside("export", *fixed, *arguments)
    assert message in error_line(code, capsys.readouterr().err)


def test_unknown_format_is_rejected(capsys):
    code = run_inside("export", "--workdir=a", "--format=pickle", "--output=a.safetensors")
    assert "torchvision" in error_line(code, capsys.readouterr().err)


@pytest.mark.slow
def test_onnx_of_a_run_in_int8_for_deepstream(untrained, tmp_path, capsys, caplog):
    onnx = pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    target = tmp_path / "onnx"
    arguments = ["--workdir", untrained.workdir, "--format=onnx", "--output", target, "--batch=2"]
    arguments += ["--picture_size=48,64", "--deepstream", "--int8"]
    arguments += ["--calibration", untrained.data_dir / "val", "--config.eval.max_images=4"]
    # Validation images are 64 x 64 but the model expects 48 x 64, so AP cannot be measured.
    code = run_inside("export", *untrained.flags, *arguments)
    line = error_line(code, capsys.readouterr().err)
    assert "has a size that the exported model takes; most are 64 x 64" in line
    assert not target.exists()  # said before anything is calibrated
    arguments[arguments.index("--picture_size=48,64")] = "--picture_size=64,64"
    assert run_inside("export", *untrained.flags, *arguments) == 0
    said = capsys.readouterr().out
    table = [line.split()[::2] for line in said.splitlines() if line.startswith(("AP", "mask_"))]
    assert [row[0] for row in table] == ["AP", "AP50", "mask_AP", "mask_AP50"]
    assert "float " in said and "self-check, float: " in said and "self-check, int8: " in said
    files = {"calibration.cache", "calibration.json", "config.pbtxt", "deepstream.onnx"}
    files |= {"deepstream_app_config.txt", "labels.txt", "manifest.json", "nvinfer.txt"}
    files |= {"deepstream.cache", "model.onnx", "model_int8.onnx"}
    assert {path.name for path in target.iterdir()} == files
    manifest = json.loads((target / "manifest.json").read_text())
    names = [entry["name"] for entry in manifest["classes"]]
    assert (target / "labels.txt").read_text().splitlines() == ["background", *names]
    assert names == ["circle", "square", "triangle", "star"]
    assert manifest["ap"].keys() == {"float", "int8"}
    assert manifest["self_check"]["float"]["boxes"] < 0.1
    made = {"pictures": 4, "calibrator": "minmax", "int8_for": "tensorrt"}
    assert manifest["calibration"] == made
    assert manifest["preprocessing"]["resized_size"] == [64, 64]
    nvinfer = configparser.ConfigParser()
    nvinfer.read(target / "nvinfer.txt")
    entries = nvinfer["property"]
    assert build(target).precision == "int8" and entries["batch-size"] == "2"
    assert entries["infer-dims"] == "3;64;64" and entries["net-scale-factor"] == "1.0"
    assert entries["onnx-file"] == "deepstream.onnx" and entries["num-detected-classes"] == "5"
    parsed = onnxruntime.InferenceSession(
        target / "deepstream.onnx", providers=["CPUExecutionProvider"]
    )
    shapes = {output.name: output.shape for output in parsed.get_outputs()}
    assert list(shapes) == entries["output-blob-names"].split(";")
    rows = manifest["outputs"]["boxes"]["shape"][1]
    assert list(shapes.values()) == [["batch", rows, 6], ["batch", rows, 5, 28, 28]]
    problems = manifest["tensorrt"]["problems"]
    assert problems == {"deepstream.onnx": [], "model.onnx": [], "model_int8.onnx": []}
    assert "--calib=calibration.cache" in "".join(manifest["tensorrt"]["trtexec"])
    check_calibration_cache(target)
    said = {"canvas": "[64, 64]", "task": "boxes, masks"}
    said["version"] = f"mask_rcnn_jax {__version__}"
    for name in ("model.onnx", "model_int8.onnx", "deepstream.onnx"):
        found = {entry.key: entry.value for entry in onnx.load(target / name).metadata_props}
        classes = json.loads(found.pop("classes"))
        assert classes == {str(k): name for k, name in enumerate(names, start=1)}
        assert found.items() >= said.items()
    for name in ("model.onnx", "model_int8.onnx"):
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(target / name, providers=providers)
        (images,) = session.get_inputs()
        assert (images.type, images.shape) == ("tensor(float)", ["batch", 3, 64, 64])
        described, outputs = manifest["outputs"], session.get_outputs()
        assert described.keys() == {output.name for output in outputs}
        for output in outputs:
            assert output.shape == described[output.name]["shape"]
            kind = {"float32": "float"}.get(described[output.name]["dtype"], "int32")
            assert output.type == f"tensor({kind})"
    check_artifact_runs(untrained, target, tmp_path, manifest["ap"], capsys, caplog)


def check_calibration_cache(folder):
    """Each tensor of the cache is one of the float model, and has the scale of the int8 model."""
    onnx = pytest.importorskip("onnx")
    nodes = onnx.load(folder / "model.onnx").graph.node
    known = {name for node in nodes for name in (*node.input, *node.output)}
    lines = (folder / "calibration.cache").read_text().splitlines()[1:]
    scales = {}
    for line in lines:
        name, bits = line.rsplit(": ", 1)
        scales[name] = np.frombuffer(bytes.fromhex(bits), ">f4").item()
    assert len(scales) > 20 and scales.keys() <= known
    quantized = onnx.load(folder / "model_int8.onnx").graph
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in quantized.initializer}
    found = 0
    for node in quantized.node:
        if node.op_type == "QuantizeLinear" and node.input[0] in scales:
            scale = arrays[node.input[1]].item()
            # onnxruntime spreads the range over 254 steps.
            assert scales[node.input[0]] == pytest.approx(scale, rel=0.01), node.input[0]
            found += 1
    assert found > 20


def check_artifact_runs(untrained, folder, tmp_path, aps, capsys, caplog):
    """`infer` and `evaluate` with an exported folder, in batches of two."""
    image = untrained.data_dir / "val" / sorted(os.listdir(untrained.data_dir / "val"))[0]
    arguments = ["--artifact", folder, "--engine=onnxruntime", "--score_threshold=0.1"]
    cv2.imwrite(str(tmp_path / "wide.png"), np.zeros((32, 64, 3), np.uint8))  # is skipped
    inputs = ["--input", image, "--input", tmp_path / "wide.png"]
    assert run_inside("infer", *arguments, *inputs, "--output", tmp_path / "found") == 0
    assert (tmp_path / "found" / image.name).is_file()
    assert "wide.png: an image of 32 x 64 on a canvas of 64 x 64 does" in caplog.text
    for precision, ap in (("", aps["float"]), ("int8", aps["int8"])):
        flags = [f"--engine_precision={precision}"] if precision else []
        flags += ["--artifact", folder, "--output", tmp_path / "scores"]
        flags += ["--config.eval.max_images=4"]
        assert run_inside("evaluate", *flags) == 0
        metrics = json.loads((tmp_path / "scores" / "metrics.json").read_text())
        assert {name: metrics[name] for name in ap} == pytest.approx(ap, abs=1e-6)
    flags[-1] = "--config.eval.detections_per_image=3"
    code = run_inside("evaluate", *flags)
    assert "eval.detections_per_image is 3, but the" in error_line(code, capsys.readouterr().err)
    code = run_inside("serve", "--workdir", untrained.workdir, "--engine=openvino", "--port=0")
    line = error_line(code, capsys.readouterr().err)
    assert "--engine is for exported models: it needs --artifact" in line


@pytest.mark.slow
def test_stablehlo_of_a_run_in_int8(tmp_path):
    """With a wide head, since what describes the program is the same size in int8."""
    pytest.importorskip("flatbuffers")
    wide = untrained_run(tmp_path / "wide", ("model.box_head.channels", 256))
    arguments = ["--workdir", wide.workdir, "--format=stablehlo", "--output", tmp_path]
    arguments += ["--int8", "--calibration", wide.data_dir / "val"]
    arguments += ["--config.eval.max_images=2"]
    assert run_inside("export", *wide.flags, *arguments) == 0
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["inputs"]["images"]["shape"] == ["batch", 64, 64, 3]
    assert manifest["self_check"]["float"]["scores"] < 1e-4
    sizes = [(tmp_path / f"{name}.stablehlo").stat().st_size for name in ("model", "model_int8")]
    assert sizes[1] < 0.4 * sizes[0]


def test_int8_needs_annotations_and_images(untrained, tmp_path, capsys):
    pytest.importorskip("onnx")
    arguments = ["--workdir", untrained.workdir, "--format=onnx", "--output", tmp_path, "--int8"]
    absent = [*untrained.flags, "--config.data.val_json=none.json", "--calibration", tmp_path]
    code = run_inside("export", *absent, *arguments)
    assert "--int8 reports AP on config.data.val_json" in error_line(code, capsys.readouterr().err)
    code = run_inside("export", *untrained.flags, "--calibration", tmp_path, *arguments)
    assert "no images found" in error_line(code, capsys.readouterr().err)
