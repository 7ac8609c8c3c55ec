"""The layers of `models/` as ONNX operators: trunk, pyramid and heads, NCHW, float32.

A fixed norm is multiplied into the convolution before it. Where a recipe lets maps end at the
picture (`model.input.pad_multiple`), `Extent` cuts them as `ops.extent.ValidExtent` does.
"""

import numpy as np

from mask_rcnn_jax.deploy.onnx_graph import Graph, Map, floats, ints
from mask_rcnn_jax.models.resnet import BLOCKS_PER_STAGE


class Extent:
    """How much of the maps counts, where that is known only when the graph runs."""

    def __init__(self, graph: Graph, extent: str | None):
        """extent: int64 [B, 2] (height, width); None if all of the canvas counts."""
        self._graph, self.extent = graph, extent
        self._cells: dict[int, str] = {}
        self._masks: dict[int, str] = {}

    def cells(self, stride: int) -> str:
        """int64 [B, 2] (rows, columns) of a map of that stride that count."""
        if stride not in self._cells:
            graph = self._graph
            self._cells[stride] = graph.op(
                "Div", graph.op("Add", self.extent, ints(stride - 1)), ints(stride)
            )
        return self._cells[stride]

    def keep_inside(self, x: Map, stride: int) -> Map:
        """Zeros in the cells that do not count."""
        if self.extent is None:
            return x
        graph = self._graph
        if stride not in self._masks:
            self._masks[stride] = inside(graph, self.cells(stride), x.height, x.width)
        return x._replace(name=graph.op("Where", self._masks[stride], x.name, floats(0.0)))


def inside(graph: Graph, sizes: str, height: int, width: int) -> str:
    """bool [B, 1, height, width]: which cells lie within the (rows, columns) of `sizes` [B, 2]."""
    rows, columns = (
        graph.unsqueeze(graph.unsqueeze(graph.slice(sizes, i, i + 1, axis=1), 2), 3)
        for i in range(2)
    )
    below = graph.op("Less", np.arange(height)[None, None, :, None], rows)
    left = graph.op("Less", np.arange(width)[None, None, None, :], columns)
    return graph.op("And", below, left)


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
) -> Map:
    """A convolution with our kernel [k, k, in, out].

    affine: scale and bias, [out] each, that follow it. weights: name of the layer's constants where
    it runs several times.
    """
    weights = weights or name
    kernel = np.asarray(layer["kernel"], np.float32)
    bias = layer.get("bias")
    if affine is not None:
        kernel, bias = kernel * affine[0], affine[1]
    side = kernel.shape[0]
    pads, sizes = zip(*(_pads(n, side, stride, padding) for n in (x.height, x.width)), strict=True)
    inputs = [x.name, graph.constant(kernel.transpose(3, 2, 0, 1), f"{weights}/kernel")]
    if bias is not None:
        inputs.append(graph.constant(np.asarray(bias, np.float32), f"{weights}/bias"))
    result = graph.op(
        "Conv",
        *inputs,
        name=name,
        kernel_shape=[side, side],
        strides=[stride, stride],
        pads=[pads[0][0], pads[1][0], pads[0][1], pads[1][1]],
    )
    return Map(result, *sizes)


