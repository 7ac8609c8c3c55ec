"""Flags of commands that several processes run together, and how they join."""

import atexit
import ctypes
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from absl import flags, logging

from mask_rcnn_jax.terminal import interrupts

AUTO = "auto"  # of --coordinator_address
ADDRESS_HELP = (
    f"HOST:PORT of the first of several processes; {AUTO!r} takes this and the next two from "
    "SLURM, Open MPI, Kubernetes or a slice of a TPU. One process alone if unset."
)
PROCESS_FLAGS = ("coordinator_address", "num_processes", "process_id", "lost_after")
# Also of an abort for another cause, which cannot be told from a lost process.
LOST = (
    "aborted, since another process of this run ended or cannot be reached, as its own "
    "output says, or for the cause that the lines above name"
)
# A process that has ended waits so long for the first, which may still write the report: JAX's
# five minutes would end both with an error. A dead process is noticed by its missing heartbeats.
END_S = 24 * 3600
# Until all processes have to be there, since batch systems start some of them late; JAX's default.
JOIN_S = 300
TRY_S = 5.0  # to connect to the first process once
_FAULT = re.compile("Agent status: (%s)?(.*?)( This is usually|$)")  # in what JAX says at its end

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
    reached: list[str] = []
    try:
        with _one_last_line(reached):
            jax.distributed.initialize(
                **where,
                initialization_timeout=JOIN_S,
                heartbeat_timeout_seconds=FLAGS.lost_after,
                shutdown_timeout_seconds=END_S,
            )
    except ValueError as error:
        raise ValueError(
            f"--coordinator_address={address}: {error} Without a cluster, set it to "
            "HOST:PORT, with --num_processes and --process_id"
        ) from error
    except _Unreachable as error:
        interrupts.end_with(1, f"--coordinator_address={address}: {error}")
    except RuntimeError as error:
        what = " ".join(str(error).split())
        if "bad_cast" in what:  # it has no way to tell Python why
            what = _fault_of_client()
        # An orderly end would shut down what was not set up, and print a traceback.
        interrupts.end_with(
            1,
            f"--coordinator_address={address}: the processes did not join{''.join(reached)}. "
            f"JAX says: {what}",
        )
    return jax.process_index(), jax.process_count()


class _Unreachable(Exception):
    """Why a process cannot reach the first one."""


@contextmanager
def _one_last_line(reached: list[str]) -> Iterator[None]:
    """Let the clients of JAX's service that are made inside end this process with exit code 1 and
    one line when another process is lost.

    They are made once the first process can be reached; `reached` is told, or _Unreachable raised.
    By default they print the addresses of C++ code and abort, which only a private name of JAX can
    change. Its callback gets a status that Python cannot be given, so that the process aborts as
    well, but without addresses. Its time to shut down has no other name, either.
    """
    global _abort_handler

    def end(_: object = None) -> None:
        interrupts.end_with(1, LOST)

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

    def make(address: str, index: int, **settings: Any) -> Any:
        settings["init_timeout"] = _reach(address, index, settings["init_timeout"])
        reached.append(f", though process {index} has reached the first one at {address}")
        own = {"missed_heartbeat_callback": end, "shutdown_timeout": END_S}
        return make_client(address, index, **settings | own)

    _jax.get_distributed_runtime_client = make
    try:
        yield
    finally:
        _jax.get_distributed_runtime_client = make_client


def _reach(address: str, index: int, seconds: int) -> int:
    """Wait until the first process listens, and return the seconds that are left to join it, at
    least ten. JAX alone would not say why it cannot be reached.

    Args:
        address: HOST:PORT, as given or as JAX found it in the cluster.
        index: of this process.
        seconds: to wait at most.
    """
    host, _, port = address.rpartition(":")
    begin, told = time.monotonic(), False
    while True:
        try:
            with socket.create_connection((host.strip("[]"), int(port)), TRY_S):
                left = seconds - (time.monotonic() - begin)
                return max(min(10, seconds), round(left))
        except OSError as error:
            why = _reason(error)
        waited = time.monotonic() - begin
        text = f"process {index} cannot reach the first process at {address}: {why}"
        if waited >= seconds:
            raise _Unreachable(f"{text}; tried for {seconds} seconds")
        if waited > TRY_S and not told:
            logging.warning("%s; trying for %d seconds", text, seconds)
            told = True
        time.sleep(min(1.0, max(0.0, seconds - waited)))


def _reason(error: OSError) -> str:
    if isinstance(error, socket.gaierror):
        return f"the name cannot be resolved ({error.strerror})"
    if isinstance(error, ConnectionRefusedError):
        return "the connection is refused, as where nothing listens"
    if isinstance(error, TimeoutError):
        return "the connection timed out, as behind a firewall"
    return error.strerror or str(error)


def _fault_of_client() -> str:
    """What JAX says of a client that did not join, which it tells when that is shut down."""
    import jax

    said = ["no reason"]

    def shut_down() -> None:
        try:
            jax.distributed.shutdown()
        except Exception as error:
            if found := _FAULT.search(" ".join(str(error).split())):
                said[0] = found[2]

    thread = threading.Thread(target=shut_down, daemon=True)
    thread.start()
    thread.join(TRY_S)
    return said[0]


def _check_numbers(address: str, count: int | None, index: int | None) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"--coordinator_address is {address!r}, expected HOST:PORT or {AUTO!r}")
    if count is None or index is None:
        raise ValueError("--coordinator_address needs --num_processes and --process_id")
    if not 0 <= index < count:
        raise ValueError(f"--process_id is {index}, expected 0 to {count - 1} (--num_processes)")
