"""Search for a learning rate and an augmentation with Ray Tune's ASHA, on a cluster.

    python examples/ray_tune_asha.py my_recipe.py /shared/search 12

The recipe sets train.steps and train.eval_every. The same command goes on with a killed search.
"""

import os
import sys
from functools import partial
from pathlib import Path

import jax
from ray import tune
from ray.tune.schedulers import ASHAScheduler

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.training.optim import rate_in_state

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # else Ray reports on its use
AUGMENT = {"flip": (), "colors": ("brightness", "contrast", "hue"), "copy_paste": ("copy_paste",)}
SPACE = {"learning_rate": tune.loguniform(1e-3, 3e-2), "augment": tune.choice(list(AUGMENT))}
OF_A_TRIAL = {"cpu": 2, "gpu": 0}


def trial(chosen: dict, recipe: str, folder: Path, start: str) -> None:
    os.chdir(start)  # where the paths of the recipe begin; Tune has a folder for each trial
    jax.config.update("jax_compilation_cache_dir", str(folder / "compiled"))
    rate, kinds = chosen["learning_rate"], AUGMENT[chosen["augment"]]
    config = mrcnn.load_config(recipe, {"optim.learning_rate": rate, "data.augment": kinds})

    def report(step, metrics, images):
        if "ap/mask" in metrics:  # of an evaluation; ASHA may end the trial in this call
            tune.report({"ap": metrics["ap/mask"], "step": step})

    workdir = folder / f"trial_{tune.get_context().get_trial_id()}"
    mrcnn.train(config, workdir, optimizer=rate_in_state(config), loggers=[report])


def main(recipe: str, folder: str, trials: str = "12") -> tune.ResultGrid:
    path, train = Path(folder).resolve(), mrcnn.load_config(recipe).train
    run = partial(trial, recipe=recipe, folder=path, start=os.getcwd())
    run = tune.with_resources(run, OF_A_TRIAL)
    if tune.Tuner.can_restore(path / "tune"):
        tuner = tune.Tuner.restore(str(path / "tune"), run, resume_errored=True)
    else:
        asha = ASHAScheduler("step", max_t=train.steps + 1, grace_period=train.eval_every)
        about = {"metric": "ap", "mode": "max", "scheduler": asha, "num_samples": int(trials)}
        kept = tune.RunConfig(name="tune", storage_path=str(path))
        tuner = tune.Tuner(
            run, param_space=SPACE, tune_config=tune.TuneConfig(**about), run_config=kept
        )
    results = tuner.fit()
    best = results.get_best_result()
    print(f"best: {best.metrics['trial_id']}, {best.metrics['ap']:.3f}, {best.config}")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:])
