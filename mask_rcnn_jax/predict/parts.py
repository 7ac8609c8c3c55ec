"""Detect objects in a share of the images, in parts that are done once."""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from absl import logging

from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.predict.annotate import detect_images
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.lists import Images, Shard
from mask_rcnn_jax.predict.part_files import (
    FORMATS,
    RECORD,
    PartFile,
    delete_drafts,
    delete_record,
    list_parts,
    local_copy,
    place_of,
    whole_file,
    write_lines,
)
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.saving import named_results
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.terminal.progress import Progress

PART_SIZE = 10_000
# A part of more images, none of which can be read, is a sign of a missing disk, not of bad images.
MOST_UNREAD = 10
# Other entries of a recipe that bear on what is found.
_ENTRIES = ("train.precision", "train.implementation", "data.apply_exif", "data.inclusive_boxes")
_FREE = ("model.num_classes", "model.init_from", "model.adapt_input", "data.canvases")


@dataclass(frozen=True)
class Parts:
    """How results are written in parts.

    Attributes:
        shard: whose images are looked at.
        size: images in a part; the last one of a shard may have fewer.
        format: one of FORMATS.
        settings: by name, what must be the same for all parts; see `settings_of`.
    """

    shard: Shard = Shard()
    size: int = PART_SIZE
    format: str = FORMATS[0]
    settings: Mapping[str, Any] = field(default_factory=dict)


def settings_of(
    recipe: Recipe, weights: Exported | Mapping, tile: int, overlap: float
) -> dict[str, Any]:
    """What results depend on, as parts record it.

    recipe: with the score threshold.
    weights: an exported model, or variables.
    """
    entries = flatten(recipe.to_dict())
    in_data = {f"data.{name}" for name in ExampleOptions.__dataclass_fields__}
    kept = {
        name: repr(value)
        for name, value in sorted(entries.items())
        if name in in_data or name in _ENTRIES or name.startswith(("model.", "eval.", "data.bands"))
    }
    for name in _FREE:
        kept.pop(name, None)
    digest = hashlib.sha256(json.dumps(kept).encode()).hexdigest()[:16]
    return {
        "weights": _weights_digest(weights),
        "engine": weights.engine if isinstance(weights, Exported) else None,
        "score_threshold": recipe.eval.score_threshold,
        "tile": tile,
        "overlap": overlap if tile else None,
        "recipe": digest,
    }


def _weights_digest(weights: Exported | Mapping) -> str:
    digest = hashlib.sha256()
    if isinstance(weights, Exported):
        for model in weights.models:
            digest.update(model.path.read_bytes() if model.path else b"")
        return digest.hexdigest()[:16]
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        array = np.ascontiguousarray(jax.device_get(leaf))
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()[:16]


def write_parts(predictor: Predictor, images: Images, folder: str, parts: Parts) -> None:
    """Detect objects in the images of a shard and write the parts that are not there.

    folder: or the address of one.

    Raises ValueError if a part was made of other images or with other settings, or if none of many
    images can be read.
    """
    found, shard = list_parts(folder), parts.shard
    _check_kind(folder, found, parts)
    delete_drafts(folder, shard)
    progress = Progress(f"images of shard {shard.number}/{shard.total}", images.count(shard))
    settings = dict(parts.settings) | {"part_size": parts.size}
    canvases = [list(size) for size in predictor.canvases]
    shared = {"settings": settings, "canvases": canvases, "batch": predictor.images_at_once}
    unused, done, skipped, kept = Unused(), 0, 0, 0
    for number, (inputs, is_last) in enumerate(_in_parts(images.share(shard), parts.size)):
        file = PartFile(*shard, number, parts.format)
        wanted = {"inputs": len(inputs), "names": _names_digest(inputs), "last": is_last, **shared}
        record = None
        if {file, file._replace(ending="json")} <= found:
            record = read_record(folder, file)
            _check_record(place_of(folder, file.name), record, wanted)
            kept += 1
            progress.advance(len(inputs))
        else:
            if file._replace(ending="json") in found:  # left of a part that was deleted
                delete_record(folder, file)
            record = _write_part(predictor, inputs, folder, file, wanted, unused, progress)
        done, skipped = done + record["done"], skipped + record["skipped"]
    for line in unused.lines(infers=True):
        logging.warning("%s", line)
    logging.info("shard %d/%d: %d images done, %d skipped", *shard, done, skipped)
    logging.info("results: %s, %d parts, of which %d were there", folder, number + 1, kept)


