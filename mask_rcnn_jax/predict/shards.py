"""Detect objects in a share of the images, into one file that is written whole or not at all.

`shard-00000-of-00008.jsonl` has a line for each image, in order, with `detections`, or with why it
was `skipped` (it is damaged or absent) or `failed` (its disk, store or network did; the next start
tries it again). Two lines follow: what the results depend on, and the SHA-256 of all lines above.
"""

import hashlib
import heapq
import json
import os
import re
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from absl import logging

from mask_rcnn_jax import store_folders, stores
from mask_rcnn_jax.data.options import ExampleOptions
from mask_rcnn_jax.data.unused import Unused
from mask_rcnn_jax.disk import whole_file
from mask_rcnn_jax.predict.annotate import Unavailable, detect_images
from mask_rcnn_jax.predict.engines import Exported
from mask_rcnn_jax.predict.inputs import Input
from mask_rcnn_jax.predict.lists import Images, Shard
from mask_rcnn_jax.predict.predictor import Predictor
from mask_rcnn_jax.predict.result import Result
from mask_rcnn_jax.predict.saving import named_results
from mask_rcnn_jax.recipe.entries import flatten
from mask_rcnn_jax.recipe.recipe import Recipe
from mask_rcnn_jax.terminal.progress import Progress

STATES = ("done", "skipped", "failed")  # of an image
# More images, none of which can be read, are a sign of a missing disk, not of bad images.
MOST_UNREAD = 10
_NAME = re.compile(r"shard-(\d{5})-of-(\d{5})\.jsonl")
_BLOCK = 1 << 16  # bytes of a shard that are read at a time
# Other entries of a recipe that bear on what is found.
_ENTRIES = ("train.precision", "train.implementation", "data.apply_exif", "data.inclusive_boxes")
_FREE = ("model.num_classes", "model.init_from", "model.adapt_input", "data.canvases")


def shard_file(folder: str, shard: Shard) -> str:
    """The path or address of a shard's file."""
    return f"{folder.rstrip('/')}/shard-{shard.number:05d}-of-{shard.total:05d}.jsonl"


def list_shards(folder: str) -> set[Shard]:
    """Shards that have a file in a folder or below an address; none if it is absent."""
    if stores.is_address(folder):
        names = [name for name, is_file in stores.list_folder(folder).items() if is_file]
    else:
        names = os.listdir(folder) if os.path.isdir(folder) else []
    return {Shard(int(m[1]), int(m[2])) for m in filter(None, map(_NAME.fullmatch, names))}


def settings_of(
    recipe: Recipe, weights: Exported | Mapping, tile: int, overlap: float
) -> dict[str, Any]:
    """What results depend on, as shards record it.

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


def write_shard(
    predictor: Predictor, images: Images, folder: str, shard: Shard, settings: Mapping[str, Any]
) -> dict[str, Any]:
    """Detect objects in the images of a shard, unless its file is there, and return its record.

    Of a file that is there, the images that failed are done again.

    Args:
        predictor: detects.
        images: of all shards.
        folder: or the address of one.
        shard: whose images are looked at.
        settings: by name, what must be the same for all shards; see `settings_of`.

    Raises ValueError if the file is of other images or settings, or if none of many images can be
    read.
    """
    path, name = shard_file(folder, shard), f"shard {shard.number}/{shard.total}"
    if stores.is_address(folder):
        store_folders.check_writable(folder)  # before the work
    wanted = _inputs(images, shard) | {
        "settings": dict(settings),
        "canvases": [list(size) for size in predictor.canvases],
        "batch": predictor.images_at_once,
        "keypoints": list(predictor.keypoint_names),
    }
    kept: Iterable[dict[str, Any]] = ()
    again: set[int] | None = None
    if found := _found(path):
        local, record = found
        _check_record(path, record, wanted)
        if not record["failed"]:
            text = "%s is there: %s, %d images done, %d skipped"
            logging.info(text, path, name, record["done"], record["skipped"])
            return record
        again = {one["image_id"] for one in read_lines(local, record) if "failed" in one}
        kept = (one for one in read_lines(local, record) if "failed" not in one)
    given = (one for one in images.share(shard) if again is None or one[0] in again)
    number = wanted["inputs"] if again is None else len(again)
    progress, unused = Progress(f"images of {name}", number), Unused()
    counts, digest, reason = Counter(dict.fromkeys(STATES, 0)), hashlib.sha256(), ""
    with (
        closing(_lines(predictor, given, unused, progress)) as made,
        whole_file(path) as draft,
        open(draft, "wb") as file,
    ):
        for line in heapq.merge(kept, made, key=lambda line: line["image_id"]):
            state = state_of(line)
            counts[state] += 1
            if state != "done" and not reason:
                reason = f"{line['file_name']}: {line[state]}"
            _write(file, digest, line)
        if not counts["done"] and wanted["inputs"] > MOST_UNREAD:
            read = f"none of {wanted['inputs']:,} images could be read"
            raise ValueError(f"{read}, such as {reason}")
        record = wanted | counts
        _write(file, digest, record)
        file.write(_checksum(digest))
    for text in unused.lines(infers=True):
        logging.warning("%s", text)
    logging.info("%s: %d images done, %d skipped: %s", name, *(counts[s] for s in STATES[:2]), path)
    if counts["failed"]:
        text = "%d images could not be had; the same command does them again"
        logging.warning(text, counts["failed"])
    return record


def state_of(line: Mapping[str, Any]) -> str:
    """What became of the image of a line, out of STATES."""
    return next((state for state in STATES[1:] if state in line), STATES[0])


def read_record(path: Path) -> dict[str, Any]:
    """What the results of a shard depend on, with the number of its `inputs` and of each of STATES.

    Raises ValueError if the file is not as it was written.
    """
    digest, last, end = hashlib.sha256(), b"", b""
    with open(path, "rb") as file:
        for line in file:
            digest.update(end)
            last, end = end, line
    if end != _checksum(digest):
        raise ValueError(f"{path} is damaged: its lines do not have the SHA-256 of its last one")
    return json.loads(last)


def read_lines(path: Path, record: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the lines of images of a shard with this record; the file is only open while some of it
    is read, so that there may be thousands."""
    return islice(_all_lines(path), record["inputs"])


