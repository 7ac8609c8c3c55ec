"""Imports go down only, rooms of one floor do not import each other, commands are on top."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = (
    *("__main__", "train", "evaluate", "infer", "serve", "prune", "prepare", "export", "benchmark"),
    *("demo", "recipes"),
)
FLOORS = {
    "configs": 12,
    "benchmarking": 10,
    "training": 9,
    "serving": 9,
    "exporting": 9,
    "predict": 8,
    "pruning": 8,
    "weights": 7,
    "formats": 7,
    "cli": 8,
    "report": 6,
    "config": 6,
    "recipe": 5,
    "device": 5,
    "models": 4,
    "ops": 3,
    "data": 3,
    "evaluation": 3,
    "video": 3,
    "images": 2,
    "download": 2,
    "jax_to_onnx": 1,
    "annotations": 1,
    "cpu_kernels": 1,
    "pallas_kernels": 1,
    "terminal": 1,
    "version": 1,
    "disk": 1,
    "host": 1,
    "memory": 1,
    "opencv": 0,
    "tars": 0,
    "stores": -1,
    "store_folders": 1,
    "network": 1,
    "rle": 0,
    "signatures": 0,
    "ranges": 0,
    "platforms": 0,
    "protobuf": 1,
    "consent": 1,
    "parts": 1,
    "structures": 1,
    "optional_packages": 0,
    "compile_cache": 0,
}
# These run on any GPU machine: nothing beyond jax, flax, optax, numpy and our own rooms.
LEAN = [
    "ops",
    "models",
    "cpu_kernels",
    "training/step.py",
    "training/optim.py",
    "recipe/schedule.py",
    "recipe/averaging.py",
    "training/distill.py",
    "training/flip.py",
    "training/loss_scale.py",
    "benchmarking",
]
LEAN_IMPORTS = {
    "jax",
    "flax",
    "optax",
    "numpy",
    "jaxtyping",
    "mask_rcnn_jax",
    "pallas_kernels",
    "collections",
    "concurrent",
    "contextlib",
    "contextvars",
    "dataclasses",
    "functools",
    "typing",
    "math",
    "re",
    "time",
    "importlib",
    "inspect",
    "pathlib",
    "os",
    "resource",
    "sys",
}
NOT_LEAN = ["loading.py"]  # reads pictures


def source_files():
    return sorted((ROOT / "mask_rcnn_jax").rglob("*.py"))


def imports(path: Path) -> list[str]:
    """Dotted names of all imports of a file, those inside functions too."""
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def room_of(dotted: str) -> str | None:
    """The room or top-level module of one of our own names."""
    first, *rest = dotted.split(".")
    if first == "pallas_kernels":
        return first
    return rest[0] if first == "mask_rcnn_jax" and rest else None


@pytest.mark.parametrize("path", source_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_go_down_only(path):
    room = path.relative_to(ROOT / "mask_rcnn_jax").parts[0].removesuffix(".py")
    if room == "__init__":
        return
    floor = 11 if room in COMMANDS else FLOORS[room]
    for name in imports(path):
        other = room_of(name)
        if other is None or other == room:
            continue
        assert other not in COMMANDS, f"{path.name} imports the command {name}"
        assert FLOORS[other] < floor, f"{path.name} (floor {floor}) imports {name}"


def test_opencv_is_imported_where_it_gets_its_limits():
    direct = [p.name for p in source_files() if "cv2" in {n.split(".")[0] for n in imports(p)}]
    assert direct == ["opencv.py"]


@pytest.mark.parametrize("where", LEAN)
def test_what_runs_on_any_gpu_machine_needs_jax_flax_optax_numpy_only(where):
    target = ROOT / "mask_rcnn_jax" / where
    for path in [target] if target.is_file() else sorted(target.glob("*.py")):
        if path.name in NOT_LEAN:
            continue
        extra = {name.split(".")[0] for name in imports(path)} - LEAN_IMPORTS
        assert not extra, f"{path.name} imports {extra}"