def read_record(folder: str, file: PartFile) -> dict[str, Any]:
    """Read the record beside a part; ValueError if it is damaged."""
    path = local_copy(folder, file.stem + RECORD)
    try:
        record = json.loads(path.read_bytes())
        # Of another version, entries are missing.
        counts = {name: int(record[name]) for name in ("inputs", "done", "skipped", "detections")}
        settings = {"settings": dict(record["settings"])}
        return {name: record[name] for name in _CHECKED} | counts | settings
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{place_of(folder, file.stem + RECORD)} is damaged: {error}") from error


_CHECKED = ("inputs", "names", "last", "settings", "canvases", "batch")


def check_settings(place: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the setting, for a part that was made with others."""
    for name in wanted:
        if found.get(name) != wanted[name]:
            was, now = found.get(name), wanted[name]
            raise ValueError(
                f"{place} was made with {name} {was}, not {now}; choose another --output, or "
                "delete the parts"
            )


def _check_record(place: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    check_settings(place, found["settings"], wanted["settings"])
    if any(found[name] != wanted[name] for name in ("inputs", "names", "last")):
        counts = f"{found['inputs']:,} images, now {wanted['inputs']:,}"
        raise ValueError(
            f"{place} is of other images than --input has now ({counts}); choose another "
            "--output, or delete the parts"
        )


def _check_kind(folder: str, found: Iterable[PartFile], parts: Parts) -> None:
    """Raise ValueError if there are parts of another number of shards, or in another format."""
    for file in sorted(found):
        if file.shards != parts.shard.total or file.ending not in (parts.format, RECORD[1:]):
            now = f"{parts.shard.total} shards in {parts.format}"
            raise ValueError(f"{folder} holds {file.name}, not of {now}; choose another --output")


def _in_parts(
    images: Iterator[tuple[int, Input]], size: int
) -> Iterator[tuple[list[tuple[int, Input]], bool]]:
    """Yield the images of each part, at least one, and whether it is the last."""
    part: list[tuple[int, Input]] = []
    for item in images:
        if len(part) == size:
            yield part, False
            part = []
        part.append(item)
    yield part, True


def _names_digest(inputs: Iterable[tuple[int, Input]]) -> str:
    digest = hashlib.sha256()
    for number, image in inputs:
        digest.update(f"{number} {image.name}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _write_part(
    predictor: Predictor,
    inputs: list[tuple[int, Input]],
    folder: str,
    file: PartFile,
    wanted: Mapping[str, Any],
    unused: Unused,
    progress: Progress,
) -> dict[str, Any]:
    """Write a part and its record, which is returned."""
    counts, reasons = {"done": 0, "skipped": 0, "detections": 0}, []

    def counted() -> Iterator[dict[str, Any]]:
        for line in _lines(predictor, inputs, unused):
            if "skipped" in line:
                counts["skipped"] += 1
                reasons[:] = reasons or [f"{line['file_name']}: {line['skipped']}"]
            else:
                counts["done"] += 1
                counts["detections"] += len(line["detections"])
            progress.advance(1)
            yield line

    with whole_file(folder, file.name) as draft:
        write_lines(draft, counted(), file.ending)
        if counts["skipped"] == len(inputs) > MOST_UNREAD:
            raise ValueError(f"none of {len(inputs):,} images could be read, such as {reasons[0]}")
    record = counts | dict(wanted)
    with whole_file(folder, file.stem + RECORD) as draft:
        draft.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return record


def _lines(
    predictor: Predictor, inputs: list[tuple[int, Input]], unused: Unused
) -> Iterator[dict[str, Any]]:
    """Yield what a part says of each image, in order."""
    skipped: dict[int, dict[str, Any]] = {}

    def line(result: Result, image: Input, number: int) -> dict[str, Any]:
        height, width = result.image.shape[:2]
        found = named_results(result, number)
        return _named(image, number) | {"height": height, "width": width, "detections": found}

    def on_error(number: int, image: Input, error: ValueError) -> None:
        logging.warning("skipped %s", error)
        reason = str(error).removeprefix(f"{image.source}: ")
        skipped[number] = _named(image, number) | {"skipped": reason}

    for one in detect_images(predictor, inputs, line, on_error, (), unused):
        for number in sorted(n for n in skipped if n < one["image_id"]):
            yield skipped.pop(number)
        yield one
    yield from (skipped[number] for number in sorted(skipped))


def _named(image: Input, number: int) -> dict[str, Any]:
    return {"file_name": str(image.name), "image_id": number}
