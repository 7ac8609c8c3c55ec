"""What makes a whole COCO json unusable, one message per problem; `faults` checks its annotations.

Run `structure_problems` first; the other checks rely on the keys and types that it checks.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from mask_rcnn_jax.annotations.absent import absent_images
from mask_rcnn_jax.annotations.ids import MAX_NAME, id_fault, other_type
from mask_rcnn_jax.annotations.lvis import file_name_in, label_problems
from mask_rcnn_jax.annotations.segmentation import show

# Keys that a section's entries must have: for training, and to be scored.
TRAINING_KEYS = {
    "images": ("id", "file_name", "height", "width"),
    "categories": ("id", "name"),
    "annotations": ("image_id", "category_id"),
}
SCORING_KEYS = {**TRAINING_KEYS, "images": ("id",), "categories": ("id",)}
MAX_PIXELS = 178_956_970  # of an image that is read whole, as Pillow has it
# Of an image that a json describes: pycocotools counts pixels in 32 bits.
MAX_STATED_PIXELS = 2**31 - 1
MAX_PATH = 4096  # characters


def structure_problems(content: Any, keys: dict[str, tuple[str, ...]]) -> Iterator[str]:
    """Find missing keys, and ids, names and sizes of the wrong type or out of bounds."""
    if not isinstance(content, dict):
        kind = "a list (detection results?)" if isinstance(content, list) else "not an object"
        yield f"not a COCO json: {kind}, expected an object with {', '.join(keys)}"
        return
    for section, required in keys.items():
        entries = content.get(section)
        if not isinstance(entries, list):
            yield f"not a COCO json: key {section!r} {_no_list(content, section)}"
            continue
        for position, entry in enumerate(entries):
            if problem := _entry_problem(entry, required, section):
                yield f"{section}[{position}] {problem}"


def _no_list(content: dict[str, Any], section: str) -> str:
    """Say what is there instead of a section's list."""
    if section not in content:
        return "is missing"
    found = content[section]
    if isinstance(found, dict):
        of_entries = found and all(isinstance(entry, dict) for entry in found.values())
        return "is an object, expected " + ("the list of its values" if of_entries else "a list")
    return f"is {show(found, 40)}, expected a list"


def _entry_problem(entry: Any, required: tuple[str, ...], section: str) -> str | None:
    if not isinstance(entry, dict):
        return "is not an object"
    if missing := [key for key in required if key not in entry]:
        lacks = f"lacks {', '.join(map(repr, missing))}"
        if "file_name" not in missing or "coco_url" not in entry or file_name_in(entry["coco_url"]):
            return lacks
        return f"{lacks}, and its coco_url {show(entry['coco_url'])} does not end in folder/name"
    for key in ("id", "image_id", "category_id"):
        if key in entry and (fault := id_fault(key, entry[key])):
            return fault
    if section == "images":
        return _image_problem(entry)
    if section == "categories" and "name" in entry:
        return _text_problem("name", entry["name"], MAX_NAME)
    return None


def _image_problem(entry: dict) -> str | None:
    sides = [entry[key] for key in ("height", "width") if key in entry]
    if not all(map(is_size, sides)):
        return f"has height or width that is not a positive whole number: {show(sides)}"
    if len(sides) == 2 and sides[0] * sides[1] > MAX_STATED_PIXELS:
        return f"has {sides[0]} x {sides[1]} pixels, at most {MAX_STATED_PIXELS:,} are read"
    return (
        _text_problem("file_name", entry["file_name"], MAX_PATH) if "file_name" in entry else None
    )


def _text_problem(key: str, value: Any, length: int) -> str | None:
    if isinstance(value, str) and len(value) <= length:
        return None
    return f"has {key} {show(value)}, expected a string of at most {length} characters"


def is_number(value: Any) -> bool:
    return type(value) in (int, float)


def is_size(value: Any) -> bool:
    """Check for a height or a width in pixels."""
    return is_number(value) and 0 < value <= MAX_STATED_PIXELS and value == int(value)


def image_sizes(content: dict) -> dict[int | str, tuple[int, int] | None]:
    """(height, width) per image id; None if missing from the json."""
    return {
        entry["id"]: (int(entry["height"]), int(entry["width"]))
        if "height" in entry and "width" in entry
        else None
        for entry in content["images"]
    }


def id_problems(content: dict, *, same_annotations: bool = False) -> Iterator[str]:
    """Find duplicate and dangling ids, and images or categories with ids of two types.

    pycocotools makes strings of all ids if there is one, and then finds none of the numbers.
    `same_annotations` lets annotations have the same id.
    """
    for section in ("images", "categories", "annotations"):
        ids = Counter(entry["id"] for entry in content[section] if "id" in entry)
        if not (same_annotations and section == "annotations"):
            yield from (
                f"{section}: id {show(i)} occurs {n} times; {_remedy(content, section, i)}"
                for i, n in ids.items()
                if n > 1
            )
        if section != "annotations" and len(set(map(type, ids))) > 1:
            yield f"{section}: some ids are numbers and some are strings, expected one kind"
    image_ids = {entry["id"] for entry in content["images"]}
    for position, entry in enumerate(content["annotations"]):
        if entry["image_id"] not in image_ids:
            yield _dangling(entry, position, "image_id", image_ids, "images")
    yield from label_problems(content)


def _remedy(content: dict, section: str, twice: int | str) -> str:
    """Say what to do about an id that occurs twice."""
    if section == "annotations":
        return "`prepare merge` of this json alone renumbers them, each as an object of its own"
    key = "name" if section == "categories" else "file_name"
    same = [entry.get(key) for entry in content[section] if entry.get("id") == twice]
    if same[0] is not None and all(other == same[0] for other in same):
        return f"all of them are {show(same[0])}: delete all but one"
    both = f" ({show(same[0])}, {show(same[1])})" if None not in same[:2] else ""
    return f"which of them{both} is meant is unknown: export again with an id for each"


def training_problems(
    content: dict, image_dir: str | None, require_annotations: bool
) -> Iterator[str]:
    """Find whatever else keeps a file from being trained on.

    Args:
        image_dir: folder of the images; None looks for no file.
    """
    images = content["images"]
    names = Counter(entry["name"] for entry in content["categories"])
    joins = "`prepare merge` makes them one"
    yield from (
        f"categories: name {show(i)} occurs {n} times; {joins}" for i, n in names.items() if n > 1
    )
    if not images:
        yield "'images' is empty"
    if image_dir is not None:
        yield from absent_images([entry["file_name"] for entry in images], image_dir)
    yield from category_problems(content)
    if require_annotations and not content["annotations"]:
        yield "'annotations' is empty, expected at least one object"


def category_problems(content: dict) -> Iterator[str]:
    """Find annotations whose category is not there."""
    category_ids = {entry["id"] for entry in content["categories"]}
    for position, entry in enumerate(content["annotations"]):
        if entry["category_id"] not in category_ids:
            yield _dangling(entry, position, "category_id", category_ids, "categories")


def _dangling(entry: dict, position: int, key: str, known: set[int | str], section: str) -> str:
    other = other_type(entry[key], known)
    absent = f"{key} {show(entry[key])} is not in {section!r}"
    return f"{annotation_name(entry, position)}: {absent}" + (f"; {other}" if other else "")


def annotation_name(entry: dict, position: int) -> str:
    return (
        f"annotation {show(entry['id'])}" if "id" in entry else f"annotations[{position}] (no id)"
    )
