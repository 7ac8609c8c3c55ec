"""Find a learning rate: raise it step by step until the loss runs away, and print a table.

    python examples/lr_finder.py finetune data.train_json=my/train.json data.train_images=my/images

A tenth of the rate with the lowest loss is suggested. Entries of the recipe follow its name.
"""

import argparse
import ast
import tempfile
from contextlib import suppress

import optax

import mask_rcnn_jax as mrcnn


def find(recipe, train_set=None, steps=100, lowest=1e-6, highest=1.0) -> dict[float, float]:
    """Return the loss, averaged over about ten steps, by learning rate."""
    options, rates = recipe.optim, optax.exponential_decay(lowest, steps, highest / lowest)
    kind, more = optax.sgd, {"momentum": options.momentum}
    if options.name == "adamw":
        kind, more = optax.adamw, {"b1": options.betas[0], "b2": options.betas[1]}
    losses, mean = {}, 0.0

    def watch(step, metrics, images):
        nonlocal mean
        mean = 0.9 * mean + 0.1 * metrics["loss/total"]
        losses[metrics["lr"]] = mean / (1 - 0.9**step)
        if losses[metrics["lr"]] > 4 * min(losses.values()):
            raise mrcnn.StopTraining("the loss runs away")

    optimizer = optax.inject_hyperparams(kind)(learning_rate=rates, **more)
    with tempfile.TemporaryDirectory() as workdir, suppress(FloatingPointError):
        mrcnn.train(recipe, workdir, train_set=train_set, optimizer=optimizer, loggers=[watch])
    return losses


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("entries", nargs="*", help="such as train.batch_size=4")
    parser.add_argument("--steps", type=int, default=100)
    given = parser.parse_args(arguments)
    entries = dict(entry.split("=", 1) for entry in given.entries)
    for name, text in entries.items():
        with suppress(SyntaxError, ValueError):  # a text without quotes stays one
            entries[name] = ast.literal_eval(text)
    fixed = {"data.val_json": "", "train.epochs": 0.0, "train.steps": given.steps}
    fixed |= {"train.log_every": 1, "train.checkpoint_every": given.steps}
    try:
        recipe = mrcnn.load_config(given.recipe, entries | fixed)
        losses = find(recipe, steps=given.steps)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if not losses:
        parser.error("the loss is not finite at the first step, whatever the rate")
    print(*(f"{rate:.2e}  {loss:.4f}" for rate, loss in losses.items()), sep="\n")
    best = min(losses, key=losses.get) / 10 * recipe.optim.reference_batch / recipe.train.batch_size
    print(f"try --config.optim.learning_rate={best:.2g}")


if __name__ == "__main__":
    main()
