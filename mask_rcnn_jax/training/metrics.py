"""The metrics.jsonl of a run: a series of json lines without repeats."""

import json
import os
from pathlib import Path

FILE_NAME = "metrics.jsonl"


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a metrics.jsonl; a line half written when its run was killed is left out."""
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "step" in record:
                records.append(record)
    return records


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop half-written records and those of steps after `last_step`, atomically.

    The shortened series replaces the file in one step: a run killed here leaves the old file or
    the new one.
    """
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if record["step"] <= last_step]
    text = "".join(json.dumps(record) + "\n" for record in records)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
