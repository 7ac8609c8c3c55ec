"""Ctrl-C and SIGTERM as exceptions that are not lost, wherever Python is when they come.

What is raised inside a gc callback or a finalizer is discarded; a library may catch it or make an
error of its own of it. So it is raised again until the block that waits for it is left, but not
while it is on its way there: what is cleaned up meanwhile is not to be interrupted.
"""

import atexit
import os
import select
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

EXIT_CODE = 130  # as shells have it
AGAIN_S = 0.2  # until an exception that may have been lost is raised once more
LATEST_S = 10.0  # from a Ctrl-C to the end, whatever there is to clean up or to compile
SOON_S = 2.0  # likewise, and from other signals, inside `ending_soon`
_STOP_WATCHING = 0  # no signal has this number

_makers: dict[int, Callable[[], BaseException]] = {}  # of the exceptions, by signal
_ends: dict[int, Callable[[], object]] = {}  # what ends the process where they cannot be raised
_cleaners: list[Callable[[], object]] = []
_pending: set[int] = set()  # signals whose exception has not arrived
_repeating = threading.Lock()
_exit_code: int | None = None
_watching = _is_program = _is_soon = False


def begin() -> None:
    """End this process at a Ctrl-C, in one line, until a command begins: its imports take seconds.

    Does nothing where Ctrl-C is ignored, as in a background job. Also leaves out the lines of XLA's
    C++ code, unless `--debug` is given: its errors are raised as well, and compiling for more than
    two minutes is none.
    """
    global _is_program
    if "--debug" not in sys.argv:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # which it reads when it is loaded
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end_at_once)
        atexit.register(_skip_the_rest)  # registered first, called last
        _is_program = True


def end_at_once(number: int = signal.SIGINT, frame: object = None) -> None:
    """End the process as `kill -9` would, but in one line."""
    end_with(EXIT_CODE, "interrupted" if _exit_code is None else "")  # or it is said already


def end_with(code: int, message: str, *, is_error: bool = True) -> NoReturn:
    """End the process at once, with an error on stderr if there is a message."""
    if message and sys.__stderr__:  # if that is closed, 2 may be another file
        with suppress(OSError):  # what reads it may have ended, as `tee` by the same Ctrl-C
            os.write(2, f"{'error: ' if is_error else ''}{message}\n".encode())
    os._exit(code)


def leave_with(code: int) -> None:
    """Have this process, if it is a command of its own, end with `code` once the functions of
    `atexit` are done: to take Python apart while a thread of XLA compiles would crash."""
    global _exit_code
    if _is_program:
        _exit_code = code


@contextmanager
def heard() -> Iterator[None]:
    """Raise KeyboardInterrupt at a Ctrl-C, unless that is ignored; a second one ends the process at
    once, as do ten seconds, also while C++ has the main thread."""
    global _watching
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    thread = threading.Thread(target=_watch, args=(reading,), name="signals", daemon=True)
    thread.start()
    _watching = True
    try:
        if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, end_at_once):
            with raising(signal.SIGINT, KeyboardInterrupt):
                yield
        else:
            yield
    finally:
        if _watching:  # and not forked since
            _watching = False
            signal.set_wakeup_fd(before)
            os.write(writing, bytes([_STOP_WATCHING]))
            thread.join()
        os.close(writing)
        os.close(reading)


@contextmanager
def ending_soon() -> Iterator[None]:
    """Have signals end the process within two seconds, until `end_later`: nothing is lost by it."""
    global _is_soon
    _is_soon = True
    try:
        yield
    finally:
        _is_soon = False


@contextmanager
def cleaning(clean: Callable[[], object]) -> Iterator[None]:
    """Have `clean()` called, from another thread, where a signal ends the process in this block
    without that the main thread leaves it."""
    _cleaners.append(clean)
    try:
        yield
    finally:
        _cleaners.remove(clean)


def end_cleaned(end: Callable[[], object]) -> None:
    """End the process after what `cleaning` was told, which has ten seconds."""
    cleaners = [threading.Thread(target=clean, daemon=True) for clean in _cleaners]
    for thread in cleaners:
        thread.start()
    for thread in cleaners:
        thread.join(LATEST_S)
    end()


def end_later() -> None:
    """End `ending_soon`."""
    global _is_soon
    _is_soon = False


@contextmanager
def raising(
    number: int, make: Callable[[], BaseException], end: Callable[[], object] | None = None
) -> Iterator[None]:
    """Raise `make()` in the main thread at a signal; inside `heard`, until this block is left.

    Whatever leaves it after the signal is replaced by that exception. Inside `ending_soon`, `end`
    is called in another thread where that takes too long, as where C++ has the main thread.
    """
    _makers[number] = make
    if end is not None:
        _ends[number] = end
    before = signal.signal(number, _raise)
    try:
        yield
        if number in _pending:
            raise make()
    except Exception as error:
        if number in _pending:
            raise make() from error
        raise
    finally:
        with _repeating:  # or `before` would get what was meant for `_raise`
            signal.signal(number, before)
            _pending.discard(number)
            _ends.pop(number, None)


def is_repeated(error: type[BaseException] | None) -> bool:
    """Whether an exception that was caught or discarded will be raised again."""
    endings = KeyboardInterrupt, SystemExit
    return bool(_pending) and error is not None and issubclass(error, endings)


def _raise(number: int, frame: object) -> None:
    _pending.add(number)
    if not _is_on_its_way():
        raise _makers[number]()


def _is_on_its_way() -> bool:
    """Whether the code that the signal met cleans up after such an exception."""
    error = sys.exception()
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error is not None


def _watch(pipe: int) -> None:
    """Read the numbers of signals, which C code writes at once, and repeat what is pending."""
    main = threading.main_thread().ident
    assert main is not None
    repeated: Counter[int] = Counter()  # their numbers come, too
    wait: float | None = None  # nothing is pending before the first signal
    latest = float("inf")
    end: Callable[[], object] = end_at_once
    while True:
        if time.monotonic() > latest:
            end_cleaned(end)
        if not select.select([pipe], [], [], wait)[0]:
            with _repeating:
                for number in tuple(_pending):
                    if callable(signal.getsignal(number)):
                        repeated[number] += 1
                        signal.pthread_kill(main, number)  # also ends what it waits for
            continue
        wait = AGAIN_S
        for number in os.read(pipe, 512):
            if number == _STOP_WATCHING:
                return
            if repeated[number]:
                repeated[number] -= 1
            # The handler is another one in `serve`, for instance.
            elif signal.getsignal(number) is not _raise:
                continue
            elif number == signal.SIGINT and latest < float("inf"):
                end_at_once()
            elif number == signal.SIGINT:
                latest = time.monotonic() + (SOON_S if _is_soon else LATEST_S)
            elif _is_soon and number in _ends:
                latest, end = min(latest, time.monotonic() + SOON_S), _ends[number]


def _skip_the_rest() -> None:
    if _exit_code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(_exit_code)


def _forget_the_pipe() -> None:
    """A forked process must not write into the pipe of the one that it comes from."""
    global _watching
    if _watching:
        _watching = False
        with suppress(ValueError):  # forked from another thread
            signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_the_pipe)
