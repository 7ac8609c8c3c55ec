"""The measured peak of a core, and what is said where it cannot be measured."""

import json
import shutil

import pytest

from benchmarks import core_peak


@pytest.fixture
def program(tmp_path):
    """A program that claims two rates."""
    path = tmp_path / "core_peak"
    path.write_text("#!/bin/sh\necho float32 100.5\necho int8 400\n")
    path.chmod(0o755)
    return path


def test_rates_of_all_cores_are_added(program, tmp_path, monkeypatch):
    monkeypatch.setattr(core_peak, "build", lambda folder: program)
    monkeypatch.setattr(core_peak.os, "sched_getaffinity", lambda process: {0, 1, 2})
    file = tmp_path / "peak.json"
    core_peak.main([f"--json={file}"])
    written = json.loads(file.read_text())
    assert written["one_core"] == {"float32": 100.5, "int8": 400.0}
    assert written["all_cores"] == {"float32": 301.5, "int8": 1200.0} and written["cores"] == 3


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_the_loops_are_compiled_for_this_processor(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    source = tmp_path / "core_peak.c"
    source.write_text(core_peak.SOURCE.read_text().replace("20000000L", "20000L"))
    monkeypatch.setattr(core_peak, "SOURCE", source)
    for one in core_peak.measure(core_peak.build(tmp_path), copies=2):
        assert all(0 < rate < 1e5 for rate in one.values())


def test_what_is_missing_is_told(program, tmp_path, monkeypatch):
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(SystemExit, match="error: no-such-compiler: no such C compiler; CC may"):
        core_peak.main([])
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho unknown processor >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    with pytest.raises(SystemExit, match="cannot compile core_peak.c: unknown processor"):
        core_peak.main([])
    program.write_text("#!/bin/sh\nexit 4\n")
    with pytest.raises(ValueError, match=r"ended with \[4\]"):
        core_peak.measure(program, copies=1)
