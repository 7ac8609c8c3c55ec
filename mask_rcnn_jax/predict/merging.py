"""Put the files of all shards together."""

import csv
import heapq
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from absl import logging

from mask_rcnn_jax import stores
from mask_rcnn_jax.disk import whole_file
from mask_rcnn_jax.predict.lists import Shard
from mask_rcnn_jax.predict.saving import TABLE, JsonList, csv_head, csv_row
from mask_rcnn_jax.predict.shards import (
    STATES,
    check_settings,
    list_shards,
    read_lines,
    read_record,
    shard_file,
    state_of,
)
from mask_rcnn_jax.terminal.progress import Progress

DETECTIONS, SKIPPED, CSV = "detections.json", "skipped.jsonl", "detections.csv"
_MOST_NAMED = 20  # shards that are missing or failed
_MOST_REASONS = 1000  # that are counted, and of which the log has some
_LOGGED = 10


def merge_shards(folder: str, output: str, kinds: Sequence[str] = ()) -> None:
    """Write detections.json, that of a single run on all images, and skipped.jsonl into `output`.

    folder: or the address of one.
    kinds: "csv" for detections.csv, too.

    Raises ValueError if shards are missing, damaged, or do not belong together.
    """
    files = {shard: stores.local_file(shard_file(folder, shard)) for shard in _all_shards(folder)}
    records = {shard: _record(folder, shard, file) for shard, file in files.items()}
    _check_alike(folder, records)
    total = sum(record["inputs"] for record in records.values())
    progress, reasons = Progress("images", total), Counter[tuple[str, str]]()
    streams = [read_lines(file, records[shard]) for shard, file in files.items()]
    merged = heapq.merge(*streams, key=lambda line: line["image_id"])
    output, table = output.rstrip("/"), None
    with ExitStack() as opened:
        entries = JsonList(opened.enter_context(whole_file(f"{output}/{DETECTIONS}")))
        opened.enter_context(closing(entries))
        left = opened.enter_context(whole_file(f"{output}/{SKIPPED}"))
        file = opened.enter_context(open(left, "w", encoding="utf-8"))
        if "csv" in kinds:
            draft = opened.enter_context(whole_file(f"{output}/{CSV}"))
            table = csv.writer(opened.enter_context(open(draft, "w", **TABLE)))
            table.writerow(csv_head(next(iter(records.values()))["keypoints"]))
        for number, line in enumerate(merged, start=1):
            if line["image_id"] != number:
                raise _other_inputs(folder, number, line)
            if (state := state_of(line)) != "done":
                file.write(json.dumps(line) + "\n")
                reason = line[state] if len(reasons) < _MOST_REASONS else "others"
                reasons[state, reason] += 1
            for entry in line.get("detections", ()):
                named = {"file_name": line["file_name"], **entry}
                entries.append(named)
                if table:
                    table.writerow(csv_row(named))
            progress.advance(1)
    counts = [sum(record[state] for record in records.values()) for state in STATES]
    logging.info("%d images: %d done, %d skipped, %d failed", total, *counts)
    for (state, reason), count in reasons.most_common(_LOGGED):
        logging.warning("%s %d: %s", state, count, reason)
    if counts[-1]:
        again = [shard for shard, record in records.items() if record["failed"]]
        logging.warning("%s does those that failed again", _command(again))
    logging.info("results: %s/%s and %s", output, DETECTIONS, SKIPPED)


def _all_shards(folder: str) -> list[Shard]:
    """ValueError names those that are missing."""
    found = list_shards(folder)
    totals = sorted({shard.total for shard in found})
    if not totals:
        raise ValueError(f"--merge {folder}: no shards, which infer writes with --shard")
    if len(totals) > 1:
        text = " and of ".join(map(str, totals))
        raise ValueError(f"--merge {folder} holds shards of {text}, expected those of one run")
    shards = [Shard(number, totals[0]) for number in range(totals[0])]
    if missing := [shard for shard in shards if shard not in found]:
        what = f"{len(missing)} of {totals[0]} shards missing"
        raise ValueError(f"--merge {folder}: {what}; run {_command(missing)}")
    return shards


def _command(shards: Sequence[Shard]) -> str:
    numbers = ", ".join(str(shard.number) for shard in shards[:_MOST_NAMED])
    more = ", .." if len(shards) > _MOST_NAMED else ""
    return f"infer --shard i/{shards[0].total} for i = {numbers}{more}"


def _record(folder: str, shard: Shard, file: Path) -> dict[str, Any]:
    try:
        return read_record(file)
    except ValueError as error:
        raise ValueError(f"--merge {folder}: {error}; run {_command([shard])}") from error


def _check_alike(folder: str, records: Mapping[Shard, Mapping[str, Any]]) -> None:
    first, *others = records.values()
    for shard, record in records.items():
        check_settings(shard_file(folder, shard), record["settings"], first["settings"])
    if any(record[name] != first[name] for name in ("canvases", "batch") for record in others):
        logging.warning(
            "shards were made on different canvases or in other batches, as with --batch_size or "
            "by machines with other numbers of devices: scores may differ in their last digits "
            "from those of a single run"
        )


def _other_inputs(folder: str, number: int, line: Mapping[str, Any]) -> ValueError:
    what = "is missing" if line["image_id"] > number else "occurs twice"
    wrong = min(number, line["image_id"])
    return ValueError(
        f"--merge {folder}: image {wrong} of --input {what}, near {line['file_name']}: the shards "
        "had different inputs"
    )
