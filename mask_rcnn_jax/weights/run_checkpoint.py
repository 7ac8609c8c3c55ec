"""Find a run's checkpoints and read their parameters."""

import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp


def has_checkpoint(workdir: str | os.PathLike) -> bool:
    """Whether a workdir has a checkpoint to resume from; looks at names only."""
    return any(folder.name.isdigit() for folder in (Path(workdir) / "checkpoints").glob("*"))


class CheckpointPath(NamedTuple):
    """A run's checkpoint."""

    workdir: Path
    step: int

    @property
    def folder(self) -> Path:
        return self.workdir / "checkpoints" / str(self.step)


def find_checkpoint(path: str | os.PathLike) -> CheckpointPath:
    """Return the checkpoint at `WORKDIR/checkpoints/<step>`, or the latest one of a workdir.

    Raises ValueError if there is none.
    """
    path = Path(path).absolute()
    if path.name.isdigit() and path.parent.name == "checkpoints":
        found = CheckpointPath(path.parents[1], int(path.name))
    else:
        folders = (path / "checkpoints").glob("*")
        steps = [int(folder.name) for folder in folders if folder.name.isdigit()]
        if not steps:
            raise ValueError(f"{path} holds no checkpoint, expected {path}/checkpoints/<step>")
        found = CheckpointPath(path, max(steps))
    if not (found.folder / "state").is_dir():
        raise ValueError(f"{found.folder} is not a checkpoint of a run")
    return found


def load_checkpoint(path: str | os.PathLike) -> dict:
    """Load {"params": ..., "batch_stats": ...} as numpy arrays, without model or optimizer.

    path: as for `find_checkpoint`.
    """
    folder = find_checkpoint(path).folder / "state"
    with ocp.PyTreeCheckpointer() as checkpointer:
        saved = checkpointer.metadata(folder).item_metadata.tree
        item = {name: saved[name] for name in ("params", "batch_stats") if name in saved}
        item = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), item)
        restore_args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
        restored = checkpointer.restore(
            folder,
            args=ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True),
        )
    return {"params": restored["params"], "batch_stats": restored.get("batch_stats", {})}
