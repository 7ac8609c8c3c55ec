"""Convert a JAX program to an ONNX graph, with a rule for each primitive.

`trace.translate` walks a jaxpr and calls the rules that it is given; those for JAX's own primitives
are in `rules`, `shapes` and `products`. Nothing here knows Mask R-CNN.
"""
