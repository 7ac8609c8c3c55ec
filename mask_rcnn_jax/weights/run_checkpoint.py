"""Find the checkpoints of a run and read their parameters."""

from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp


def has_checkpoint(workdir: str | Path) -> bool:
    """Whether a run can resume from here. Looks at names only, opens nothing."""
    return any(folder.name.isdigit() for folder in (Path(workdir) / "checkpoints").glob("*"))


class CheckpointPath(NamedTuple):
    """One checkpoint of a run."""

    workdir: Path
    step: int

    @property
    def folder(self) -> Path:
        return self.workdir / "checkpoints" / str(self.step)


def find_checkpoint(path: str | Path) -> CheckpointPath:
    """The checkpoint that a path means: `WORKDIR/checkpoints/<step>`, or the latest of a workdir.

    Raises ValueError where there is none.
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
        raise ValueError(f"{found.folder} is no checkpoint of a run")
    return found


def load_checkpoint(path: str | Path) -> dict:
    """`{"params", "batch_stats"}` as numpy arrays, see `find_checkpoint` for what `path` may be.

    Needs neither the model nor the optimiser.
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
