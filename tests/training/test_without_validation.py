"""A run without a set to evaluate: it trains, keeps its last checkpoints, and goes on."""

import jax
import pytest
from absl import logging

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.source import load_split
from mask_rcnn_jax.training import loop
from mask_rcnn_jax.training.scored_file import evaluate_results
from tests.memory_set import ShapeSet
from tests.training.own_run import small_config
from tests.training.stubbed_run import EVERY, kept, series, stubbed

__all__ = ["stubbed"]


def run(workdir, **changes):
    config = small_config()
    config.data.val_json = ""
    config.train.update(EVERY | changes)
    return jax.device_get(loop.train(config, workdir, train_set=ShapeSet("train", 10)))


def test_nothing_is_evaluated_and_the_last_checkpoints_stay(stubbed, tmp_path, caplog):
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        state = run(tmp_path, steps=11, checkpoint_every=2, eval_every=3, keep_checkpoints=3)
    assert int(state.step) == 11
    assert sorted(kept(tmp_path), key=int) == ["8", "10", "11"]
    assert [record["step"] for record in series(tmp_path)] == list(range(1, 12))
    assert not any("ap/box" in record for record in series(tmp_path))
    assert not (tmp_path / "eval").exists()
    said = [record.getMessage() for record in caplog.records]
    assert sum("nothing is evaluated" in line for line in said) == 1
    assert "finished at step 11" in said
    first, tensorboard, infer, export = said[-1].splitlines()
    assert first == "next:" and tensorboard.endswith(f"tensorboard --logdir {tmp_path}")
    assert "mask_rcnn_jax.infer" in infer and "mask_rcnn_jax.export" in export
    assert f"report: {tmp_path / 'report.html'}" in said
    assert "Total loss" in (tmp_path / "report.html").read_text()

    (tmp_path / "report.html").unlink()  # as if the run had been killed before
    with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
        run(tmp_path, steps=11, checkpoint_every=2)
    assert f"nothing to do: {tmp_path} is finished at step 11" in caplog.text
    assert (tmp_path / "report.html").is_file()


@pytest.mark.slow
def test_a_longer_run_goes_on(stubbed, tmp_path):
    run(tmp_path / "two", steps=6)
    two = run(tmp_path / "two")
    one = run(tmp_path / "one")
    assert jax.tree.map(lambda x: x.tolist(), two) == jax.tree.map(lambda x: x.tolist(), one)


def test_what_needs_an_evaluation_says_so(stubbed, tmp_path):
    with pytest.raises(ValueError, match="stop_at_box_ap is 0.3, .* data.val_json"):
        run(tmp_path, stop_at_box_ap=0.3)
    assert not list(tmp_path.iterdir())
    config = small_config()
    config.data.val_json = ""
    with pytest.raises(ValueError, match="data.val_json is empty: there is nothing to evaluate on"):
        load_split(as_recipe(config).data, "val")
    (tmp_path / "results.json").write_text("[]")
    with pytest.raises(ValueError, match="data.val_json is empty: there is nothing to evaluate on"):
        evaluate_results(tmp_path / "results.json", config)
