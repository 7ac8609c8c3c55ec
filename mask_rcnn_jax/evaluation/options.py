"""How results are scored: a part of a recipe's `eval` section."""

from dataclasses import dataclass
from typing import Annotated, Literal

from mask_rcnn_jax.ranges import FROM_0_TO_1, Positives, Range, Ranged


@dataclass(frozen=True)
class Scoring(Ranged):
    """Rules of the scores, and what computes them.

    Attributes:
        engine: what computes the scores; "hotcoco" takes a fraction of the time for the same bits;
            "auto" is hotcoco if installed, or pycocotools, which always scores keypoints.
        protocol: rules of the scores; "lvis" is for its json, with up to 300 detections per image;
            "cells" adds microscopy's measures to COCO's, see `evaluation.cells`.
        cells_score_threshold: detections with at least this score count in "cells".
        boundary: also score masks by boundary IoU, which sees how exact outlines are, see
            `evaluation.boundary`; with pycocotools, whatever the engine.
        keypoint_sigmas: how far off each of `data.keypoints` may be, COCO's sigma in units of the
            root of an object's area; () takes COCO's for its names, or else 0.05 for all.
    """

    engine: Literal["auto", "pycocotools", "hotcoco"] = "auto"
    protocol: Literal["coco", "lvis", "cells"] = "coco"
    cells_score_threshold: Annotated[float, Range("a number from 0 to 1", FROM_0_TO_1.allows)] = 0.5
    boundary: bool = False
    keypoint_sigmas: Positives = ()
