"""Kernels compiled in a process of their own, of which some crash."""

import json
import sys

import jax
import pytest

from mask_rcnn_jax.ops import dispatch
from pallas_kernels import check_compile, probe, support

# A process in which `{function}` takes the place of JAX's compiler.
BROKEN = """
import os, sys, time, jax
from pallas_kernels import probe
probe._has_gpu = lambda: True
def broken(function):
    if "{op}" in str(function):
        {broken}
    return sys.modules["jax._src.api"].jit(lambda *args: 0)
jax.jit = broken
sys.exit(probe.main())
"""


def broken_for(op: str, how: str) -> list[str]:
    """A command that compiles nothing and fails for one op."""
    return [sys.executable, "-c", BROKEN.format(op=op, broken=how)]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("os.abort()", "its compiler was ended by SIGABRT"),
        slow(
            "os.write(2, b'LLVM ERROR: Cannot select\\n0x1\\n'); os.abort()", "LLVM ERROR: Cannot"
        ),
        slow("raise ValueError('no\\\\nptxas')", "its compiler failed: ValueError: no"),
        slow("time.sleep(60)", "its compiler took more than 3 s"),
    ],
)
def test_a_crash_is_told_and_leaves_this_process_alone(how, reason, tmp_path, monkeypatch):
    monkeypatch.setattr(probe, "TIMEOUT", 3 if "sleep" in how else 300)
    memory = tmp_path / "kernels.json"
    ops = ["nms", "fill_polygons"]
    reasons = probe.failures(ops, memory, broken_for("nms", how))
    assert list(reasons) == ["nms"] and reason in reasons["nms"], reasons
    assert "\n" not in reasons["nms"]
    assert json.loads(memory.read_text()) == {probe.described_gpu(): ["fill_polygons"]}
    assert probe.untested(["gather_sum", *ops], memory) == ["gather_sum", "nms"]


def test_a_process_without_the_gpu_shows_nothing(tmp_path):
    memory = tmp_path / "kernels.json"
    assert probe.failures(["nms"], memory) == {}
    assert not memory.exists() and probe.untested(["nms"], memory) == ["nms"]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}"])
def test_what_is_remembered_may_be_damaged(content, tmp_path):
    memory = tmp_path / "kernels.json"
    memory.write_text(content)
    assert probe.untested(["nms"], memory) == ["nms"]


def test_what_is_remembered_is_of_one_gpu_driver_and_jax(tmp_path):
    memory = tmp_path / "kernels.json"
    memory.write_text(json.dumps({"another": ["nms"], probe.described_gpu(): ["gather_sum"]}))
    assert probe.untested(["nms", "gather_sum"], memory) == ["nms"]
    assert jax.__version__ in probe.described_gpu() and "cpu" in probe.described_gpu()


def test_a_refused_kernel_gives_way_to_the_plain_form(monkeypatch):
    monkeypatch.setattr(support, "_refused", {})
    monkeypatch.setattr(dispatch, "_forms", {})

    def choose(op, implementation=None):
        return dispatch.choose(op, implementation, xla=str, load_kernel=lambda: (None, int))

    support.refuse({"nms": "its compiler failed: fatal"})
    assert choose("nms") is str and choose("gather_sum") is not str
    assert dispatch.chosen_forms() == (
        "GPU kernels: RoIAlign; NMS by XLA: its compiler failed: fatal"
    )
    choose("fill_polygons")
    assert dispatch.chosen_forms().startswith("GPU kernels: RoIAlign, mask targets; NMS by XLA: ")
    assert support.mosaic_unsupported("nms", (10, 0)) is None  # another GPU
    for op in support.KERNELS:
        choose(op, "xla")
    assert dispatch.chosen_forms() == (
        "GPU kernels: none; RoIAlign, NMS, mask targets by XLA: train.implementation=xla"
    )
    with pytest.raises(NotImplementedError, match="NMS: implementation='pallas': its compiler"):
        choose("nms", "pallas")


@pytest.mark.parametrize(
    ("target", "first"), [("h100", (0, 10)), ("l4", (0, 12))], ids=["h100", "l4"]
)
def test_the_compiler_for_a_gpu_that_is_not_there(target, first):
    """LLVM really ends the process for an L4 before JAX 0.12."""
    missing = check_compile.missing_requirement("h100")
    if missing:
        pytest.skip(missing)
    reasons = probe.failures(["nms"], command=[*probe.COMMAND, "--target", target])
    if jax.__version_info__ >= first:
        assert reasons == {}
    else:
        assert "LLVM ERROR" in reasons["nms"]
