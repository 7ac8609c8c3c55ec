"""Loggers: functions of (step, metrics, images) that receive everything a run measures.

metrics: name -> float. images: name -> uint8 [H, W, 3] RGB, often empty. A logger may also have
`open(workdir, entries)`, called before the first step, and `close()`. All are called on the first
process only.
"""

import json
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import jax
import numpy as np
from absl import logging

from mask_rcnn_jax.optional_packages import import_package
from mask_rcnn_jax.terminal.safe_text import file_name
from mask_rcnn_jax.training import dllogger, logger_keys, processes
from mask_rcnn_jax.training.ending import StopTraining
from mask_rcnn_jax.training.metrics import FILE_NAME, PER_CLASS, in_place, truncate_metrics

FLUSH_S = 120.0  # at most, until TensorBoard sees events
Metrics = Mapping[str, float]
Images = Mapping[str, np.ndarray]
Logger = Callable[[int, Metrics, Images], None]


class Loggers:
    """Call every logger of a run, on the first process; nothing happens on the others.

    A user's logger that raises is reported once, by name, and called again at the next step: a run
    is worth more than its log. The failure count is logged at the end. An error of `open` stops the
    run, which has not begun then, as does one of our own loggers, such as that of a full disk.
    `StopTraining` of a user's logger ends the run, see `why_ended`.
    """

    def __init__(self, own: Sequence[AbstractContextManager[Logger]], users: Sequence[Logger]):
        self._failures: Counter[str] = Counter()
        self._closing = ExitStack()
        self._own, self._users = [self._closing.enter_context(one) for one in own], users
        self._held: list[tuple[int, dict[str, float], Images]] | None = None
        self._why_ended = ""
        self._asked = True  # since the last call

    def why_ended(self) -> str:
        """Return which logger ends the run and why; "" if none does. All processes ask."""
        if not self._asked:
            self._asked, self._why_ended = True, processes.from_first(self._why_ended)
        return self._why_ended

    def open(self, workdir: Path, entries: dict[str, Any]) -> None:
        """Open the users' loggers."""
        for logger in self._users:
            if hasattr(logger, "open"):
                try:
                    logger.open(workdir, entries)
                except Exception as error:  # of the user's code
                    why = f"{type(error).__name__}: {error}"
                    raise ValueError(f"logger {logger_name(logger)} cannot start: {why}") from error
            if hasattr(logger, "close"):
                self._closing.callback(self._guard, logger, logger.close)

    def __call__(self, step: int, metrics: Mapping[str, Any], images: Images | None = None) -> None:
        """Log metrics, of anything that `float` takes, and images."""
        values = {name: float(value) for name, value in metrics.items()}
        if self._held is None:
            self._log(int(step), values, images or {})
        else:
            self._held.append((int(step), values, images or {}))

    def hold(self) -> None:
        """Keep what is logged from now on, until what belongs before it is there."""
        self._held = []

    def release(self, *first) -> None:
        """Log `first`, which are the arguments of a call, if any, and what was kept."""
        held, self._held = self._held or (), None
        if first:
            self(*first)
        for entry in held:
            self._log(*entry)

    def close(self) -> None:
        """Write out what is kept or buffered. A second call does nothing."""
        try:
            self.release()
        finally:
            self._closing.close()
            for name, count in self._failures.items():
                logging.warning("logger %s failed %d times", name, count)
            self._failures.clear()

    def _log(self, step: int, values: dict[str, float], images: Images) -> None:
        self._asked = False
        for log in self._own:
            log(step, values, images)
        for logger in self._users:
            self._guard(logger, logger, step, dict(values), dict(images))

    def _guard(self, logger: Logger, call: Callable, *arguments) -> None:
        try:
            call(*arguments)
        except StopTraining as stop:
            reason = f": {stop}" if str(stop) else ""
            self._why_ended = self._why_ended or f"logger {logger_name(logger)} ended it{reason}"
        except Exception as error:  # of the user's code
            name = logger_name(logger)
            if not self._failures[name]:
                why = f"{type(error).__name__}: {error}"
                logging.warning("logger %s failed, the run goes on: %s", name, why)
            self._failures[name] += 1


