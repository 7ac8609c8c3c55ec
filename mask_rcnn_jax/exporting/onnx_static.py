"""Non-maximum suppression and RoIAlign of fixed shapes, for compilers that take no others.

The operators NonMaxSuppression and NonZero return as many rows as there are, so that shapes depend
on the image. Here every row is computed, and those that count are marked.
RoIAlign is traced as `ops.roi_align` has it, a sum of gathered rows: a quarter of the time of the
operator RoiAlign at all levels. Adaptive sampling has too many rows for that.
"""

from typing import Any

import numpy as np

from mask_rcnn_jax.jax_to_onnx.graph import Graph, floats
from mask_rcnn_jax.jax_to_onnx.values import Equation, Value, arrange, tensor

TILE = 128
ROUNDS = 16  # even: what is not decided by then is kept


def nms_rule(graph: Graph, eqn: Equation, given: list) -> Value:
    """Suppress boxes [B, N, 4], sorted by descending score, in tiles as `ops.nms` does.

    The rounds within a tile have a fixed number, as graphs have no loops that all compilers take. A
    box is decided once the boxes that may suppress it are: chains of more than `ROUNDS` boxes of
    one tile, each overlapping the next, may keep too many. Callers take the best `max_out` boxes.
    """
    batch, rows = eqn.outvars[0].aval.shape
    boxes, valid, *groups = (arrange(graph, each) for each in given)
    sides = _sides(graph, boxes, eqn.params["offset"])
    if groups:
        sides.append(graph.unsqueeze(graph.cast(groups[0], "FLOAT"), 2))
    across = [graph.op("Transpose", side, perm=[0, 2, 1]) for side in sides]  # [B, 1, N]
    alive = graph.unsqueeze(graph.cast(valid, "FLOAT"), 1)
    kept: list[str] = []
    for start in range(0, rows, TILE):
        stop = min(start + TILE, rows)
        tile = [graph.slice(side, start, stop, axis=2) for side in across]
        left = graph.slice(alive, start, stop, axis=2)
        if kept:
            earlier = [graph.slice(side, 0, start, axis=1) for side in sides]
            hits = _hits(graph, earlier, tile, eqn.params)
            left = _without_hit(graph, left, graph.concat(*kept, axis=2), hits)
        hits = _hits(
            graph, [graph.slice(side, start, stop, axis=1) for side in sides], tile, eqn.params
        )
        size = stop - start
        hits = graph.op("Mul", hits, np.triu(np.ones((1, size, size), np.float32), k=1))
        keep = left
        for _ in range(min(ROUNDS, size - 1)):
            keep = _without_hit(graph, left, keep, hits)
        kept.append(keep)
    marks = graph.reshape(graph.concat(*kept, axis=2), batch, rows)
    return tensor(graph.op("Greater", marks, floats(0.5)), (batch, rows))


def _sides(graph: Graph, boxes: str, offset: float) -> list[str]:
    """Return x1, y1, x2 + offset, y2 + offset and the area of boxes [B, N, 4], each [B, N, 1]."""
    x1, y1, x2, y2 = (graph.slice(boxes, i, i + 1, axis=2) for i in range(4))
    if offset:
        x2, y2 = (graph.op("Add", side, floats(offset)) for side in (x2, y2))
    lengths = (graph.op("Relu", graph.op("Sub", *pair)) for pair in ((x2, x1), (y2, y1)))
    return [x1, y1, x2, y2, graph.op("Mul", *lengths)]


def _hits(graph: Graph, a: list[str], b: list[str], options: dict[str, Any]) -> str:
    """1.0 where IoU(a_i, b_j) is above the threshold and their groups are equal: [B, n, T].

    a: `_sides` and groups, [B, n, 1] each; b: the same, [B, 1, T] each.
    """
    lengths = []
    for low, high in ((0, 2), (1, 3)):
        first, last = graph.op("Max", a[low], b[low]), graph.op("Min", a[high], b[high])
        lengths.append(graph.op("Relu", graph.op("Sub", last, first)))
    inter = graph.op("Mul", *lengths)
    union = graph.op("Sub", graph.op("Add", a[4], b[4]), inter)
    hits = graph.op("Greater", inter, graph.op("Mul", union, floats(options["iou_thresh"])))
    if len(a) > 5:
        hits = graph.op("And", hits, graph.op("Equal", a[5], b[5]))
    return graph.cast(hits, "FLOAT")


def _without_hit(graph: Graph, left: str, keep: str, hits: str) -> str:
    """Return the boxes `left` [B, 1, T] that no box of `keep` [B, 1, n] hits; 1.0 or 0.0 each."""
    return graph.op("Relu", graph.op("Sub", left, graph.op("MatMul", keep, hits)))


nms_rule.keeps_known = True  # type: ignore[attr-defined]  # JAX cannot compute the primitive
RULES: dict[str, Any] = {"nms": nms_rule}
