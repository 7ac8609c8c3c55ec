"""Operations that ONNX has as a whole: non-maximum suppression, RoIAlign, group and layer norm.

While a model is traced, each is a primitive of its own, which a rule translates. Another op that is
`ops.dispatch.named` needs a function in `replacements` and a rule in `RULES`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive

from mask_rcnn_jax.jax_to_onnx.graph import CannotConvert, Graph, floats, ints
from mask_rcnn_jax.jax_to_onnx.values import Equation, Known, Value, arrange, tensor
from mask_rcnn_jax.models import norm
from mask_rcnn_jax.models.conv import Conv, UpConv
from mask_rcnn_jax.models.keypoints import Heatmaps
from mask_rcnn_jax.ops import dispatch
from mask_rcnn_jax.ops import roi_align as ops_roi_align
from mask_rcnn_jax.ops.extent import STRIDES
from mask_rcnn_jax.ops.roi_align import MAX_UNROLLED, MIN_LEVEL, RoIAlign

nms_p, roi_align_p = Primitive("nms"), Primitive("roi_align")
group_norm_p, layer_norm_p = Primitive("group_norm"), Primitive("layer_norm")


@nms_p.def_abstract_eval
def _nms_shape(boxes, valid, *groups, **options):
    return ShapedArray(boxes.shape[:2], np.dtype(bool))


@roi_align_p.def_abstract_eval
def _roi_align_shape(boxes, *arrays, size, **options):
    return ShapedArray((*boxes.shape[:2], *size, arrays[0].shape[-1]), arrays[0].dtype)


@group_norm_p.def_abstract_eval
@layer_norm_p.def_abstract_eval
def _norm_shape(x, *ends, **options):
    return ShapedArray(x.shape, x.dtype)


@contextmanager
def tracing(num_classes: int | None, static: bool = False) -> Iterator[None]:
    """Trace models, within this, with primitives for operations that ONNX has as a whole."""
    with dispatch.replaced(**replacements(num_classes, static)), nn.intercept_methods(plain_layers):
        yield


def replacements(num_classes: int | None, static: bool = False) -> dict[str, Callable]:
    """Return functions for `ops.dispatch.replaced`.

    num_classes: groups of NMS are 1 to this. static: for fixed shapes, see `onnx_static`.
    """

    def nms(
        boxes, valid, *, groups=None, iou_thresh, max_out=None, offset=0.0, implementation=None
    ):
        options = dict(iou_thresh=iou_thresh, max_out=max_out or boxes.shape[1], offset=offset)
        more = [] if groups is None else [groups]
        if more and num_classes is None:
            raise ValueError("--format=onnx: model.box_head has no attribute num_classes")
        return nms_p.bind(boxes, valid, *more, **options, num_classes=num_classes)

    def roi_align(
        features,
        boxes,
        options,
        *,
        output_size,
        level_offset=0.0,
        extent=None,
        of_rows=None,
        implementation=None,
    ):
        if of_rows is not None:
            raise ValueError("--format=onnx: it cannot convert roi_align with images or valid")
        size = (output_size, output_size) if isinstance(output_size, int) else output_size
        if static and 0 < 2 * options.sampling_ratio <= MAX_UNROLLED:
            ends = dict(level_offset=level_offset, extent=extent, implementation="xla")
            return op(features, boxes, options, output_size=size, **ends)
        maps = features[: options.max_level - MIN_LEVEL + 1]
        more = [] if extent is None else [extent]
        return roi_align_p.bind(
            boxes,
            *maps,
            *more,
            options=options,
            size=tuple(size),
            strides=STRIDES[: len(maps)],
            level_offset=level_offset,
            static=static,
        )

    op = ops_roi_align.roi_align.__wrapped__  # type: ignore[attr-defined]
    # ONNX's loops are not converted; where one look finds the highest place, nothing is lost.
    ops: dict[str, Callable] = {"nms": nms, "roi_align": roi_align}
    return ops | {"until_highest": lambda look_again, start: start}


def plain_layers(next_call: Callable, args: tuple, kwargs: dict, context: Any) -> jax.Array:
    """Replace layers whose form suits a CPU or a GPU, for `flax.linen.intercept_methods`.

    Convolutions are one each, and rows that are not valid are computed as well.
    """
    module = context.module
    kind = type(module)  # not of users' subclasses, which may compute something else
    is_norm = kind in (nn.GroupNorm, nn.LayerNorm, norm.GroupNorm, norm.LayerNorm) and not kwargs
    if is_norm and context.method_name == "__call__":
        x, eps = args[0], float(module.epsilon)
        params = module.variables.get("params", {})
        axes = {module.reduction_axes, getattr(module, "feature_axes", -1)}
        ends = [
            params.get("scale", jnp.ones(x.shape[-1])),
            params.get("bias", jnp.zeros(x.shape[-1])),
        ]
        if isinstance(module, nn.LayerNorm) and axes <= {-1, (-1,)}:
            return layer_norm_p.bind(x, *ends, eps=eps)
        is_whole = x.ndim == 4 and (len(args) == 1 or args[1] is None)
        is_whole = is_whole and getattr(module, "reduction_axes", None) is None
        if isinstance(module, nn.GroupNorm) and is_whole and module.num_groups:
            scale, bias = (each[None, None, None] for each in ends)
            return group_norm_p.bind(x, groups=module.num_groups, eps=eps) * scale + bias
    if getattr(kind, "contract", None) is Conv.contract and context.method_name == "contract":
        pads: Any = module.padding if module.padding == "SAME" else ((module.padding,) * 2,) * 2
        return _convolve(args[0], args[1], module.stride, pads, module.groups)
    if kind is UpConv and context.method_name == "__call__":
        x, params = args[0], module.variables["params"]
        kernel = params["kernel"].reshape(-1, x.shape[-1]).T[None, None]
        y = _convolve(x, kernel, 1, "VALID", 1) + jnp.tile(params["bias"], 4)[None, None, None]
        return y.reshape(*x.shape[:3], 2, 2, module.features)
    if kind is Heatmaps and context.method_name == "__call__":
        x, params = args[0], module.variables["params"]
        kernel = params["kernel"][::-1, ::-1].swapaxes(2, 3)
        pads = ((2, 2), (2, 2))  # one pixel of the doubled map less than the kernel has around it
        y = _convolve(x, kernel, 1, pads, 1, lhs_dilation=(2, 2))
        return jnp.moveaxis(y, 3, 1) + params["bias"][None, :, None, None]
    return next_call(*args, **kwargs)


def group_norm_rule(graph: Graph, eqn: Equation, given: list) -> Value:
    """As InstanceNormalization over the groups: an older, better supported operator."""
    batch, height, width, channels = eqn.outvars[0].aval.shape
    shape, groups = (batch, channels, height, width), eqn.params["groups"]
    size = height * width * channels // groups
    x = graph.reshape(arrange(graph, given[0], (0, 3, 1, 2)), batch, groups, size)
    one, zero = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    y = graph.op("InstanceNormalization", x, one, zero, epsilon=eqn.params["eps"])
    return tensor(graph.reshape(y, *shape), shape, (0, 2, 3, 1))


def _convolve(
    x: jax.Array, kernel: jax.Array, stride: int, padding, groups: int, **options: Any
) -> jax.Array:
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
        **options,
    )


def layer_norm_rule(graph: Graph, eqn: Equation, given: list) -> Value:
    """Normalize [.., C]."""
    shape, eps = eqn.outvars[0].aval.shape, eqn.params["eps"]
    x, scale, bias = (arrange(graph, each) for each in given)
    if graph.opset >= 17:
        y = graph.op("LayerNormalization", x, scale, bias, axis=-1, epsilon=eps)
        return tensor(y, shape)
    y = graph.op("Sub", x, graph.op("ReduceMean", x, axes=[-1]))
    variance = graph.op("ReduceMean", graph.op("Mul", y, y), axes=[-1])
    y = graph.op("Div", y, graph.op("Sqrt", graph.op("Add", variance, floats(eps))))
    return tensor(graph.op("Add", graph.op("Mul", y, scale), bias), shape)


def nms_rule(graph: Graph, eqn: Equation, given: list) -> Value:
    """Suppress boxes [B, N, 4], sorted by descending score.

    Ranks are the scores, so that the result does not depend on how a runtime orders equal ones.
    With groups, `max_out` boxes of each are kept, and callers take the best `max_out` of them.
    """
    batch, rows = eqn.outvars[0].aval.shape
    options = eqn.params
    boxes, valid, *groups = (arrange(graph, each) for each in given)
    # The operator has no inclusive pixels and flips inverted boxes. So sides are extended by the
    # offset, and empty boxes neither suppress nor are suppressed. The operator expects y before x,
    # which makes no difference.
    low, high = graph.slice(boxes, 0, 2, axis=2), graph.slice(boxes, 2, 4, axis=2)
    if options["offset"]:
        high = graph.op("Add", high, floats(options["offset"]))
    corners = graph.concat(low, graph.op("Max", high, low), axis=2)
    rank = (np.arange(rows, 0, -1) / rows).astype(np.float32)[None]
    scores = graph.unsqueeze(graph.op("Where", valid, rank, floats(0.0)), 1)
    if groups:
        every = np.arange(1, options["num_classes"] + 1)[None, :, None]
        same = graph.op("Equal", graph.unsqueeze(groups[0], 1), every)
        scores = graph.op("Where", same, scores, floats(0.0))
    limit = ints(min(options["max_out"], rows))
    thresholds = np.array([options["iou_thresh"]], np.float32), np.zeros(1, np.float32)
    selected = graph.op("NonMaxSuppression", corners, scores, limit, *thresholds)
    places = graph.op("Gather", selected, ints(0, 2), axis=1)
    length = graph.slice(graph.op("Shape", places), 0, 1, axis=0)
    ones = graph.op("Expand", np.ones(1, np.float32), length)
    none = Known(np.broadcast_to(np.float32(0), (batch, rows)))
    marks = graph.op("ScatterND", arrange(graph, none), places, ones)
    return tensor(graph.op("Greater", marks, floats(0.5)), (batch, rows))


def roi_align_rule(graph: Graph, eqn: Equation, given: list) -> Value:
    """Pool boxes [B, N, 4]: each level its own, as many as there are; Gather restores their order.

    Rows of `NonZero` and `RoiAlign` have no fixed number; if they must, each level pools all boxes,
    those of other levels without extent, which costs adaptive sampling nothing.
    """
    options: RoIAlign = eqn.params["options"]
    strides, (height, width) = eqn.params["strides"], eqn.params["size"]
    maps, extent = given[1 : 1 + len(strides)], given[1 + len(strides) :]
    batch, rows = eqn.invars[0].aval.shape[:2]
    count, channels = batch * rows, maps[0].sizes[-1]
    boxes = graph.reshape(arrange(graph, given[0]), count, 4)
    start, end = graph.slice(boxes, 0, 2, axis=1), graph.slice(boxes, 2, 4, axis=1)
    length = graph.op("Sub", end, start)
    area = _area(graph, length, eqn.params["level_offset"])
    numbers = graph.count(count)
    if isinstance(numbers, str):
        image, zeros = (graph.op(op, numbers, ints(n)) for op, n in (("Div", rows), ("Mul", 0)))
    else:
        image, zeros = graph.constant(numbers // rows), graph.constant(numbers * 0)
    sampling: dict[str, Any] = {"mode": "avg", "sampling_ratio": options.sampling_ratio}
    sampling |= {"output_height": height, "output_width": width}
    sampling |= {"coordinate_transformation_mode": "half_pixel"}
    static, on_levels, pooled, places = eqn.params["static"], [], [], []
    for i, (features, stride) in enumerate(zip(maps, strides, strict=True)):
        # The operator subtracts half a cell; compensate if the model does not.
        half = floats(0.5 * stride)
        first = start if options.aligned else graph.op("Add", start, half)
        shortest = floats(options.min_size * stride)
        lengths = graph.op("Max", length, shortest) if options.min_size > 0 else length
        if len(maps) > 1:
            on_levels.append(_on_level(graph, area, i, len(maps)))
        if static and on_levels:
            mark = graph.reshape(graph.cast(on_levels[i], "FLOAT"), -1, 1)
            lengths = graph.op("Mul", lengths, mark)
        rois, images = graph.concat(first, graph.op("Add", first, lengths), axis=1), image
        if on_levels and not static:
            places.append(graph.reshape(graph.op("NonZero", on_levels[i]), -1))
            rois, images = (graph.op("Gather", x, places[-1], axis=0) for x in (rois, images))
        if static and any(isinstance(each, Value) for each in extent):
            raise CannotConvert("maps that end at each image with --static; use --picture_size")
        x = _valid_cells(graph, features, stride, *extent)
        scale = 1.0 / stride
        pooled.append(graph.op("RoiAlign", x, rois, images, spatial_scale=scale, **sampling))
    if len(maps) == 1 or static:
        result = pooled[-1]
        for on_level, other in zip(on_levels[:-1], pooled, strict=False):
            result = graph.op("Where", graph.reshape(on_level, -1, 1, 1, 1), other, result)
    else:
        place = graph.concat(*places, axis=0)
        row = graph.op("ScatterElements", zeros, place, numbers)
        result = graph.op("Gather", graph.concat(*pooled, axis=0), row, axis=0)
    if batch == 1:
        axes = (), (0,), (2,), (3,), (1,)
        return Value(result, (count, channels, height, width), axes)
    shape = batch, rows, channels, height, width
    graph.reshaped[split := graph.reshape(result, *shape)] = result, (count, *shape[2:])
    return tensor(split, shape, (0, 1, 3, 4, 2))


def _valid_cells(graph: Graph, x: Value, stride: int, extent: Value | Known | None = None) -> str:
    """Return a map [B, C, h, w], cropped to its valid cells."""
    name, sizes = arrange(graph, x, (0, 3, 1, 2)), x.sizes[1:3]
    if extent is None:
        return name
    if isinstance(extent, Known):
        cells = np.clip(-(-extent.array.astype(np.int64) // stride), 1, sizes)
        if tuple(cells) == sizes:
            return name
        return graph.op("Slice", name, ints(0, 0), cells, ints(2, 3))
    up = graph.op("Add", arrange(graph, extent), ints(stride - 1))
    cells_name = graph.op("Max", graph.op("Div", up, ints(stride)), ints(1))
    return graph.op("Slice", name, ints(0, 0), cells_name, ints(2, 3))


def _area(graph: Graph, length: str, offset: float) -> str:
    """Area [R] of boxes whose sides are length [R, 2]."""
    sides = graph.op("Add", length, floats(offset)) if offset else length
    sides = graph.op("Max", sides, floats(0.0))
    width, height = (graph.slice(sides, i, i + 1, axis=1) for i in range(2))
    return graph.reshape(graph.op("Mul", width, height), -1)


def _on_level(graph: Graph, area: str, i: int, num_levels: int) -> str:
    """bool, shaped like `area`: true for boxes pooled from map `i`."""
    conditions = []
    lowest, highest = (56.0 * 2**i) ** 2, (56.0 * 2 ** (i + 1)) ** 2  # P4 begins at 224 pixels
    if i > 0:
        conditions.append(graph.op("GreaterOrEqual", area, floats(lowest)))
    if i < num_levels - 1:
        conditions.append(graph.op("Less", area, floats(highest)))
    return conditions[0] if len(conditions) == 1 else graph.op("And", *conditions)


RULES: dict[str, Any] = {
    "nms": nms_rule,
    "roi_align": roi_align_rule,
    "group_norm": group_norm_rule,
    "layer_norm": layer_norm_rule,
}
for _rule in RULES.values():  # JAX cannot compute these primitives
    _rule.keeps_known = True