def open_loggers(
    workdir: Path, entries: dict[str, Any], users: Sequence[Logger], *, resume_step: int
) -> Loggers:
    """Open metrics.jsonl, TensorBoard's events and the users' loggers, on the first process."""
    if jax.process_index() != 0:
        return Loggers((), ())
    own = [jsonl_logger(workdir, resume_step), tensorboard_logger(workdir, resume_step)]
    loggers = Loggers(own, users)
    try:
        dllogger.truncate(workdir / dllogger.FILE_NAME, resume_step)
        loggers.open(workdir, entries)
    except BaseException:
        loggers.close()
        raise
    return loggers


def logger_name(logger: Logger) -> str:
    """Return the name of a logger for messages."""
    return getattr(logger, "__name__", None) or type(logger).__name__


def resolve_loggers(loggers: Sequence[Logger | str]) -> list[Logger]:
    """Return loggers with names replaced by the loggers of `train.loggers` that they name.

    Raises:
        ValueError: a name is unknown, its package is not installed, or a logger is no function.
    """
    for logger in loggers:
        known = logger in BY_NAME if isinstance(logger, str) else callable(logger)
        if not known:
            expected = ", ".join(map(repr, BY_NAME))
            raise ValueError(
                f"train.loggers has {logger!r}, expected {expected} or, in a call of train, a "
                "function of (step, metrics, images); TensorBoard and metrics.jsonl are always on"
            )
    return [BY_NAME[one]() if isinstance(one, str) else one for one in loggers]


def check_loggers(loggers: Sequence[Logger]) -> None:
    """Raise ValueError, naming what is missing, if a service has no key or address; for the first
    process, before minutes of other work."""
    for logger in loggers:
        if isinstance(logger, _Service):
            logger.check()


