"""Serve `StubPredictor` by workers: `python -m tests.serving.stub_workers COUNT`.

An image of `FATAL` kills the worker that gets it, one of `SLOW` takes `SECONDS`. A worker whose
number is in the environment as `BROKEN` fails before it is ready, as `GONE` it ends without a word,
and as `COMPILING` it never gets ready.
"""

import os
import sys
import threading
import time

from mask_rcnn_jax.serving import supervisor, workers
from mask_rcnn_jax.serving.server import Server
from mask_rcnn_jax.serving.service import Limits, Service
from tests.predict.stub_predictor import StubPredictor

FATAL, SLOW, SECONDS = 13, 14, "SECONDS"
BROKEN, GONE, COMPILING = "BROKEN", "GONE", "COMPILING"


class Predictor(StubPredictor):
    def stream(self, images):
        rows = list(images)
        values = {int(image.canvas[0, 0, 0]) for _, image in rows}
        if FATAL in values:
            os.kill(os.getpid(), 9)
        if SLOW in values:
            time.sleep(float(os.environ[SECONDS]))
        yield from super().stream(rows)


def main(count: int) -> None:
    supervisor.RESTART_SECONDS = 0.0
    worker = workers.given()
    with Server(listener=worker and worker.listener) as server:
        if worker is None:
            supervisor.supervise(server, [workers.Share((), {})] * count)
        elif os.environ.get(BROKEN) == str(worker.number):
            sys.exit("error: no weights")
        elif os.environ.get(GONE) == str(worker.number):
            pass
        elif os.environ.get(COMPILING) == str(worker.number):
            with workers.ending_with(worker.supervisor):
                print("compiling", flush=True)
                threading.Event().wait()
        else:
            counts = workers.open_counts(worker.counts, count)
            service = Service(Predictor(), Limits(), counts, worker.number)
            server.run(service, worker.supervisor)


if __name__ == "__main__":
    main(int(sys.argv[1]))
