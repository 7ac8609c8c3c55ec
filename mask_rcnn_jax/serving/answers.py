"""What requests may ask for, and how they are answered: detections as json, and refusals."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import numpy as np

from mask_rcnn_jax import opencv as cv2
from mask_rcnn_jax.predict.outlines import outer_parts
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.report.error_images import data_uri

MASKS = ("rle", "polygons", "outlines", "none")
SCORE_THRESHOLD = 0.5  # of a request that names none
VIEW_SIDE = 2048  # longer side of an image as it is seen


class Refused(Exception):
    """A request that gets an error status and one line that says why."""

    def __init__(self, status: HTTPStatus, message: str, headers: Mapping[str, str] = {}):
        super().__init__(message)
        self.status, self.headers = status, headers


class Answer(NamedTuple):
    """Of HTTP."""

    status: HTTPStatus
    content: bytes
    content_type: str = "application/json"
    headers: Mapping[str, str] = {}


def refusal(refused: Refused) -> Answer:
    """Answer with the error."""
    content = json.dumps({"error": str(refused)}).encode() + b"\n"
    return Answer(refused.status, content, headers=refused.headers)


def json_answer(content: Any) -> Answer:
    """Answer with what becomes json."""
    return Answer(HTTPStatus.OK, json.dumps(content).encode() + b"\n")


def to_data_uri(image: np.ndarray) -> str:
    """uint8 [H, W, 3] as a data URI, not larger than a page needs."""
    scale = VIEW_SIDE / max(image.shape)
    if scale < 1:
        height, width = (max(1, round(side * scale)) for side in image.shape[:2])
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    return data_uri(image)


def read_options(query: str) -> tuple[float, str, bool]:
    """Read the score threshold, the masks' kind and whether the image is to be seen."""
    given = dict(parse_qsl(query, keep_blank_values=True))
    text = given.pop("score_threshold", str(SCORE_THRESHOLD))
    masks, view = given.pop("masks", MASKS[0]), given.pop("view", "0")
    if given:
        message = f"unknown parameter {min(given)!r}, expected score_threshold, masks or view"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    try:
        threshold = float(text)
    except ValueError:
        threshold = math.nan
    if not 0 <= threshold <= 1:
        message = f"score_threshold is {text!r}, expected a number from 0 to 1"
        raise Refused(HTTPStatus.BAD_REQUEST, message)
    if masks not in MASKS:
        raise Refused(HTTPStatus.BAD_REQUEST, f"masks is {masks!r}, expected {', '.join(MASKS)}")
    if view not in ("0", "1"):
        raise Refused(HTTPStatus.BAD_REQUEST, f"view is {view!r}, expected 0 or 1")
    return threshold, masks, view == "1"


def to_entries(result: Result, masks: str) -> list[dict[str, Any]]:
    """Return COCO results without image_id, with class names and such masks."""
    plain = result if masks == "rle" else replace(result, mask_grids=None)
    entries = plain.to_coco()
    for entry, name in zip(entries, result.names, strict=True):
        del entry["image_id"]
        entry["category"] = name
    if masks in ("polygons", "outlines") and result.has_masks:
        for entry, parts in zip(entries, result.polygons(), strict=True):
            kept = outer_parts(parts) if masks == "polygons" else parts
            entry["segmentation"] = [_rounded(part) for part in kept]
    return entries


def _rounded(part: np.ndarray) -> list[float]:
    """x1, y1, x2, y2, .. to hundredths of a pixel."""
    return [round(value, 2) for value in part.ravel().tolist()]
