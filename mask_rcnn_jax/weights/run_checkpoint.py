"""Find a run's checkpoints, tell whole ones from damaged ones, and read their parameters."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging

from mask_rcnn_jax.weights import checksums


class CheckpointPath(NamedTuple):
    """A run's checkpoint."""

    workdir: Path
    step: int

    @property
    def folder(self) -> Path:
        return self.workdir / "checkpoints" / str(self.step)


def checkpoint_steps(workdir: str | os.PathLike) -> list[int]:
    """Return the steps of the folders named like checkpoints, whole or not, newest first."""
    folders = (Path(workdir) / "checkpoints").glob("*")
    return sorted((int(f.name) for f in folders if _is_step(f.name) and f.is_dir()), reverse=True)


def has_checkpoint(workdir: str | os.PathLike) -> bool:
    """Whether a workdir has a checkpoint to resume from; looks at names only."""
    return bool(checkpoint_steps(workdir))


def find_checkpoint(path: str | os.PathLike) -> CheckpointPath:
    """Return the checkpoint at `WORKDIR/checkpoints/<step>`, or the newest whole one of a workdir.

    Raises ValueError if there is none, or if the one that the path names is damaged.
    """
    path = Path(path).absolute()
    if path.name.isdigit() and path.parent.name == "checkpoints":
        if not _is_step(path.name) or not (path / "state").is_dir():
            raise ValueError(f"{path} is not a checkpoint of a run")
        found = CheckpointPath(path.parents[1], int(path.name))
        if fault := find_fault(path):
            raise ValueError(f"{path} is damaged: {fault}; choose another checkpoint")
        return found
    if not has_checkpoint(path):
        absent = "" if path.exists() else "does not exist and "
        raise ValueError(f"{path} {absent}holds no checkpoint, expected {path}/checkpoints/<step>")
    step, faults = newest_intact(path)
    for fault in faults.values():
        logging.warning("%s; step %d is used", fault, step)
    return CheckpointPath(path, step)


def newest_intact(workdir: str | os.PathLike) -> tuple[int, dict[int, str]]:
    """Return the newest whole checkpoint's step and why each newer one is not whole, by step.

    Raises ValueError if none is whole.
    """
    folder, faults = Path(workdir) / "checkpoints", {}
    for step in checkpoint_steps(workdir):
        fault = find_fault(folder / str(step))
        if fault is None:
            return step, faults
        faults[step] = f"{folder / str(step)} is damaged: {fault}"
    raise ValueError(
        f"{'; '.join(faults.values())}; no whole checkpoint is left, choose another workdir or "
        f"remove {folder} to start from the first step"
    )


def find_fault(folder: Path) -> str | None:
    """Say why a checkpoint cannot be trusted; None if all of its bytes are as they were saved.

    One without checksums, of an earlier version, is read as a trial.
    """
    if not (folder / "state").is_dir():
        return "it holds no state"
    if (folder / checksums.FILE_NAME).exists():
        return checksums.find_damage(folder)
    logging.info("%s has no checksums, so that not all damage is noticed", folder)
    try:
        read_arrays(folder, lambda tree: tree)
    except (PermissionError, MemoryError):
        raise
    except Exception as error:  # orbax and tensorstore raise whatever a damaged file leads to
        return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None


def load_checkpoint(path: str | os.PathLike, *, raw: bool = False) -> dict:
    """Load {"params": ..., "batch_stats": ...} as numpy arrays, without model or optimizer.

    Args:
        path: as for `find_checkpoint`.
        raw: take the weights of the step itself, also where their average is kept.
    """

    def variables(tree: dict) -> dict:
        if average := tree.get("average"):
            if not raw:
                return {"average": average}
        return {name: tree[name] for name in ("params", "batch_stats") if name in tree}

    restored = read_arrays(find_checkpoint(path).folder, variables, partial=True)
    if average := restored.get("average"):
        logging.info("%s: the average of the weights; eval.weights=raw takes the last ones", path)
    taken = average or restored
    return {"params": taken["params"], "batch_stats": taken.get("batch_stats", {})}


def read_arrays(folder: Path, choose: Callable[[Any], Any], *, partial: bool = False) -> Any:
    """Read a checkpoint's arrays as numpy arrays, wherever they were when it was saved.

    Every process reads for itself; one may, without the others.

    Args:
        choose: from the tree that was saved, whose leaves have shapes and dtypes, to the tree to
            read: itself, or another one of the same structure.
        partial: whether `choose` may leave arrays out.
    """
    me = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(primary_host=me, active_processes={me})
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=alone),
        state=ocp.PyTreeCheckpointHandler(multiprocessing_options=alone),
    )
    with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
        item = choose(checkpointer.metadata(folder).item_metadata["state"].tree)
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), item)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        given = {"item": item, "restore_args": restore_args, "partial_restore": partial}
        args = ocp.args.Composite(state=ocp.args.PyTreeRestore(**given))
        return checkpointer.restore(folder, args=args)["state"]


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdigit() and name == str(int(name))
