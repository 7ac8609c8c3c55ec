"""What DeepStream draws of an exported model, by NVIDIA's parser as its source describes it."""

import configparser
from typing import NamedTuple

import numpy as np
import pytest

from mask_rcnn_jax.data.resize import resize_plan
from mask_rcnn_jax.exporting import deepstream
from mask_rcnn_jax.exporting.manifest import ModelInterface
from mask_rcnn_jax.exporting.tensorrt import tensorrt_problems
from mask_rcnn_jax.exporting.triton import model_config
from tests.small_model import generated, predict_function, random_variables, small_config

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from mask_rcnn_jax.exporting.onnx import OnnxInput, build_onnx  # noqa: E402
from mask_rcnn_jax.predict.programs import load_onnx  # noqa: E402

SIZE, CANVAS, BATCH, ROWS = (48, 80), (64, 128), 2, 60
CATEGORIES = [{"id": 4, "name": "bolt; long"}, {"id": 7, "name": "nut"}, {"id": 9, "name": "cog"}]


class Drawn(NamedTuple):
    """An object as the parser passes it on."""

    left: float
    top: float
    width: float
    height: float
    class_id: int
    score: float
    mask: np.ndarray


def parse(layers: dict, config: dict, width: int, height: int) -> list[Drawn]:
    """Read the outputs for one image as NvDsInferParseCustomMrcnnTLTV2 does.

    It counts the planes of masks with num-detected-classes, in memory without shapes.
    """
    rows, masks = layers["generate_detections"], layers["mask_fcn_logits/BiasAdd"]
    assert rows.dtype == masks.dtype == np.float32  # it ignores layers of other types
    assert masks.ndim == 4
    planes = int(config["property"]["num-detected-classes"])
    threshold = float(config["class-attrs-all"]["pre-cluster-threshold"])
    numbers, area = rows.reshape(-1), masks.shape[2] * masks.shape[3]
    found = []
    for i in range(len(masks)):
        y1, x1, y2, x2, class_id, score = numbers[6 * i : 6 * i + 6].tolist()
        if score < threshold:
            continue
        drawn_width = min(max(x2, 0), width - 1) - x1
        drawn_height = min(max(y2, 0), height - 1) - y1
        if drawn_width <= 0 or drawn_height <= 0:
            continue
        left, top = min(max(x1, 0), width - 1), min(max(y1, 0), height - 1)
        start = (i * planes + int(class_id)) * area
        mask = masks.reshape(-1)[start : start + area].reshape(masks.shape[2:])
        found.append(Drawn(left, top, drawn_width, drawn_height, int(class_id), score, mask))
    return found


@pytest.fixture(scope="module")
def exported():
    """A serialized model, a batch of images and their sizes."""
    limits = {"eval__detections_per_image": ROWS, "eval__score_threshold": 0.25}
    config = small_config("quickstart", CANVAS, **limits)
    variables = random_variables(config)
    variables["params"]["box_head"]["cls_score"]["kernel"] *= 0.4  # else all are of one class
    plan = resize_plan(*SIZE, config.data)
    source = OnnxInput(CANVAS, plan.size, None, "float32", planar=True)
    model, detect = predict_function(config)[0], config.eval
    built = build_onnx(model, variables, source, opset=17, detect=detect)
    inputs = generated(config, [SIZE] * BATCH, CANVAS)
    return built.SerializeToString(), *(
        np.concatenate(parts) for parts in zip(*inputs, strict=True)
    )


def boxes_alone(model: bytes) -> bytes:
    """The model without its output `masks`."""
    proto = onnx.load_from_string(model)
    kept = [output for output in proto.graph.output if output.name != "masks"]
    del proto.graph.output[:]
    proto.graph.output.extend(kept)
    return proto.SerializeToString()


def files_of(model: bytes) -> tuple[dict, configparser.ConfigParser]:
    inputs = {"images": {"dtype": "float32", "shape": ["batch", 3, *CANVAS]}}
    interface = ModelInterface(inputs, CANVAS, "float32", SIZE)
    files = deepstream.files(model, CATEGORIES, interface, BATCH)
    config = configparser.ConfigParser()
    config.read_string(files["nvinfer.txt"].decode())
    return files, config


def run(model: bytes, images: np.ndarray) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    feed = np.ascontiguousarray(images.transpose(0, 3, 1, 2), np.float32)
    return dict(zip(names, session.run(names, {"images": feed}), strict=True))


