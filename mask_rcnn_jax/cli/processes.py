"""Flags of commands that several processes run together, and how they join."""

import atexit
import ctypes
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from absl import flags

AUTO = "auto"  # of --coordinator_address
ADDRESS_HELP = (
    f"HOST:PORT of the first of several processes; {AUTO!r} takes this and the next two from "
    "SLURM, Open MPI or Kubernetes. One process alone if unset."
)
PROCESS_FLAGS = ("coordinator_address", "num_processes", "process_id", "lost_after")
# Also of an abort for another cause, which cannot be told from a lost process.
LOST = (
    "error: aborted, since another process of this run ended or cannot be reached, as its own "
    "output says, or for the cause that the lines above name\n"
)
# A process that has ended waits so long for the first, which may still write the report: JAX's
# five minutes would end both with an error. A dead process is noticed by its missing heartbeats.
END_S = 24 * 3600
UNJOINED = "error: --coordinator_address={address}: the processes did not join. JAX says:"

_abort_handler: Any = None  # C code may call it until the process ends


def define_processes() -> None:
    """Define the flags of a command that several processes can run together."""
    flags.DEFINE_string("coordinator_address", None, ADDRESS_HELP)
    flags.DEFINE_integer("num_processes", None, "How many processes there are.")
    flags.DEFINE_integer("process_id", None, "Which of them this one is, from 0.")
    lost_help = "Seconds without a sign of life until a process counts as dead, and the others end."
    flags.DEFINE_integer("lost_after", 100, lost_help, lower_bound=1)


def join_processes() -> tuple[int, int]:
    """Wait for the other processes, if there are any, before anything looks at the devices.

    Returns the index of this process and the number of processes.

    Raises ValueError for flags that do not fit together, or where no cluster is found.
    """
    FLAGS = flags.FLAGS
    if "coordinator_address" not in FLAGS:
        return 0, 1
    address, numbers = FLAGS.coordinator_address, (FLAGS.num_processes, FLAGS.process_id)
    if address is None:
        if numbers != (None, None):
            raise ValueError("--num_processes and --process_id need --coordinator_address")
        return 0, 1
    import jax

    where: dict[str, Any] = {}
    if address != AUTO:
        _check_numbers(address, *numbers)
        where = {name: FLAGS[name].value for name in PROCESS_FLAGS[:3]}
    try:
        with _one_last_line():
            jax.distributed.initialize(
                **where,
                heartbeat_timeout_seconds=FLAGS.lost_after,
                shutdown_timeout_seconds=END_S,
            )
    except ValueError as error:
        raise ValueError(
            f"--coordinator_address={address}: {error} Without a cluster, set it to "
            "HOST:PORT, with --num_processes and --process_id"
        ) from error
    except RuntimeError as error:
        # An orderly exit would shut down what was not set up, and print a traceback.
        what = " ".join(str(error).split())
        os.write(2, f"{UNJOINED.format(address=address)} {what}\n".encode())
        os._exit(1)
    return jax.process_index(), jax.process_count()


@contextmanager
def _one_last_line() -> Iterator[None]:
    """Let the clients of JAX's service that are made inside end this process with exit code 1 and
    one line when another process is lost.

    By default they print the addresses of C++ code and abort, which only a private name of JAX can
    change. Its callback gets a status that Python cannot be given, so that the process aborts as
    well, but without addresses. Its time to shut down has no other name, either.
    """
    global _abort_handler

    def end(_: object = None) -> None:
        os.write(2, LOST.encode())
        os._exit(1)

    _abort_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(end)
    set_signal = ctypes.CDLL(None).signal
    set_signal(signal.SIGABRT, _abort_handler)
    atexit.register(set_signal, signal.SIGABRT, None)  # Python cannot be called when it has ended
    try:
        from jax._src.lib import _jax

        make_client = _jax.get_distributed_runtime_client
    except (ImportError, AttributeError):  # another version of JAX: the addresses are printed
        yield
        return
    _jax.get_distributed_runtime_client = partial(
        make_client, missed_heartbeat_callback=end, shutdown_timeout=END_S
    )
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make_client


def _check_numbers(address: str, count: int | None, index: int | None) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--coordinator_address is {address!r}, expected HOST:PORT or {AUTO!r}")
    if count is None or index is None:
        raise ValueError("--coordinator_address needs --num_processes and --process_id")
    if not 0 <= index < count:
        raise ValueError(f"--process_id is {index}, expected 0 to {count - 1} (--num_processes)")
