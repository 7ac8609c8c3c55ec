"""Weak scaling as it is measured, and as it is estimated from a compiled program."""

import json
from types import SimpleNamespace

import pytest

from benchmarks import hlo, scaling
from benchmarks.roofline import REACH
from benchmarks.scaling import Event
from mask_rcnn_jax.benchmarking import scaling as measured
from mask_rcnn_jax.benchmarking import steps
from mask_rcnn_jax.config import as_recipe
from tests.helpers import tiny_config

HLO = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0} parameter(0)
  %first = f32[1000]{0} negate(%x)
  %start.1 = (f32[1000]{0}, f32[500]{0}) all-reduce-start(%first, %half), to_apply=%add
  %start.2 = f32[1000]{0} all-reduce-start(%first), to_apply=%add
  %second = f32[1000]{0} negate(%first)
  %done.1 = (f32[1000]{0}, f32[500]{0}) all-reduce-done(%start.1)
  %third = f32[1000]{0} negate(%second)
  %losses = f32[] all-reduce(%third), to_apply=%add
  ROOT %done.2 = f32[1000]{0} all-reduce-done(%start.2)
}
"""


def test_a_schedule_has_launches_starts_and_waits_in_the_order_of_the_program():
    events = scaling.schedule(hlo.parse(HLO), "H100", REACH["low"])
    assert [(event.kind, event.name) for event in events] == [
        ("launch", ""), ("start", "start.1"), ("start", "start.2"), ("launch", ""),
        ("wait", "start.1"), ("launch", ""), ("start", "losses"), ("wait", "losses"),
        ("wait", "start.2"),
    ]  # fmt: skip
    assert [event.value for event in events if event.kind == "start"] == [6000, 4000, 4]
    assert all(event.value == 2.5 for event in events if event.kind == "launch")


H100 = scaling.LINKS["h100"]


def test_all_reduces_of_one_node_and_of_several():
    # 8 GPUs: 14/8 of the bytes at 0.8 of 450 GB/s. 4 nodes: 6/4 of an eighth of them at 0.8 of 50.
    inside = 1.75 * 176e6 / (0.8 * 450e9) * 1e6
    assert scaling.all_reduce_us(176e6, 8, H100) == pytest.approx(inside + 30)
    between = 1.5 * 22e6 / (0.8 * 50e9) * 1e6
    assert scaling.all_reduce_us(176e6, 32, H100) == pytest.approx(inside + between + 50)
    assert scaling.all_reduce_us(176e6, 1, H100) == 0


EVENTS = [
    Event("launch", 1000.0),
    Event("start", 80e6, "a"),
    Event("start", 80e6, "b"),
    Event("launch", 500.0),
    Event("wait", name="a"),
    Event("launch", 100.0),
    Event("wait", name="b"),
]


def test_a_step_waits_for_what_the_launches_beside_it_do_not_hide():
    one = scaling.all_reduce_us(80e6, 8, H100)  # 419 us: "a" is hidden, "b" follows it
    step, waited = scaling.run_us(EVENTS, 8, H100)
    assert 400 < one < 500
    assert step == pytest.approx(1000 + 2 * one)
    assert waited == pytest.approx(2 * one - 600)
    assert scaling.run_us(EVENTS, 1, H100) == (1600, 0)
    assert scaling.all_reduces(EVENTS) == [
        {"mbytes": 80, "start_ms": 1, "wait_ms": 1.5, "step_ms": 1.6},
        {"mbytes": 80, "start_ms": 1, "wait_ms": 1.6, "step_ms": 1.6},
    ]


def test_rows_have_what_the_hosts_must_do():
    eight, many = (scaling.estimate(EVENTS, 4, gpus, H100) for gpus in (8, 256))
    assert (eight["batch_size"], many["batch_size"]) == (32, 1024)
    assert eight["efficiency"] > many["efficiency"]
    rate = 32 / scaling.run_us(EVENTS, 8, H100)[0] * 1e6
    assert eight["images_per_s"] == round(rate)
    assert eight["loader_cores_per_node"] == round(rate / scaling.HOST["loaded_per_core"])
    assert eight["s_per_epoch"] == pytest.approx(118_287 / rate, abs=0.1)
    assert scaling.table([eight, many]).count("\n") == 3


def test_figures_that_differ_are_ranges():
    assert scaling.ranges({"gpus": 8, "ms": 40.0}, {"gpus": 8, "ms": 31.7}) == {
        "gpus": 8,
        "ms": "31.7 to 40.0",
    }


def test_both_ends_of_the_range_are_printed_and_written(monkeypatch, tmp_path, capsys):
    """Of a program with 1 GB through each of three launches, and small all-reduces."""
    compiled = SimpleNamespace(as_text=lambda: HLO.replace("f32[1000]", "f32[125000000]"))
    step = {"images_per_device": 2}
    monkeypatch.setattr(scaling, "compile_programs", lambda *_: iter([(step, compiled)]))
    path = tmp_path / "scaling.json"
    scaling.main(scaling.parse(["--config=quickstart", "--gpus=1,8", f"--json={path}"]))
    (alone, node) = json.loads(path.read_text())["rows"]
    launched = 3 * 1e9 / 3.35e12 * 1e3
    assert alone["low"]["ms_per_step"] == pytest.approx(launched / 0.79, abs=0.06)
    assert alone["high"]["ms_per_step"] == pytest.approx(launched / 0.9, abs=0.06)
    low, high = node["low"]["images_per_s"], node["high"]["images_per_s"]
    assert low < high and f"| {low} to {high} |" in capsys.readouterr().out


def counted(config, calls, mesh):
    figures = dict.fromkeys((*measured.SHARED, *measured.OF_A_ROW), 0)
    batch_size = config.train.batch_size
    rate = {1: 10.0, 2: 15.0}[mesh.size]
    return figures | {"batch_size": batch_size, "images_per_s": rate, "steps": calls}


def test_every_device_has_the_same_images_in_each_row(monkeypatch):
    monkeypatch.setattr(steps, "train", counted)
    config = tiny_config()
    half, table = measured.weak_scaling(as_recipe(config), 5, [1, 2])
    assert half["rows"] == table["rows"][:1]
    assert (table["processes"], table["images_per_device"], table["steps"]) == (1, 2, 5)
    shown = ("devices", "batch_size", "images_per_s_per_device", "efficiency")
    rows = [tuple(row[name] for name in shown) for row in table["rows"]]
    assert rows == [(1, 2, 10.0, 1.0), (2, 4, 7.5, 0.75)]
    assert config.train.batch_size == 4


@pytest.mark.parametrize(
    ("counts", "batch_size", "problem"),
    [
        ([1, 3], 3, "--devices has 3, this run has 2"),
        ([1, 2], 3, "train.batch_size is 3, expected a multiple of 2"),
        ([2, 2], 4, "--devices is 2,2, expected different numbers"),
    ],
)
def test_numbers_of_devices_that_cannot_be_measured(counts, batch_size, problem):
    config = tiny_config()
    config.train.batch_size = batch_size
    with pytest.raises(ValueError, match=problem):
        next(measured.weak_scaling(as_recipe(config), 5, counts))
