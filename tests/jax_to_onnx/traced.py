"""Functions of arrays as ONNX graphs, run by onnxruntime."""

import jax
import numpy as np


def converted(function, *arrays, **options):
    """Return the nodes of the graph of a function, and its outputs for these arrays, as leaves.

    options: of `convert`.
    """
    nodes, run = convert(function, *arrays, **options)
    return nodes, run(*arrays)


def convert(
    function,
    *arrays,
    opset=17,
    variables=None,
    num_classes=None,
    static=False,
    float16=False,
    any_batch=False,
):
    """Return the nodes of the graph of a function of such arrays, and a function that runs it.

    variables: given to the function before the arrays, unless None. any_batch: the first axis of
        each array and each result is a batch, whose size is left open.
    """
    import onnx
    import onnxruntime

    from mask_rcnn_jax.exporting.onnx import add_function
    from mask_rcnn_jax.jax_to_onnx.cleanup import clean_up
    from mask_rcnn_jax.jax_to_onnx.graph import ANY, Graph, make_model_proto
    from mask_rcnn_jax.jax_to_onnx.half import to_float16
    from mask_rcnn_jax.jax_to_onnx.rules import onnx_type
    from mask_rcnn_jax.jax_to_onnx.values import arrange, tensor

    def run(variables, *given):
        found = function(*given) if variables is None else function(variables, *given)
        return jax.tree.leaves(found)

    graph, inputs, outputs = Graph(opset), {}, {}
    if any_batch:
        graph.batch = graph.slice(graph.op("Shape", "x0"), 0, 1, axis=0)
    sizes = [(ANY, *array.shape[1:]) if any_batch else array.shape for array in arrays]
    given = [tensor(f"x{i}", shape) for i, shape in enumerate(sizes)]
    shapes = [jax.ShapeDtypeStruct(s, x.dtype) for s, x in zip(sizes, arrays, strict=True)]
    for i, shape in enumerate(shapes):
        inputs[f"x{i}"] = (onnx_type(shape.dtype), list(shape.shape))
    expected = jax.eval_shape(run, variables, *shapes)
    found = add_function(graph, run, variables, shapes, given, num_classes, static=static)
    for i, (value, shape) in enumerate(zip(found, expected, strict=True)):
        graph.op("Identity", arrange(graph, value), name=f"y{i}")
        outputs[f"y{i}"] = (onnx_type(shape.dtype), list(value.sizes))
    clean_up(graph, outputs)
    if float16:
        to_float16(graph)
    model = make_model_proto(graph, "test", inputs, outputs, opset)
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    content, providers = model.SerializeToString(), ["CPUExecutionProvider"]
    session = onnxruntime.InferenceSession(content, providers=providers)

    def run_graph(*arrays):
        feeds = {
            f"x{i}": array.astype(np.int64) if array.dtype.kind == "i" else array
            for i, array in enumerate(arrays)
        }
        return session.run(list(outputs), feeds)

    return [node for node in graph.nodes if node.op_type != "Identity"], run_graph
