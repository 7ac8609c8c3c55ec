"""A Ctrl-C or a SIGTERM ends a command, wherever Python is when it comes."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

from mask_rcnn_jax.__main__ import COMMANDS
from mask_rcnn_jax.terminal import interrupts

INT = signal.SIGINT
SECONDS = 30  # what never ends would last so long


@pytest.fixture(autouse=True)
def usual_handler():
    """pytest may have been started as a background job, which ignores Ctrl-C."""
    before = signal.signal(INT, signal.default_int_handler)
    hook, sys.unraisablehook = sys.unraisablehook, lambda unraisable: None
    yield
    signal.signal(INT, before)
    sys.unraisablehook = hook


def work() -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        time.sleep(0.01)
    raise AssertionError("it was lost")


def in_a_gc_callback() -> None:
    def callback(phase, info):
        gc.callbacks.remove(callback)
        signal.raise_signal(INT)

    gc.callbacks.append(callback)
    gc.collect()


def in_a_finalizer() -> None:
    class Dropped:
        def __del__(self):
            signal.raise_signal(INT)

    Dropped()


def in_a_weakref_callback() -> None:
    class Dropped:
        pass

    dropped = Dropped()
    watch = weakref.ref(dropped, lambda _: signal.raise_signal(INT))
    del dropped
    assert watch() is None


def in_code_that_catches_all() -> None:
    """Twice."""
    try:
        signal.raise_signal(INT)
    except BaseException:
        pass
    try:
        work()
    except KeyboardInterrupt:
        pass


def in_a_jax_callback() -> None:
    import jax

    shape = jax.ShapeDtypeStruct((), "float32")
    call = jax.jit(lambda: jax.pure_callback(lambda: signal.raise_signal(INT), shape))
    try:
        call()
    except jax.errors.JaxRuntimeError:
        pass


@pytest.mark.parametrize(
    "lose",
    [
        in_a_gc_callback,
        in_a_finalizer,
        in_a_weakref_callback,
        in_code_that_catches_all,
        in_a_jax_callback,
    ],
)
def test_one_that_is_discarded_is_raised_again(lose):
    with pytest.raises(KeyboardInterrupt), interrupts.heard():
        lose()
        work()
    assert signal.getsignal(INT) is signal.default_int_handler


def test_an_error_that_a_library_makes_of_it_is_one():
    with pytest.raises(KeyboardInterrupt), interrupts.heard():
        try:
            signal.raise_signal(INT)
        except KeyboardInterrupt:
            raise RuntimeError("callback failed") from None


def test_a_sigterm_that_is_discarded_is_raised_again(monkeypatch):
    """Also where another handler has taken over meanwhile."""
    seen = threading.Event()
    with pytest.raises(SystemExit) as end, interrupts.heard():
        with interrupts.raising(signal.SIGTERM, lambda: SystemExit(75)):
            try:
                signal.raise_signal(signal.SIGTERM)
            except SystemExit:
                pass
            with monkeypatch.context():
                signal.signal(signal.SIGTERM, lambda number, frame: seen.set())
                assert seen.wait(SECONDS)
    assert end.value.code == 75


def test_what_is_cleaned_up_is_not_interrupted_again(monkeypatch):
    monkeypatch.setattr(interrupts, "AGAIN_S", 0.01)
    cleaned = []
    with pytest.raises(KeyboardInterrupt), interrupts.heard():
        try:
            try:
                signal.raise_signal(INT)
            finally:
                time.sleep(0.2)
                raise OSError
        finally:
            time.sleep(0.2)
            cleaned.append(1)
    assert cleaned


def test_without_one_nothing_changes():
    before = signal.getsignal(INT), signal.set_wakeup_fd(-1)
    threads = threading.active_count()
    with pytest.raises(ValueError, match="own"), interrupts.heard():
        raise ValueError("own")
    assert (signal.getsignal(INT), signal.set_wakeup_fd(-1)) == before
    assert threading.active_count() == threads


def ended(program: str | list[str], *presses: str) -> tuple[int, str, float]:
    """Exit code and stderr of a program, or of Python's arguments, to which a SIGINT is sent at
    each of these lines of its output, and the seconds since the last."""
    arguments = ["-c", textwrap.dedent(program)] if isinstance(program, str) else program
    process = subprocess.Popen(
        [sys.executable, *arguments],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(INT, signal.default_int_handler),
    )  # fmt: skip
    for line in presses:
        assert process.stdout.readline().strip() == line
        process.send_signal(INT)
    sent = time.monotonic()
    said = process.communicate(timeout=2 * SECONDS)[1]
    return process.returncode, said, time.monotonic() - sent


def test_a_second_one_ends_the_process_while_c_has_the_main_thread():
    """A call through ctypes releases Python's lock, as XLA does when it compiles; this one waits
    for itself."""
    program = """
    import ctypes, threading
    from mask_rcnn_jax.terminal import interrupts
    interrupts.begin()
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    with interrupts.heard():
        for seconds, line in ((0.5, "first"), (1, "again")):
            threading.Timer(seconds, print, [line], {"flush": True}).start()
        libc.pthread_mutex_lock(mutex)
    """
    code, said, seconds = ended(program, "first", "again")
    assert (code, said) == (130, "error: interrupted\n") and seconds < SECONDS / 2


def test_one_is_enough_where_the_main_thread_never_returns():
    program = """
    import ctypes, threading
    from mask_rcnn_jax.terminal import interrupts
    interrupts.begin()
    interrupts.LATEST_S = 0.5
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    with interrupts.heard():
        threading.Timer(0.5, print, ["first"], {"flush": True}).start()
        libc.pthread_mutex_lock(mutex)
    """
    code, said, seconds = ended(program, "first")
    assert (code, said) == (130, "error: interrupted\n") and seconds < SECONDS / 2


# Instead of packages that commands import.
ENDLESS = """import os
print(os.environ.get("TF_CPP_MIN_LOG_LEVEL"), flush=True)
while True: pass
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_that_imports_ends_in_one_line(command, tmp_path, monkeypatch):
    """And leaves out the lines of XLA."""
    for name in ("absl", "jax"):
        (tmp_path / f"{name}.py").write_text(ENDLESS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    code, said, _ = ended(["-m", f"mask_rcnn_jax.{command}"], "3")
    assert (code, said) == (130, "error: interrupted\n")
    if command == "train":
        assert ended(["-m", "mask_rcnn_jax.train", "--debug"], "None")[0] == 130


def test_a_program_of_another_package_keeps_its_handler(tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("import mask_rcnn_jax")
    (tmp_path / "own" / "job.py").write_text("import signal; print(signal.getsignal(2))")
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "own.job", "mask_rcnn_jax"],
        env={**os.environ, "PYTHONPATH": paths}, text=True, capture_output=True, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(INT, signal.default_int_handler),
    )  # fmt: skip
    assert "default_int_handler" in done.stdout, done.stderr


