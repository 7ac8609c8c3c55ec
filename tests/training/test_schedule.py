"""Learning rates against fvcore's, as detectron2 uses them, and numbers worked by hand."""

import json

import numpy as np
import pytest

from mask_rcnn_jax.recipe.schedule import Schedule
from tests.helpers import shared

# The rate of every listed iteration; fractions of the run where detectron2 has iterations.
GOLDEN = {
    "d2_lsj_100ep": ("steps", (163_889, 177_546)),
    "d2_lsj_400ep": ("steps", (655_556, 710_184)),
    "vitdet_b": ("steps", (163_889, 177_546)),
    "small_steps": ("steps", (60, 80)),
    "small_cosine": ("cosine", ()),
}


@pytest.mark.parametrize("name", GOLDEN)
def test_rates_are_those_of_fvcore(name):
    golden = json.loads(shared("goldens/modern/schedules.json").read_text())[name]
    kind, drops = GOLDEN[name]
    steps = golden["max_iter"]
    schedule = Schedule(
        learning_rate=golden["base_lr"],
        reference_batch=64,
        warmup_until=golden["warmup_iterations"] / steps,
        warmup_factor=golden["warmup_factor"],
        schedule=kind,
        decay_at=tuple(drop / steps for drop in drops),
        decay_levels=(0.1, 0.01)[: len(drops)],
    )
    rate = schedule.rates(64, steps)
    iterations = list(map(int, golden["lr"]))
    found = np.array([float(rate(np.int32(step))) for step in iterations])
    # A warm-up is a difference from the peak, so that its first steps have the peak's rounding.
    rounding = 1e-7 * golden["base_lr"]
    np.testing.assert_allclose(found, list(golden["lr"].values()), rtol=1e-6, atol=rounding)


def rates(steps, at, batch_size=16, **options):
    options = {"learning_rate": 0.02, "warmup_until": 0.0} | options
    rate = Schedule(**options).rates(batch_size, steps)
    return [float(rate(step)) for step in at]


def test_a_polynomial_of_power_one_is_a_line():
    found = rates(10, (0, 1, 5, 9, 10, 50), schedule="polynomial")
    np.testing.assert_allclose(found, [0.02, 0.018, 0.01, 0.002, 0.0, 0.0], rtol=1e-6)


def test_a_polynomial_ends_at_its_share_of_the_peak():
    """A tenth and nine tenths of the square of what is left."""
    found = rates(4, (0, 1, 2, 4), schedule="polynomial", power=2.0, end_factor=0.1)
    np.testing.assert_allclose(found, [0.02, 0.012125, 0.0065, 0.002], rtol=1e-6)


def test_a_cosine_ends_at_its_share_of_the_peak():
    found = rates(6, (0, 2, 3, 6, 9), schedule="cosine", end_factor=0.2, batch_size=8)
    np.testing.assert_allclose(found, [0.01, 0.008, 0.006, 0.002, 0.002], rtol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_a_warm_up_meets_the_curve(kind):
    """From a tenth of the peak in a straight line."""
    whole = rates(100, (20, 21), schedule=kind)
    found = rates(100, (0, 10, 20, 21), schedule=kind, warmup_until=0.2, warmup_factor=0.1)
    middle = (0.002 + whole[0]) / 2
    np.testing.assert_allclose(found, [0.002, middle, *whole], rtol=1e-6)


@pytest.mark.parametrize("kind", ["cosine", "polynomial"])
def test_where_the_rate_of_steps_drops_is_of_no_matter_to_others(kind):
    assert Schedule(schedule=kind, warmup_until=0.9).decay_at == (60 / 90, 80 / 90)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"warmup_until": 0.7}, "warmup_until is 0.7, .* 0 to the first of optim.decay_at"),
        ({"warmup_until": 1.5, "schedule": "cosine"}, "warmup_until is 1.5, .* from 0 to 1$"),
        ({"decay_levels": (0.1,)}, "decay_at is .* a level for each"),
        ({"end_factor": -0.1}, "end_factor is -0.1"),
        ({"power": 0.0}, "power is 0.0, expected above 0"),
        ({"power": float("nan")}, "power is nan"),
    ],
)
def test_what_is_no_schedule_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Schedule(**options)
