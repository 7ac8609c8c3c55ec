"""The script of docs/deployment.md, run where this package cannot be imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.commands.command import ROOT

GUARD = (
    "import sys, runpy; sys.modules['mask_rcnn_jax'] = sys.modules['flax'] = None; "
    "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
)


def documented_script() -> str:
    text = (ROOT / "docs" / "deployment.md").read_text()
    return re.search(r"<!-- runs without this package -->\n```python\n(.*?)```", text, re.S)[1]


def run_alone(folder: Path, *arguments) -> subprocess.CompletedProcess:
    """`python detect.py <arguments>` in `folder`, on the CPU."""
    (folder / "detect.py").write_text(documented_script())
    return subprocess.run(
        [sys.executable, "-c", GUARD, "detect.py", *map(str, arguments)], cwd=folder, text=True,
        capture_output=True, env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=600,
    )  # fmt: skip
