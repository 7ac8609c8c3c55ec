"""Metrics of a run, as json lines and for TensorBoard, and the progress of long work."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

FILE_NAME = "metrics.jsonl"


class MetricWriter:
    """Writes the metrics of a run into its workdir. On any process but the first it does nothing.

    `metrics.jsonl` is a series without repeats: on resume at a step, what a killed run wrote of
    later steps is taken out, because those steps are about to be done again. TensorBoard is told
    the same.
    """

    def __init__(
        self,
        workdir: str | os.PathLike,
        process_index: int = 0,
        *,
        resume_step: int | None = None,
    ):
        """Opens the files, which appear in `workdir`.

        Args:
            process_index: `jax.process_index()`.
            resume_step: the last step that counts as done (0 at the start of training); records
                of later steps are removed. None keeps them all.
        """
        self._file: TextIO | None = None
        self._events: Any = None
        if process_index != 0:
            return
        from tensorboardX import SummaryWriter

        Path(workdir).mkdir(parents=True, exist_ok=True)
        path = Path(workdir) / FILE_NAME
        _truncate(path, math.inf if resume_step is None else resume_step)
        self._file = open(path, "a", encoding="utf-8")
        purge_step = None if resume_step is None else resume_step + 1
        self._events = SummaryWriter(str(workdir), purge_step=purge_step)

    def write_scalars(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one record; anything that `float` takes is a value."""
        if self._file is None:
            return
        values = {name: float(value) for name, value in metrics.items()}
        record = {"step": int(step)} | {name: _json_number(v) for name, v in values.items()}
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()  # a killed run must have left every record that it logged
        for name, value in values.items():
            self._events.add_scalar(name, value, int(step))

    def write_images(self, step: int, images: Mapping[str, np.ndarray]) -> None:
        """Puts pictures, uint8 [H, W, 3] RGB, into TensorBoard."""
        if self._events is None:
            return
        for name, image in images.items():
            self._events.add_image(name, np.asarray(image), int(step), dataformats="HWC")
        self._events.flush()

    def close(self) -> None:
        """Writes out what is still buffered and closes the files. A second call does nothing."""
        if self._file is None:
            return
        self._file.close()
        self._events.close()
        self._file = self._events = None

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()


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


def _truncate(path: Path, last_step: float) -> None:
    """Drops half-written records and those of steps after `last_step`, all at once or not at all.

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


def _json_number(value: float) -> float | None:
    """json has no NaN and no infinity: they become null."""
    return value if math.isfinite(value) else None
