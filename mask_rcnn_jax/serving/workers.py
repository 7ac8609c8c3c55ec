"""Processes that serve behind one port, each with its own model: what each of them is given."""

import mmap
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import jax
import numpy as np

from mask_rcnn_jax.predict.programs import usable_cpus

GIVEN = "MASK_RCNN_JAX_WORKER"  # environment variable: the numbers of a `Worker`
# What all workers know of each: whether it runs, and is ready; images at work, and answered since
# the start; connections; memory at its peak. Each writes its own row; the supervisor, when it ends.
_NAMES = ("alive", "ready", "waiting", "answered", "connections", "megabytes")
COUNTS = np.dtype([(name, np.int64) for name in _NAMES])
_FIND_DEVICES = "import jax; print(jax.default_backend(), jax.local_device_count())"


class Worker(NamedTuple):
    """What a worker is given.

    Attributes:
        number: of the worker, from 0.
        total: of workers.
        supervisor: id of the process that started it.
        listener: file descriptor of the socket that all share.
        counts: file descriptor for `open_counts`.
    """

    number: int
    total: int
    supervisor: int
    listener: int
    counts: int


class Share(NamedTuple):
    """A worker's part of the machine: CPUs, all if none are named, and environment variables."""

    cpus: Sequence[int]
    environment: dict[str, str]


def is_one() -> bool:
    """Return whether this process is a worker, until it has asked for what it is `given`."""
    return GIVEN in os.environ


def given() -> Worker | None:
    """Return what this process was given if it is a worker. Its own children are none."""
    text = os.environ.pop(GIVEN, None)
    return Worker(*map(int, text.split())) if text else None


@contextmanager
def ending_with(supervisor: int) -> Iterator[None]:
    """End this process where its supervisor ends inside the block, such as while it compiles: until
    then it would keep the port."""
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            if os.getppid() != supervisor:
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        is_over.set()


def open_counts(file: int, count: int) -> np.ndarray:
    """Return COUNTS [count] in the memory of a file, which all that open it share."""
    return np.frombuffer(mmap.mmap(file, count * COUNTS.itemsize), COUNTS)


def divide(count: int) -> list[Share]:
    """Return a part of the CPUs, or of the GPUs, for each of `count` workers.

    Raises ValueError if there are more workers than those, or if the devices are others.
    """
    backend, devices = find_devices()
    if backend == "cpu":
        if count > (cpus := usable_cpus()):
            raise ValueError(f"--workers is {count}, expected at most {cpus}, one for each CPU")
        has_affinity = hasattr(os, "sched_getaffinity")
        mine = sorted(os.sched_getaffinity(0)) if has_affinity else []
        return [Share(mine[index::count], {}) for index in range(count)]
    if backend != "gpu":
        raise ValueError(f"--workers is {count}, which needs CPUs or GPUs and not {backend}")
    if count > devices:
        raise ValueError(
            f"--workers is {count}, expected at most {devices}, one for each GPU; with "
            "--platform cpu, workers share the CPUs"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(devices)))
    ids = visible.split(",")[:devices]
    parts = (",".join(ids[index::count]) for index in range(count))
    return [Share((), {"CUDA_VISIBLE_DEVICES": part}) for part in parts]


def find_devices() -> tuple[str, int]:
    """Return JAX's name of the devices here and how many there are, without taking them.

    A process that has looked at GPUs holds most of their memory, so another one looks.
    """
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]
    if platforms == "cpu":
        return "cpu", 1
    environment = os.environ | ({"JAX_PLATFORMS": platforms} if platforms else {})
    done = subprocess.run(
        [sys.executable, "-c", _FIND_DEVICES], env=environment, text=True, capture_output=True
    )
    if done.returncode:
        raise OSError(f"JAX finds no devices: {done.stderr.strip().rpartition(chr(10))[2]}")
    backend, devices = done.stdout.split()
    return backend, int(devices)
