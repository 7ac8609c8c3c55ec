"""Layers of `models/` as ONNX operators: backbone, FPN and heads in NCHW float32.

Norms with statistics are folded into the preceding convolution. For recipes whose maps end at the
image (`model.input.pad_multiple`), `Extent` masks them as `ops.extent.ValidExtent` does.
"""

from typing import NamedTuple

import numpy as np

from mask_rcnn_jax.deploy.onnx_graph import Graph, Map, floats, ints
from mask_rcnn_jax.models.norm import EPS, GROUPS
from mask_rcnn_jax.models.resnet import BLOCKS_PER_STAGE
from mask_rcnn_jax.models.roi_heads import BoxHead, MaskHead


class Extent:
    """Valid extent of the feature maps, known only when the graph runs."""

    def __init__(self, graph: Graph, size: str | None):
        """size: int64 [B, 2] (height, width); None if the whole canvas is valid."""
        self._graph, self.size = graph, size
        self._cells: dict[int, str] = {}
        self._masks: dict[int, str] = {}

    def cells(self, stride: int) -> str:
        """int64 [B, 2] valid (rows, columns) of a map with this stride."""
        if stride not in self._cells:
            graph = self._graph
            assert self.size is not None
            self._cells[stride] = graph.op(
                "Div", graph.op("Add", self.size, ints(stride - 1)), ints(stride)
            )
        return self._cells[stride]

    def mask(self, x: Map, stride: int) -> Map:
        """Zero the invalid cells."""
        if self.size is None:
            return x
        graph = self._graph
        if stride not in self._masks:
            self._masks[stride] = cell_mask(graph, self.cells(stride), x.height, x.width)
        return x._replace(name=graph.op("Where", self._masks[stride], x.name, floats(0.0)))


def cell_mask(graph: Graph, sizes: str, height: int, width: int) -> str:
    """bool [B, 1, height, width]: true within the (rows, columns) of `sizes` [B, 2]."""
    rows, columns = (
        graph.unsqueeze(graph.unsqueeze(graph.slice(sizes, i, i + 1, axis=1), 2), 3)
        for i in range(2)
    )
    row_valid = graph.op("Less", np.arange(height)[None, None, :, None], rows)
    column_valid = graph.op("Less", np.arange(width)[None, None, None, :], columns)
    return graph.op("And", row_valid, column_valid)


def conv(
    graph: Graph,
    x: Map,
    layer: dict,
    name: str,
    *,
    stride: int = 1,
    padding: str = "torch",
    affine: tuple[np.ndarray, np.ndarray] | None = None,
    weights: str = "",
    groups: int = 1,
) -> Map:
    """Apply a convolution whose kernel is stored as [k, k, in / groups, out].

    affine: scale and bias, [out] each, folded into the convolution. weights: constant name prefix
    for layers that run several times.
    """
    weights = weights or name
    kernel = np.asarray(layer["kernel"], np.float32)
    bias = layer.get("bias")
    if affine is not None:
        kernel, bias = kernel * affine[0], affine[1]
    side = kernel.shape[0]
    inputs = [x.name, graph.constant(kernel.transpose(3, 2, 0, 1), f"{weights}/kernel")]
    if bias is not None:
        inputs.append(graph.constant(np.asarray(bias, np.float32), f"{weights}/bias"))
    more = {"group": groups} if groups > 1 else {}
    return _window(graph, "Conv", x, inputs, side, stride, padding, name, **more)


def _window(
    graph: Graph,
    op: str,
    x: Map,
    inputs: list[str],
    side: int,
    stride: int,
    padding: str,
    name: str = "",
    **attributes: int,
) -> Map:
    """Apply a square sliding-window operator: Conv or MaxPool."""
    (top, bottom), height = _pads(x.height, side, stride, padding)
    (left, right), width = _pads(x.width, side, stride, padding)
    pads, sides, strides = [top, left, bottom, right], [side, side], [stride, stride]
    options = dict(kernel_shape=sides, strides=strides, pads=pads, **attributes)
    y = graph.op(op, *inputs, name=name, **options)
    return Map(y, height, width)


