"""What `load` makes of a run, a recipe, a file and a name of public weights."""

import jax
import pytest

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.predict import loading
from mask_rcnn_jax.weights.restore import Restored
from tests.predict.conftest import CATEGORIES, two_canvas_config


@pytest.fixture
def restored(monkeypatch, variables):
    """Calls of `restore`, which returns a small model."""
    calls = []

    def restore(config, weights, **_):
        calls.append((config, weights))
        return Restored(as_recipe(two_canvas_config()), variables, CATEGORIES, None)

    monkeypatch.setattr(loading, "restore", restore)
    return calls


def test_a_run_brings_its_own_config(restored):
    predictor = mrcnn.load("runs/mine", batch_size=2)
    assert restored == [(None, "runs/mine")]
    assert predictor.categories == CATEGORIES
    assert predictor.images_at_once == 2 * jax.local_device_count()


def test_a_recipe_takes_a_file(restored, tmp_path):
    mrcnn.load("coco_torchvision:v2", tmp_path / "w.pth")
    ((config, weights),) = restored
    assert config.model.rpn.num_convs == 2 and weights == tmp_path / "w.pth"


def test_the_threshold_holds_after_soft_nms(restored, monkeypatch):
    configs = []
    monkeypatch.setattr(loading, "Predictor", lambda config, *_: configs.append(config))
    for threshold in (0.7, 0.0):
        mrcnn.load("runs/mine", score_threshold=threshold)
    assert [config.eval.score_threshold for config in configs] == [0.7, 0.0]
    assert [config.eval.soft_min_score for config in configs] == [0.7, 1e-3]
    for threshold in (50, -0.1):  # named as it was given
        with pytest.raises(ValueError, match="^score_threshold is .*, expected from 0 to 1"):
            mrcnn.load("runs/mine", score_threshold=threshold)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["coco_torchvision:v2"], "coco_torchvision:v2 is a recipe, expected weights as well"),
        (["runs/absent"], "runs/absent"),
        (["coco", "absent.pth"], "absent.pth"),
        (["unknown", "absent.pth"], "unknown"),
    ],
)
def test_what_cannot_be_loaded_is_named(arguments, message):
    with pytest.raises((ValueError, OSError), match=message):
        mrcnn.load(*arguments)
