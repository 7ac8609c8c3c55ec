"""The engines that DeepStream builds from an export, and those of the trtexec commands."""

import functools
import json
import re
import shutil

import cv2
import pytest

from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting import deepstream
from mask_rcnn_jax.formats.shapes import generate_image
from tests.small_model import (
    CATEGORIES,
    SMALL_TRUNK,
    predict_function,
    random_variables,
    small_config,
    write_artifact,
)

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from tests.exporting.nvinfer import build  # noqa: E402

PICTURE = (48, 80)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A folder by precision, each exported once: float for one source, int8 for three."""
    config = small_config("quickstart", (64, 128), data__val_images="absent", **SMALL_TRUNK)
    model, root = (config, random_variables(config)), tmp_path_factory.mktemp("exported")
    (root / "photos").mkdir()
    assert cv2.imwrite(str(root / "photos/0.png"), generate_image(0, "val", 0, PICTURE)[0])
    options = {"deepstream": True, "picture_size": PICTURE}
    int8 = {"batch": 3, "int8": True, "calibration": str(root / "photos")}

    @functools.cache
    def folder(precision):
        more = int8 if precision == "int8" else {}
        return write_artifact(root / precision, model, "onnx", **options, **more)

    return folder


@pytest.mark.parametrize(("precision", "sources"), [("fp32", 1), ("int8", 3)])
@pytest.mark.slow
def test_nvinfer_builds_the_engine_that_its_config_names(precision, sources, exported):
    folder = exported(precision)
    engine = build(folder)
    assert engine.precision == precision and engine.profile["max"] == (sources, 3, 64, 128)
    # Else it would be built again at each start.
    assert f"\nmodel-engine-file={engine.file}\n" in (folder / "nvinfer.txt").read_text()
    # As does trtexec, with the same precision and shapes.
    commands = json.loads((folder / "manifest.json").read_text())["tensorrt"]["trtexec"]
    (command,) = (each for each in commands if "--onnx=deepstream.onnx " in each)
    assert f" --saveEngine={engine.file} " in command and "--fp16" not in command
    assert ("--int8" in command) == (precision == "int8")
    for kind, shape in engine.profile.items():
        assert f" --{kind}Shapes=images:{'x'.join(map(str, shape))}" in command


def test_engines_of_a_folder_have_names_of_their_own(exported):
    commands = json.loads((exported("int8") / "manifest.json").read_text())["tensorrt"]["trtexec"]
    names = [re.search(r"--saveEngine=(\S+)", command)[1] for command in commands]
    assert len(commands) == 4 and len(set(names)) == 4


def test_int8_needs_a_calibration_file(exported, tmp_path):
    folder = shutil.copytree(exported("int8"), tmp_path / "out")
    config = (folder / "nvinfer.txt").read_text()
    (folder / "nvinfer.txt").write_text(re.sub("int8-calib-file=.*\n", "", config))
    with pytest.raises(ValueError, match="quantized layers in fp16"):
        build(folder)


def test_a_graph_for_a_fixed_batch_does_not_run_with_fewer_frames(exported, tmp_path):
    config = small_config("quickstart", (64, 128), **SMALL_TRUNK)
    model, size = predict_function(config)[0], resize_plan(*PICTURE, config.data).size
    source = OnnxInput((64, 128), size, 3, "float32", planar=True)
    variables = random_variables(config)
    fixed = build_onnx(model, variables, source, opset=17, detect=config.eval)
    folder = shutil.copytree(exported("int8"), tmp_path / "out")
    parsed = deepstream.parser_model(fixed.SerializeToString(), len(CATEGORIES))
    (folder / deepstream.MODEL).write_bytes(parsed)
    with pytest.raises(Exception, match="Reshape"):
        build(folder)
