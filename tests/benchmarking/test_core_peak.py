"""`benchmarks/core_peak.c`: what one core multiplies and adds."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "benchmarks" / "core_peak.c"


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86 processor")
def test_each_rate_is_one_that_a_core_can_have(tmp_path):
    program = tmp_path / "core_peak"
    options = ["-O2", "-Wall", "-Wextra", "-Werror", "-DROUNDS=2000000L"]
    subprocess.run(["gcc", *options, SOURCE, "-o", program], check=True)
    lines = subprocess.run([program], check=True, text=True, capture_output=True).stdout
    rates = dict(re.findall(r"^(.*): (\d+) G(?:FL)?OP/s$", lines, re.MULTILINE))
    assert len(rates) == len(lines.splitlines()) > 0, lines
    # Far above, a loop was optimized away; a virtual machine's core has at least this.
    assert all(2 < int(rate) < 5000 for rate in rates.values()), rates
