"""Search for a learning rate and an augmentation with Optuna: bad trials end early.

    python examples/optuna_search.py my_recipe.py runs/search 12

The recipe sets train.steps and train.eval_every. The same command goes on with a killed search.
"""

import os
import sys

import jax
import optuna

import mask_rcnn_jax as mrcnn
from mask_rcnn_jax.training.optim import rate_in_state

AUGMENT = {"flip": (), "colors": ("brightness", "contrast", "hue"), "copy_paste": ("copy_paste",)}
SILENT_S = 120  # until a trial counts as killed, and is taken up again


def objective(trial: optuna.Trial, recipe: str, folder: str) -> float:
    rate = trial.suggest_float("learning_rate", 1e-3, 3e-2, log=True)
    kinds = AUGMENT[trial.suggest_categorical("augment", list(AUGMENT))]
    config = mrcnn.load_config(recipe, {"optim.learning_rate": rate, "data.augment": kinds})

    def report(step, metrics, images):
        if "ap/mask" in metrics:  # of an evaluation
            trial.report(metrics["ap/mask"], step)
            if trial.should_prune():
                raise mrcnn.StopTraining("pruned")

    workdir = f"{folder}/{trial.params['augment']}_{rate:.9f}"  # also where it is tried again
    optimizer = rate_in_state(config)
    try:
        state = mrcnn.train(config, workdir, optimizer=optimizer, loggers=[report])
    except FloatingPointError as error:
        raise optuna.TrialPruned(str(error)) from error
    jax.clear_caches()  # or the programs of all trials stay in memory
    if state.step < config.train.steps:
        raise optuna.TrialPruned(f"at step {state.step}")
    return state.metrics["ap/mask"]


def main(recipe: str, folder: str, trials: str = "12") -> None:
    os.makedirs(folder, exist_ok=True)
    jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
    beats = {"heartbeat_interval": SILENT_S // 2, "grace_period": SILENT_S}
    beats["heartbeat_stale_trial_callback"] = optuna.storages.RetryHeartbeatStaleTrialCallback()
    given = {"storage": optuna.storages.RDBStorage(f"sqlite:///{folder}/study.db", **beats)}
    given |= {"pruner": optuna.pruners.MedianPruner(n_startup_trials=4), "load_if_exists": True}
    study = optuna.create_study(study_name="search", direction="maximize", **given)
    done = [optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED]
    while len(study.get_trials(states=done)) < int(trials):
        study.optimize(lambda trial: objective(trial, recipe, folder), n_trials=1)
    print(f"best: {study.best_params}, mask AP {study.best_value:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
