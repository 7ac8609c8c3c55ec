"""ConvNeXt as ONNX operators that are the same in every opset: no LayerNormalization, no Gelu."""

import numpy as np

from mask_rcnn_jax.deploy.onnx_graph import Graph, Map, floats
from mask_rcnn_jax.deploy.onnx_layers import Trunk, conv
from mask_rcnn_jax.models.norm import LAYER_EPS


class ConvNeXtTrunk(Trunk):
    """ConvNeXt and FPN of a `MaskRCNN`."""

    def features(self, images: Map) -> list[Map]:
        """Compute C2..C5 from normalized images."""
        graph, extent, params = self._graph, self._extent, self._tree.of("backbone").params
        x = self._conv(images, "stem_conv", 4)
        x = _layer_norm(graph, x, params["stem_norm"])
        features = []
        for stage, blocks in enumerate(self._model.backbone.depths, start=2):
            if stage > 2:
                x = _layer_norm(graph, x, params[f"down{stage}_norm"])
                x = self._conv(extent.mask(x, 2 ** (stage - 1)), f"down{stage}_conv", 2)
            for i in range(blocks):
                name = f"res{stage}_{i}"
                y = _branch(graph, extent.mask(x, 2**stage), params[name], name)
                x = x._replace(name=graph.op("Add", x.name, y.name))
            features.append(_layer_norm(graph, x, params[f"output{stage}_norm"]))
        return features

    def _conv(self, x: Map, name: str, stride: int) -> Map:
        """Apply a convolution whose windows touch."""
        layer = self._input_order(self._tree.of("backbone").params[name], name)
        return conv(self._graph, x, layer, name, stride=stride, padding="same")


def _branch(graph: Graph, x: Map, params: dict, name: str) -> Map:
    """Compute what a block adds to its input."""
    channels = len(params["gamma"])
    y = conv(graph, x, params["dwconv"], f"{name}/dwconv", groups=channels)
    y = _layer_norm(graph, y, params["norm"])
    y = _gelu(graph, conv(graph, y, _pixelwise(params["fc1"]), f"{name}/fc1"))
    return conv(graph, y, _pixelwise(params["fc2"], params["gamma"]), f"{name}/fc2")


def _pixelwise(layer: dict, gamma: np.ndarray | float = 1.0) -> dict:
    """Return a fully connected layer, times `gamma`, as a convolution, which is quantized."""
    kernel, bias = (np.asarray(layer[leaf]) * np.asarray(gamma) for leaf in ("kernel", "bias"))
    return {"kernel": kernel[None, None], "bias": bias}


def _layer_norm(graph: Graph, x: Map, params: dict) -> Map:
    """Normalize each pixel's channels, with means as products with a matrix."""
    scale, bias = (np.asarray(params[leaf], np.float32) for leaf in ("scale", "bias"))
    count = len(scale)
    average = graph.constant(np.full((count, 1), 1 / count, np.float32), f"average/{count}")
    y = graph.op("Transpose", x.name, perm=[0, 2, 3, 1])
    y = graph.op("Sub", y, graph.op("MatMul", y, average))
    variance = graph.op("MatMul", graph.op("Mul", y, y), average)
    y = graph.op("Div", y, graph.op("Sqrt", graph.op("Add", variance, floats(LAYER_EPS))))
    y = graph.op("Add", graph.op("Mul", y, scale), bias)
    return x._replace(name=graph.op("Transpose", y, perm=[0, 3, 1, 2]))


def _gelu(graph: Graph, x: Map) -> Map:
    """x / 2 * (1 + erf(x / sqrt(2)))."""
    erf = graph.op("Erf", graph.op("Mul", x.name, floats(0.5**0.5)))
    half = graph.op("Mul", x.name, floats(0.5))
    return x._replace(name=graph.op("Mul", half, graph.op("Add", erf, floats(1.0))))
