"""Functions of arrays as ONNX graphs, run by onnxruntime."""

import jax
import numpy as np


def converted(function, *arrays, opset=17, variables=None, num_classes=None, static=False):
    """Return the nodes of the graph of a function, and its outputs for these arrays, as leaves.

    variables: given to the function before the arrays, unless None.
    """
    import onnxruntime

    from mask_rcnn_jax.exporting.onnx import add_function
    from mask_rcnn_jax.jax_to_onnx.cleanup import clean_up
    from mask_rcnn_jax.jax_to_onnx.graph import Graph, make_model_proto
    from mask_rcnn_jax.jax_to_onnx.rules import onnx_type
    from mask_rcnn_jax.jax_to_onnx.values import arrange, tensor

    def run(variables, *given):
        found = function(*given) if variables is None else function(variables, *given)
        return jax.tree.leaves(found)

    graph, inputs, outputs = Graph(opset), {}, {}
    for i, array in enumerate(arrays):
        inputs[f"x{i}"] = (onnx_type(array.dtype), list(array.shape))
    given = [tensor(f"x{i}", array.shape) for i, array in enumerate(arrays)]
    shapes = [jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays]
    expected = jax.eval_shape(run, variables, *shapes)
    found = add_function(graph, run, variables, shapes, given, num_classes, static=static)
    for i, (value, shape) in enumerate(zip(found, expected, strict=True)):
        graph.op("Identity", arrange(graph, value), name=f"y{i}")
        outputs[f"y{i}"] = (onnx_type(shape.dtype), list(shape.shape))
    clean_up(graph, outputs)
    model = make_model_proto(graph, "test", inputs, outputs, opset).SerializeToString()
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    feeds = {
        f"x{i}": array.astype(np.int64) if array.dtype.kind == "i" else array
        for i, array in enumerate(arrays)
    }
    nodes = [node for node in graph.nodes if node.op_type != "Identity"]
    return nodes, session.run(list(outputs), feeds)
