"""What is counted in a compiled program, and the limits for it."""

import argparse
import json
import tomllib

import jax
import jax.numpy as jnp
import pytest

from benchmarks import compiled_step, entries, hlo
from mask_rcnn_jax.config import load_config
from tests.commands.command import ROOT

BUDGETS = str(ROOT / "benchmarks" / "budgets.toml")
LIMITS = [
    (str(path), recipe)
    for path in sorted((ROOT / "benchmarks").glob("budgets*.toml"))
    for recipe in tomllib.loads(path.read_text())
]

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
  %cudnn-conv.1 = (f16[8]{0}, u8[0]{0}) custom-call(%Arg_0.1), custom_call_target="__cudnn$convBiasActivationForward"
  %gemm = f32[8]{0} custom-call(%Arg_0.1), custom_call_target="__cublas$gemm"
  %dot_fusion = f32[8]{0} fusion(%gemm), kind=kCustom, calls=%gemm_computation, backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
  %fusion.1 = bf16[4,2]{1,0} fusion(%gemm), kind=kInput, calls=%fused_transpose
  %wrapped_sort = f32[8]{0} fusion(%gemm), kind=kInput, calls=%wrapped_sort_computation
  %while.1 = (s32[], f32[8]{0}) while(%gemm), condition=%condition, body=%body
  %while.2 = (s32[], f32[8]{0}) while(%gemm), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"16"}}
  %all-reduce-start.2 = f32[8]{0} all-reduce-start(%gemm), to_apply=%region_1.2
  %negate.1 = f32[8]{0} negate(%gemm)
  %all-reduce-done.2 = f32[8]{0} all-reduce-done(%all-reduce-start.2)
  %all-reduce-start = f32[8]{0} all-reduce-start(%gemm), to_apply=%region_1.2
  %gte = f32[8]{0} bitcast(%gemm)
  ROOT %all-reduce-done = f32[8]{0} all-reduce-done(%all-reduce-start)
}
"""  # noqa: E501

BRANCHES = """HloModule jit_branches

%usual (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %sine = f32[2]{0} sine(%x)
  ROOT %cosine = f32[8]{0} cosine(%sine)
}

%overflow (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %wide = f32[99]{0} broadcast(%x)
  ROOT %sum = f32[8]{0} negate(%wide)
}

