"""RegNet as ONNX operators."""

from mask_rcnn_jax.deploy.onnx_graph import Map, floats
from mask_rcnn_jax.deploy.onnx_layers import Trunk, conv, relu


class RegNetTrunk(Trunk):
    """RegNet and FPN of a `MaskRCNN`."""

    def features(self, images: Map) -> list[Map]:
        """Compute C2..C5 from normalized images."""
        stem = self._conv_norm(images, "stem_conv", "stem_norm", stride=2, map_stride=1)
        x, features = relu(self._graph, stem), []
        for stage, (_, blocks, groups) in enumerate(self._model.backbone.stages, start=2):
            for i in range(blocks):
                x = self._bottleneck(x, f"res{stage}_{i}", 1 if i else 2, 2**stage, groups)
            features.append(x)
        return features

    def _bottleneck(self, x: Map, block: str, stride: int, map_stride: int, groups: int) -> Map:
        """Apply a block; map_stride: pixels per cell of its output."""
        graph, params = self._graph, self._tree.of("backbone").params[block]

        def layer(x: Map, name: str, stride: int = 1, groups: int = 1) -> Map:
            options = dict(stride=stride, map_stride=map_stride // stride, block=block)
            return self._conv_norm(x, name, f"{name}_norm", groups=groups, **options)

        y = relu(graph, layer(x, "a"))
        y = relu(graph, layer(y, "b", stride, groups))
        if "se_fc1" in params:
            y = self._excite(y, params, block, map_stride)
        y = layer(y, "c")
        x = layer(x, "shortcut", stride) if "shortcut" in params else x
        return relu(graph, y._replace(name=graph.op("Add", x.name, y.name)))

    def _excite(self, x: Map, params: dict, block: str, map_stride: int) -> Map:
        """Apply squeeze-and-excitation, whose means are those of the valid cells."""
        graph, extent = self._graph, self._extent
        mean = graph.op("GlobalAveragePool", extent.mask(x, map_stride).name)
        if extent.size is not None:
            cells = graph.cast(extent.cells(map_stride), "FLOAT")
            rows, columns = (graph.slice(cells, i, i + 1, axis=1) for i in range(2))
            share = graph.op("Div", graph.op("Mul", rows, columns), floats(x.height * x.width))
            mean = graph.op("Div", mean, graph.reshape(share, -1, 1, 1, 1))
        y = Map(mean, 1, 1)
        y = relu(graph, conv(graph, y, params["se_fc1"], f"{block}/se_fc1"))
        y = conv(graph, y, params["se_fc2"], f"{block}/se_fc2")
        return x._replace(name=graph.op("Mul", x.name, graph.op("Sigmoid", y.name)))
