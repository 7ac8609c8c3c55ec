"""Put the parts of all shards together."""

import heapq
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

from absl import logging

from mask_rcnn_jax.predict.part_files import (
    PartFile,
    list_parts,
    local_copy,
    place_of,
    read_lines,
    whole_file,
)
from mask_rcnn_jax.predict.parts import check_settings, read_record
from mask_rcnn_jax.predict.saving import JsonList
from mask_rcnn_jax.terminal.progress import Progress

DETECTIONS, SKIPPED = "detections.json", "skipped.jsonl"
_MOST_NAMED = 3  # parts that are missing
_MOST_REASONS = 1000  # that are counted, and of which the log has some
_LOGGED = 10


def merge_parts(folder: str, output: str) -> None:
    """Write detections.json, that of a single run on all images, and skipped.jsonl into `output`.

    folder: or the address of one.

    Raises ValueError if parts are missing, damaged, or do not belong together.
    """
    shards = _whole_shards(folder)
    records = {file: read_record(folder, file) for files in shards for file in files}
    _check_alike(folder, records)
    total = sum(record["inputs"] for record in records.values())
    progress, reasons, done = Progress("images", total), Counter[str](), 0
    streams = [_shard_lines(folder, files) for files in shards]
    merged = heapq.merge(*streams, key=lambda line: line["image_id"])
    with whole_file(output, DETECTIONS) as found, whole_file(output, SKIPPED) as left:
        with closing(JsonList(found)) as entries, open(left, "w", encoding="utf-8") as file:
            for number, line in enumerate(merged, start=1):
                if line["image_id"] != number:
                    raise _other_inputs(folder, number, line)
                if (reason := line.get("skipped")) is not None:
                    file.write(json.dumps(line) + "\n")
                    reasons[reason if len(reasons) < _MOST_REASONS else "others"] += 1
                else:
                    done += 1
                for entry in line.get("detections", ()):
                    entries.append({"file_name": line["file_name"], **entry})
                progress.advance(1)
        if done + sum(reasons.values()) != total:
            raise ValueError(f"{folder} is damaged: its parts hold fewer images than {total:,}")
    logging.info("%d images: %d done, %d skipped", total, done, total - done)
    for reason, count in reasons.most_common(_LOGGED):
        logging.warning("skipped %d: %s", count, reason)
    logging.info("results: %s and %s", place_of(output, DETECTIONS), SKIPPED)


def _whole_shards(folder: str) -> list[list[PartFile]]:
    """The parts of each shard, in order. ValueError names those that are missing."""
    found = list_parts(folder)
    counts = sorted({file.shards for file in found})
    endings = sorted({file.ending for file in found} - {"json"})
    if not counts or not endings:
        raise ValueError(f"--merge {folder}: no parts, which infer writes with --shard")
    if len(counts) > 1 or len(endings) > 1:
        text = f"of {' and of '.join(map(str, counts))} shards, in {' and in '.join(endings)}"
        raise ValueError(f"--merge {folder} holds parts {text}, expected those of one run")
    shards, missing = list[list[PartFile]](), list[PartFile]()
    numbers: dict[int, set[int]] = {}
    for file in found:
        if file.ending == endings[0] and file._replace(ending="json") in found:
            numbers.setdefault(file.shard, set()).add(file.number)
    for shard in range(counts[0]):
        own = numbers.get(shard, set())
        files = [PartFile(shard, counts[0], n, endings[0]) for n in range(max(own, default=0) + 1)]
        absent = [file for file in files if file.number not in own]
        if not absent and not read_record(folder, files[-1])["last"]:
            absent = [files[-1]._replace(number=files[-1].number + 1)]
        missing += absent
        shards.append(files)
    if missing:
        names = ", ".join(file.stem for file in missing[:_MOST_NAMED])
        names += " and others" if len(missing) > _MOST_NAMED else ""
        again = ", ".join(str(shard) for shard in sorted({file.shard for file in missing})[:20])
        raise ValueError(
            f"--merge {folder}: {names} missing; run infer --shard i/{counts[0]} for i = {again}"
        )
    return shards


def _check_alike(folder: str, records: Mapping[PartFile, Mapping[str, Any]]) -> None:
    first, *others = records.items()
    for file, record in others:
        place = place_of(folder, file.name)
        check_settings(place, record["settings"], first[1]["settings"])
    if any(record[n] != first[1][n] for n in ("canvases", "batch") for _, record in others):
        logging.warning(
            "parts were made on different canvases or in other batches, as with --batch_size or by "
            "machines with other numbers of devices: scores may differ in their last digits from "
            "those of a single run"
        )


def _shard_lines(folder: str, files: list[PartFile]) -> Iterator[dict[str, Any]]:
    for file in files:
        yield from read_lines(local_copy(folder, file.name))


def _other_inputs(folder: str, number: int, line: Mapping[str, Any]) -> ValueError:
    what = "is missing" if line["image_id"] > number else "occurs twice"
    wrong = min(number, line["image_id"])
    return ValueError(
        f"--merge {folder}: image {wrong} of --input {what}, near {line['file_name']}: the shards "
        "had different inputs, or a part is damaged"
    )
