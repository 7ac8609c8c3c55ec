"""Say which program compiles, and for how long."""

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from mask_rcnn_jax.memory import return_free_memory
from mask_rcnn_jax.structures import Batch
from mask_rcnn_jax.terminal import console


@contextmanager
def compiling(program: str, canvases: Collection[tuple[int, ...]]) -> Iterator[None]:
    """Log how long a program compiles for canvases (height, width), and return its memory."""
    texts = [f"{height} x {width}" for height, width in canvases]
    sizes = " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))
    with console.lasting(f"compiling the {program} for images of {sizes}", "compiled"):
        yield
    return_free_memory()


def say_compiling(
    program: str, run_batch: Callable[[dict, Any], Any]
) -> Callable[[dict, Any], Any]:
    """Return a jitted function of (variables, batch, or the views of one) that says when it
    compiles: at the first batch of each shape."""
    compiled = set()

    def run(variables: dict, batch: Any) -> Any:
        views = (batch,) if isinstance(batch, Batch) else batch
        shapes = tuple(view.images.shape for view in views)
        if shapes in compiled:
            return run_batch(variables, batch)
        compiled.add(shapes)
        with compiling(program, [shape[1:3] for shape in shapes]):
            return run_batch(variables, batch)

    return run
