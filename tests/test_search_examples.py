"""examples/optuna_search.py and examples/ray_tune_asha.py at a toy size."""

import importlib.util
import signal
import subprocess
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import pytest

from mask_rcnn_jax.training.metrics import read_metrics
from tests.training.own_run import small_config

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RECIPE = """
from tests.test_search_examples import toy_recipe


def get_config():
    return toy_recipe({folder!r})
"""


def toy_recipe(folder: str):
    """Six steps of a model that compiles quickly, on generated shapes."""
    config = small_config()
    for split in ("train", "val"):
        annotations = f"{folder}/annotations/instances_{split}.json"
        config.data.update({f"{split}_json": annotations, f"{split}_images": f"{folder}/{split}"})
    config.data.update(source="json", num_workers=0)
    config.train.update(steps=6, eval_every=2, checkpoint_every=2, batch_size=2)
    config.eval.update(loss_images=0, pictures=0)
    return config


def load_example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def recipe(tmp_path):
    from mask_rcnn_jax.formats.shapes import write_shapes

    write_shapes(tmp_path / "shapes", train=4, val=2, size=(64, 64))
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE.format(folder=str(tmp_path / "shapes")))
    return path


@pytest.fixture
def optuna():
    module = pytest.importorskip("optuna")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", module.exceptions.ExperimentalWarning)
        yield module


@pytest.mark.slow
def test_a_killed_search_goes_on_and_bad_trials_end_early(optuna, recipe, tmp_path, monkeypatch):
    """A kill -9 in the first trial; its run goes on from its checkpoint, not from the start. Four
    trials that were better, as their records say, have the next one pruned."""
    folder = tmp_path / "search"
    command = [sys.executable, EXAMPLES / "optuna_search.py", recipe, folder, "1"]
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=log)
    while not list(folder.glob("*/checkpoints/4")):
        assert process.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()

    example = load_example("optuna_search")
    monkeypatch.setattr(example, "SILENT_S", 2)  # compiling took longer
    example.main(str(recipe), str(folder), "1")
    study = optuna.load_study(study_name="search", storage=f"sqlite:///{folder}/study.db")
    killed, retried = study.get_trials()
    assert (killed.state.name, retried.state.name) == ("FAIL", "COMPLETE")
    assert retried.params == killed.params and 2 not in retried.intermediate_values
    (records,) = map(read_metrics, folder.glob("*/metrics.jsonl"))
    assert [record["step"] for record in records if "lr" in record] == [*range(1, 7)]

    space = killed.distributions
    for rate in (1e-3, 2e-3, 3e-3, 4e-3):
        given = {"params": killed.params | {"learning_rate": rate}, "distributions": space}
        values = {step: 0.9 for step in (2, 4, 6)}
        study.add_trial(optuna.create_trial(value=0.9, intermediate_values=values, **given))
    example.main(str(recipe), str(folder), "6")
    last = study.get_trials()[-1]
    assert (last.state.name, list(last.intermediate_values)) == ("PRUNED", [2])
    assert len(study.get_trials()) == 7


def test_trials_of_nearly_one_rate_have_folders_of_their_own(optuna, recipe, monkeypatch):
    """TPE looks near what was good; the same folder would go on with the other trial's run."""
    example, folders = load_example("optuna_search"), []

    def train(config, workdir, **given):
        folders.append(workdir)
        raise FloatingPointError

    monkeypatch.setattr(example.mrcnn, "train", train)
    for rate in (0.005123456, 0.005123499, 0.005123456):
        trial = optuna.trial.FixedTrial({"learning_rate": rate, "augment": "flip"})
        with pytest.raises(optuna.TrialPruned):
            example.objective(trial, str(recipe), "search")
    first, other, again = folders
    assert first == again != other


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of Ray
def test_asha_ends_trials_where_they_report(recipe, tmp_path, monkeypatch):
    """All of them at step 4, to see it. What is finished is not done again."""
    ray = pytest.importorskip("ray")
    example, folder = load_example("ray_tune_asha"), tmp_path / "search"
    shorter = partial(example.ASHAScheduler, "step", max_t=4)
    monkeypatch.setattr(example, "ASHAScheduler", lambda _, max_t, **given: shorter(**given))
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        first = example.main(str(recipe), str(folder), "2")
        again = example.main(str(recipe), str(folder), "2")
    finally:
        ray.shutdown()
    assert not first.errors and [one.metrics["step"] for one in first] == [4, 4]
    assert {one.path for one in first} == {one.path for one in again}
    records = [read_metrics(path) for path in folder.glob("trial_*/metrics.jsonl")]
    assert [max(record["step"] for record in one) for one in records] == [4, 4]
