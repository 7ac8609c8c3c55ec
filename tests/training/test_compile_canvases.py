"""Both canvases of a recipe are compiled before the first step, and never again."""

import threading
from functools import cached_property

import jax
import numpy as np
import pytest
from absl import logging

from mask_rcnn_jax.config import as_recipe
from mask_rcnn_jax.data.transforms import empty_batch
from mask_rcnn_jax.training import loop
from mask_rcnn_jax.training.batches import abstract_train_batch
from mask_rcnn_jax.training.compiling import compile_canvases
from mask_rcnn_jax.training.loop import train
from mask_rcnn_jax.training.step import make_mesh, replicate, shard_batch
from tests.helpers import tiny_config
from tests.memory_set import ShapeSet
from tests.training.own_run import small_config
from tests.training.stubbed_run import stubbed

__all__ = ["stubbed"]

CANVASES = [(64, 128), (128, 64)]


def two_canvases(config):
    config.data.update(image_size=(48, 96), resize="shortest_edge")
    return config


class _Lowered:
    """A program that is compiled once as many threads do so as there are programs."""

    def __init__(self, lowered, barrier):
        self.lowered, self.barrier = lowered, barrier

    def compile(self):
        self.barrier.wait(30)
        return self.lowered.compile()


class _Step:
    def __init__(self, step, threads):
        self.step, self.barrier = step, threading.Barrier(threads)

    def lower(self, *arguments):
        return _Lowered(self.step.lower(*arguments), self.barrier)


def test_canvases_are_compiled_at_the_same_time_for_the_loaders_batches():
    recipe, mesh = as_recipe(two_canvases(tiny_config())), make_mesh()
    data, rows = recipe.data, recipe.train.batch_size
    step = jax.jit(lambda state, batch: (state + 1, batch.images.sum(dtype=np.int32) + state))
    state = replicate(np.int32(5), mesh)
    shapes = {canvas: abstract_train_batch(data, rows, canvas, mesh) for canvas in CANVASES}
    compiled = compile_canvases(_Step(step, len(CANVASES)), state, shapes)
    for canvas in CANVASES:
        batch = empty_batch(rows, canvas, data)
        batch.images[:, 0, 1] = 2
        batch = shard_batch(batch, mesh)
        state, total = compiled(state, batch)  # a program takes no other shapes and shardings
        assert total == state - 1 + 2 * 3 * rows
    assert state == 7 and step._cache_size() == 0


class Mixed:
    """Landscapes and portraits in turns."""

    class_names = ShapeSet.class_names

    def __init__(self, split, count):
        self.sets = [ShapeSet(split, count, size) for size in ((48, 64), (64, 48))]

    @cached_property
    def images(self):
        both = zip(*(one.images for one in self.sets), strict=True)
        return [pair[index % 2] for index, pair in enumerate(both)]

    def decode(self, index):
        return self.sets[index % 2].decode(index)


def test_a_run_that_only_lacks_its_last_evaluation_compiles_nothing(stubbed, tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(
        loop, "compile_canvases", lambda step, state, shapes: compiled.append([*shapes]) or step
    )
    config = two_canvases(small_config())
    config.train.update(steps=2, checkpoint_every=2, eval_every=2)

    def run():
        train(config, tmp_path, train_set=Mixed("train", 8), val_set=Mixed("val", 2))

    run()
    assert list(map(sorted, compiled)) == [CANVASES]
    path = tmp_path / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if "ap/box" not in line))
    run()
    assert len(compiled) == 1 and "ap/box" in path.read_text()


class Rarely(Mixed):
    """One portrait among twelve."""

    @cached_property
    def images(self):
        landscapes, portraits = (one.images for one in self.sets)
        return [*portraits[:1], *landscapes[1:]]

    def decode(self, index):
        return self.sets[0 if index else 1].decode(index)


def test_a_rare_canvas_is_left_until_it_comes(stubbed, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(loop, "compile_canvases", None)  # not called for the other one alone
    config = two_canvases(small_config())
    config.train.update(steps=2, checkpoint_every=2, eval_every=2)
    with caplog.at_level("INFO"):
        train(config, tmp_path, train_set=Rarely("train", 12), val_set=Mixed("val", 2))
    line = "images of 128 x 64 are 8.3%: the step compiles for them when they first come"
    assert line in caplog.text


@pytest.mark.slow
def test_a_run_compiles_both_canvases_before_its_first_step(tmp_path, caplog):
    compilations = []

    def note(event: str, _: float, **kwargs) -> None:
        if "backend_compile" in event:
            compilations.append(event)

    seen = {}

    def logger(step, metrics, images):
        seen[step] = len(compilations)

    config = two_canvases(small_config())
    config.train.update(steps=6, eval_every=6, log_every=1, checkpoint_every=6)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        with caplog.at_level("INFO", logger=logging.get_absl_logger().name):
            train(
                config,
                tmp_path,
                train_set=Mixed("train", 8),
                val_set=Mixed("val", 2),
                loggers=[logger],
            )
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
    lines = [record.getMessage() for record in caplog.records]
    said = [line for line in lines if line.startswith("compil")]
    first = "compiling the training step for images of 64 x 128 and 128 x 64 ..."
    assert said[0] == first
    # A slow machine says it again, with the seconds so far; the detector comes later.
    others = [line for line in said if not line.startswith(first)]
    assert others[0].startswith("compiled in ") and "training step" not in " ".join(others)
    assert seen[2] == seen[5]  # whichever canvas came first
