"""Checkpoints of a run: the last few and the best, written in the background by one process."""

import dataclasses
import os
import shutil
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from mask_rcnn_jax.disk import check_room, write_whole
from mask_rcnn_jax.ops.low_rank import adapters, merge, split_again
from mask_rcnn_jax.recipe.stopping import main_ap, measure
from mask_rcnn_jax.training import processes
from mask_rcnn_jax.training.loss_scale import LossScaleState
from mask_rcnn_jax.training.mirror import UNSCORED, Mirror
from mask_rcnn_jax.training.step import TrainState
from mask_rcnn_jax.weights import checksums
from mask_rcnn_jax.weights.run_checkpoint import checkpoint_steps, newest_intact, read_arrays

# What is being written or deleted has such a name; both orbax and we leave them when killed.
LEFTOVERS = ("tmp.*", "*.orbax-checkpoint-tmp*")
ADAPTERS = "adapters"  # low-rank ones, and their kernels without them


class Checkpoints:
    """`DIR/checkpoints/<step>/`, which has its number once it is complete, with checksums.

    The state is the same on all devices, and saved as arrays of the host, so that any machine can
    restore it with orbax alone. All processes make the same calls; the first one writes.
    OSError if a checkpoint cannot be written, from the next call on; earlier ones are as they were.
    """

    def __init__(
        self,
        workdir: str | Path,
        keep: int,
        is_due: Callable[[int], bool] = lambda step: True,
        mirror: Mirror | None = None,
    ):
        """Remove leftovers of killed processes.

        Args:
            keep: the latest checkpoints that are kept.
            is_due: whether a step is saved in every run; a checkpoint saved because a run was
                stopped does not count as one of these.
            mirror: is told of changes; None where the workdir is a folder alone.
        """
        self._workdir, self._keep, self._is_due = Path(workdir).absolute(), keep, is_due
        self._folder, self._mirror = self._workdir / "checkpoints", mirror or Mirror(workdir)
        self._scores: dict[int, tuple[str, float]] = {}  # measure and AP by step
        self._saved: int | None = None
        self._unscored: int | None = None  # the step of scores to come, which decide what is kept
        self._jobs: list[Future] = []
        self._writes = jax.process_index() == 0
        self._thread = ThreadPoolExecutor(1, "checkpoints")
        if self._writes:
            _remove(self._folder, *LEFTOVERS)

    @property
    def resumes_at(self) -> int | None:
        """The step at which a run that ends now resumes."""
        return self._saved if self._unscored is None else self._unscored

    def save(self, state: TrainState) -> None:
        """Start to write the state, once the one before is written."""
        step = int(state.step)
        if not self._writes or step == self._saved:
            self._saved = step
            return
        self.wait()
        # A copy: the next step takes over the state's buffers while this is still being written.
        snapshot = jax.tree.map(lambda array: np.array(array, copy=True), state)
        self._saved = step
        scores = dict(self._scores) if self._unscored is None else None
        self._jobs.append(self._thread.submit(self._write, step, snapshot, scores))

    def hold(self, step: int) -> None:
        """Delete nothing until the next `evaluated`, before which the scores of a step are to come.

        A run that is killed meanwhile resumes at that step: what depends on the scores, such as
        records, is not complete for later ones.
        """
        self._unscored = step
        if self._writes:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(self._folder / UNSCORED, str(step))
            checksums.flush_folder(self._folder)

    def evaluated(self, evaluations: Sequence[Mapping]) -> None:
        """Keep the checkpoint of the step of the highest AP of each measure, the last of equals.

        evaluations: metrics with their "step", to be added to those that are known.
        """
        self._unscored = None
        if self._writes:
            (self._folder / UNSCORED).unlink(missing_ok=True)
            known = [one for one in evaluations if np.isfinite(main_ap(one))]
            self._scores.update((one["step"], (measure(one), main_ap(one))) for one in known)
            self._jobs.append(self._thread.submit(self._prune, dict(self._scores)))
            self._jobs.append(self._thread.submit(self._mirror.update))

    def restore(self, state: TrainState) -> TrainState:
        """The newest whole state, as numpy arrays; `state` gives structure, shapes and dtypes.

        Newer ones that are damaged are named and moved aside. If only one of `state` and checkpoint
        has a loss scale, that of `state` is taken or that of the checkpoint dropped, since the run
        may go on on a device where `train.precision` "auto" is another one.

        Raises ValueError if no checkpoint is whole, or the state of the optimizer was saved by an
        optimizer of another form.
        """
        self.wait()
        step = processes.on_first(self._choose)
        folder = self._mirror.checkpoint(step)

        def fields(tree: Mapping[str, Any]) -> dict:
            if "opt_state" not in tree:
                raise ValueError(
                    f"{folder} has weights alone, as prune writes them; train in another --workdir "
                    "with model.init_from"
                )
            return _fields(_scaled_as(tree["opt_state"], state), tree)

        try:
            arrays = read_arrays(folder, fields)
        except ValueError as error:
            if "opt_state" not in str(error) or "structure" not in str(error):
                raise
            raise _optimizer_error(folder) from error
        if kept := arrays.pop(ADAPTERS, {}):
            arrays["params"] = split_again(arrays["params"], kept)
        restored = dataclasses.replace(state, **arrays)
        restored = _scaled_as(state.opt_state, restored)
        shapes, expected = (list(map(np.shape, jax.tree.leaves(t))) for t in (restored, state))
        if shapes != expected:
            raise _optimizer_error(folder)
        self._saved = step
        return restored

    def wait(self) -> None:
        """Wait for pending writes."""
        jobs, self._jobs = self._jobs, []
        try:
            for job in jobs:
                job.result()
        except Exception as error:  # a full disk is a ValueError of tensorstore, among others
            text = "a checkpoint could not be written, earlier ones are kept"
            why = " ".join(str(error).partition("[tensorstore_spec=")[0].split())
            raise OSError(f"{self._folder}: {text}: {why}") from error

    def close(self) -> None:
        """Wait for pending writes, and end."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _choose(self) -> int:
        self._drop_unscored()
        step, faults = newest_intact(self._workdir)
        for damaged, fault in faults.items():
            aside = _move_aside(self._folder / str(damaged))
            logging.warning("%s; moved to %s, the run goes on from step %d", fault, aside, step)
        return step

    def _drop_unscored(self) -> None:
        """Delete the checkpoints that do not count, see `hold`."""
        try:
            last = int((self._folder / UNSCORED).read_text())
        except (FileNotFoundError, ValueError):  # killed before it was written
            return
        later = [step for step in checkpoint_steps(self._workdir) if step > last]
        if later and self._is_checkpoint(last):
            text = "the scores of step %d were not there when the run ended: it goes on from there"
            logging.info(text, last)
            for step in later:
                self._delete(step)
        (self._folder / UNSCORED).unlink()

    def _write(
        self, step: int, state: TrainState, scores: Mapping[int, tuple[str, float]] | None
    ) -> None:
        draft, target = self._folder / f"tmp.{step}", self._folder / str(step)
        self._workdir.mkdir(parents=True, exist_ok=True)
        # Of a disk that is full in mid-write, tensorstore prints a traceback for each array.
        fields = _fields(state)
        check_room(self._workdir, sum(array.nbytes for array in jax.tree.leaves(fields)))
        # The other processes take no part, so orbax must not wait for them.
        alone = ocp.options.MultiprocessingOptions(primary_host=0, active_processes={0})
        handler = ocp.CompositeCheckpointHandler(
            composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
            state=ocp.StandardCheckpointHandler(multiprocessing_options=alone),
        )
        try:
            with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
                item = ocp.args.StandardSave(fields)
                checkpointer.save(draft, ocp.args.Composite(state=item))
            checksums.write_checksums(draft)
            if os.path.lexists(target):  # not of this run, whose steps are saved once
                logging.warning("%s was in the way, moved to %s", target, _move_aside(target))
            draft.rename(target)
        except BaseException:
            _remove(self._folder, f"tmp.{step}*")
            raise
        checksums.flush_folder(self._folder)
        if scores is not None:
            self._prune(scores)
        self._mirror.update()

    def _prune(self, scores: Mapping[int, tuple[str, float]]) -> None:
        # Others of such a name are not ours, and take no place.
        steps = [n for n in checkpoint_steps(self._workdir) if self._is_checkpoint(n)]
        regular = sorted(steps, key=lambda step: (self._is_due(step), step), reverse=True)
        rising = sorted((scores[step][1], step) for step in steps if step in scores)
        best = {scores[step][0]: step for _, step in rising}
        kept = {*regular[: self._keep], *steps[:1], *best.values()}
        for step in steps:
            if step not in kept:
                self._delete(step)

    def _delete(self, step: int) -> None:
        # Half of a checkpoint must not be taken for one.
        doomed = self._folder / f"tmp.deleted.{step}"
        (self._folder / str(step)).rename(doomed)
        shutil.rmtree(doomed)

    def _is_checkpoint(self, step: int) -> bool:
        return (self._folder / str(step) / "state").is_dir()


def _fields(state: TrainState, saved: Container[str] = ()) -> dict:
    """The fields of a state by name; no average where none is kept, unless one is in `saved`.

    `params` are those that a model takes; `ADAPTERS` is what a run goes on with.
    """
    fields = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    if kept := adapters(state.params):
        params = jax.tree.map(np.asarray, merge(state.params))
        fields |= {"params": params, ADAPTERS: kept}
    if not state.average and "average" not in saved:
        del fields["average"]
    return fields


def _scaled_as(other: Any, state: TrainState) -> TrainState:
    """A state with a loss scale if another one's optimizer, or what orbax tells of it, has one."""
    inner, scaled = state.opt_state, isinstance(state.opt_state, LossScaleState)
    wanted = isinstance(other, LossScaleState) or (
        isinstance(other, Mapping) and set(other) == set(LossScaleState._fields)
    )
    if scaled == wanted:
        return state
    if scaled:
        return dataclasses.replace(state, opt_state=inner.inner)
    if not isinstance(other, LossScaleState):  # what to read is known by shapes and dtypes alone
        other = LossScaleState(jnp.float32(0), jnp.int32(0), jnp.int32(0), inner)
    return dataclasses.replace(state, opt_state=other._replace(inner=inner))


def _optimizer_error(folder: Path) -> ValueError:
    return ValueError(
        f"{folder} was saved with another optimizer, whose state does not fit; resume with the "
        "same one or choose another workdir"
    )


def _move_aside(path: Path) -> Path:
    """Give a checkpoint a name that nothing takes for one."""
    aside = path.with_name(f"damaged.{path.name}")
    if aside.exists():
        _remove(path.parent, aside.name)
    return path.rename(aside)


def _remove(folder: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
