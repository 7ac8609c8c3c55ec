"""Two processes that find each other, for tests of what several do together."""

import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path


class Pair:
    """Two processes, with a log each; leaving the context kills what is left of them.

    start: gives the command and the environment of process `index` (0 or 1) that finds the others
    at `localhost:port`.
    """

    def __init__(self, start: Callable[[int, int], tuple[list, dict[str, str]]], folder: Path):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.logs = [folder / f"process{i}.log" for i in range(2)]
        self.processes = []
        for index, log in enumerate(self.logs):
            command, environment = start(index, port)
            with open(log, "w") as output:
                self.processes.append(
                    subprocess.Popen(
                        list(map(str, command)),
                        env=environment, stdout=output, stderr=output,
                    )
                )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        for process in self.processes:
            process.kill()
            process.wait()

    def wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + 400
        while not path.exists():
            assert all(p.poll() is None for p in self.processes), self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.02)

    def codes(self, timeout: float = 400) -> list[int]:
        return [process.wait(timeout) for process in self.processes]

    def said(self) -> list[str]:
        return [log.read_text() for log in self.logs]
