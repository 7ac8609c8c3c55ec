"""Export Mask R-CNN as one ONNX model of standard operators, from image to detections.

Each step of `MaskRCNN.predict` has a counterpart with the same order of equal scores:
 - TopK puts the lower row first, as `lax.top_k` does.
 - NonMaxSuppression gets sorted boxes with rank scores, so the result does not depend on the
   runtime's tie-breaking.
 - RoiAlign reads the boxes of each level, which NonZero finds.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mask_rcnn_jax.deploy.onnx_convnext import ConvNeXtTrunk
from mask_rcnn_jax.deploy.onnx_graph import Graph, Map, floats, ints, make_model_proto
from mask_rcnn_jax.deploy.onnx_layers import Extent, Trunk, cell_mask
from mask_rcnn_jax.deploy.onnx_regions import Regions
from mask_rcnn_jax.deploy.onnx_regnet import RegNetTrunk
from mask_rcnn_jax.models.convnext import ConvNeXt
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.fpn import FPN
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.regnet import RegNet
from mask_rcnn_jax.models.resnet import ResNet
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead
from mask_rcnn_jax.structures import Detections

if TYPE_CHECKING:
    import onnx

MAPS = ("backbone", "fpn")  # parts that compute maps of the whole image


def check_exportable(model: MaskRCNN, batch: int, image_size: tuple[int, int] | None) -> None:
    """Raise ValueError if ONNX operators cannot reproduce the model exactly."""
    parts: dict[str, tuple[type, ...]] = {
        "backbone": (ResNet, RegNet, ConvNeXt),
        "fpn": (FPN,),
        "box_head": (BoxHead,),
        "mask_head": (MaskHead,),
    }
    if model.mask_head is None:
        del parts["mask_head"]
    ends = model.input.pad_multiple and image_size is None  # maps end inside the canvas
    for part, known in parts.items():
        module = getattr(model, part)
        norm: str = getattr(module, "norm", "none")
        if not isinstance(module, known):
            raise ValueError(
                f"--format=onnx: model.{part} is {type(module).__name__}, which it cannot convert; "
                "--format=stablehlo can"
            )
        if norm == "layer" or (norm == "group" and ends and part in MAPS):
            reason = "" if norm == "layer" else " without --picture_size"
            raise ValueError(
                f"--format=onnx: model.{part}.norm is {norm!r}, which it cannot convert"
                f"{reason}; --format=stablehlo can"
            )
    if model.cascade.heads:
        raise ValueError(
            "--format=onnx: model.cascade.fg_iou_thresh has stages, which it cannot convert; "
            "--format=stablehlo can"
        )
    if model.box_head.num_fcs < 1:
        raise ValueError("--format=onnx: model.box_head.num_fcs is 0, expected at least 1")
    align, pad_multiple = model.roi_align, model.input.pad_multiple
    if align.border == "clamp" and align.min_size > 0:
        raise ValueError(
            "--format=onnx: model.roi_align.border='clamp' with model.roi_align.min_size="
            f"{align.min_size} has no RoiAlign in ONNX, which treats samples outside the map as "
            "zero; model.roi_align.border='zero' or model.roi_align.min_size=0 can be exported"
        )
    if pad_multiple and batch > 1 and image_size is None:
        raise ValueError(
            f"--format=onnx: --batch is {batch}, but with model.input.pad_multiple={pad_multiple} "
            "maps end at each image: use --batch=1, or --picture_size for images of one size"
        )


def export_canvas(
    model: MaskRCNN, canvas: tuple[int, int], image_size: tuple[int, int] | None
) -> tuple[int, int]:
    """(H, W) of the input: the recipe's canvas, or its valid part if all images have one size."""
    multiple = model.input.pad_multiple
    if image_size is None or not multiple:
        return canvas
    height, width = (-(-side // multiple) * multiple for side in image_size)
    return height, width


@dataclass(frozen=True)
class OnnxInput:
    """Input `images` of an ONNX model, pixel values in 0..255.

    Attributes:
        canvas: (H, W), see `export_canvas`.
        image_size: (height, width) of every image on the canvas; None adds the input `image_sizes`,
            int32 [batch, 2].
        batch: batch size.
        dtype: "uint8" or "float32".
        planar: [batch, 3, H, W] instead of [batch, H, W, 3].
    """

    canvas: tuple[int, int]
    image_size: tuple[int, int] | None = None
    batch: int = 1
    dtype: str = "uint8"
    planar: bool = False


def build_onnx(
    model: MaskRCNN, variables: dict, source: OnnxInput, *, opset: int, detect: Detect
) -> "onnx.ModelProto":
    """Build and check a float32 ONNX model of `model.predict` with these weights.

    Its outputs are the fields of `Detections`, with `valid` as int32 if the input is planar. Raises
    ValueError for a model or input rejected by `check_exportable`, and for soft-NMS.
    """
    if detect.nms != "hard":
        raise ValueError(f"eval.nms is {detect.nms!r}, expected 'hard' for an ONNX model")
    batch, image_size = source.batch, source.image_size
    check_exportable(model, batch, image_size)
    height, width = canvas = source.canvas
    planar, dtype = source.planar, source.dtype
    graph = Graph()
    shape = [batch, 3, height, width] if planar else [batch, height, width, 3]
    inputs = {"images": ({"uint8": "UINT8", "float32": "FLOAT"}[dtype], shape)}
    if image_size is None:
        inputs["image_sizes"] = ("INT32", [batch, 2])
        sizes = graph.cast("image_sizes", "INT64")
    else:
        sizes = graph.constant(np.tile(ints(*image_size), (batch, 1)))
    valid_size = None
    if model.input.pad_multiple and image_size is None:
        multiple = ints(model.input.pad_multiple)
        blocks = graph.op("Div", graph.op("Add", sizes, multiple - 1), multiple)
        valid_size = graph.op("Mul", blocks, multiple)
    params, stats = variables["params"], variables.get("batch_stats", {})
    regions = Regions(graph, model, params, canvas, batch, Extent(graph, valid_size), stats)
    images = _normalize(graph, model, source, sizes)
    trunks = {RegNet: RegNetTrunk, ConvNeXt: ConvNeXtTrunk}
    trunk = trunks.get(type(model.backbone), Trunk)
    pyramid = trunk(graph, model, variables, regions.extent).pyramid(images)
    limits = regions.box_limits(sizes)
    boxes, valid, rows = regions.proposals(pyramid, limits)
    valid_dtype = "INT32" if planar else "BOOL"
    boxes, classes, valid = regions.detections(
        pyramid, boxes, valid, rows, limits, detect, valid_dtype=valid_dtype
    )
    count = [batch, detect.detections_per_image]
    outputs = {
        "boxes": ("FLOAT", [*count, 4]),
        "scores": ("FLOAT", count),
        "classes": ("INT32", count),
    }
    if model.mask_head is not None:
        regions.masks(pyramid, boxes, classes, valid, detect.detections_per_image)
        side = 2 * model.mask_roi_size
        outputs["masks"] = ("FLOAT", [*count, side, side])
    outputs["valid"] = (valid_dtype, count)
    return make_model_proto(graph, "mask_rcnn", inputs, outputs, opset)


def load_onnx(model: bytes) -> Callable:
    """Load a model as a function (images [n, H, W, 3], image_sizes [n, 2]) -> `Detections`.

    It accepts up to `batch` images, on a canvas at least as large as the model's, of which it reads
    the upper left part.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    inputs = {value.name: value for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]

    def run(images: np.ndarray, image_sizes: np.ndarray) -> Detections:
        dtype = {"tensor(uint8)": "uint8", "tensor(float)": "float32"}[inputs["images"].type]
        feeds = make_feeds(images, image_sizes, inputs["images"].shape, dtype)
        feeds = {name: value for name, value in feeds.items() if name in inputs}
        found = dict(zip(names, session.run(names, feeds), strict=True))
        found["valid"] = found["valid"].astype(bool)
        found = {name: value[: len(images)] for name, value in found.items()}
        return Detections(**{"masks": None, **found})

    return run


def make_feeds(images: np.ndarray, image_sizes: np.ndarray, shape: list[int], dtype: str) -> dict:
    """Convert images to model inputs, repeating the last image to fill the batch.

    shape, dtype: of the input `images`, such as [1, 3, 64, 64] and "float32".
    """
    planar = shape[1] == 3
    height, width = shape[2:] if planar else shape[1:3]
    rows = np.minimum(np.arange(shape[0]), len(images) - 1)
    images = np.asarray(images)[rows, :height, :width]
    images = images.transpose(0, 3, 1, 2) if planar else images
    sizes = np.asarray(image_sizes)[rows]
    return {"images": np.ascontiguousarray(images, dtype), "image_sizes": sizes.astype(np.int32)}


def check_packages(*names: str) -> None:
    """Raise ValueError, naming the extra to install, if a package is missing."""
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ValueError(
                f"--format=onnx needs the package {name}: pip install 'mask-rcnn-jax[export]'"
            ) from error


def _normalize(graph: Graph, model: MaskRCNN, source: OnnxInput, sizes: str) -> Map:
    """Normalize `images` to NCHW with mean and std, zero outside each image."""
    x = graph.cast("images", "FLOAT") if source.dtype == "uint8" else "images"
    if not source.planar:
        x = graph.op("Transpose", x, perm=[0, 3, 1, 2])
    mean, std = (
        np.array(values, np.float32)[:, None, None]
        for values in (model.input.mean, model.input.std)
    )
    x = graph.op("Div", graph.op("Sub", x, mean), std)
    if source.image_size != source.canvas:
        x = graph.op("Where", cell_mask(graph, sizes, *source.canvas), x, floats(0.0))
    return Map(x, *source.canvas)
