"""Checkpoints of a run: the last few and the best by mask AP, written in the background."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy as policies

from mask_rcnn_jax.training.step import TrainState


class Checkpoints:
    """`DIR/checkpoints/<step>/`. A save that was cut off is never seen by `latest_step`.

    With several processes, all of them make the same calls, on a folder that they share. OSError
    if a checkpoint cannot be written, from the next call on; earlier ones are as they were.
    """

    def __init__(self, workdir: str | Path, keep: int):
        def mask_ap(metrics: dict[str, float]) -> float:
            return metrics.get("ap/mask", metrics["ap/box"])

        best = policies.BestN(get_metric_fn=mask_ap, n=1, keep_checkpoints_without_metrics=False)
        options = ocp.CheckpointManagerOptions(
            best_fn=mask_ap,
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            cleanup_tmp_directories=True,
        )
        folder = Path(workdir).absolute() / "checkpoints"
        self._manager = ocp.CheckpointManager(folder, options=options)

    @property
    def latest_step(self) -> int | None:
        return self._manager.latest_step()

    def save(self, state: TrainState, metrics: dict[str, float] | None = None) -> None:
        """Start writing the state; `metrics` holds the APs where this step was evaluated."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        # A copy: the next step takes over the state's buffers while this is still being written.
        snapshot = ocp.args.StandardSave(jax.tree.map(jnp.copy, state))
        with self._failing_clearly():
            self._manager.save(step, args=ocp.args.Composite(state=snapshot), metrics=metrics)

    def restore(self, state: TrainState) -> TrainState:
        """The latest state; `state` gives shapes, dtypes and shardings.

        Raises ValueError if the state of the optimizer was saved by an optimizer of another form.
        """
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            return self._manager.restore(self.latest_step, args=args).state
        except ValueError as error:
            if "opt_state" not in str(error) or "structure" not in str(error):
                raise
            folder = self._manager.directory / str(self.latest_step)
            raise ValueError(
                f"{folder} was saved with another optimizer, whose state does not fit; resume with "
                "the same one or choose another workdir"
            ) from error

    def close(self) -> None:
        """Wait for what is being written."""
        try:
            with self._failing_clearly():
                self._manager.wait_until_finished()
        finally:
            self._manager.close()

    @contextmanager
    def _failing_clearly(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a full disk is a ValueError of tensorstore, among others
            text = "a checkpoint could not be written, earlier ones are kept"
            raise OSError(f"{self._manager.directory}: {text}: {error}") from error
