"""Proposals, detections and masks as ONNX operators: all steps after the feature maps."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from mask_rcnn_jax.deploy.onnx_graph import INVALID_SCORE, Graph, Map, floats, ints
from mask_rcnn_jax.deploy.onnx_layers import Extent, Tree, box_head, mask_head, rpn_head
from mask_rcnn_jax.models.detect import Detect
from mask_rcnn_jax.models.mask_rcnn import MaskRCNN
from mask_rcnn_jax.ops.boxes import MAX_LOG_SCALE
from mask_rcnn_jax.ops.extent import STRIDES, ValidExtent
from mask_rcnn_jax.ops.roi_align import MIN_LEVEL


@dataclass(frozen=True)
class Regions:
    """Proposals, detections and masks for a batch."""

    graph: Graph
    model: MaskRCNN
    params: dict
    canvas: tuple[int, int]
    batch: int
    extent: Extent
    stats: dict = field(default_factory=dict)

    def box_limits(self, sizes: str) -> str:
        """[B, 1, 4] largest valid x, y, x, y of a box."""
        graph = self.graph
        sizes = graph.op("Gather", graph.cast(sizes, "FLOAT"), ints(1, 0, 1, 0), axis=1)
        return graph.unsqueeze(graph.op("Sub", sizes, floats(self.model.box_coder.offset)), 1)

    def proposals(self, pyramid: Sequence[Map], limits: str) -> tuple[str, str, int]:
        """Return boxes [B, N, 4], valid [B, N], and N."""
        graph, model, rpn = self.graph, self.model, self.model.rpn
        all_boxes, all_scores, total = [], [], 0
        for i, (features, anchors) in enumerate(zip(pyramid, self.anchors(), strict=True)):
            options: dict[str, Any] = dict(extent=self.extent, num_convs=rpn.num_convs)
            params, level = self.params["rpn_head"], MIN_LEVEL + i
            scores, deltas = rpn_head(graph, params, features, level, **options)
            count = min(rpn.pre_nms_topk_test, len(anchors))
            if self.extent.size is not None:
                scores = graph.op("Where", self._anchor_valid(i), scores, floats(INVALID_SCORE))
            top, index = graph.top_k(scores, count)
            origin = graph.op("Gather", anchors, index, axis=0)
            if self.extent.size is not None and model.anchors.stride == "map":
                origin = graph.op("Add", origin, self._anchor_shift(i, index))
            boxes = self._decode(graph.gather_rows(deltas, index), origin, (1.0,) * 4, limits)
            large = self._larger_than(boxes, rpn.min_size)
            top = graph.op("Where", large, top, floats(INVALID_SCORE))
            valid = graph.op("Greater", top, floats(INVALID_SCORE / 2))
            limit = rpn.post_nms_topk_test
            keep = self.nms(boxes, valid, count, iou_thresh=rpn.nms_thresh, max_out=limit)
            all_boxes.append(boxes)
            all_scores.append(graph.op("Where", keep, top, floats(INVALID_SCORE)))
            total += count
        rows = min(rpn.post_nms_topk_test, total)
        top, index = graph.top_k(graph.concat(*all_scores, axis=1), rows)
        valid = graph.op("Greater", top, floats(INVALID_SCORE / 2))
        boxes = graph.gather_rows(graph.concat(*all_boxes, axis=1), index)
        return self._where_valid(valid, boxes, 1), valid, rows

    def detections(
        self,
        pyramid: Sequence[Map],
        proposals: str,
        proposals_valid: str,
        rows: int,
        limits: str,
        detect: Detect,
        *,
        valid_dtype: str,
    ) -> tuple[str, str, str]:
        """Make all outputs except masks; return boxes [B, D, 4], int64 classes and valid [B, D]."""
        graph, model, batch = self.graph, self.model, self.batch
        num_classes, count = self.model.box_head.num_classes, detect.detections_per_image
        pooled = self.pool(pyramid, proposals, rows, 7)
        head: Any = model.box_head
        tree = Tree(self.params, self.stats).of("box_head")
        logits, deltas = box_head(graph, tree, head, pooled, 7)
        to_scores: dict[str, Any] = {"softmax": dict(axis=1), "sigmoid": {}}[model.classifier.kind]
        scores = graph.op(model.classifier.kind.capitalize(), logits, **to_scores)
        scores = graph.slice(scores, 1, num_classes + 1, axis=1)
        scores = graph.reshape(scores, batch, rows, num_classes)
        above = graph.op("Greater", scores, floats(detect.score_threshold))
        usable = graph.op("And", above, graph.unsqueeze(proposals_valid, 2))
        scores = graph.op("Where", usable, scores, floats(-1.0))
        candidates = min(detect.pre_nms_topk, rows * num_classes)
        top, index = graph.top_k(graph.reshape(scores, batch, -1), candidates)
        roi = graph.op("Div", index, ints(num_classes))
        class_index = graph.op("Add", graph.op("Mod", index, ints(num_classes)), ints(1))
        row = roi
        if not head.class_agnostic:
            row = graph.op("Add", graph.op("Mul", roi, ints(num_classes + 1)), class_index)
        deltas = graph.reshape(deltas, batch, -1, 4)
        deltas, origin = graph.gather_rows(deltas, row), graph.gather_rows(proposals, roi)
        boxes = self._decode(deltas, origin, model.box_coder.weights, limits)
        valid = graph.op("GreaterOrEqual", top, floats(0.0))
        valid = graph.op("And", valid, self._larger_than(boxes, detect.min_box_size))
        rule: dict[str, Any] = dict(iou_thresh=detect.nms_thresh, max_out=count)
        keep = self.nms(boxes, valid, candidates, **rule, classes=class_index)
        best = min(count, candidates)
        top, index = graph.top_k(graph.op("Where", keep, top, floats(-1.0)), best)
        top = graph.pad_rows(top, (batch, best), count, np.float32)
        index = graph.pad_rows(index, (batch, best), count, np.int64)
        valid = graph.op("GreaterOrEqual", top, floats(0.0))
        if best < count:
            valid = graph.op("And", valid, (np.arange(count) < best)[None])
        boxes = self._where_valid(valid, graph.gather_rows(boxes, index), 1, name="boxes")
        class_index = graph.op("GatherElements", class_index, index, axis=1)
        class_index = graph.op("Where", valid, class_index, ints(0))
        self._where_valid(valid, top, 0, name="scores")
        graph.cast(class_index, "INT32", name="classes")
        graph.cast(valid, valid_dtype, name="valid")
        return boxes, class_index, valid

    def masks(self, pyramid, boxes: str, classes: str, valid: str, count: int) -> None:
        """Make the output `masks`, [B, D, M, M]."""
        graph, size = self.graph, self.model.mask_roi_size
        pooled = self.pool(pyramid, boxes, count, size)
        tree, head = Tree(self.params, self.stats).of("mask_head"), self.model.mask_head
        each = graph.reshape(classes, -1)
        logits = mask_head(graph, tree, head, pooled, size, each)  # type: ignore[arg-type]
        masks = graph.op("Sigmoid", graph.reshape(logits, self.batch, count, 2 * size, 2 * size))
        self._where_valid(valid, masks, 2, name="masks")

    def anchors(self) -> list[np.ndarray]:
        """Anchors [A_l, 4] of each level."""
        # If the input ends with the image, spacings of "map" are known; else see `_anchor_shift`.
        whole = self.extent.size is None and self.model.input.pad_multiple
        extent = ValidExtent(self.canvas, jnp.array(self.canvas, jnp.int32) if whole else None)
        boxes = self.model.anchors(extent, offset=self.model.box_coder.iou_offset).boxes
        return [np.asarray(level) for level in boxes]

    def _anchor_cells(self, level: int) -> np.ndarray:
        """Cell row and column of every anchor on one level, [2, A_l]."""
        cells = np.indices([-(-side // STRIDES[level]) for side in self.canvas])
        return np.repeat(cells.reshape(2, -1), self.model.anchors.per_cell, axis=1)

    def _anchor_valid(self, level: int) -> str:
        """bool [B, A_l]: true for anchors on a valid cell."""
        graph, cells = self.graph, self.extent.cells(STRIDES[level])
        row, column = (index[None].astype(np.int64) for index in self._anchor_cells(level))
        row_valid = graph.op("Less", row, graph.slice(cells, 0, 1, axis=1))
        column_valid = graph.op("Less", column, graph.slice(cells, 1, 2, axis=1))
        return graph.op("And", row_valid, column_valid)

    def _anchor_shift(self, level: int, index: str) -> str:
        """[B, k, 4] shift of anchors `index`, which are spaced wider than on the whole canvas."""
        graph, stride = self.graph, STRIDES[level]
        cells = self.extent.cells(stride)
        assert self.extent.size is not None
        extra = graph.op("Sub", graph.op("Div", self.extent.size, cells), ints(stride))
        extra = graph.op("Gather", graph.cast(extra, "FLOAT"), ints(1, 0, 1, 0), axis=1)
        row, column = self._anchor_cells(level)
        center = np.float32(self.model.anchors.center)
        centers = np.stack([column, row] * 2, axis=1).astype(np.float32) + center
        places = graph.op("Gather", centers, index, axis=0)
        return graph.op("Mul", places, graph.unsqueeze(extra, 1))

    def _decode(self, deltas: str, origin: str, weights: Sequence[float], limits: str) -> str:
        """Decode deltas relative to the boxes `origin` into clipped boxes [B, k, 4]."""
        graph, offset = self.graph, floats(self.model.box_coder.offset)
        low, high = graph.slice(origin, 0, 2, axis=2), graph.slice(origin, 2, 4, axis=2)
        sides = graph.op("Add", graph.op("Sub", high, low), offset)
        center = graph.op("Add", low, graph.op("Mul", sides, floats(0.5)))
        shift = graph.op("Div", graph.slice(deltas, 0, 2, axis=2), floats(*weights[:2]))
        center = graph.op("Add", graph.op("Mul", shift, sides), center)
        growth = graph.op("Div", graph.slice(deltas, 2, 4, axis=2), floats(*weights[2:]))
        growth = graph.op("Exp", graph.op("Min", growth, floats(MAX_LOG_SCALE)))
        half = graph.op("Mul", graph.op("Mul", growth, sides), floats(0.5))
        high = graph.op("Sub", graph.op("Add", center, half), offset)
        boxes = graph.concat(graph.op("Sub", center, half), high, axis=2)
        return graph.op("Min", graph.op("Max", boxes, floats(0.0)), limits)

    def _sides(self, boxes: str, offset: float, axis: int) -> tuple[str, str]:
        """Widths and heights of boxes [.., 4], without the last axis."""
        graph = self.graph
        x1, y1, x2, y2 = (
            graph.op("Squeeze", graph.slice(boxes, i, i + 1, axis), ints(axis)) for i in range(4)
        )
        width, height = (
            graph.op("Add", graph.op("Sub", high, low), floats(offset))
            for low, high in ((x1, x2), (y1, y2))
        )
        return width, height

    def _larger_than(self, boxes: str, min_size: float) -> str:
        """bool [B, k]: true if both sides exceed `min_size`."""
        graph, sides = self.graph, self._sides(boxes, self.model.box_coder.offset, 2)
        return graph.op("And", *(graph.op("Greater", side, floats(min_size)) for side in sides))

    def nms(
        self, boxes: str, valid: str, rows: int, *, iou_thresh, max_out, classes: str | None = None
    ) -> str:
        """Suppress overlapping boxes [B, rows, 4], sorted by descending score, within classes.

        Returns bool [B, rows]: true for kept boxes, up to `max_out` per class or, without classes,
        per image.
        """
        graph, batch = self.graph, self.batch
        # The operator has no inclusive pixels and flips inverted boxes. So sides are extended by
        # the offset, and empty boxes neither suppress nor are suppressed. The operator expects y
        # before x, which makes no difference.
        low = graph.slice(boxes, 0, 2, axis=2)
        high = graph.slice(boxes, 2, 4, axis=2)
        high = graph.op("Max", graph.op("Add", high, floats(self.model.box_coder.iou_offset)), low)
        rank = (np.arange(rows, 0, -1) / rows).astype(np.float32)[None]
        scores = graph.unsqueeze(graph.op("Where", valid, rank, floats(0.0)), 1)
        if classes is not None:
            every = np.arange(1, self.model.box_head.num_classes + 1)[None, :, None]
            same = graph.op("Equal", graph.unsqueeze(classes, 1), every)
            scores = graph.op("Where", same, scores, floats(0.0))
        corners, limit = graph.concat(low, high, axis=2), ints(min(max_out, rows))
        thresholds = np.array([iou_thresh], np.float32), np.zeros(1, np.float32)
        selected = graph.op("NonMaxSuppression", corners, scores, limit, *thresholds)
        places = graph.op("Gather", selected, ints(0, 2), axis=1)
        length = graph.slice(graph.op("Shape", places), 0, 1, axis=0)
        ones = graph.op("Expand", np.ones(1, np.float32), length)
        marks = graph.op("ScatterND", np.zeros((batch, rows), np.float32), places, ones)
        return graph.op("Greater", marks, floats(0.5))

    def pool(self, pyramid: Sequence[Map], boxes: str, rows: int, size: int) -> str:
        """RoIAlign of boxes [B, rows, 4], giving [B * rows, C, size, size].

        Each level pools its own boxes, as many as there are; Gather restores their order.
        """
        graph, align = self.graph, self.model.roi_align
        maps = pyramid[: align.max_level - 1]
        boxes = graph.reshape(boxes, -1, 4)
        sides = self._sides(boxes, self.model.box_coder.iou_offset, 1)
        area = graph.op("Mul", *(graph.op("Max", side, floats(0.0)) for side in sides))
        start = graph.slice(boxes, 0, 2, axis=1)
        length = graph.op("Sub", graph.slice(boxes, 2, 4, axis=1), start)
        image = graph.constant(np.repeat(np.arange(self.batch), rows).astype(np.int64))
        sampling: dict[str, Any] = {"mode": "avg", "sampling_ratio": align.sampling_ratio}
        sampling |= {"output_height": size, "output_width": size}
        sampling |= {"coordinate_transformation_mode": "half_pixel"}
        parts, places = [], []
        for i, (features, stride) in enumerate(zip(maps, STRIDES, strict=False)):
            # The operator subtracts half a cell; compensate if the model does not.
            half = floats(0.5 * stride)
            first = start if align.aligned else graph.op("Add", start, half)
            shortest = floats(align.min_size * stride)
            lengths = graph.op("Max", length, shortest) if align.min_size > 0 else length
            rois, images = graph.concat(first, graph.op("Add", first, lengths), axis=1), image
            if len(maps) > 1:
                on_level = self._on_level(area, i, len(maps))
                places.append(graph.reshape(graph.op("NonZero", on_level), -1))
                rois, images = (graph.op("Gather", x, places[-1], axis=0) for x in (rois, images))
            x, scale = self._crop_to_valid(features, stride), 1.0 / stride
            parts.append(graph.op("RoiAlign", x, rois, images, spatial_scale=scale, **sampling))
        if len(maps) == 1:
            return parts[0]
        count = self.batch * rows
        place = graph.concat(*places, axis=0)
        row = graph.op("ScatterElements", np.zeros(count, np.int64), place, ints(*range(count)))
        return graph.op("Gather", graph.concat(*parts, axis=0), row, axis=0)

    def _crop_to_valid(self, features: Map, stride: int) -> str:
        """Crop a map to its valid cells."""
        if self.extent.size is None:
            return features.name
        graph = self.graph
        ends = graph.reshape(self.extent.cells(stride), 2)
        return graph.op("Slice", features.name, ints(0, 0), ends, ints(2, 3))

    def _on_level(self, area: str, i: int, num_levels: int) -> str:
        """bool, shaped like `area`: true for boxes pooled from map `i`."""
        graph, conditions = self.graph, []
        lowest, highest = (56.0 * 2**i) ** 2, (56.0 * 2 ** (i + 1)) ** 2  # P4 begins at 224 pixels
        if i > 0:
            conditions.append(graph.op("GreaterOrEqual", area, floats(lowest)))
        if i < num_levels - 1:
            conditions.append(graph.op("Less", area, floats(highest)))
        return conditions[0] if len(conditions) == 1 else graph.op("And", *conditions)

    def _where_valid(self, valid: str, x: str, extra_axes: int, name: str = "") -> str:
        """Zero the invalid rows of x [B, D, ...]."""
        for _ in range(extra_axes):
            valid = self.graph.unsqueeze(valid, -1)
        return self.graph.op("Where", valid, x, floats(0.0), name=name)
