"""What `benchmarks/cold_start.py` waits for, and how it writes what it found."""

import pytest

from benchmarks import cold_start
from mask_rcnn_jax.training import step_log


def test_training_says_what_is_waited_for():
    with open(step_log.__file__) as file:
        assert f'"{cold_start.FIRST_STEP} after' in file.read()


def test_seconds_are_written_with_their_extremes():
    assert cold_start.text([3.0, 1.004, 2.0]) == "2.00 (1.00 to 3.00)"
    assert cold_start.text([1.239]) == "1.24"


@pytest.mark.parametrize("run", [cold_start.run_command, cold_start.until_first_step])
def test_a_command_that_fails_ends_the_benchmark(run):
    with pytest.raises(SystemExit, match="error: prepare ended with 2: error: "):
        run("prepare", "nothing")


def test_training_is_ended_after_its_first_step(monkeypatch, tmp_path):
    (tmp_path / "mask_rcnn_jax").mkdir()
    (tmp_path / "mask_rcnn_jax" / "__init__.py").touch()
    (tmp_path / "mask_rcnn_jax" / "train.py").write_text(
        "import sys, time\n"
        "print('first step done after 0.1 s', file=sys.stderr, flush=True)\n"
        "time.sleep(600)\n"
    )
    monkeypatch.setattr(cold_start, "ROOT", tmp_path)
    assert 0 < cold_start.until_first_step("train", "--workdir=x") < 300
