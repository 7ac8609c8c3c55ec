"""Start stubbed runs, interfere with them, and compare what they leave."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from mask_rcnn_jax.training.metrics import read_metrics
from mask_rcnn_jax.weights.run_checkpoint import load_checkpoint

RECIPE = Path(__file__).with_name("recipe.py")
STEPS, CHECKPOINT_EVERY, EVAL_EVERY = 24, 3, 8  # of recipe.py


class Server:
    """The process of stubbed_train.py. `data`: flags that name a data set."""

    def __init__(self, data: list[str]):
        self.data = data
        quiet = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.stubbed_train"],
            env=os.environ | quiet, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def start(self, workdir: Path, *flags: str, log: Path | None = None, **environment) -> "Run":
        log = log or workdir.with_name(f"{workdir.name}.{time.monotonic_ns()}.log")
        arguments = [f"--config={RECIPE}", f"--workdir={workdir}"]
        arguments += ["--compile_cache=off", *self.data, *flags]
        wanted = {"arguments": arguments, "environment": environment, "log": str(log)}
        self._process.stdin.write(json.dumps(wanted) + "\n")
        self._process.stdin.flush()
        return Run(json.loads(self._process.stdout.readline()), workdir, log)

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()


class Run:
    """A run that was started; its log holds stdout and stderr."""

    def __init__(self, pid: int, workdir: Path, log: Path):
        self.pid, self.workdir, self.log = pid, workdir, log
        self.started = time.monotonic()

    @property
    def code(self) -> int | None:
        """The exit code, -N if signal N ended it; None while it runs."""
        path = Path(f"{self.log}.exit")
        return int(path.read_text()) if path.exists() else None

    def send(self, number: int) -> None:
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            pass

    def wait(self, timeout: float = 60) -> int:
        """The exit code; a run that takes longer is killed and fails the test."""
        if not wait_until(lambda: self.code is not None, timeout):
            os.killpg(self.pid, signal.SIGKILL)
            raise AssertionError(f"no end within {timeout} s: {self.said()[-500:]}")
        return self.code

    def kill(self) -> bool:
        """SIGKILL; whether it still ran."""
        self.send(signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        return (self.said().strip().splitlines() or [""])[-1]

    def has_saved(self, step: int) -> bool:
        return (self.workdir / "checkpoints" / str(step)).exists()


def wait_until(condition: Callable[[], bool], timeout: float = 30) -> bool:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.002)
    return False


def kept_steps(workdir: Path) -> list[int]:
    names = [path.name for path in (workdir / "checkpoints").iterdir() if path.is_dir()]
    return sorted(int(name) for name in names if name.isdigit())


def outcome(workdir: Path) -> dict:
    """All that must not depend on interruptions: records, parameters bit by bit, files."""
    records = [
        {key: value for key, value in record.items() if not key.startswith("perf/")}
        for record in read_metrics(workdir / "metrics.jsonl")
    ]
    steps = kept_steps(workdir)
    return {
        "records": records,
        "checkpoints": {
            n: digest(load_checkpoint(workdir / "checkpoints" / str(n))) for n in steps
        },
        "evaluations": {
            path.parent.name: path.read_text()
            for path in sorted((workdir / "eval").glob("*/metrics.json"))
        },
    }


def digest(tree) -> str:
    found = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        leaf = np.asarray(leaf)
        found.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {leaf.shape}".encode())
        found.update(leaf.tobytes())
    return found.hexdigest()


def assert_same(workdir: Path, reference: dict) -> None:
    """The workdir holds what the uninterrupted run left."""
    actual = outcome(workdir)
    for name, expected in reference.items():
        assert actual[name] == expected, f"{workdir}: {name} differ from an uninterrupted run's"


def assert_one_line(run: Run) -> None:
    """The run ended with an error of one line."""
    said = run.said()
    assert "Traceback" not in said, said
    assert run.last_line().startswith("error: "), said
    assert said.count("error: ") == 1, said


def copy_of(workdir: Path, target: Path) -> Path:
    shutil.rmtree(target, ignore_errors=True)
    return Path(shutil.copytree(workdir, target))


def largest_file(folder: Path) -> Path:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return max(files, key=lambda path: path.stat().st_size)