def _pads(length: int, kernel: int, stride: int, padding: str) -> tuple[tuple[int, int], int]:
    """Zeros before and after one axis, and the length of the result."""
    if padding == "same":
        result = -(-length // stride)
        total = max((result - 1) * stride + kernel - length, 0)
        return (total // 2, total - total // 2), result
    before = kernel // 2
    return (before, before), (length + 2 * before - kernel) // stride + 1


def relu(graph: Graph, x: Map) -> Map:
    return x._replace(name=graph.op("Relu", x.name))


def dense(graph: Graph, x: str, layer: dict, name: str, kernel: np.ndarray | None = None) -> str:
    """x [N, in] to [N, out]. kernel: in place of the layer's own."""
    kernel = np.asarray(layer["kernel"] if kernel is None else kernel, np.float32)
    bias = np.asarray(layer["bias"], np.float32)
    return graph.op(
        "Gemm",
        x,
        graph.constant(kernel, f"{name}/kernel"),
        graph.constant(bias, f"{name}/bias"),
        name=name,
    )


class Trunk:
    """ResNet and feature pyramid of a `MaskRCNN`, whose fields say how."""

    def __init__(self, graph: Graph, model, variables: dict, extent: Extent):
        self._graph, self._model, self._extent = graph, model, extent
        self._params = variables["params"]
        self._stats = variables.get("batch_stats", {})

    def pyramid(self, images: Map) -> list[Map]:
        """Normalised images to P2..P6."""
        graph, extent = self._graph, self._extent
        x = self._conv_norm(images, "stem_conv", "stem_norm", stride=2, map_stride=1)
        x = self._max_pool(extent.keep_inside(relu(graph, x), 2))
        features = []
        for stage, blocks in enumerate(BLOCKS_PER_STAGE[self._model.backbone.depth], start=2):
            for i in range(blocks):
                stride = 2 if stage > 2 and i == 0 else 1
                x = self._block(x, f"res{stage}_{i}", stride, 2**stage // stride)
            features.append(x)
        return self._fpn(features)

    def _conv_norm(self, x, conv_name, norm_name, *, stride, map_stride, block="") -> Map:
        """map_stride: pixels per cell of `x`."""
        where = [block] if block else []
        layer = _inner(self._params["backbone"], [*where, conv_name])
        affine = self._fixed_norm([*where, norm_name])
        if layer["kernel"].shape[0] > 1:
            x = self._extent.keep_inside(x, map_stride)
        if not block and self._model.input.channel_order == "bgr":
            layer = {**layer, "kernel": np.asarray(layer["kernel"])[:, :, ::-1]}
        name = "/".join([*where, conv_name])
        x = conv(
            self._graph,
            x,
            layer,
            name,
            stride=stride,
            padding=self._model.backbone.padding,
            affine=affine,
        )
        return self._group_norm(x, [*where, norm_name]) if affine is None else x

    def _fixed_norm(self, path: list[str]) -> tuple[np.ndarray, np.ndarray] | None:
        """Scale and bias of a norm with fixed statistics; None for one that computes them."""
        if self._model.backbone.norm == "group":
            return None
        stats = _inner(self._stats["backbone"], path)
        if self._model.backbone.norm == "frozen":
            return np.asarray(stats["scale"]), np.asarray(stats["bias"])
        params = _inner(self._params["backbone"], path)
        scale = np.asarray(params["scale"]) / np.sqrt(
            np.asarray(stats["var"]) + np.float32(self._model.backbone.norm_eps)
        )
        return scale, np.asarray(params["bias"]) - np.asarray(stats["mean"]) * scale

    def _group_norm(self, x: Map, path: list[str]) -> Map:
        """32 groups, as an instance norm of the groups: its operator is older and better known."""
        graph, params = self._graph, _inner(self._params["backbone"], path)
        channels, groups = len(params["scale"]), 32
        grouped = graph.reshape(x.name, 0, groups, -1)
        one, zero = np.ones(groups, np.float32), np.zeros(groups, np.float32)
        grouped = graph.op(
            "InstanceNormalization",
            grouped,
            one,
            zero,
            epsilon=float(self._model.backbone.norm_eps),
        )
        y = graph.reshape(grouped, 0, channels, x.height, x.width)
        scale, bias = (
            np.asarray(params[key], np.float32)[:, None, None] for key in ("scale", "bias")
        )
        return x._replace(name=graph.op("Add", graph.op("Mul", y, scale), bias))

    def _max_pool(self, x: Map) -> Map:
        pads, sizes = zip(
            *(_pads(n, 3, 2, self._model.backbone.pool_padding) for n in (x.height, x.width)),
            strict=True,
        )
        result = self._graph.op(
            "MaxPool",
            x.name,
            kernel_shape=[3, 3],
            strides=[2, 2],
            pads=[pads[0][0], pads[1][0], pads[0][1], pads[1][1]],
        )
        return Map(result, *sizes)

    def _block(self, x: Map, block: str, stride: int, map_stride: int) -> Map:
        """A basic block or a bottleneck; map_stride: pixels per cell of `x`."""
        graph = self._graph
        strides = [stride, 1]
        if self._model.backbone.depth >= 50:
            strides = [stride, 1, 1] if self._model.backbone.stride_in == "1x1" else [1, stride, 1]
        y, at = x, map_stride
        for i, step in enumerate(strides, start=1):
            y = self._conv_norm(y, f"conv{i}", f"norm{i}", stride=step, map_stride=at, block=block)
            at *= step
            if i < len(strides):
                y = relu(graph, y)
        if "shortcut" in self._params["backbone"][block]:
            x = self._conv_norm(
                x, "shortcut", "shortcut_norm", stride=stride, map_stride=map_stride, block=block
            )
        return relu(graph, y._replace(name=graph.op("Add", x.name, y.name)))

    def _fpn(self, features: list[Map]) -> list[Map]:
        graph, extent, params = self._graph, self._extent, self._params["fpn"]
        pyramid, top_down = [], None
        for level in range(5, 1, -1):
            lateral = conv(
                graph, features[level - 2], params[f"fpn_lateral{level}"], f"fpn_lateral{level}"
            )
            if top_down is not None:
                doubled = graph.op(
                    "Resize",
                    top_down.name,
                    "",
                    floats(1.0, 1.0, 2.0, 2.0),
                    mode="nearest",
                    coordinate_transformation_mode="asymmetric",
                    nearest_mode="floor",
                )
                lateral = lateral._replace(name=graph.op("Add", lateral.name, doubled))
            top_down = lateral
            output = conv(
                graph,
                extent.keep_inside(top_down, 2**level),
                params[f"fpn_output{level}"],
                f"fpn_output{level}",
            )
            pyramid.insert(0, extent.keep_inside(output, 2**level))
        top = pyramid[-1]
        every_second = graph.op("MaxPool", top.name, kernel_shape=[1, 1], strides=[2, 2])
        return [*pyramid, Map(every_second, -(-top.height // 2), -(-top.width // 2))]


def rpn_head(graph: Graph, params: dict, x: Map, level: int) -> tuple[str, str]:
    """Logits [B, A_l] and deltas [B, A_l, 4] of one level."""
    hidden = relu(graph, conv(graph, x, params["conv"], f"rpn{level}/conv", weights="rpn/conv"))
    results = []
    for layer, tail in (("objectness_logits", []), ("anchor_deltas", [4])):
        y = conv(graph, hidden, params[layer], f"rpn{level}/{layer}", weights=f"rpn/{layer}").name
        y = graph.op("Transpose", y, perm=[0, 2, 3, 1])
        results.append(graph.reshape(y, 0, -1, *tail))
    return results[0], results[1]


def box_head(graph: Graph, params: dict, pooled: str, side: int) -> tuple[str, str]:
    """[N, C, side, side] to class logits [N, K + 1] and deltas [N, 4 (K + 1)]."""
    kernel = np.asarray(params["fc1"]["kernel"], np.float32)
    # Our rows run over (y, x, channel), those of a flattened NCHW map over (channel, y, x).
    by_channel = kernel.reshape(side, side, -1, kernel.shape[1]).transpose(2, 0, 1, 3)
    x = graph.op("Flatten", pooled, axis=1)
    x = dense(graph, x, params["fc1"], "fc1", by_channel.reshape(kernel.shape))
    x = graph.op("Relu", x)
    x = graph.op("Relu", dense(graph, x, params["fc2"], "fc2"))
    return (
        dense(graph, x, params["cls_score"], "cls_score"),
        dense(graph, x, params["bbox_pred"], "bbox_pred"),
    )


def mask_head(graph: Graph, params: dict, pooled: str, side: int) -> str:
    """[N, C, side, side] to mask logits of every class, [N, K + 1, 2 side, 2 side]."""
    x = Map(pooled, side, side)
    for i in range(1, 5):
        x = relu(graph, conv(graph, x, params[f"mask_fcn{i}"], f"mask_fcn{i}"))
    up = params["mask_deconv"]
    kernel = np.asarray(up["kernel"], np.float32).transpose(3, 2, 0, 1)  # [in, out, 2, 2]
    y = graph.op(
        "ConvTranspose",
        x.name,
        graph.constant(kernel, "mask_deconv/kernel"),
        graph.constant(np.asarray(up["bias"], np.float32), "mask_deconv/bias"),
        name="mask_deconv",
        kernel_shape=[2, 2],
        strides=[2, 2],
    )
    x = Map(graph.op("Relu", y), 2 * side, 2 * side)
    return conv(graph, x, params["mask_predictor"], "mask_predictor").name


def _inner(tree: dict, path: list[str]) -> dict:
    for key in path:
        tree = tree[key]
    return tree
