"""Several processes behind one port: answers, one that is killed, the end, and their shares."""

import contextlib
import http.client
import json
import os
import select
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from mask_rcnn_jax.serving import supervisor, workers
from mask_rcnn_jax.serving.server import Server
from tests.commands.command import ROOT, run_captured
from tests.serving.asking import ask, ask_on, classes, connect, opened, png, wait_until
from tests.serving.stub_workers import BROKEN, COMPILING, FATAL, GONE, SECONDS, SLOW

IDLE = workers.Share((), {})


@contextlib.contextmanager
def running(count=2, **environment):
    """Workers of a stub, as `asking` takes a server; `process` is their supervisor."""
    command = [sys.executable, "-m", "tests.serving.stub_workers", str(count)]
    environment = os.environ | {SECONDS: "1"} | environment
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=pipe, stderr=pipe
    )
    try:
        ready = process.stdout.readline()
        port = int(ready.rstrip("/\n").rpartition(":")[2]) if ready else None
        yield SimpleNamespace(process=process, server_address=("127.0.0.1", port))
    finally:
        process.terminate()
        try:
            process.communicate(timeout=200)
        finally:
            process.kill()


def children(server) -> list[int]:
    """The processes of the workers."""
    pid = server.process.pid
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def health(server) -> dict:
    return json.loads(ask(server, "GET", "/health").body)


def is_over(connection) -> bool:
    """Whether the other side has closed the connection."""
    readable, _, _ = select.select([connection], [], [], 0)
    try:
        return bool(readable) and connection.recv(1) == b""
    except ConnectionResetError:
        return True


def is_running(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def is_refused(server) -> bool:
    with contextlib.suppress(ConnectionRefusedError), opened(server):
        return False
    return True


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_two_answer_as_one_and_one_that_is_killed_is_replaced():
    with running() as server, contextlib.ExitStack() as stack:
        bodies = [png(value) for value in range(1, 11)]
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda body: ask(server, body=body), bodies))
        assert [classes(answer) for answer in answers] == [[f"class {k}"] for k in range(1, 11)]
        assert health(server) == {"status": "ready", "waiting": 0, "answered": 10, "workers": 2}

        clients = [stack.enter_context(contextlib.closing(connect(server))) for _ in range(8)]
        for client in clients:
            assert ask_on(client, "GET", "/health").status == 200
        before = set(children(server))
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            ask(server, body=png(FATAL))
        for value in range(1, 11):  # on new connections, while another starts
            assert classes(ask(server, body=png(value))) == [f"class {value}"]
        wait_until(lambda: any(is_over(client.sock) for client in clients))
        lost = sum(is_over(client.sock) for client in clients)
        assert 1 <= lost <= 7  # the connections had been divided
        # The supervisor looks now and then; the new one imports JAX.
        wait_until(lambda: len(before & set(children(server))) == 1, seconds=200)
        wait_until(lambda: health(server)["workers"] == 2, seconds=200)
        assert len(children(server)) == 2
        assert health(server) == {"status": "ready", "waiting": 0, "answered": 20, "workers": 2}


@pytest.mark.slow
@pytest.mark.parametrize("number, to_all", [(signal.SIGTERM, True), (signal.SIGINT, False)])
def test_a_signal_ends_all_with_what_is_in_flight_answered(number, to_all):
    """systemd sends it to workers, too, which is no second signal."""
    with running() as server, ThreadPoolExecutor(4) as pool:
        slow = [pool.submit(ask, server, body=png(SLOW)) for _ in range(4)]
        wait_until(lambda: health(server)["waiting"] == 4)
        pids = children(server)
        for pid in (*(pids if to_all else ()), server.process.pid):
            os.kill(pid, number)
        assert [classes(answer.result()) for answer in slow] == [[f"class {SLOW}"]] * 4
        assert server.process.wait(timeout=100) == 0
        assert not any(map(is_running, pids)) and is_refused(server)


@pytest.mark.slow
def test_a_second_signal_ends_all_at_once():
    with running(**{SECONDS: "60"}) as server, ThreadPoolExecutor(1) as pool:
        slow = pool.submit(ask, server, body=png(SLOW))
        wait_until(lambda: health(server)["waiting"] == 1)
        server.process.terminate()
        wait_until(lambda: is_refused(server))
        server.process.terminate()
        assert server.process.wait(timeout=20) == 0
        with pytest.raises((ConnectionError, http.client.HTTPException)):
            slow.result()


@pytest.mark.slow
def test_workers_end_with_a_supervisor_that_is_killed():
    with running() as server:
        pids = children(server)
        server.process.kill()
        wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.parametrize("broken", ["0", "1"])