def _pads(length: int, kernel: int, stride: int, padding: str) -> tuple[tuple[int, int], int]:
    """Zeros before and after one axis, and the output length."""
    if padding == "same":
        result = -(-length // stride)
        total = max((result - 1) * stride + kernel - length, 0)
        return (total // 2, total - total // 2), result
    before = kernel // 2
    return (before, before), (length + 2 * before - kernel) // stride + 1


def relu(graph: Graph, x: Map) -> Map:
    return x._replace(name=graph.op("Relu", x.name))


def dense(graph: Graph, x: str, layer: dict, name: str, kernel: np.ndarray | None = None) -> str:
    """Apply a dense layer to x [N, in]. kernel: replaces the layer's kernel."""
    kernel = np.asarray(layer["kernel"] if kernel is None else kernel, np.float32)
    kernel_name = graph.constant(kernel, f"{name}/kernel")
    bias_name = graph.constant(np.asarray(layer["bias"], np.float32), f"{name}/bias")
    return graph.op("Gemm", x, kernel_name, bias_name, name=name)


class Tree(NamedTuple):
    """Variables of a module."""

    params: dict
    stats: dict

    def of(self, name: str) -> "Tree":
        """Those of a submodule."""
        return Tree(self.params.get(name, {}), self.stats.get(name, {}))


def conv_norm(
    graph: Graph, x: Map, tree: Tree, conv_name: str, norm_name: str, *, norm: str, **options
) -> Map:
    """Apply a convolution and its norm; options as for `conv`, `name` and `eps` aside.

    norm: a name of `models.norm` but "layer".
    """
    name, eps = options.pop("name", conv_name), options.pop("eps", EPS)
    layer, affine = options.pop("layer", None) or tree.params[conv_name], None
    params, stats = tree.of(norm_name)
    if norm == "frozen":
        affine = np.asarray(stats["scale"]), np.asarray(stats["bias"])
    elif norm not in ("none", "group"):
        scale = np.asarray(params["scale"]) / np.sqrt(np.asarray(stats["var"]) + np.float32(eps))
        affine = scale, np.asarray(params["bias"]) - np.asarray(stats["mean"]) * scale
    y = conv(graph, x, layer, name, affine=affine, **options)
    return _group_norm(graph, y, params, eps) if norm == "group" else y


def _group_norm(graph: Graph, x: Map, params: dict, eps: float) -> Map:
    """32 groups, as InstanceNormalization over the groups: an older, better supported op."""
    channels = len(params["scale"])
    y = graph.reshape(x.name, 0, GROUPS, -1)
    one, zero = np.ones(GROUPS, np.float32), np.zeros(GROUPS, np.float32)
    y = graph.op("InstanceNormalization", y, one, zero, epsilon=float(eps))
    y = graph.reshape(y, 0, channels, x.height, x.width)
    scale, bias = (np.asarray(params[key], np.float32)[:, None, None] for key in ("scale", "bias"))
    return x._replace(name=graph.op("Add", graph.op("Mul", y, scale), bias))


class Trunk:
    """ResNet and FPN of a `MaskRCNN`."""

    def __init__(self, graph: Graph, model, variables: dict, extent: Extent):
        self._graph, self._model, self._extent = graph, model, extent
        self._tree = Tree(variables["params"], variables.get("batch_stats", {}))

    def pyramid(self, images: Map) -> list[Map]:
        """Compute P2..P6 from normalized images."""
        return self._fpn(self.features(images))

    def features(self, images: Map) -> list[Map]:
        """Compute C2..C5 from normalized images."""
        graph, extent, backbone = self._graph, self._extent, self._model.backbone
        x = self._conv_norm(images, "stem_conv", "stem_norm", stride=2, map_stride=1)
        x = extent.mask(relu(graph, x), 2)
        x = _window(graph, "MaxPool", x, [x.name], 3, 2, backbone.pool_padding)
        features = []
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[backbone.depth], start=2):
            for i in range(blocks):
                stride = 2 if stage > 2 and i == 0 else 1
                x = self._block(x, f"res{stage}_{i}", stride, 2**stage // stride)
            features.append(x)
        return features

    def _input_order(self, layer: dict, name: str) -> dict:
        """Return a layer, of which the first one reads R, G, B."""
        if name != "stem_conv" or self._model.input.channel_order == "rgb":
            return layer
        return {**layer, "kernel": np.asarray(layer["kernel"])[:, :, ::-1]}

    def _conv_norm(self, x, conv_name, norm_name, *, stride, map_stride, block="", groups=1) -> Map:
        """Apply a convolution and its norm; map_stride: pixels per cell of `x`."""
        backbone, tree = self._model.backbone, self._tree.of("backbone")
        tree = tree.of(block) if block else tree
        layer = tree.params[conv_name]
        if layer["kernel"].shape[0] > 1:
            x = self._extent.mask(x, map_stride)
        layer = self._input_order(layer, conv_name)
        options = dict(norm=backbone.norm, eps=backbone.norm_eps, layer=layer)
        options |= dict(name=f"{block}/{conv_name}" if block else conv_name)
        padding = getattr(backbone, "padding", "torch")
        options |= dict(stride=stride, padding=padding, groups=groups)
        return conv_norm(self._graph, x, tree, conv_name, norm_name, **options)

    def _block(self, x: Map, block: str, stride: int, map_stride: int) -> Map:
        """Apply a basic block or a bottleneck; map_stride: pixels per cell of `x`."""
        graph, backbone = self._graph, self._model.backbone
        strides, groups = [stride, 1], [1, 1]
        if backbone.depth >= 50:
            strides = [stride, 1, 1] if backbone.stride_in == "1x1" else [1, stride, 1]
            groups = [1, backbone.groups, 1]
        y, at = x, map_stride
        for i, (step, count) in enumerate(zip(strides, groups, strict=True), start=1):
            options = dict(stride=step, map_stride=at, block=block, groups=count)
            y = self._conv_norm(y, f"conv{i}", f"norm{i}", **options)
            at *= step
            if i < len(strides):
                y = relu(graph, y)
        if "shortcut" in self._tree.params["backbone"][block]:
            x = self._conv_norm(
                x, "shortcut", "shortcut_norm", stride=stride, map_stride=map_stride, block=block
            )
        return relu(graph, y._replace(name=graph.op("Add", x.name, y.name)))

    def _fpn(self, features: list[Map]) -> list[Map]:
        graph, extent, tree = self._graph, self._extent, self._tree.of("fpn")
        norm = self._model.fpn.norm
        nearest = {"mode": "nearest", "nearest_mode": "floor"}
        nearest["coordinate_transformation_mode"] = "asymmetric"
        pyramid, top_down = [], None
        for level in range(5, 1, -1):
            name = f"fpn_lateral{level}"
            lateral = conv_norm(graph, features[level - 2], tree, name, f"{name}_norm", norm=norm)
            if top_down is not None:
                scales = floats(1.0, 1.0, 2.0, 2.0)
                doubled = graph.op("Resize", top_down.name, "", scales, **nearest)
                lateral = lateral._replace(name=graph.op("Add", lateral.name, doubled))
            top_down = lateral
            name = f"fpn_output{level}"
            masked = extent.mask(top_down, 2**level)
            output = conv_norm(graph, masked, tree, name, f"{name}_norm", norm=norm)
            pyramid.insert(0, extent.mask(output, 2**level))
        top = pyramid[-1]
        p6 = graph.op("MaxPool", top.name, kernel_shape=[1, 1], strides=[2, 2])
        return [*pyramid, Map(p6, -(-top.height // 2), -(-top.width // 2))]


def rpn_head(
    graph: Graph, params: dict, x: Map, level: int, extent: Extent, num_convs: int
) -> tuple[str, str]:
    """Objectness logits [B, A_l] and deltas [B, A_l, 4] of one level."""
    hidden = x
    for name in ["conv", *(f"conv{i}" for i in range(2, num_convs + 1))]:
        hidden = hidden if hidden is x else extent.mask(hidden, 2**level)
        layer, weights = params[name], f"rpn/{name}"
        hidden = relu(graph, conv(graph, hidden, layer, f"rpn{level}/{name}", weights=weights))
    results = []
    for layer, tail in (("objectness_logits", []), ("anchor_deltas", [4])):
        y = conv(graph, hidden, params[layer], f"rpn{level}/{layer}", weights=f"rpn/{layer}").name
        y = graph.op("Transpose", y, perm=[0, 2, 3, 1])
        results.append(graph.reshape(y, 0, -1, *tail))
    return results[0], results[1]


def box_head(graph: Graph, tree: Tree, head: BoxHead, pooled: str, side: int) -> tuple[str, str]:
    """Class logits [N, K + 1] and deltas [N, 4 (K + 1)] from pooled [N, C, side, side].

    Deltas are [N, 4] if they are class-agnostic.
    """
    params, features = tree.params, Map(pooled, side, side)
    for i in range(1, head.num_convs + 1):
        names = f"conv{i}", f"norm{i}"
        y = conv_norm(graph, features, tree, *names, norm=head.norm, name=f"box_{names[0]}")
        features = relu(graph, y)
    kernel = np.asarray(params["fc1"]["kernel"], np.float32)
    # Our kernel rows are ordered (y, x, channel), a flattened NCHW map (channel, y, x).
    by_channel = kernel.reshape(side, side, -1, kernel.shape[1]).transpose(2, 0, 1, 3)
    x = graph.op("Flatten", features.name, axis=1)
    x = dense(graph, x, params["fc1"], "fc1", by_channel.reshape(kernel.shape))
    x = graph.op("Relu", x)
    for name in (f"fc{i}" for i in range(2, head.num_fcs + 1)):
        x = graph.op("Relu", dense(graph, x, params[name], name))
    logits, deltas = (dense(graph, x, params[name], name) for name in ("cls_score", "bbox_pred"))
    return logits, deltas


def mask_head(
    graph: Graph, tree: Tree, head: MaskHead, pooled: str, side: int, classes: str
) -> str:
    """Mask logits [N, 2 side, 2 side] of the classes int64 [N] from pooled [N, C, side, side].

    The deconvolution, whose windows do not overlap, is a 1 x 1 convolution with the channels of
    four cells: runtimes have an int8 kernel for it. Cells are put in place last, in one channel.
    """
    params, x = tree.params, Map(pooled, side, side)
    for name in (f"mask_fcn{i}" for i in range(1, head.num_convs + 1)):
        x = relu(graph, conv_norm(graph, x, tree, name, f"{name}_norm", norm=head.norm))
    kernel, bias = (np.asarray(params["mask_deconv"][key]) for key in ("kernel", "bias"))
    channels = len(bias)
    # [2, 2, out, in] to one input per column of four outputs
    layer = {"kernel": kernel.reshape(1, 1, 4 * channels, -1).swapaxes(2, 3)}
    layer["bias"] = np.tile(bias, 4)
    x = relu(graph, conv(graph, x, layer, "mask_deconv"))
    cells = graph.reshape(x.name, -1, 4, channels, side * side)
    last = params["mask_predictor"]  # only the kernel of the object's class is computed
    kernels = np.asarray(last["kernel"], np.float32)[0, 0].T[:, None, None]
    biases = np.asarray(last["bias"], np.float32)[:, None, None, None]
    kernel_name = graph.op("Gather", graph.constant(kernels, "mask_predictor/kernel"), classes)
    bias_name = graph.op("Gather", graph.constant(biases, "mask_predictor/bias"), classes)
    logits = graph.op("Add", graph.op("MatMul", kernel_name, cells), bias_name)
    logits = graph.op(
        "Transpose", graph.reshape(logits, -1, 2, 2, side, side), perm=[0, 3, 1, 4, 2]
    )
    return graph.reshape(logits, -1, 2 * side, 2 * side)
