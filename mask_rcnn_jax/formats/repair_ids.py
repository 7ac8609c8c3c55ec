"""Repair sections and ids of a COCO json where only one thing can be meant.

All functions take the content of a json, of whatever form, and return it with new entries in place
of those that they change; `done` counts what they did. Keys keep their order.
"""

from collections import Counter
from collections.abc import Container, Iterable
from itertools import count
from typing import Any

from mask_rcnn_jax.annotations.ids import is_id, is_zero, whole_number, with_whole_ids
from mask_rcnn_jax.annotations.lvis import IMAGE_KEYS

Content = dict[str, Any]
SECTIONS = ("images", "categories", "annotations")
REFERENCES = {"images": "image_id", "categories": "category_id"}


def entries_of(content: Content, section: str) -> list[Any]:
    """The entries of a section, none if it is no list."""
    found = content.get(section)
    return found if isinstance(found, list) else []


def with_lists(content: Content, done: Counter[str]) -> Content:
    """Sections that are objects become the lists of their values, as LIVECELL's annotations."""
    lists = {}
    for section in SECTIONS:
        found = content.get(section)
        if not isinstance(found, dict) or not found:
            continue
        values = list(found.values())
        # Others refer to images and categories, whose ids may be the keys.
        needs_id = section != "annotations"
        if all(isinstance(v, dict) and ("id" in v or not needs_id) for v in values):
            lists[section] = values
            done[f"{section} of an object, now in a list"] += len(values)
    return content | lists


def with_ids(content: Content, done: Counter[str]) -> Content:
    """Ids of images and categories have one type, and annotations refer to them by that type."""
    whole = with_whole_ids(content)
    for section in SECTIONS:
        pairs = zip(entries_of(content, section), entries_of(whole, section), strict=True)
        changed = sum(old is not new and repr(old) != repr(new) for old, new in pairs)
        done[f"{section} with ids such as 1.0, now 1"] += changed
    content = whole
    for section, key in REFERENCES.items():
        ids = [e["id"] for e in entries_of(content, section) if isinstance(e, dict) and "id" in e]
        if new := _of_one_type([i for i in ids if type(i) in (int, str)]):
            done[f"ids of {section} of another type than the others, or too large"] += len(new)
            content = _replaced(content, section, key, new)
            ids = [new.get(i, i) if type(i) in (int, str) else i for i in ids]
        known = {i for i in ids if type(i) in (int, str)}
        content = _with_references(content, section, known, done)
    return content


def _of_one_type(ids: list[int | str]) -> dict[int | str, int | str]:
    """New ids by old ones: numbers for texts such as "2" among numbers, or texts for all if some
    number has more than 64 bits. None are changed where two would be the same."""
    numbers, texts = ({i for i in ids if type(i) is kind} for kind in (int, str))
    if numbers and texts:
        new: dict[int | str, int | str] = {text: _other(text) for text in texts}
        is_clear = all(type(i) is int and is_id(i) for i in new.values())
        is_clear &= len({*new.values(), *numbers}) == len(numbers) + len(texts)
        return new if is_clear else {}
    if not all(map(is_id, numbers)):
        return {number: str(number) for number in numbers}
    return {}


def _other(value: int | str) -> int | str:
    """The same id as of the other type; a text that is no number stays."""
    if isinstance(value, int):
        return str(value)
    text = value.removesuffix(".0")
    is_number = len(text) < 21 and text.removeprefix("-").isdecimal() and text.isascii()
    return int(text) if is_number and str(int(text)) == text else value


def _replaced(content: Content, section: str, key: str, new: dict[Any, Any]) -> Content:
    """The content with new ids of a section, and in what refers to them."""

    def of(value: Any) -> Any:
        return new.get(value, value) if type(value) in (int, str) else value

    changed: Content = {}
    for name, field in ((section, "id"), ("annotations", key)):
        entries = entries_of(content, name)
        has_field = [isinstance(entry, dict) and field in entry for entry in entries]
        if any(has_field):
            pairs = zip(entries, has_field, strict=True)
            changed[name] = [e | {field: of(e[field])} if has else e for e, has in pairs]
    return _with_lists_mapped(content | changed, section, of)


