"""DeepStream: the outputs that NVIDIA's parser for TAO's Mask R-CNN reads, and its config files.

The parser, `NvDsInferParseCustomMrcnnTLTV2`, comes with DeepStream and with deepstream_tao_apps. It
finds two float32 outputs by name. For each image, that is behind the batch axis:

  * `generate_detections` [N, 6]: y1, x1, y2, x2 in pixels of the input, class and score.
  * `mask_fcn_logits/BiasAdd` [N, C, M, M]: of C classes, the first of which is the background, the
    plane of the detection's class. DeepStream draws the part above `segmentation-threshold`; we
    write probabilities, TAO wrote logits.

Rows with a score below the threshold of class 0 are skipped, and boxes without area, such as those
of invalid rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mask_rcnn_jax.exporting.manifest import ModelInterface, labels
from mask_rcnn_jax.exporting.tensorrt import calibration_cache
from mask_rcnn_jax.images.bands import Bands

DETECTIONS, MASKS = "generate_detections", "mask_fcn_logits/BiasAdd"
MODEL = "deepstream.onnx"  # name of the file
CACHE = "deepstream.cache"
PARSER = "NvDsInferParseCustomMrcnnTLTV2"
LIBRARY = "/opt/nvidia/deepstream/deepstream/lib/libnvds_infercustomparser.so"
SAMPLE = "/opt/nvidia/deepstream/deepstream/samples/streams/sample_720p.mp4"
SCORE_THRESHOLD = 0.5  # of objects that are drawn, as in `infer`


def check_bands(bands: Bands) -> None:
    """Raise ValueError unless the bands are those of video."""
    if bands.count != 3 or bands.is_scaled:
        names = ", ".join(bands.names)
        raise ValueError(
            f"--deepstream: its frames have 8-bit red, green, blue, but the model sees {names} "
            f"(data.bands.scale {bands.scale!r})"
        )


def files(
    model: bytes, categories: Sequence[Mapping[str, Any]], interface: ModelInterface, batch: int
) -> dict[str, bytes]:
    """Return the files that DeepStream needs, by name: `MODEL`, its config, labels and an app's
    config.

    Args:
        model: serialized ONNX model of planar float32 images, with the outputs of `interface`.
        categories: `[{"id", "name"}, ...]`, class 1 first.
        interface: inputs of the model, with a `picture_size`.
        batch: number of sources.
    """
    import onnx

    graph = onnx.load_from_string(model).graph
    masks = any(output.name == "masks" for output in graph.output)
    int8 = any(node.op_type == "QuantizeLinear" for node in graph.node)
    classes = len(categories)
    assert interface.picture_size is not None  # as `ArtifactOptions.check` demands
    texts = {
        "nvinfer.txt": nvinfer_config(
            interface.canvas, batch=batch, num_classes=classes, int8=int8, masks=masks
        ),
        "deepstream_app_config.txt": app_config(interface.picture_size, batch=batch, masks=masks),
        # A semicolon would separate the labels of several classifiers.
        "labels.txt": "background\n" + labels(categories).replace(";", ","),
    }
    if int8:
        # nvinfer builds in int8 only if there is a calibration cache, which TensorRT does not read
        # for a model that is quantized already.
        texts[CACHE] = calibration_cache({})
    contents = {name: text.encode() for name, text in texts.items()}
    return {MODEL: parser_model(model, classes), **contents}


def parser_model(model: bytes, num_classes: int) -> bytes:
    """Return a serialized ONNX model with the parser's two outputs in place of its own.

    Args:
        model: has the outputs boxes [B, N, 4], scores and classes [B, N] and, unless it finds boxes
            alone, masks [B, N, M, M]. B may be symbolic.
        num_classes: K, without the background.

    The outputs are [B, N, 6] and [B, N, K + 1, M, M], where M is 1 for boxes alone.
    """
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    proto = onnx.load_from_string(model)
    graph = proto.graph
    shapes = {output.name: output.type.tensor_type.shape.dim for output in graph.output}
    batch, rows = (dim.dim_param or dim.dim_value for dim in shapes["scores"])
    side = shapes["masks"][2].dim_value if "masks" in shapes else 1

    def constant(name: str, value: np.ndarray) -> str:
        graph.initializer.append(numpy_helper.from_array(value, f"parser/{name}"))
        return f"parser/{name}"

    def node(op_type: str, *inputs: str, name: str, **attributes: Any) -> str:
        graph.node.append(helper.make_node(op_type, inputs, [name], name=name, **attributes))
        return name

    last, planes = constant("last", np.array([2])), constant("planes", np.array([3, 4]))
    corners = constant("y_first", np.array([1, 0, 3, 2]))
    boxes = node("Gather", "boxes", corners, name="parser/boxes", axis=2)
    numbers = node("Cast", "classes", name="parser/classes", to=TensorProto.FLOAT)
    columns = [
        node("Unsqueeze", value, last, name=f"parser/{name}")
        for name, value in (("class_column", numbers), ("score_column", "scores"))
    ]
    node("Concat", boxes, *columns, name=DETECTIONS, axis=2)
    each = constant("each_class", np.arange(num_classes + 1, dtype=np.int32))
    classes = node("Unsqueeze", "classes", last, name="parser/class")
    is_class = node("Equal", classes, each, name="parser/is_class")
    is_class = node("Cast", is_class, name="parser/weights", to=TensorProto.FLOAT)
    if "masks" in shapes:
        weights = node("Unsqueeze", is_class, planes, name="parser/planes_of_class")
        node("Mul", weights, node("Unsqueeze", "masks", last, name="parser/plane"), name=MASKS)
    else:
        node("Unsqueeze", is_class, planes, name=MASKS)
    del graph.output[:]
    for name, shape in ((DETECTIONS, [6]), (MASKS, [num_classes + 1, side, side])):
        info = helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, rows, *shape])
        graph.output.append(info)
    onnx.checker.check_model(proto, full_check=True)
    return proto.SerializeToString()


def engine_file(batch: int, int8: bool) -> str:
    """Return the name that nvinfer gives the engine that it builds from `MODEL`."""
    return f"{MODEL}_b{batch}_gpu0_{'int8' if int8 else 'fp32'}.engine"


def nvinfer_config(
    canvas: tuple[int, int], *, batch: int, num_classes: int, int8: bool, masks: bool
) -> str:
    """Return the configuration of nvinfer for `MODEL`, which builds it for 1 to `batch` images.

    Pixels are passed unscaled (factor 1, offsets 0) and the model normalizes them, because
    nvinfer's single factor cannot express per-channel standard deviations.
    """
    entries = {
        "gpu-id": 0,
        "onnx-file": MODEL,
        "model-engine-file": engine_file(batch, int8),
        "labelfile-path": "labels.txt",
        "batch-size": batch,
        "network-mode": 1 if int8 else 0,  # 0 is float32, 1 int8, 2 float16
        **({"int8-calib-file": CACHE} if int8 else {}),
        "infer-dims": f"3;{canvas[0]};{canvas[1]}",
        "network-input-order": 0,  # planar
        "model-color-format": 0,  # RGB
        "net-scale-factor": "1.0",
        "offsets": "0;0;0",
        "maintain-aspect-ratio": 1,
        "symmetric-padding": 0,  # right and below
        "scaling-filter": 1,  # bilinear
        "process-mode": 1,  # whole frames
        "network-type": 3,  # instance segmentation
        "cluster-mode": 4,  # none: the model has done NMS
        "num-detected-classes": num_classes + 1,  # and the background, class 0
        "output-blob-names": f"{DETECTIONS};{MASKS}",
        "parse-bbox-instance-mask-func-name": PARSER,
        "custom-lib-path": LIBRARY,
        "output-instance-mask": int(masks),
        "segmentation-threshold": 0.5,
        "gie-unique-id": 1,
    }
    objects = {"pre-cluster-threshold": SCORE_THRESHOLD}
    return _key_file({"property": entries, "class-attrs-all": objects})


def app_config(picture_size: tuple[int, int], *, batch: int, masks: bool) -> str:
    """Return a configuration of deepstream-app that draws objects in a video.

    picture_size: (height, width) of frames. batch: number of sources.
    """
    height, width = picture_size
    size = {"width": width, "height": height}
    model = {"config-file": "nvinfer.txt", "gie-unique-id": 1}
    video = {"container": 1, "codec": 1}  # an mp4 with H.264
    draw = {"display-bbox": 1, "display-text": 1, "display-mask": int(masks)}
    groups: dict[str, dict[str, Any]] = {
        "application": {"enable-perf-measurement": 1, "perf-measurement-interval-sec": 5},
        "source0": {"enable": 1, "type": 3, "uri": f"file://{SAMPLE}", "num-sources": batch},
        "streammux": {"batch-size": batch, "batched-push-timeout": 40000, **size},  # microseconds
        "primary-gie": {"enable": 1, "batch-size": batch, **model},
        "tiled-display": {"enable": int(batch > 1), "rows": 1, "columns": batch, **size},
        "osd": {"enable": 1, "process-mode": 0, **draw},
        "sink0": {"enable": 1, "type": 3, **video, "output-file": "found.mp4", "sync": 0},
    }
    return _key_file(groups)


def _key_file(groups: Mapping[str, Mapping[str, Any]]) -> str:
    """A file of GLib's key-value format."""
    texts = (
        f"[{group}]\n" + "".join(f"{key}={value}\n" for key, value in entries.items())
        for group, entries in groups.items()
    )
    return "\n".join(texts)
