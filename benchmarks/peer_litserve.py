"""Our predictor behind LitServe, for `serving.py --litserve`: what another server of it costs.

    python benchmarks/peer_litserve.py PORT WORKERS MODEL [WEIGHTS]

MODEL and WEIGHTS are those of `mask_rcnn_jax.load`. LitServe has one process for each worker and as
many for HTTP, and leaves the cores to all of them.
"""

import sys
import threading
import time
import urllib.request
from contextlib import suppress
from typing import Annotated

import litserve
from fastapi import Body

import mask_rcnn_jax


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:
        self.predictor = mask_rcnn_jax.load(*sys.argv[3:], score_threshold=0)
        for image in self.predictor.samples():
            self.predictor([image])

    def decode_request(self, request: Annotated[bytes, Body()]) -> bytes:
        return request

    def predict(self, content: bytes) -> dict:
        result = self.predictor([self.predictor.read(content)])[0]
        height, width = result.image.shape[:2]
        about = {"width": width, "height": height}
        return {"image": about, "detections": result.to_coco()}

    def encode_response(self, answer: dict) -> dict:
        return answer


def say_ready(port: int) -> None:
    while True:
        with suppress(OSError):  # also an error's status
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health").close()
            print(f"ready: http://127.0.0.1:{port}/", flush=True)
            return
        time.sleep(0.2)


if __name__ == "__main__":
    port, workers = map(int, sys.argv[1:3])
    threading.Thread(target=say_ready, args=(port,), daemon=True).start()
    server = litserve.LitServer(
        Api(api_path="/detect"), accelerator="cpu", workers_per_device=workers, timeout=300
    )
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error")