@pytest.mark.parametrize("closed", [True, False])
def test_it_ends_a_process_in_order_whose_stderr_is_gone(closed):
    """As in `mrcnn train |& tee log`, where the Ctrl-C ends `tee` first. A closed one may be a
    file of another kind by then."""
    program = """
    import time
    from mask_rcnn_jax import cli
    from mask_rcnn_jax.terminal import interrupts
    def main(argv):
        print("first", flush=True)
        time.sleep(30)
    interrupts.begin()
    try:
        cli.run(main, lambda: None)
    except SystemExit as end:
        print(end.code, interrupts._exit_code, flush=True)
        interrupts._exit_code = None
        interrupts.end_at_once()
    """
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=writing,
        preexec_fn=lambda: closed and os.close(2),
    )  # fmt: skip
    os.close(writing)
    os.close(reading)
    assert process.stdout.readline() == "first\n"
    process.send_signal(INT)
    said = process.communicate(timeout=2 * SECONDS)[0]
    assert process.returncode == 130 and said.endswith("130 130\n")


def test_a_library_and_a_background_job_keep_their_handlers():
    program = """
    import signal
    import mask_rcnn_jax
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    from mask_rcnn_jax.terminal import interrupts
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.begin()
    with interrupts.heard():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    """
    assert ended(program)[:2] == (0, "")


def test_a_forked_process_tells_the_first_nothing():
    """A signal to the whole group would count twice."""
    program = f"""
    import os, signal, time, warnings
    from mask_rcnn_jax.terminal import interrupts
    warnings.simplefilter("ignore")  # from Python 3.12 on, of threads beside a fork
    interrupts.begin()
    try:
        with interrupts.heard():
            started, start = os.pipe()
            child = os.fork()
            if child:
                os.read(started, 1)
                os.kill(child, signal.SIGINT)
                os.waitpid(child, 0)
                print("first", flush=True)
            else:
                os.write(start, b"1")
            time.sleep({SECONDS})
            os._exit(1)
    except KeyboardInterrupt:
        pass
    """
    assert ended(program, "first")[:2] == (0, "")
