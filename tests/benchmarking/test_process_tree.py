"""What processes take: of a child that is known to hold memory and to have worked."""

import os
import subprocess
import sys

import pytest

from mask_rcnn_jax.benchmarking import process_tree

CHILD = """
import time
held = bytearray(b"x") * 50_000_000
while time.process_time() < 0.2:
    pass
print("ready", flush=True)
input()
"""


@pytest.fixture
def child():
    """A child of this process, and its child, with 50 MB and 0.2 s of work behind it."""
    before = set(process_tree.family())
    command = f"{sys.executable} -c '{CHILD}'; true"  # so that the shell stays
    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "ready\n"
    (worker,) = set(process_tree.family()) - before - {process.pid}
    yield process.pid, worker
    process.communicate("\n")


def test_family_has_grandchildren_and_what_they_take(child):
    shell, worker = child
    assert process_tree.family()[0] == os.getpid() and shell in process_tree.family()
    assert process_tree.family(shell) == [shell, worker]
    assert process_tree.rss_mb([worker]) > 50 > process_tree.rss_mb([shell])
    assert process_tree.cpu_seconds([worker]) >= 0.19 > process_tree.cpu_seconds([shell])
    both = process_tree.rss_mb([worker]) + process_tree.rss_mb([shell])
    assert process_tree.rss_mb([worker, shell]) == pytest.approx(both, abs=1)


def test_a_system_without_proc_is_told_of(monkeypatch, tmp_path):
    monkeypatch.setattr(process_tree, "PROC", tmp_path)
    with pytest.raises(ValueError, match="exists on Linux only"):
        process_tree.family()
