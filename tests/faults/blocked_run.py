"""A run with a loader's worker whose first step never ends, as one that compiles for minutes.

python -m tests.faults.blocked_run WORKDIR; says "blocked:" and the worker's process id once the
main thread is in C code, where no signal handler of Python's is called.
"""

import ctypes
import multiprocessing
import signal
import threading

from mask_rcnn_jax import cli
from mask_rcnn_jax.cli import processes as cli_processes
from mask_rcnn_jax.terminal import interrupts
from mask_rcnn_jax.training import processes
from tests.training import stubbed_run
from tests.training.own_run import small_config


def make_step(*_):
    def step(state, batch):
        workers = [process.pid for process in multiprocessing.active_children()]
        threading.Timer(0.5, print, ["blocked:", *workers], {"flush": True}).start()
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)

    return step


def with_worker():
    config = small_config()
    config.data.num_workers = 1
    return config


def main(arguments) -> None:
    stubbed_run.make_step, stubbed_run.small_config = make_step, with_worker
    with processes.end_on_sigterm():
        stubbed_run.main(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    interrupts.begin()
    cli.run(main, cli_processes.define_processes, positional=True)