@pytest.mark.slow
def test_one_that_fails_at_the_start_ends_all(broken):
    with running(**{BROKEN: broken}) as server:
        said = server.process.communicate(timeout=200)
        assert (server.process.returncode, said) == (1, ("", "error: no weights\n"))


@pytest.mark.slow
def test_one_that_ends_without_an_error_is_not_waited_for():
    with running(**{GONE: "0"}) as server:
        out, log = server.process.communicate(timeout=60)
        assert (server.process.returncode, out) == (1, "")
        assert "worker 0 ended with code 0 before all were ready" in log


@pytest.mark.slow
def test_one_that_compiles_ends_with_a_supervisor_that_is_killed():
    """Or it would keep the port from the next one."""
    with compiling() as (process, pid):
        process.kill()
        wait_until(lambda: not is_running(pid))


@pytest.mark.slow
def test_sigterm_ends_what_compiles_at_once():
    with compiling() as (process, pid):
        process.terminate()
        assert process.wait(timeout=15) == 0 and not is_running(pid)


@contextlib.contextmanager
def compiling():
    """A supervisor, and the process of a worker that does not get ready."""
    command = [sys.executable, "-m", "tests.serving.stub_workers", "2"]
    environment = os.environ | {COMPILING: "0"}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe) as process:
        try:
            assert process.stdout.readline() == "compiling\n"
            (pid,) = children(SimpleNamespace(process=process))
            yield process, pid
        finally:
            process.kill()


def test_a_worker_that_cannot_be_started_is_tried_again(monkeypatch, tmp_path, caplog):
    with Server() as server, open(tmp_path / "counts", "w+b") as file:
        with supervisor._Workers(server, [IDLE], file) as started:
            monkeypatch.setattr(sys, "orig_argv", [sys.executable, "-c", ""])
            started.start(1)
            started._running[0].process.wait()
            monkeypatch.setattr(supervisor, "RESTART_SECONDS", 0.0)
            with monkeypatch.context() as patched:
                patched.setattr(sys, "executable", str(tmp_path / "none"))
                started.replace()
            assert "worker 0 cannot be started" in caplog.text
            ended = started._running[0].process.pid
            started.replace()
            assert started._running[0].process.pid != ended


def test_cpus_are_divided(monkeypatch):
    monkeypatch.setattr(workers, "find_devices", lambda: ("cpu", 1))
    monkeypatch.setattr(workers, "usable_cpus", lambda: 5)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 1, 5, 7, 9})
    shares = [share.cpus for share in workers.divide(2)]
    assert shares == [[1, 5, 9], [3, 7]]
    with pytest.raises(ValueError, match="--workers is 6, expected at most 5, one for each CPU"):
        workers.divide(6)


@pytest.mark.parametrize(
    "visible, count, expected",
    [
        (None, 2, ["0,2", "1,3"]),
        ("", 4, ["0", "1", "2", "3"]),
        ("4,GPU-8932f937,6,7", 3, ["4,7", "GPU-8932f937", "6"]),
    ],
)
def test_gpus_are_divided(visible, count, expected, monkeypatch):
    monkeypatch.setattr(workers, "find_devices", lambda: ("gpu", 4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    shares = workers.divide(count)
    assert [share.environment["CUDA_VISIBLE_DEVICES"] for share in shares] == expected
    assert not any(share.cpus for share in shares)
    with pytest.raises(ValueError, match="--workers is 5, expected at most 4, one for each GPU"):
        workers.divide(5)


def test_another_process_looks_for_the_devices(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "3")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(workers, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms="")))
    assert workers.find_devices() == ("cpu", 3)


def test_too_little_memory_for_the_others_is_said(monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(supervisor, "available_host_bytes", lambda: 1_000_000_000)
    with Server() as server, open(tmp_path / "counts", "w+b") as file:
        started = supervisor._Workers(server, [IDLE] * 3, file)
        counts = workers.open_counts(file.fileno(), 3)
        counts["megabytes"][0] = 499
        started.check_memory()
        assert not caplog.records
        counts["megabytes"][0] = 501
        started.check_memory()
    assert "about 501 MB, and 1000 MB are free for 2 more" in caplog.text


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (["--workers=0"], "workers"),
        (["--workers=9999"], "--workers is 9999, expected at most "),
        (["--workers=2", "--port=TAKEN"], "Address already in use; --port 0 picks a free port"),
    ],
)
def test_mistakes_are_one_line(arguments, expected):
    with Server() as taken:
        taken.server_activate()
        port = str(taken.server_address[1])
        flags = [argument.replace("TAKEN", port) for argument in arguments]
        done = run_captured("serve", "--workdir=nowhere", "--platform=cpu", *flags)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ") and expected in done.stderr
