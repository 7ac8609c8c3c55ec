"""Export Mask R-CNN as one ONNX model of standard operators, from image to detections.

The model is `MaskRCNN.predict`, traced by JAX and translated one primitive at a time
(`deploy.onnx_trace`), so that it follows whatever the model's parts compute, those of users
included. Operations that ONNX has as a whole, such as RoIAlign, are in `deploy.onnx_named`.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax.deploy import onnx_named, onnx_products, onnx_rules, onnx_shapes
from mask_rcnn_jax.deploy.onnx_cleanup import clean_up
from mask_rcnn_jax.deploy.onnx_graph import Graph, check_opset, make_model_proto
from mask_rcnn_jax.deploy.onnx_trace import translate
from mask_rcnn_jax.deploy.onnx_values import Known, Value, arrange, tensor
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.structures import Detections

if TYPE_CHECKING:
    import onnx

RULES = onnx_rules.RULES | onnx_shapes.RULES | onnx_products.RULES | onnx_named.RULES
FIELDS = ("boxes", "scores", "classes", "masks", "valid")


def check_exportable(model: MaskRCNN, batch: int, image_size: tuple[int, int] | None) -> None:
    """Raise ValueError if ONNX operators cannot reproduce the model exactly."""
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
    check_opset(opset)
    batch, (height, width), planar = source.batch, source.canvas, source.planar
    check_exportable(model, batch, source.image_size)
    graph = Graph(opset)
    shape = [batch, 3, height, width] if planar else [batch, height, width, 3]
    inputs = {"images": ({"uint8": "UINT8", "float32": "FLOAT"}[source.dtype], shape)}
    pixels = graph.cast("images", "FLOAT") if source.dtype == "uint8" else "images"
    pixels = pixels if planar else graph.op("Transpose", pixels, perm=[0, 3, 1, 2])
    images = tensor(pixels, (batch, 3, height, width), (0, 2, 3, 1))
    if source.image_size is None:
        inputs["image_sizes"] = ("INT32", [batch, 2])
        sizes: Value | Known = tensor(graph.cast("image_sizes", "INT64"), (batch, 2))
    else:
        sizes = Known(np.array([source.image_size] * batch, np.int32))

    def predict(variables, images, sizes):
        found = model.apply(variables, images, sizes, detect, method="predict")
        fields = {name: getattr(found, name) for name in FIELDS}
        return {name: array for name, array in fields.items() if array is not None}

    shapes = (
        jax.ShapeDtypeStruct((batch, height, width, 3), jnp.float32),
        jax.ShapeDtypeStruct((batch, 2), jnp.int32),
    )
    num_classes = getattr(model.box_head, "num_classes", None)
    found = add_function(graph, predict, variables, shapes, [images, sizes], num_classes)
    dtypes = {"classes": "INT32", "valid": "INT32" if planar else "BOOL"}
    outputs = {}
    for name in (name for name in FIELDS if name in found):
        made, dtype = arrange(graph, found[name]), dtypes.get(name, "FLOAT")
        if dtype == "INT32":
            graph.cast(made, dtype, name=name)
        else:
            graph.op("Identity", made, name=name)
        outputs[name] = (dtype, list(found[name].sizes))
    clean_up(graph, outputs)
    return make_model_proto(graph, "mask_rcnn", inputs, outputs, opset)


def add_function(
    graph: Graph,
    function: Callable,
    variables: dict,
    shapes: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[Value | Known],
    num_classes: int | None = None,
) -> Any:
    """Add the operators of function(variables, *inputs), and return its results as `Value`s.

    shapes: of the inputs. num_classes: for NMS by class.
    """

    def traced(*given):  # anew: JAX keeps the programs of functions that it has seen
        return function(*given)

    with onnx_named.tracing(num_classes):
        closed, out = jax.make_jaxpr(traced, return_shape=True)(variables, *shapes)
    known = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]:
        name = "/".join(str(key.key) for key in path[1:])  # without the collection
        known.append(Known(np.asarray(leaf), name))
    found = translate(graph, RULES, closed.jaxpr, closed.consts, [*known, *inputs])
    return jax.tree.unflatten(jax.tree.structure(out), found)


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
