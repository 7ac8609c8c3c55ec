"""A process that reads with two workers: `python -m tests.data.reading [COUNT]`.

Prints the name of its shared files and the workers' process ids once batches come. Without COUNT it
then waits until it is killed; otherwise it goes on after a SIGTERM, reads COUNT batches and ends.
"""

import multiprocessing
import os
import signal
import sys
import time

from mask_rcnn_jax.data import workers
from mask_rcnn_jax.data.loader import TrainLoader, TrainOrder
from mask_rcnn_jax.data.options import ExampleOptions
from tests.memory_set import ShapeSet


def main(count: int) -> None:
    for number in (signal.SIGHUP, signal.SIGINT):  # ignored below nohup and in background jobs
        signal.signal(number, signal.SIG_DFL)
    if count:
        signal.signal(signal.SIGTERM, lambda *_: None)  # what is ignored, its workers ignore, too
    options = ExampleOptions((64, 64), resize="shortest_edge", max_instances=9, mask_size=8)
    order = TrainOrder(seed=1, batch_size=2)
    loader = TrainLoader(ShapeSet("train", 20), options, order, num_workers=2)
    step, kept = 0, []
    while not count or step < count:
        batch = next(loader)
        assert batch.images.any()
        if not count:  # no memory comes back: batches that nobody has taken are in new files
            kept.append(batch)
        if step == 5:
            pids = [process.pid for process in multiprocessing.active_children()]
            print(workers._owner(os.getpid()), *pids, flush=True)
            if not count:
                time.sleep(600)
        step += 1
        time.sleep(0.01)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
