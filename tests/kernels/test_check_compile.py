import json
import sys
from pathlib import Path

import jax
import pytest

from pallas_kernels import cases, check_compile

PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'gather_sum_kernel_mosaic_gpu_kernel' for '{arch}'
ptxas info    : Function properties for gather_sum_kernel_mosaic_gpu_kernel
    0 bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 2 barriers, 16 bytes smem, 400 bytes cmem[0]
"""
WELL = dict(arch="sm_90a", stores=0, loads=0, registers=64)


def output_of_a_child(*kernels, found=1):
    result = dict(temp_bytes=12_000_000, peak_bytes=30_000_000, kernels=found)
    text = "".join(PTXAS.format(**kernel) for kernel in kernels)
    return f"a warning\n{text}{check_compile.RESULT}{json.dumps(result)}\n"


def test_the_output_of_the_compiler_is_read():
    output = output_of_a_child(WELL, WELL | dict(registers=97))
    report = check_compile.read_output("two kernels", output, 0, "9.0")
    assert report == check_compile.Report(
        "two kernels", None, registers=97, spill_bytes=0, smem_bytes=16, temp_bytes=12_000_000,
        peak_bytes=30_000_000,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("output", "exit_code", "failure"),
    [
        (output_of_a_child(WELL, WELL | dict(stores=8, loads=12)), 0, "20 bytes of registers"),
        (output_of_a_child(WELL | dict(arch="sm_80")), 0, "for ['sm_80'], expected sm_90"),
        (output_of_a_child(), 0, "machine code for []"),
        (output_of_a_child(WELL, found=0), 0, "no Mosaic GPU kernel"),
        ("LLVM ERROR: Cannot select\n", -6, "exit code -6: LLVM ERROR: Cannot select"),
        ("", 0, "no output"),
    ],
)
def test_what_is_wrong_is_found(output, exit_code, failure):
    report = check_compile.read_output("case", output, exit_code, "9.0")
    assert failure in report.failure


@pytest.mark.parametrize(("name", "fails"), [("nms tiny", True), ("gather_sum tiny", False)])
def test_a_fused_product_is_refused_where_its_rounding_counts(name, fails):
    output = "\tfma.rn.f32 \t%r1, %r2, %r3, %r4;\n" + output_of_a_child(WELL)
    report = check_compile.read_output(name, output, 0, "9.0")
    assert (report.failure is not None) == fails


@pytest.mark.parametrize("failure", [None, "8 bytes of registers are spilled"])
def test_the_exit_code_and_the_table(monkeypatch, tmp_path, capsys, failure):
    def check_one(target, name):
        return check_compile.Report(name, failure if "rpn" in name else None, registers=64)

    monkeypatch.setattr(check_compile, "missing_requirement", lambda target: None)
    monkeypatch.setattr(check_compile, "check_one", check_one)
    monkeypatch.setattr(check_compile, "use_cuda_tools", lambda: None)
    file = tmp_path / "table.json"
    code = check_compile.main(["--target", "h100", "--only", "nms", "--json", str(file)])
    assert code == (failure is not None)
    table = capsys.readouterr().out
    rows = json.loads(file.read_text())
    assert len(rows) == len(cases.NMS_CASES)
    for row in rows:
        assert f"| {row['name']} | 64 | 0 |" in table
        assert (f"FAILED {row['name']}: {failure}" in table) == (row["failure"] is not None)


def test_missing_packages_are_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(check_compile, "PACKAGES", {"no_such.module": "one"})
    monkeypatch.setattr(check_compile, "TOOLS", {"no/such/file": "two"})
    assert check_compile.main(["--target", "h100"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs the packages one, two (" in line


def test_a_cuda_toolkit_does_as_well_as_the_packages(monkeypatch, tmp_path):
    def make(name: str) -> Path:
        for tool in check_compile.TOOLS:
            file = tmp_path / name / tool
            file.parent.mkdir(parents=True)
            file.touch()
        return tmp_path / name

    toolkit, home = make("toolkit"), make("home")
    for name in ("CUDA_ROOT", "CUDA_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(check_compile, "PACKAGES", {})
    monkeypatch.setattr(check_compile, "TOOLKIT", str(toolkit))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "site")])
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_compile.cuda_root() == toolkit and not check_compile.missing_requirement("h100")
    monkeypatch.setenv("CUDA_HOME", str(home))
    assert check_compile.cuda_root() == home
    older = make("site/nvidia/cuda_nvcc")  # JAX prefers these
    assert check_compile.cuda_root() == older
    packages = make("site/nvidia/cu13")
    assert check_compile.cuda_root() == packages
    (packages / "bin" / "ptxas").unlink()
    assert "needs the packages nvidia-cuda-nvcc (" in check_compile.missing_requirement("h100")
    monkeypatch.setenv("CUDA_ROOT", str(home))  # and this to them
    assert check_compile.cuda_root() == home


@pytest.mark.parametrize("complete", [True, False])
def test_the_toolkit_of_the_ptxas_on_the_path_is_the_last_choice(monkeypatch, tmp_path, complete):
    """Unless it is a lone program, such as a script that calls another."""
    (toolkit, wrong) = tmp_path / "cuda-13", tmp_path / "wrong"
    for tool in list(check_compile.TOOLS)[: 2 if complete else 1]:
        (toolkit / tool).parent.mkdir(parents=True)
        (toolkit / tool).touch(0o755)
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "ptxas").symlink_to(toolkit / "bin" / "ptxas")
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("CUDA_ROOT", str(wrong))
    assert check_compile.cuda_root() == (toolkit if complete else wrong)
    assert (check_compile.missing_tools() == []) == complete


def test_a_gpu_that_this_jax_has_no_kernels_for_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(check_compile, "PACKAGES", {})
    monkeypatch.setattr(check_compile, "TOOLS", {})
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    assert check_compile.main(["--target", "a100"]) == 1
    assert "8.0 needs JAX 0.11 or newer" in capsys.readouterr().err


def test_every_case_is_compiled():
    jobs = check_compile.jobs()
    assert len(jobs) == len(cases.CASES) + len(cases.ROI_ALIGN_CASES)
    for case in cases.CASES:
        assert f"{case.op} {case.name}" in jobs


CAPABILITIES = {"t4": "7.5", "a100": "8.0", "a10": "8.6", "l4": "8.9", "h100": "9.0", "h200": "9.0"}
CAPABILITIES |= {"b200": "10.0", "rtx5090": "12.0"}


@pytest.mark.parametrize("target", check_compile.targets())
def test_targets(target):
    gpu = check_compile.describe(target)
    assert gpu["capability"] == CAPABILITIES[target]
    assert target.upper() in gpu["name"].replace(" ", "")
    assert 40 <= int(gpu["cores"]) < 200


@pytest.mark.parametrize("name", ["gather_sum tiny_4", "gather_sum_transpose tiny_4"])
@pytest.mark.slow
def test_machine_code_for_a_gpu_that_is_not_there(name, capsys):
    missing = check_compile.missing_requirement("h200")
    if missing:
        pytest.skip(missing)
    assert check_compile.main(["--target", "h200", "--only", name]) == 0, capsys.readouterr().out
