"""Export Mask R-CNN as one ONNX model of standard operators, from image to detections.

The model is `MaskRCNN.predict`, traced by JAX and translated one primitive at a time
(`jax_to_onnx.trace`), so that it follows whatever the model's parts compute, those of users
included. Operations that ONNX has as a whole, such as RoIAlign, are in `exporting.onnx_named`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from mask_rcnn_jax.exporting import onnx_named, onnx_static
from mask_rcnn_jax.jax_to_onnx import products as onnx_products
from mask_rcnn_jax.jax_to_onnx import rules as onnx_rules
from mask_rcnn_jax.jax_to_onnx import shapes as onnx_shapes
from mask_rcnn_jax.jax_to_onnx.cleanup import clean_up
from mask_rcnn_jax.jax_to_onnx.graph import ANY, Graph, check_opset, make_model_proto
from mask_rcnn_jax.jax_to_onnx.half import to_float16
from mask_rcnn_jax.jax_to_onnx.trace import translate
from mask_rcnn_jax.jax_to_onnx.values import Known, Value, arrange, tensor
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.models.protocols import BoxHeadLike, ability
from mask_rcnn_jax.optional_packages import import_package
from mask_rcnn_jax.predict.programs import FIELDS

if TYPE_CHECKING:
    import onnx

RULES = onnx_rules.RULES | onnx_shapes.RULES | onnx_products.RULES | onnx_named.RULES
STATIC_RULES = RULES | onnx_static.RULES


def takes_batches(model: MaskRCNN, image_size: tuple[int, int] | None) -> bool:
    """Whether an ONNX model takes several images at a time, see `check_exportable`."""
    return image_size is not None or not model.input.pad_multiple


def check_exportable(
    model: MaskRCNN, batch: int | None, image_size: tuple[int, int] | None
) -> None:
    """Raise ValueError if ONNX operators cannot reproduce the model exactly."""
    align, pad_multiple = model.roi_align, model.input.pad_multiple
    if align.border == "clamp" and align.min_size > 0:
        raise ValueError(
            "--format=onnx: model.roi_align.border='clamp' with model.roi_align.min_size="
            f"{align.min_size} has no RoiAlign in ONNX, which treats samples outside the map as "
            "zero; model.roi_align.border='zero' or model.roi_align.min_size=0 can be exported"
        )
    if batch != 1 and not takes_batches(model, image_size):
        raise ValueError(
            f"--format=onnx: --batch is {batch or 'any'}, but with model.input.pad_multiple="
            f"{pad_multiple} maps end at each image: use --batch=1, or --picture_size for images "
            "of one size"
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
        batch: batch size; None leaves it open, and names the first axes of inputs and outputs so.
        dtype: "uint8" or "float32".
        planar: [batch, C, H, W] instead of [batch, H, W, C].
    """

    canvas: tuple[int, int]
    image_size: tuple[int, int] | None = None
    batch: int | None = None
    dtype: str = "uint8"
    planar: bool = False


