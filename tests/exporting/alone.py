"""examples/detect.py, run with the packages alone that it names."""

import re
import subprocess
import sys
from pathlib import Path

from tests.commands.command import ROOT
from tests.requirements import modules_of_others, required

SCRIPT = ROOT / "examples" / "detect.py"
GUARD = (
    "import sys, runpy; sys.modules |= dict.fromkeys(sys.argv.pop(1).split(',')); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def run_alone(folder: Path, engine: str, *arguments) -> subprocess.CompletedProcess:
    """`python detect.py <arguments>` in `folder`, with the packages of its line for an engine."""
    packages = re.search(rf"pip install (.*\b{engine}\b.*)\n", SCRIPT.read_text())[1].split()
    absent = modules_of_others(required(packages))
    assert {"mask_rcnn_jax", "flax", "cv2", "onnx"} <= absent
    command = [sys.executable, "-c", GUARD, ",".join(absent), SCRIPT, *arguments]
    return subprocess.run(
        [*map(str, command)], cwd=folder, text=True, capture_output=True, timeout=600
    )