def _all_lines(path: Path) -> Iterator[dict[str, Any]]:
    offset, lines = 0, [b""]
    while lines:
        with open(path, "rb") as file:
            file.seek(offset)
            lines = file.readlines(_BLOCK)
            offset = file.tell()
        yield from map(json.loads, lines)


def check_settings(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the setting, for a shard that was made with others."""
    for name in wanted:
        if found.get(name) != wanted[name]:
            was, now = found.get(name), wanted[name]
            raise ValueError(
                f"{path} was made with {name} {was}, not {now}; delete it or take another --output"
            )


def _check_record(path: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    check_settings(path, found["settings"], wanted["settings"])
    if any(found[name] != wanted[name] for name in ("inputs", "names")):
        counts = f"{found['inputs']:,} images, now {wanted['inputs']:,}"
        raise ValueError(
            f"{path} is of other images than --input has now ({counts}); delete it or choose "
            "another --output"
        )


def _found(path: str) -> tuple[Path, dict[str, Any]] | None:
    """A shard's file on this machine and its record; None if it is absent or damaged."""
    try:
        local = stores.local_file(path)
        return local, read_record(local)
    except FileNotFoundError:
        return None
    except ValueError as error:
        logging.warning("%s; it is made again", error)
        return None


def _inputs(images: Images, shard: Shard) -> dict[str, Any]:
    """Number of images in a shard, and a digest of their names."""
    digest, count = hashlib.sha256(), 0
    for number, image in images.share(shard):
        digest.update(f"{number} {image.name}\n".encode("utf-8", "surrogatepass"))
        count += 1
    return {"inputs": count, "names": digest.hexdigest()}


def _write(file: Any, digest: Any, line: Mapping[str, Any]) -> None:
    content = json.dumps(line).encode() + b"\n"
    digest.update(content)
    file.write(content)


def _checksum(digest: Any) -> bytes:
    return json.dumps({"sha256": digest.hexdigest()}).encode() + b"\n"


def _lines(
    predictor: Predictor, inputs: Iterable[tuple[int, Input]], unused: Unused, progress: Progress
) -> Generator[dict[str, Any]]:
    """Yield what a shard says of each image, in order."""
    left: dict[int, dict[str, Any]] = {}  # that are skipped or failed

    def line(result: Result, image: Input, number: int) -> dict[str, Any]:
        height, width = result.image.shape[:2]
        found = named_results(result, number)
        return _named(image, number) | {"height": height, "width": width, "detections": found}

    def on_error(number: int, image: Input, error: ValueError) -> None:
        state = "failed" if isinstance(error, Unavailable) else "skipped"
        logging.warning("%s %s", state, error)
        reason = str(error).removeprefix(f"{image.source}: ")
        left[number] = _named(image, number) | {state: reason}
        progress.advance(1)

    with closing(detect_images(predictor, inputs, line, on_error, (), unused)) as found:
        for one in found:
            progress.advance(1)
            for number in sorted(n for n in left if n < one["image_id"]):
                yield left.pop(number)
            yield one
    yield from (left[number] for number in sorted(left))


def _named(image: Input, number: int) -> dict[str, Any]:
    return {"file_name": str(image.name), "image_id": number}