@contextmanager
def jsonl_logger(workdir: Path, resume_step: int) -> Iterator[Logger]:
    """Append a line of `metrics.jsonl` for each call that has metrics, without those per class.

    resume_step: the last step that counts as done. What a killed run wrote of later steps is
    removed, since they are about to be done again.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / FILE_NAME
    truncate_metrics(path, resume_step)
    file: TextIO = open(path, "a+", encoding="utf-8")

    def log(step: int, metrics: Metrics, images: Images) -> None:
        nonlocal file
        if metrics:
            # json has no NaN and no infinity.
            finite = {n: float(v) if math.isfinite(v) else None for n, v in metrics.items()}
            values = {n: v for n, v in finite.items() if not n.startswith(PER_CLASS)}
            file = in_place(file, path)
            file.write(json.dumps({"step": int(step), **values}, allow_nan=False) + "\n")
            file.flush()  # a killed run must have left every record that it logged

    try:
        yield log
        file = in_place(file, path)
    finally:
        file.close()


@contextmanager
def tensorboard_logger(workdir: Path, resume_step: int) -> Iterator[Logger]:
    """Write TensorBoard events into the workdir; `resume_step` is that of `jsonl_logger`.

    Not by the thread of tensorboardX's `SummaryWriter`, which ends at a full disk, so that the run
    would wait for it for ever.
    """
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    path, flushed = workdir / "events", time.monotonic()  # the file's name goes on

    def write(step: int, **content: Any) -> None:
        events.write_event(Event(wall_time=time.time(), step=step, **content))

    def log(step: int, metrics: Metrics, images: Images) -> None:
        for name, value in metrics.items():
            write(step, summary=summary.scalar(name, value))
        for name, image in images.items():
            write(step, summary=summary.image(name, np.asarray(image), dataformats="HWC"))
        nonlocal flushed
        if images or time.monotonic() - flushed > FLUSH_S:
            events.flush()  # to the disk
            flushed = time.monotonic()

    with closing(EventsWriter(str(path))) as events:
        write(resume_step + 1, session_log=SessionLog(status=SessionLog.START))
        yield log


class _Service:
    """A logger that starts with the run.

    start: (workdir, entries) -> the logger's context. check: raises ValueError if it cannot start.
    """

    def __init__(
        self,
        name: str,
        start: Callable[..., AbstractContextManager[Logger]],
        check: Callable[[], None],
    ):
        self.__name__, self._start, self.check, self._closing = name, start, check, ExitStack()
        self.close = self._closing.close

    def open(self, workdir: Path, entries: dict[str, Any]) -> None:
        self._log = self._closing.enter_context(self._start(workdir, entries))

    def __call__(self, step: int, metrics: Metrics, images: Images) -> None:
        self._log(step, metrics, images)


def wandb_logger(**kwargs) -> Logger:
    """Log to Weights & Biases. kwargs: those of `wandb.init`, such as project and name."""
    wandb = _package("wandb")

    @contextmanager
    def start(workdir: Path, entries: dict[str, Any]) -> Iterator[Logger]:
        path = workdir / "wandb_run.txt"
        path.write_text(run_id := _recalled(path) or uuid.uuid4().hex)
        defaults = {"name": workdir.name, "dir": str(workdir), "id": run_id, "resume": "allow"}
        run = wandb.init(**defaults | {"config": entries} | kwargs)

        def log(step: int, metrics: Metrics, images: Images) -> None:
            drawn = {name: wandb.Image(image) for name, image in images.items()}
            run.log({**metrics, **drawn}, step=step)

        yield log
        run.finish()

    return _Service("wandb", start, partial(logger_keys.check_wandb, wandb, kwargs))


def mlflow_logger(**kwargs) -> Logger:
    """Log to the MLflow server of MLFLOW_TRACKING_URI. kwargs: those of `mlflow.start_run`."""
    mlflow = _package("mlflow")

    @contextmanager
    def start(workdir: Path, entries: dict[str, Any]) -> Iterator[Logger]:
        path = workdir / "mlflow_run.txt"
        run_id = _recalled(path)
        known = {"run_id": run_id} if run_id else {"run_name": workdir.name}
        path.write_text(mlflow.start_run(**{**known, **kwargs}).info.run_id)
        mlflow.log_dict(entries, "config.json")

        def log(step: int, metrics: Metrics, images: Images) -> None:
            mlflow.log_metrics(metrics, step=step)
            taken: set[str] = set()
            for name, image in images.items():
                mlflow.log_image(image, f"images/{step}/{file_name(name, '.png', taken)}")

        yield log
        mlflow.end_run()

    return _Service("mlflow", start, partial(logger_keys.check_mlflow, mlflow, kwargs))


def clearml_logger(**kwargs) -> Logger:
    """Log to ClearML. kwargs: those of `clearml.Task.init`, such as project_name and task_name."""
    clearml = _package("clearml")

    @contextmanager
    def start(workdir: Path, entries: dict[str, Any]) -> Iterator[Logger]:
        path = workdir / "clearml_run.txt"
        known = _recalled(path)
        # A continued task would count on from its last step unless told 0.
        resumed = {"continue_last_task": 0} if known else {}
        defaults: dict[str, Any] = {"project_name": "mask_rcnn_jax", "task_name": workdir.name}
        defaults |= {"reuse_last_task_id": known or False, **resumed}
        # ClearML would otherwise log TensorBoard's events and the flags a second time.
        defaults |= {"auto_connect_frameworks": False, "auto_connect_arg_parser": False}
        clearml.Task._report_subprocess_enabled = False  # a fork may deadlock beside JAX's threads
        updates = import_package("clearml.utilities.check_updates")
        updates.CheckPackageUpdates._package_version_checked = True  # asks its makers, offline too
        task = clearml.Task.init(**{**defaults, **kwargs})
        if not clearml.Task.is_offline():
            path.write_text(task.id)
        task.connect_configuration(entries, "config")
        report = task.get_logger()

        def log(step: int, metrics: Metrics, images: Images) -> None:
            for name, value in metrics.items():
                title, _, series = name.partition("/")
                report.report_scalar(title, series or title, value, iteration=step)
            for name, image in images.items():
                report.report_image("images", name, iteration=step, image=image)

        yield log
        task.close()

    return _Service("clearml", start, partial(logger_keys.check_clearml, clearml, kwargs))


BY_NAME: dict[str, Callable[[], Logger]] = {
    "wandb": wandb_logger,
    "mlflow": mlflow_logger,
    "clearml": clearml_logger,
    "dllogger": dllogger.DLLogger,
}


def _package(name: str):
    """Import an optional package; ValueError with the command that installs it."""
    try:
        return import_package(name)
    except ImportError as error:
        raise ValueError(
            f"the logger {name!r} needs the package {name}: pip install 'mask-rcnn-jax[{name}]' "
            f"({error})"
        ) from error


def _recalled(path: Path) -> str | None:
    """Return the id that a service knows a resumed run by; None for a new run."""
    return path.read_text().strip() if path.exists() else None
