"""The metrics.jsonl of a run: a series of json lines without repeats."""

import json
import math
import os
from pathlib import Path
from types import NoneType
from typing import TextIO

from absl import logging

from mask_rcnn_jax.disk import write_whole

FILE_NAME = "metrics.jsonl"
PER_CLASS = "ap_class/"  # names that only loggers get; eval/<step>/metrics.json has the values


def read_metrics(path: str | os.PathLike) -> list[dict]:
    """The records of a metrics.jsonl; a line half written when its run was killed is left out.

    Raises ValueError, naming file and line, for a record that no run writes: `step` must be a whole
    number of at most 64 bits, everything else a number or null.
    """
    records = []
    with open(path, encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(record, dict) and "step" in record:
                if fault := _fault(record):
                    raise ValueError(f"{path}, line {number}: {fault}")
                records.append(record)
    return records


def _fault(record: dict) -> str | None:
    """Return why a record is none that a run writes."""
    for name, value in record.items():
        kinds = (int,) if name == "step" else (int, float, NoneType)
        is_huge = isinstance(value, int) and not -(2**63) <= value < 2**63
        if not isinstance(value, kinds) or isinstance(value, bool) or is_huge:
            expected = "a whole number" if name == "step" else "a number or null"
            return f"{name!r} is {str(value)[:40]!r}, expected {expected}"
    return None


def read_evaluations(workdir: Path, last_step: int) -> list[dict]:
    """The records of evaluations up to `last_step` in a workdir, with `ap/box` and `ap/mask`."""
    path = workdir / FILE_NAME
    records = read_metrics(path) if path.exists() else []
    return [r for r in records if "ap/box" in r and r["step"] <= last_step]


def last_metrics(workdir: Path) -> dict[str, float]:
    """The last value of each name in a workdir's metrics.jsonl, without `perf/`."""
    path, last = workdir / FILE_NAME, {}
    for record in read_metrics(path) if path.exists() else []:
        last |= {name: math.nan if x is None else float(x) for name, x in record.items()}
    return {name: x for name, x in last.items() if name != "step" and not name.startswith("perf/")}


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drop half-written records and those of steps after `last_step`, atomically.

    The shortened series replaces the file in one step: a run killed here leaves the old file or
    the new one.
    """
    if not path.exists():
        return
    records = [record for record in read_metrics(path) if record["step"] <= last_step]
    write_whole(path, "".join(json.dumps(record) + "\n" for record in records))


def in_place(file: TextIO, path: Path) -> TextIO:
    """Return `file`, or what takes its place: it was opened with "a+" at `path`, where something
    else may lie now. If nothing does, its content is written again."""
    try:
        if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
            return file
    except FileNotFoundError:
        if not path.parent.exists():  # which the run's lock notices
            return file
        file.seek(0)
        write_whole(path, file.read())  # as long as it is open, it is there
        logging.warning("%s was deleted while the run was at work, and is written again", path)
    file.close()
    return open(path, "a+", encoding="utf-8")