def _with_references(
    content: Content, section: str, known: Container[Any], done: Counter[str]
) -> Content:
    """References as numbers where the ids are numbers, and as texts where they are texts."""
    key, count_of = REFERENCES[section], Counter[str]()

    def of(value: Any) -> Any:
        value = whole_number(value)
        if type(value) in (int, str) and value not in known and _other(value) in known:
            count_of[key] += 1
            return _other(value)
        return value

    entries = []
    for entry in entries_of(content, "annotations"):
        if isinstance(entry, dict) and key in entry:
            value = of(entry[key])
            entry = entry if value is entry[key] else entry | {key: value}
        entries.append(entry)
    if entries:
        content = content | {"annotations": entries}
    content = _with_lists_mapped(content, section, of)
    done[f"{key} of another type than the ids of {section}"] += count_of[key]
    return content


def _with_lists_mapped(content: Content, section: str, of: Any) -> Content:
    """The content with LVIS's lists of categories changed by a function."""
    if section != "categories":
        return content
    images = []
    for entry in entries_of(content, "images"):
        if isinstance(entry, dict):
            lists = {k: entry[k] for k in IMAGE_KEYS if isinstance(entry.get(k), list)}
            entry = entry | {k: list(map(of, ids)) for k, ids in lists.items()}
        images.append(entry)
    return content | {"images": images} if images else content


def without_copies(content: Content, done: Counter[str]) -> Content:
    """Entries that are there twice, equal in everything, stay once.

    Annotations without an id of their own may be several equal objects.
    """
    changed = {}
    for section in SECTIONS:
        entries, kept, seen = entries_of(content, section), [], set[str]()
        usable = [e for e in entries if isinstance(e, dict) and not _lacks_id(e, section)]
        times = Counter(repr(entry.get("id")) for entry in usable)
        for entry in entries:
            is_several = isinstance(entry, dict) and times[repr(entry.get("id"))] > 1
            text = repr(sorted(entry.items())) if is_several else ""
            if not text or text not in seen:
                kept.append(entry)
            seen.add(text)
        if len(kept) < len(entries):
            done[f"{section} that repeat another one"] += len(entries) - len(kept)
            changed[section] = kept
    return content | changed


def _lacks_id(entry: Content, section: str) -> bool:
    found = entry.get("id")
    return section == "annotations" and (not is_id(found) or is_zero(found))


def with_annotation_ids(content: Content, done: Counter[str]) -> Content:
    """Annotations have ids that occur once and are not 0; the first of several keeps its id.

    Nothing refers to them, and each is an object of its own, as `prepare merge` has it.
    """
    entries = entries_of(content, "annotations")
    used = {entry["id"] for entry in entries if isinstance(entry, dict) and is_id(entry.get("id"))}
    free: Iterable[int] = (n for n in count(1) if n not in used and str(n) not in used)
    numbers, seen, new = iter(free), set[int | str](), []
    for entry in entries:
        if isinstance(entry, dict) and (reason := _why_new(entry, seen)):
            number = next(numbers)
            entry = entry | {"id": str(number) if isinstance(entry.get("id"), str) else number}
            done[reason] += 1
        elif isinstance(entry, dict):
            seen.add(entry["id"])
        new.append(entry)
    return content | {"annotations": new} if new else content


def _why_new(entry: Content, seen: set[int | str]) -> str:
    found = entry.get("id")
    if not is_id(found):
        return "annotations without a usable id, now with one"
    if is_zero(found):
        return "annotations with the id 0, now with another"
    return "annotations with the id of another one, now with their own" if found in seen else ""
