"""DLLogger's JSON lines, as NVIDIA's examples write them, without its package.

A line is `DLLL ` and an object with `timestamp`, `datetime`, `elapsedtime`, `type`, `step` and
`data`. Losses, rate, time and memory have the names of NVIDIA's PyTorch example.
"""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from mask_rcnn_jax.disk import write_whole
from mask_rcnn_jax.recipe.entries import flatten

FILE_NAME = "dllogger.json"
NAMES = {
    "loss/total": "loss",
    "loss/rpn_cls": "loss_objectness",
    "loss/rpn_box": "loss_rpn_box_reg",
    "loss/box_cls": "loss_classifier",
    "loss/box_reg": "loss_box_reg",
    "loss/mask": "loss_mask",
    "loss/keypoint": "loss_keypoint",
    "lr": "learning_rate",
    "perf/images_per_s": "throughput",
    "perf/peak_memory_mb": "memory",
    "ap/box": "BBOX_mAP",
    "ap/mask": "MASK_mAP",
}


def truncate(path: Path, last_step: int) -> None:
    """Drop lines of steps after `last_step`, and a half-written one, atomically."""
    if path.exists():
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
        write_whole(path, "".join(line for line in lines if _is_kept(line, last_step)))


def _is_kept(line: str, last_step: int) -> bool:
    try:
        step = json.loads(line.removeprefix("DLLL "))["step"]
    except (ValueError, KeyError, TypeError):
        return False
    is_step = isinstance(step, list) and step and isinstance(step[0], int)
    return line.endswith("\n") and not (is_step and step[0] > last_step)


def _finite(value: Any) -> Any:
    """A value of the config with text for infinity and NaN, which json does not have."""
    if isinstance(value, list | tuple):
        return list(map(_finite, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


class DLLogger:
    """Append the metrics of a run to `dllogger.json` in its workdir."""

    def open(self, workdir: Path, entries: Mapping[str, Any]) -> None:
        self._started = datetime.now()
        self._file = open(workdir / FILE_NAME, "a", encoding="utf-8")
        self._write("PARAMETER", {n: _finite(v) for n, v in flatten(entries).items()})

    def __call__(
        self, step: int, metrics: Mapping[str, float], images: Mapping[str, np.ndarray]
    ) -> None:
        # json has no NaN and no infinity.
        finite = {n: v if math.isfinite(v) else None for n, v in metrics.items()}
        data = {NAMES.get(name, name): value for name, value in finite.items()}
        if milliseconds := data.pop("perf/ms_per_step", None):
            data["time"] = milliseconds / 1000
        if data:
            self._write([step], data)

    def close(self) -> None:
        self._write([], {"e2e_train_time": self._elapsed(datetime.now())})
        self._file.close()

    def _elapsed(self, now: datetime) -> float:
        return (now - self._started).total_seconds()

    def _write(self, step: list[int] | str, data: dict[str, Any]) -> None:
        now = datetime.now()
        times = {"timestamp": str(now.timestamp()), "datetime": str(now)}
        entry = {**times, "elapsedtime": str(self._elapsed(now)), "type": "LOG", "step": step}
        self._file.write(f"DLLL {json.dumps({**entry, 'data': data}, allow_nan=False)}\n")
        self._file.flush()
