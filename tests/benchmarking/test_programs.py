"""What is counted in a compiled program, and the limits for it."""

import json
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled_step, hlo
from mask_rcnn_jax.config import load_config
from tests.commands.command import ROOT

BUDGETS = str(ROOT / "benchmarks" / "budgets.toml")

HLO = """HloModule jit_step, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%region_1.2 (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%fused_transpose (param_0: f32[2,4]) -> bf16[4,2] {
  %param_0 = f32[2,4]{1,0} parameter(0)
  %convert.5 = bf16[2,4]{1,0} convert(%param_0)
  ROOT %transpose.3 = bf16[4,2]{1,0} transpose(%convert.5), dimensions={1,0}
}

%wrapped_sort_computation (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  ROOT %sort.7 = f32[8]{0} sort(%x), dimensions={0}, to_apply=%region_1.2
}

%body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state = (s32[], f32[8]{0}) parameter(0)
  ROOT %copy.1 = (s32[], f32[8]{0}) copy(%state)
}

ENTRY %main.9 (Arg_0.1: f32[8]) -> f32[8] {
  %Arg_0.1 = f32[8]{0} parameter(0)
  %custom-call.1 = f32[8]{0} custom-call(%Arg_0.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/jvp(M)/pool"}
  %custom-call.2 = f32[8]{0} custom-call(%Arg_0.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp(M))/pool"}
  %custom-call.4 = f32[8]{0} custom-call(%Arg_0.1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/transpose(jvp(M))/pool"}
  %cudnn-conv = (f32[8]{0}, u8[0]{0}) custom-call(%Arg_0.1), custom_call_target="__cudnn$convForward"
  %gemm = f32[8]{0} custom-call(%Arg_0.1), custom_call_target="__cublas$gemm"
  %dot_fusion = f32[8]{0} fusion(%gemm), kind=kCustom, calls=%gemm_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %fusion.1 = bf16[4,2]{1,0} fusion(%gemm), kind=kInput, calls=%fused_transpose
  %wrapped_sort = f32[8]{0} fusion(%gemm), kind=kInput, calls=%wrapped_sort_computation
  %while.1 = (s32[], f32[8]{0}) while(%gemm), condition=%condition, body=%body
  %all-reduce-start.2 = f32[8]{0} all-reduce-start(%gemm), to_apply=%region_1.2
  %negate.1 = f32[8]{0} negate(%gemm)
  %all-reduce-done.2 = f32[8]{0} all-reduce-done(%all-reduce-start.2)
  %all-reduce-start = f32[8]{0} all-reduce-start(%gemm), to_apply=%region_1.2
  %gte = f32[8]{0} bitcast(%gemm)
  ROOT %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}
"""  # noqa: E501

STEP = {
    "images_per_device": 2, "devices": 1, "peak_mb": 2100.0, "temp_mb": 1700.0,
    "gflop_per_image": 1500.0, "compile_s": 50.0,
}  # fmt: skip
COUNTED = {
    "launches": 12,  # 5 library and custom calls, 3 fusions, copy in the loop, 2 sums, 1 negation
    "kernels_forward": 1,
    "kernels_backward": 2,
    "convolutions": 1,
    "matmuls": 2,
    "copies": 1,
    "transposes": 1,
    "converts": 1,
    "sorts": 1,
    "scatters": 0,
    "loops": 1,
    "all_reduces": 2,
    "all_reduces_alone": 1,  # the other runs beside the negation
}
READ = {"gbytes_per_image": 7.5, "estimates": {"H200": {"ms": 9.0}}, "costliest": [{"us": 1.0}]}
PROGRAM = STEP | COUNTED | READ


def test_instructions_are_counted_where_they_start_work():
    assert compiled_step.count_instructions(hlo.parse(HLO)) == COUNTED


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"any": {"launches": 12, "least_kernels_backward": 2}}, None),
        ({"any": {"launches": 11}}, "launches is 12 with 2 images on each of 1 devices"),
        ({"any": {"least_kernels_forward": 5}}, "least_kernels_forward is 1"),
        ({"images_2": {"peak_mb": 2000}}, "peak_mb is 2100.0"),
        ({"images_8": {"peak_mb": 2000}}, None),
        ({"any": {"gbytes_per_image": 7.4}}, "gbytes_per_image is 7.5"),
    ],
)
def test_what_is_over_its_limit_is_named(limits, expected):
    found = compiled_step.violations(PROGRAM, limits)
    assert [expected in line for line in found] == ([True] if expected else [])


@pytest.mark.parametrize("name", ["launch", "costliest"])
def test_a_limit_of_no_figure_is_refused_by_name(name, tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(f"[coco.any]\nlaunches = 9\n[coco.images_64]\nleast_{name} = 3\n")
    with pytest.raises(ValueError, match=rf"\[coco.images_64\] has 'least_{name}', expected one"):
        compiled_step.load_limits(str(path), "coco")


def test_a_bad_file_of_limits_is_refused_by_name(tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text("any = [")
    with pytest.raises(ValueError, match="limits.toml: "):
        compiled_step.load_limits(str(path), "coco")


def test_a_recipe_without_limits_is_refused_by_name():
    with pytest.raises(ValueError, match="no limits for 'coco_tao', expected one of .*'coco'"):
        compiled_step.load_limits(BUDGETS, "configs/coco_tao.py")


@pytest.mark.parametrize("recipe", tomllib.loads(Path(BUDGETS).read_text()))
def test_the_projects_own_limits_are_of_recipes_and_are_held_by_nothing_absurd(recipe):
    load_config(recipe)
    name, _, variant = recipe.partition(":")
    path = f"configs/{name}.py:{variant}" if variant else f"configs/{name}.py"
    limits = compiled_step.load_limits(BUDGETS, path)
    assert limits == compiled_step.load_limits(BUDGETS, recipe)
    assert compiled_step.violations(PROGRAM | {"launches": 10**6, "kernels_forward": 0}, limits)


def test_the_table_has_a_column_for_each_program():
    text = compiled_step.table("h100", [PROGRAM, PROGRAM | {"devices": 4, "peak_mb": 1.5}])
    assert "| devices | 1 | 4 |" in text and "| peak_mb | 2100.0 | 1.5 |" in text
    assert "estimates" not in text and "costliest" not in text


def test_a_compiled_step_is_read_written_and_held_to_its_limits(monkeypatch, tmp_path, capsys):
    compiled = jax.jit(jnp.sort).lower(jnp.ones(100)).compile()
    monkeypatch.setattr(compiled_step, "compile_steps", lambda *_: iter([(dict(STEP), compiled)]))
    arguments = ["--config", str(ROOT / "configs" / "coco.py"), "--images=2", "--devices=1"]
    json_path, budgets = tmp_path / "step.json", tmp_path / "limits.toml"
    compiled_step.main(compiled_step.parse([*arguments, "--json", str(json_path)]))
    assert "| sorts | 1 |" in capsys.readouterr().out
    (program,) = json.loads(json_path.read_text())["programs"]
    assert program["peak_mb"] == 2100.0 and set(program["estimates"]) == {"H200", "H100"}
    budgets.write_text("[coco.any]\nsorts = 0\n")
    with pytest.raises(SystemExit, match="over the budget of .*: sorts is 1 with 2 images"):
        compiled_step.main(compiled_step.parse([*arguments, "--budgets", str(budgets)]))
