"""The script of docs/deployment.md, run with the packages alone that are named there."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.commands.command import ROOT
from tests.requirements import modules_of_others, required

PAGE = ROOT / "docs" / "deployment.md"
GUARD = (
    "import sys, runpy; sys.modules |= dict.fromkeys(sys.argv.pop(1).split(',')); "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def documented_script() -> str:
    return re.search(
        r"<!-- runs without this package -->\n```python\n(.*?)```", PAGE.read_text(), re.S
    )[1]


def absent_modules() -> set[str]:
    """Modules that the documented installation does not bring."""
    packages = re.search(r"pip install (jax [\w ]+)\n", PAGE.read_text())[1].split()
    absent = modules_of_others(required(packages))
    assert {"mask_rcnn_jax", "flax", "cv2"} <= absent
    return absent


def run_alone(folder: Path, *arguments) -> subprocess.CompletedProcess:
    """`python detect.py <arguments>` in `folder`, on the CPU."""
    (folder / "detect.py").write_text(documented_script())
    return subprocess.run(
        [
            sys.executable,
            "-c",
            GUARD,
            ",".join(absent_modules()),
            "detect.py",
            *map(str, arguments),
        ],
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        timeout=600,
    )