@pytest.mark.parametrize("masks", [True, False], ids=["masks", "boxes alone"])
def test_the_parser_finds_our_detections(exported, masks):
    model, images, sizes = exported
    files, config = files_of(model if masks else boxes_alone(model))
    config["class-attrs-all"]["pre-cluster-threshold"] = "0.4"
    expected, layers = load_onnx(model)(images, sizes), run(files[deepstream.MODEL], images)
    assert list(layers) == config["property"]["output-blob-names"].split(";")
    assert layers["mask_fcn_logits/BiasAdd"].shape[:3] == (BATCH, ROWS, len(CATEGORIES) + 1)
    drawn_classes = []
    for row in range(BATCH):
        of_image = {name: values[row] for name, values in layers.items()}
        height, width = CANVAS
        found = parse(of_image, config, width, height)
        # Boxes end before the last row and column of pixels, and have an area there.
        boxes = np.minimum(expected.boxes[row], (width, height, width - 1, height - 1))
        has_area = (boxes[:, 2:] > boxes[:, :2]).all(1)
        above = np.flatnonzero(expected.valid[row] & (expected.scores[row] >= 0.4) & has_area)
        assert len(found) == len(above)
        for drawn, i in zip(found, above, strict=True):
            x1, y1, x2, y2 = boxes[i].tolist()
            assert drawn[:4] == pytest.approx((x1, y1, x2 - x1, y2 - y1), abs=1e-4)
            assert drawn.class_id == expected.classes[row, i]
            assert drawn.score == expected.scores[row, i]
            if masks:
                np.testing.assert_array_equal(drawn.mask, expected.masks[row, i])
            else:
                np.testing.assert_array_equal(drawn.mask, [[1.0]])  # the box
        assert len(found) < expected.valid[row].sum() < ROWS, "rows below the threshold, and none"
        drawn_classes += [drawn.class_id for drawn in found]
    assert len(drawn_classes) > 9 and len(set(drawn_classes)) > 1


def test_planes_of_other_classes_and_invalid_rows_are_zero(exported):
    model, images, sizes = exported
    layers = run(deepstream.parser_model(model, 3), images)
    expected = load_onnx(model)(images, sizes)
    assert not expected.valid.all(), "the test needs a row without a detection"
    masks = layers["mask_fcn_logits/BiasAdd"]
    rest = masks.sum((3, 4))
    np.put_along_axis(rest, expected.classes[..., None], 0.0, axis=2)
    assert not rest.any()
    empty = layers["generate_detections"][~expected.valid]
    assert not empty.any()


def test_a_symbolic_batch_stays_symbolic(exported):
    made = onnx.load_from_string(deepstream.parser_model(exported[0], 3))
    shapes = [
        [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim]
        for output in made.graph.output
    ]
    assert shapes == [["batch", ROWS, 6], ["batch", ROWS, 4, 28, 28]]


def test_tensorrt_documents_all_that_the_models_use(exported):
    for model in (exported[0], deepstream.parser_model(exported[0], 3)):
        assert tensorrt_problems(onnx.load_from_string(model)) == []


def test_triton_gets_a_whole_batch_of_a_fixed_size(exported):
    proto = onnx.load_from_string(exported[0])
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 2
    text = model_config(proto)
    assert 'platform: "onnxruntime_onnx"\nmax_batch_size: 0\n' in text
    assert "dynamic_batching" not in text
    images = '    name: "images"\n    data_type: TYPE_FP32\n    dims: [ 2, 3, 64, 128 ]\n'
    assert f"input [\n  {{\n{images}  }}\n]\n" in text
    assert text.count("input [") == 1 and text.count("output [") == 5
    assert 'name: "valid"\n    data_type: TYPE_INT32\n    dims: [ 2, 60 ]\n' in text


def test_config_files(exported):
    files, config = files_of(exported[0])
    entries = config["property"]
    expected = {
        "network-type": "3",
        "cluster-mode": "4",
        "output-instance-mask": "1",
        "segmentation-threshold": "0.5",
        "num-detected-classes": "4",
        "batch-size": "2",
        "infer-dims": "3;64;128",
        "net-scale-factor": "1.0",
        "network-mode": "0",
        "parse-bbox-instance-mask-func-name": "NvDsInferParseCustomMrcnnTLTV2",
    }
    assert {name: entries[name] for name in expected} == expected
    assert entries["onnx-file"] in files
    # Line k, from 0, names class k; a semicolon would end the name.
    assert files[entries["labelfile-path"]].decode() == "background\nbolt, long\nnut\ncog\n"
    app = configparser.ConfigParser()
    app.read_string(files["deepstream_app_config.txt"].decode())
    assert app["primary-gie"]["config-file"] in files
    assert (app["streammux"]["height"], app["streammux"]["width"]) == ("48", "80")
    assert app["osd"]["display-mask"] == "1" and app["source0"]["num-sources"] == "2"
    without_masks = files_of(boxes_alone(exported[0]))[1]
    assert without_masks["property"]["output-instance-mask"] == "0"