ENTRY %main (index: s32[], x: f32[8]) -> f32[8] {
  %index = s32[] parameter(0)
  %x = f32[8]{0} parameter(1)
  ROOT %conditional = f32[8]{0} conditional(%index, %x, %x), branch_computations={%overflow, %usual}
}
"""

STEP = {
    "mode": "train", "images_per_device": 2, "devices": 1, "peak_mb": 2100.0, "temp_mb": 1700.0,
    "gflop_per_image": 1500.0, "compile_s": 50.0, "implementation": "auto",
}  # fmt: skip
COUNTED = {
    "launches": 13,  # 6 library and custom calls, 3 fusions, copy in the loop, 2 sums, 1 negation
    "host_launches": 9,  # 3 calls, the convolutions, a graph of 5, and 3 around the second sum
    "kernels_forward": 1,
    "kernels_backward": 2,
    "convolutions": 2,
    "fused_convolutions": 1,  # with bias, residual and ReLU
    "float32_convolutions": 1,
    "matmuls": 2,
    "copies": 1,
    "transposes": 1,
    "converts": 1,
    "sorts": 1,
    "gathers": 0,
    "scatters": 0,
    "loops": 2,
    "open_loops": 1,
    "all_reduces": 2,
    "all_reduces_alone": 1,  # the other runs beside the negation
}
ESTIMATE = {"H200": {"low": {"ms": 12.0}, "high": {"ms": 9.0}}}
READ = {
    "gbytes_per_image": 7.5, "sort_launches": 36, "xla_mcycles": 0.0, "estimates": ESTIMATE,
    "costliest": [{"us": 1.0}],
}  # fmt: skip
PROGRAM = STEP | COUNTED | READ


def test_instructions_are_counted_where_they_start_work():
    assert compiled_step.count_instructions(hlo.parse(HLO)) == COUNTED


def test_the_cheapest_branch_counts():
    launched = hlo.parse(BRANCHES).launched
    assert [instruction.name for _, _, instruction in launched] == ["sine", "cosine"]


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"any": {"launches": 13, "least_kernels_backward": 2}}, None),
        ({"any": {"launches": 12}}, "launches is 13 with 2 images on each of 1 devices"),
        ({"any": {"least_kernels_forward": 5}}, "least_kernels_forward is 1"),
        ({"images_2": {"peak_mb": 2000}}, "peak_mb is 2100.0"),
        ({"images_8": {"peak_mb": 2000}}, None),
        ({"any": {"gbytes_per_image": 7.4}}, "gbytes_per_image is 7.5"),
        ({"any": {"sort_launches": 35}}, "sort_launches is 36"),
        ({"infer": {"launches": 11}, "infer_2": {"peak_mb": 2000}}, None),
    ],
)
def test_what_is_over_its_limit_is_named(limits, expected):
    found = compiled_step.violations(PROGRAM, limits)
    assert [expected in line for line in found] == ([True] if expected else [])


def test_predictions_have_limits_of_their_own():
    limits = {"any": {"launches": 1}, "images_2": {"launches": 1}, "infer": {"launches": 13}}
    program = PROGRAM | {"mode": "infer"}
    assert compiled_step.violations(program, limits) == []
    limits["infer_2"] = {"peak_mb": 2000}
    (line,) = compiled_step.violations(program, limits)
    assert line == (
        "peak_mb is 2100.0 with prediction, 2 images on each of 1 devices, the limit is 2000"
    )


def test_programs_without_kernels_have_limits_of_their_own():
    limits = {"any": {"launches": 1}, "infer_2": {"launches": 1}, "xla": {"open_loops": 0}}
    program = PROGRAM | {"implementation": "xla"}
    (line,) = compiled_step.violations(program, limits)
    assert line == "open_loops is 1 with 2 images on each of 1 devices, the limit is 0"
    assert compiled_step.violations(program | {"mode": "infer"}, limits) == []
    limits["xla_infer"] = {"launches": 11}
    assert len(compiled_step.violations(program | {"mode": "infer"}, limits)) == 1


@pytest.mark.parametrize("table", ["image_8", "images_", "infer_any", "inference"])
def test_a_table_that_limits_nothing_is_refused_by_name(table, tmp_path):
    path = tmp_path / "limits.toml"
    path.write_text(f"[coco.any]\nlaunches = 9\n[coco.{table}]\nlaunches = 3\n")
    with pytest.raises(ValueError, match=rf"has \[coco.{table}\], expected any, images_N, infer"):
        compiled_step.load_limits(str(path), "coco")


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


@pytest.mark.parametrize(("budgets", "recipe"), LIMITS)
def test_the_projects_own_limits_are_of_recipes_and_are_held_by_nothing_absurd(budgets, recipe):
    load_config(recipe)
    name, _, variant = recipe.partition(":")
    path = f"configs/{name}.py:{variant}" if variant else f"configs/{name}.py"
    limits = compiled_step.load_limits(budgets, path)
    assert limits == compiled_step.load_limits(budgets, recipe)
    absurd = {
        "launches": 10**6,
        "kernels_forward": 0,
        "mode": "train" if "any" in limits else "infer",
    }
    assert compiled_step.violations(PROGRAM | absurd, limits)


def test_the_table_has_a_column_for_each_program():
    text = compiled_step.table("h100", [PROGRAM, PROGRAM | {"devices": 4, "peak_mb": 1.5}])
    assert "| devices | 1 | 4 |" in text and "| peak_mb | 2100.0 | 1.5 |" in text
    assert "estimates" not in text and "costliest" not in text


def test_a_compiled_step_is_read_written_and_held_to_its_limits(monkeypatch, tmp_path, capsys):
    compiled = jax.jit(jnp.sort).lower(jnp.ones(100)).compile()
    asked = []

    def compile_programs(config, target, shapes, mode):
        asked.append((config.train.precision, target, shapes, mode))
        yield dict(STEP) | {"mode": mode}, compiled

    monkeypatch.setattr(compiled_step, "compile_programs", compile_programs)
    arguments = ["--config", str(ROOT / "configs" / "coco.py"), "--images=2", "--devices=1"]
    json_path, budgets = tmp_path / "step.json", tmp_path / "limits.toml"
    entry = "--config.train.precision=tf32"
    compiled_step.main(compiled_step.parse([*arguments, entry, "--json", str(json_path)]))
    printed = capsys.readouterr().out
    assert "| sorts | 1 |" in printed and "| sort_launches | 1 |" in printed
    (program,) = json.loads(json_path.read_text())["programs"]
    assert program["peak_mb"] == 2100.0 and set(program["estimates"]) == {"H200", "H100"}
    estimate = program["estimates"]["H100"]
    assert 0 < estimate["low"]["images_per_s"] <= estimate["high"]["images_per_s"]
    budgets.write_text("[coco.any]\nsorts = 0\n[coco.infer]\nsorts = 1\n")
    arguments += ["--budgets", str(budgets)]
    with pytest.raises(SystemExit, match="over the budget of .*: sorts is 1 with 2 images"):
        compiled_step.main(compiled_step.parse(arguments))
    compiled_step.main(compiled_step.parse([*arguments, "--mode", "infer"]))
    assert asked == [
        ("tf32", "h100", [(2, 1)], "train"),
        ("auto", "h100", [(2, 1)], "train"),
        ("auto", "h100", [(2, 1)], "infer"),
    ]


def test_entries_of_a_config_are_literals_or_text():
    given = ["a.b=3", "a.c=(832, 1344)", "a.d=all", "a.e=False", "a.f=", "a.g=x=1"]
    parser = argparse.ArgumentParser()
    parser.add_argument("--config")
    flags = [f"--config.{entry}" for entry in given]
    parsed = entries.parse(parser, ["--config", "coco", *flags])
    values = {"a.b": 3, "a.c": (832, 1344), "a.d": "all", "a.e": False, "a.f": "", "a.g": "x=1"}
    assert (parsed.config, parsed.entries) == ("coco", values)


@pytest.mark.parametrize("argument", ["--config.a.b", "--mod=infer", "coco", "--confg.a=1"])
def test_an_argument_that_is_no_entry_is_refused_by_name(argument, capsys):
    with pytest.raises(SystemExit) as stopped:
        compiled_step.parse(["--config=coco", argument])
    assert stopped.value.code == 2
    assert f"unexpected '{argument}', expected --config.section" in capsys.readouterr().err
