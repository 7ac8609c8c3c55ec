"""The additions of LVIS (Gupta et al., 2019) to COCO's json.

An image has `coco_url` in place of `file_name`. It was searched for the classes of its objects and
of `neg_category_ids` only; of those in `not_exhaustive_category_ids`, objects may be missing. A
class has a `frequency`.
"""

from collections.abc import Iterator
from typing import Any

from mask_rcnn_jax.annotations.segmentation import show

ABSENT, NOT_EXHAUSTIVE = "neg_category_ids", "not_exhaustive_category_ids"
IMAGE_KEYS = (ABSENT, NOT_EXHAUSTIVE)
FREQUENCIES = ("r", "c", "f")  # rare, common, frequent


def file_name_in(url: Any) -> str | None:
    """Return folder and name at the end of a `coco_url`, such as "train2017/000000391895.jpg"."""
    parts = url.split("/")[-2:] if isinstance(url, str) else []
    return "/".join(parts) if len(parts) == 2 and not {"", ".", ".."} & set(parts) else None


def with_file_names(content: Any) -> Any:
    """Return the content with the file names in `coco_url` for images that have no `file_name`."""
    images = content.get("images") if isinstance(content, dict) else None
    if not isinstance(images, list) or not any(map(_lacks_name, images)):
        return content
    return content | {"images": list(map(_named, images))}


def _lacks_name(entry: Any) -> bool:
    return isinstance(entry, dict) and "file_name" not in entry and "coco_url" in entry


def _named(entry: Any) -> Any:
    name = file_name_in(entry["coco_url"]) if _lacks_name(entry) else None
    return entry if name is None else entry | {"file_name": name}


def label_problems(content: dict[str, Any]) -> Iterator[str]:
    """Find images whose lists of classes, where they have some, are not ids of categories."""
    known = {entry["id"] for entry in content["categories"]}
    for position, entry in enumerate(content["images"]):
        for key in IMAGE_KEYS:
            value = entry.get(key, [])
            if not (isinstance(value, list) and all(type(i) in (int, str) for i in value)):
                yield f"images[{position}] has {key} {show(value)}, expected a list of category ids"
            elif unknown := [i for i in value if i not in known]:
                where = f"images[{position}] has {show(unknown[0])} in {key}"
                yield f"{where}, which is not in 'categories'"


def has_labels(content: dict[str, Any]) -> bool:
    """Check whether images say which classes they were searched for."""
    return any(ABSENT in entry for entry in content["images"])


def scoring_problems(content: dict[str, Any]) -> Iterator[str]:
    """Find keys that scores by LVIS's rules need and that are missing or wrong."""
    for position, entry in enumerate(content["images"]):
        if missing := [key for key in IMAGE_KEYS if key not in entry]:
            yield f"images[{position}] lacks {', '.join(map(repr, missing))}"
    for position, entry in enumerate(content["categories"]):
        if entry.get("frequency") not in FREQUENCIES:
            found = show(entry.get("frequency"))
            expected = f"one of {list(FREQUENCIES)}"
            yield f"categories[{position}] has frequency {found}, expected {expected}"
