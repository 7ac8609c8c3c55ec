"""Ids of COCO jsons and results: whole numbers or strings."""

from collections.abc import Container
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show

ZERO_ID = (
    "an annotation has the id 0: pycocotools, and so this package, counts each match with it as a "
    "mistake; `prepare merge` of this json alone numbers annotations from 1"
)
MAX_NAME = 1000  # characters
# Whole numbers up to here are the same as floats and as integers.
_EXACT = 2**53
_KEYS = ("id", "image_id", "category_id")
_LISTS = ("neg_category_ids", "not_exhaustive_category_ids")
_SECTIONS = ("images", "categories", "annotations")


def is_id(value: Any) -> bool:
    """Check for an id that pycocotools and NumPy keep as it is."""
    if isinstance(value, str):
        return len(value) <= MAX_NAME and "\0" not in value
    return type(value) is int and -(2**63) <= value < 2**63


def is_zero(annotation_id: Any) -> bool:
    """Check for an id that is 0 for NumPy, which pycocotools puts it into."""
    try:
        return float(annotation_id) == 0
    except (TypeError, ValueError, OverflowError):
        return False


def id_fault(key: str, value: Any) -> str | None:
    """Return why a value cannot be an id; None for one that can."""
    if is_id(value):
        return None
    kinds = f"a whole number of 64 bits nor a string of at most {MAX_NAME} characters"
    advice = ""
    if type(value) is int:
        advice = f", which is beyond {2**63 - 1}; write such ids as strings"
    elif type(value) is float and value.is_integer():
        advice = ", which is not exact with a decimal point; write such ids without, or as strings"
    return f"has an id that is neither {kinds}: {key} {show(value, 60)}{advice}"


def with_whole_ids(content: Any) -> Any:
    """Return a json's content with ids such as 1.0 as whole numbers: pandas writes them so."""
    if not isinstance(content, dict):
        return content
    changed = {}
    for section in _SECTIONS:
        entries = content.get(section)
        if isinstance(entries, list) and any(map(_has_float, entries)):
            changed[section] = [_whole(entry) if _has_float(entry) else entry for entry in entries]
    return content | changed if changed else content


def _has_float(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    if any([type(entry.get(key)) is float for key in _KEYS]):
        return True
    lists = [entry[key] for key in _LISTS if key in entry]
    return any(isinstance(ids, list) and float in map(type, ids) for ids in lists)


def _whole(entry: dict[str, Any]) -> dict[str, Any]:
    new: dict[str, Any] = {key: whole_number(entry[key]) for key in _KEYS if key in entry}
    for key in _LISTS:
        if isinstance(entry.get(key), list):
            new[key] = list(map(whole_number, entry[key]))
    return entry | new


def whole_number(value: Any) -> Any:
    """Return a float that is a whole number as an int, anything else as it is."""
    is_whole = type(value) is float and abs(value) <= _EXACT and value.is_integer()
    return int(value) if is_whole else value


def other_type(value: Any, known: Container[Any]) -> str:
    """Say that a string is among numbers, or a number among strings; "" if it is not."""
    if not isinstance(value, str):
        text = str(whole_number(value))
        there = f"it is a number, the ids there are strings such as {text!r}"
        return there if text in known else ""
    text = value.removesuffix(".0")
    number = int(text) if len(text) < 21 and text.removeprefix("-").isdecimal() else None
    there = f"it is a string, the ids there are numbers such as {number}"
    return there if number in known and str(number) == text else ""
