"""benchmarks/gpu_device.py: what it says of a machine."""

import sys
from types import SimpleNamespace

import pytest

from benchmarks import gpu_device
from pallas_kernels import check_compile


def test_versions_are_of_what_is_imported(monkeypatch):
    """A package earlier on the path shadows another; an unfinished installation has no name."""
    found = [("jax", "0.11.2"), (None, "1"), ("flax", "0.12"), ("jax", "0.9"), ("six", "1.17")]
    distributions = [
        SimpleNamespace(metadata={"Name": name}, version=version) for name, version in found
    ]
    monkeypatch.setattr(gpu_device.importlib.metadata, "distributions", lambda: distributions)
    assert gpu_device.packages() == {"flax": "0.12", "jax": "0.11.2"}


@pytest.mark.parametrize(
    ("action", "backend", "lacks", "message"),
    [
        ("describe", "gpu", [], ""),
        ("describe", "gpu", ["nvidia-cuda-nvcc"], "error: no nvidia-cuda-nvcc in /cuda; set CUDA"),
        ("ceilings", "gpu", ["nvidia-cuda-nvcc"], ""),
        ("describe", "cpu", [], "error: JAX finds no GPU"),
        ("ceilings", "cpu", [], "error: JAX finds no GPU"),
    ],
)
def test_what_a_machine_lacks_is_said(monkeypatch, capsys, action, backend, lacks, message):
    monkeypatch.setattr(gpu_device.jax, "default_backend", lambda: backend)
    monkeypatch.setattr(gpu_device, "describe", lambda: [("python", "3.12")])
    monkeypatch.setattr(gpu_device, "ceilings", lambda small: [("copy", 3.0)])
    monkeypatch.setattr(check_compile, "missing_tools", lambda: lacks)
    monkeypatch.setattr(check_compile, "cuda_root", lambda: "/cuda")
    monkeypatch.setattr(sys, "argv", ["gpu_device", action])
    assert gpu_device.main() == bool(message)
    said = capsys.readouterr().err
    assert said.startswith(message) and bool(said) == bool(message)
