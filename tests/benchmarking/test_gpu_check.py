"""What benchmarks/gpu_check.sh would start on a machine with a GPU."""

import os
import subprocess

import pytest

from tests.commands.command import ROOT


@pytest.fixture
def check(tmp_path):
    """Runs the script with programs that only say what they were started with."""
    (tmp_path / "nvidia-smi").write_text('#!/bin/sh\necho "NVIDIA H200"\n')
    (tmp_path / "python").write_text('#!/bin/sh\necho "ran $*"\n[ "$4" != "${BROKEN-none}" ]\n')
    for program in tmp_path.iterdir():
        program.chmod(0o755)
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"

    def run(**environment) -> tuple[list[str], int]:
        done = subprocess.run(
            ["bash", ROOT / "benchmarks" / "gpu_check.sh", tmp_path / "out"], text=True,
            env=os.environ | {"PATH": path, "PYTHON": "python"} | environment, capture_output=True,
        )  # fmt: skip
        assert not done.stderr
        return done.stdout.splitlines(), done.returncode

    return run


def test_everything_is_measured_and_the_most_telling_first(check):
    lines, code = check()
    started = [line.removeprefix("ran ") for line in lines if line.startswith("ran ")]
    steps = [line.split("--json")[0] for line in started if "benchmark train" in line]
    assert code == 0 and len(steps) == 1 + 3 * 6  # one of them traced
    first = next(line for line in started if "benchmark train" in line)
    assert first.endswith(
        "-train_8_bfloat16.json --config configs/coco.py --config.train.batch_size=8 "
        "--config.train.precision=bfloat16"
    )
    assert "/out/NVIDIA-H200-20" in first
    measured = {line.split("--json ")[1].split()[0] for line in started if "--json" in line}
    assert len(measured) == len([line for line in started if "--json" in line])
    assert sum("--precision bfloat16 --channels_last" in line for line in started) == 2
    assert sum("eval.batch_size" in line for line in started) == 3 * 6


def test_what_does_not_fit_the_time_is_left_out_and_named(check):
    lines, code = check(MINUTES="0")
    assert code == 0 and "== left out for time: kernel tests" in lines
    assert not any("json" in line for line in lines)


def test_a_failure_is_named_and_does_not_stop_the_rest(check):
    lines, code = check(BROKEN="--json", BATCHES="2", PRECISIONS="tf32")
    assert code == 1 and any(line.startswith("FAILED (1): kernels") for line in lines)
    assert any("train_2_tf32" in line for line in lines)
