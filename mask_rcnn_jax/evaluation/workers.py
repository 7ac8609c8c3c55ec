"""Encode detections in worker processes: pasting and encoding hold Python's lock.

A worker is a Python that reads jobs from its input and ends when that does, so that none survives
its owner, however that ends. Unlike those of multiprocessing, it does not import the main program,
which would cost each the import of JAX, and need `if __name__ == "__main__"` in scripts.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from queue import SimpleQueue
from typing import Any

from mask_rcnn_jax.evaluation.encode import ImageDetections, encode_image

Encoded = tuple[list[dict], list[dict]]  # box results and mask results of an image
# Fewer images are encoded before a worker has started.
IMAGES_PER_WORKER = 100
# Images that are kept for a worker, 300 KB each at 100 detections.
_AHEAD = 4
_COMMAND = "from mask_rcnn_jax.evaluation import workers; workers.work()"


class Lost(OSError):
    """A worker ended before its answer, for instance because memory ran out."""


def count_workers(num_images: int, num_sharing: int = 1) -> int:
    """Return how many workers encode that many images: at most one per core, 0 for few images.

    num_sharing: processes that share the cores of this one, and start workers of their own.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    cores //= num_sharing
    return min(cores, num_images // IMAGES_PER_WORKER) if cores > 1 else 0


def encode_images(
    images: Iterable[ImageDetections], *, paste: str, inclusive_boxes: bool, num_workers: int
) -> Generator[Encoded]:
    """Yield `encode_image` of each image, in order.

    Args:
        images: read in the calling thread, a few ahead.
        paste: see `encode_image`.
        inclusive_boxes: see `encode_image`.
        num_workers: worker processes; 0 encodes in the calling thread.

    Raises:
        Lost: a worker ended.
    """
    if num_workers == 0:
        for image in images:
            yield encode_image(image, paste, inclusive_boxes)
        return
    idle: SimpleQueue[subprocess.Popen] = SimpleQueue()
    waiting: deque[Future[Encoded]] = deque()

    def encode(image: ImageDetections) -> Encoded:
        worker = idle.get()
        try:
            return ask(worker, (image, paste, inclusive_boxes), "encodes masks")
        finally:
            idle.put(worker)

    with ExitStack() as started, ThreadPoolExecutor(num_workers) as threads:
        for _ in range(num_workers):
            idle.put(started.enter_context(worker(_COMMAND)))
        for image in images:
            waiting.append(threads.submit(encode, image))
            if len(waiting) > _AHEAD * num_workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


@contextmanager
def worker(command: str) -> Iterator[subprocess.Popen]:
    """A Python that does a command, which answers on its output what `ask` writes to its input."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    # Its products of matrices are too small for threads.
    environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    # A worker keeps these signals blocked: one to the whole group, from a terminal or a batch
    # system, must not end it while its owner still works.
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    try:
        yield process
    finally:
        process.kill()  # all that was asked has been answered, or is not wanted any more
        with suppress(BrokenPipeError), process:  # of a job half written
            pass


def ask(process: subprocess.Popen, job: Any, work: str) -> Any:
    """Have a worker do a job and return what it answers; an exception among that is raised.

    work: what the worker does, for `Lost`, which is raised if it ends before, or if the job has
        objects that cannot be sent, such as those of a function's class.
    """
    assert process.stdin is not None and process.stdout is not None
    try:
        pickle.dump(job, process.stdin, pickle.HIGHEST_PROTOCOL)
        process.stdin.flush()
        answer = pickle.load(process.stdout)
    except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
        code = process.wait()
        end = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        raise Lost(f"a worker process that {work} {end}; is memory short?") from error
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise Lost(f"a worker process that {work} cannot be given its work: {error}") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def work() -> None:
    """Answer jobs of the standard input on the standard output until it ends."""
    jobs, answers = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            job = pickle.load(jobs)
        except (EOFError, pickle.UnpicklingError):  # the owner has ended
            return
        try:
            answer: Encoded | Exception = encode_image(*job)
        except Exception as error:
            answer = error
        try:
            pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
            answers.flush()
        except BrokenPipeError:
            os._exit(0)  # or Python would complain of what it cannot flush