def build_onnx(
    model: MaskRCNN,
    variables: dict,
    source: OnnxInput,
    *,
    opset: int,
    detect: Detect,
    static: bool = False,
    float16: bool = False,
) -> "onnx.ModelProto":
    """Build and check an ONNX model of `model.predict` with these weights.

    static: fixed shapes throughout, see `onnx_static`; needs a fixed batch. float16: layers compute
    in float16, see `jax_to_onnx.half`; else all is float32.

    Its outputs are the fields of `Detections`, with `valid` as int32 if the input is planar. Raises
    ValueError for a model or input rejected by `check_exportable`, and for soft-NMS.
    """
    if detect.nms != "hard":
        raise ValueError(f"eval.nms is {detect.nms!r}, expected 'hard' for an ONNX model")
    check_opset(opset)
    (height, width), planar, channels = source.canvas, source.planar, model.input.channels
    check_exportable(model, source.batch, source.image_size)
    graph, batch = Graph(opset), source.batch or ANY
    if source.batch is None:
        graph.batch = graph.slice(graph.op("Shape", "images"), 0, 1, axis=0)
    shape = [batch, channels, height, width] if planar else [batch, height, width, channels]
    inputs = {"images": ({"uint8": "UINT8", "float32": "FLOAT"}[source.dtype], shape)}
    pixels = graph.cast("images", "FLOAT") if source.dtype == "uint8" else "images"
    pixels = pixels if planar else graph.op("Transpose", pixels, perm=[0, 3, 1, 2])
    images = tensor(pixels, (batch, channels, height, width), (0, 2, 3, 1))
    if source.image_size is None:
        inputs["image_sizes"] = ("INT32", [batch, 2])
        sizes: Value | Known = tensor(graph.cast("image_sizes", "INT64"), (batch, 2))
    else:
        sizes = Known(np.broadcast_to(np.array(source.image_size, np.int32), (batch, 2)))

    def predict(variables, images, sizes):
        found = model.apply(variables, images, sizes, detect, method="predict")
        fields = {name: getattr(found, name) for name in FIELDS}
        return {name: array for name, array in fields.items() if array is not None}

    shapes = (
        jax.ShapeDtypeStruct((batch, height, width, channels), jnp.float32),
        jax.ShapeDtypeStruct((batch, 2), jnp.int32),
    )
    num_classes = ability(model.box_head, BoxHeadLike, "num_classes")
    given = [images, sizes]
    if model.keypoint_head is not None:
        logging.info("ONNX looks once for a keypoint; docs/deployment.md says what it may miss")
    found = add_function(graph, predict, variables, shapes, given, num_classes, static=static)
    outputs = _add_outputs(graph, found, "INT32" if planar else "BOOL")
    clean_up(graph, outputs)
    if float16:
        to_float16(graph)
    return make_model_proto(graph, "mask_rcnn", inputs, outputs, opset)


def _add_outputs(
    graph: Graph, found: Mapping[str, Value | Known], valid: str
) -> dict[str, tuple[str, list[int]]]:
    """Add the fields of `Detections` as outputs; return their types and shapes."""
    dtypes = {"classes": "INT32", "valid": valid}
    outputs = {}
    for name in (name for name in FIELDS if name in found):
        made, dtype = arrange(graph, found[name]), dtypes.get(name, "FLOAT")
        if dtype == "INT32":
            graph.cast(made, dtype, name=name)
        else:
            graph.op("Identity", made, name=name)
        outputs[name] = (dtype, list(found[name].sizes))
    return outputs


def add_function(
    graph: Graph,
    function: Callable,
    variables: dict,
    shapes: Sequence[jax.ShapeDtypeStruct],
    inputs: Sequence[Value | Known],
    num_classes: int | None = None,
    *,
    static: bool = False,
) -> Any:
    """Add the operators of function(variables, *inputs), and return its results as `Value`s.

    shapes: of the inputs. num_classes: for NMS by class. static: see `onnx_static`.
    """

    def traced(*given):  # anew: JAX keeps the programs of functions that it has seen
        return function(*given)

    with onnx_named.tracing(num_classes, static):
        closed, out = jax.make_jaxpr(traced, return_shape=True)(variables, *shapes)
    known = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables)[0]:
        name = "/".join(str(key.key) for key in path[1:])  # without the collection
        known.append(Known(np.asarray(leaf), name))
    rules = STATIC_RULES if static else RULES
    found = translate(graph, rules, closed.jaxpr, closed.consts, [*known, *inputs])
    return jax.tree.unflatten(jax.tree.structure(out), found)


def check_packages(*names: str) -> None:
    """Raise ValueError, naming the extra to install, if a package is missing."""
    for name in names:
        try:
            import_package(name)
        except ImportError as error:
            raise ValueError(
                f"--format=onnx needs the package {name}: pip install 'mask-rcnn-jax[export]'"
            ) from error
