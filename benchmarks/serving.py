"""Load `serve` with clients at once: requests/s, latency, lost and wrong answers, memory.

    python benchmarks/serving.py --clients 1,8,32,32 --seconds 60 --json serving.json
    python benchmarks/serving.py --workdir runs/mine --images photos/ --clients 1,8,32
    python benchmarks/serving.py --artifact out/onnx --peer peer/bin/python --cpu 0 --clients 1,8
    python benchmarks/serving.py --workers 1,2 --litserve lit/bin/python --clients 1,4,16

Starts the user's command in a process of its own, by default with `quickstart:long` and random
weights, which find as many objects as the recipe allows. Each client keeps one connection and sends
the next image when it has the answer to the last. An answer is wrong if it is not the one that the
same image got alone. Memory and CPU time are those of the server's processes; memory that several
share counts for each. `--workers` starts a server for each of these numbers. `--peer` names a
Python with fastapi, uvicorn, onnxruntime, opencv-python-headless and pycocotools, in which
`peer_fastapi.py` serves the same artifact, and `--litserve` one with litserve and this package, in
which `peer_litserve.py` serves the same model with as many workers; each number of clients asks
ours, then the peers. Reads /proc, so it runs on Linux only.
"""

import argparse
import contextlib
import http.client
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import cv2

from mask_rcnn_jax.benchmarking.process_tree import cpu_seconds, family, rss_mb
from mask_rcnn_jax.formats.shapes import generate_image

ROOT = Path(__file__).resolve().parents[1]
SIZES = [(240, 320), (320, 240), (480, 640), (256, 256)]  # of generated images, (height, width)
GENERATED = 16
COLUMNS = ("server", "clients", "requests/s", "ms, median", "ms, 95 %", "ms, 99 %", "answers",
           "refused", "lost", "wrong", "server MB", "server cores", "CPU ms an answer")  # fmt: skip


def main(arguments: argparse.Namespace) -> None:
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})  # of the servers, too
    ours = [sys.executable, "-m", "mask_rcnn_jax.serve", "--port=0"]
    model = [arguments.artifact or arguments.workdir]  # as `mask_rcnn_jax.load` takes it
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        images = read_images(arguments.images) if arguments.images else generate(Path(folder))
        if arguments.artifact:
            ours += ["--artifact", arguments.artifact]
        elif arguments.workdir:
            ours += ["--workdir", arguments.workdir]
        else:
            model = ["quickstart:long", str(random_weights(Path(folder)))]
            ours += ["--config", model[0], "--weights", model[1]]
        load, servers = os.getloadavg()[0], {}
        for workers in arguments.workers.split(","):
            command = [*ours, f"--workers={workers}", *arguments.flags]
            servers[f"ours, {workers}"] = stack.enter_context(running(command))
            if arguments.litserve:
                command = [arguments.litserve, str(ROOT / "benchmarks" / "peer_litserve.py")]
                command += [str(free_port()), workers, *map(located, model)]
                servers[f"LitServe, {workers}"] = stack.enter_context(running(command))
        if arguments.peer:
            peer = [arguments.peer, str(ROOT / "benchmarks" / "peer_fastapi.py")]
            peer += [os.path.abspath(arguments.artifact), str(free_port())]
            servers["peer"] = stack.enter_context(running(peer))
        report = measure(arguments, images, servers)
    report |= {"date": time.strftime("%Y-%m-%d"), "load_before": load}
    report["start_s"] = {name: seconds for name, (_, _, seconds) in servers.items()}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def measure(arguments: argparse.Namespace, images: list[bytes], servers: dict) -> dict:
    """Print and return the figures for each number of clients.

    servers: by name, what `running` yields.
    """
    expected = {name: ask(port, images) for name, (port, _, _) in servers.items()}
    first, *_ = expected.values()
    found = [len(json.loads(content)["detections"]) for content in first]
    sizes = [len(content) for content in first]
    print(f"{len(images)} images, {statistics.mean(found):.0f} objects and "
          f"{statistics.mean(sizes) / 1000:.0f} kB of json in an answer", flush=True)  # fmt: skip
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|", flush=True)
    rows = []
    for clients in map(int, arguments.clients.split(",")):
        for name, (port, process, _) in servers.items():
            row = load(clients, arguments.seconds, images, expected[name], port, process)
            rows.append({"server": name, **row})
            print(f"| {' | '.join(str(value) for value in rows[-1].values())} |", flush=True)
    return {"objects": found, "seconds": arguments.seconds, "rows": rows}


def load(
    clients: int, seconds: float, images: list[bytes], expected: list[bytes], port: int, server: int
) -> dict:
    """Let clients ask for some seconds."""
    latencies: list[float] = []
    counts: Counter = Counter()
    lock = threading.Lock()
    processes = family(server)
    started, cpu, memory = time.perf_counter(), cpu_seconds(processes), rss_mb(processes)
    end = started + seconds

    def work(client: int) -> None:
        with contextlib.closing(connect(port)) as connection:
            number = client
            while (before := time.perf_counter()) < end:
                kind = exchange(connection, images, expected, number % len(images))
                number += 1
                with lock:
                    counts[kind] += 1
                    if kind == "answers":
                        latencies.append(1000 * (time.perf_counter() - before))

    threads = [threading.Thread(target=work, args=(client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - started
    cuts = statistics.quantiles(latencies, n=100)
    values = [clients, round(len(latencies) / took, 1), *(round(cuts[k]) for k in (49, 94, 98))]
    values += [counts[kind] for kind in ("answers", "refused", "lost", "wrong")]
    values.append(f"{memory:.0f} to {rss_mb(processes):.0f}")
    cpu = cpu_seconds(processes) - cpu
    values += [round(cpu / took, 2), round(1000 * cpu / len(latencies), 1)]
    return dict(zip(COLUMNS[1:], values, strict=True))


def exchange(
    connection: http.client.HTTPConnection, images: list[bytes], expected: list[bytes], i: int
) -> str:
    """Send an image and name what comes back."""
    try:
        status, content = post(connection, images[i])
    except (OSError, http.client.HTTPException):
        connection.close()  # the next request opens it again
        return "lost"
    if status == 503:
        return "refused"
    return "answers" if (status, content) == (200, expected[i]) else "wrong"


def ask(port: int, images: list[bytes]) -> list[bytes]:
    with contextlib.closing(connect(port)) as connection:
        return [post(connection, image)[1] for image in images]


def located(name: str) -> str:
    """A path for another working folder; the name of a recipe stays."""
    return os.path.abspath(name) if os.path.exists(name) else name


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def connect(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=300)


def post(connection: http.client.HTTPConnection, image: bytes) -> tuple[int, bytes]:
    kind = {"Content-Type": "application/octet-stream"}
    connection.request("POST", "/detect?score_threshold=0", image, kind)
    response = connection.getresponse()
    return response.status, response.read()


@contextlib.contextmanager
def running(command: list[str]):
    """A server; yields its port, its process and the seconds until it was ready."""
    started = time.perf_counter()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, stdout=pipe) as process:
        processes: list[int] = []
        try:
            ready = process.stdout.readline()
            if not ready.startswith("ready: "):
                raise SystemExit(f"error: {command[:3]} ended with {process.wait()}")
            port = int(ready.rstrip("/\n").rpartition(":")[2])
            processes = family(process.pid)
            yield port, process.pid, round(time.perf_counter() - started, 1)
        finally:
            process.terminate()
            process.wait()
            for left in processes:  # as LitServe's are
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGTERM)


def read_images(folder: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()]


def generate(folder: Path) -> list[bytes]:
    """JPEGs of generated shapes."""
    drawn = [generate_image(0, "val", i, SIZES[i % len(SIZES)])[0] for i in range(GENERATED)]
    return [cv2.imencode(".jpg", image[..., ::-1])[1].tobytes() for image in drawn]


def random_weights(folder: Path) -> Path:
    """Write random weights for `quickstart:long`."""
    from safetensors.numpy import save_file

    from mask_rcnn_jax.config import load_config
    from mask_rcnn_jax.models.build import build_model, init_variables
    from mask_rcnn_jax.weights.convert import to_ours_flat

    model = load_config("quickstart:long", {"model.num_classes": 4}).model
    variables = init_variables(build_model(model), 0)
    save_file(to_ours_flat(variables), folder / "random.safetensors")
    return folder / "random.safetensors"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", help="a run; random weights if unset")
    parser.add_argument("--artifact", help="an exported model instead")
    parser.add_argument("--peer", help="a Python with FastAPI, which serves the artifact, too")
    parser.add_argument("--workers", default="1", help="of a server each")
    parser.add_argument("--litserve", help="a Python with LitServe, which serves the model, too")
    parser.add_argument("--cpu", type=int, help="the only one for servers and clients")
    parser.add_argument("--images", help="a folder of images; generated ones if unset")
    parser.add_argument("--clients", default="1,8,32", help="clients at once, in turn")
    parser.add_argument("--seconds", type=float, default=60, help="for each number of clients")
    parser.add_argument("--json", help="write the figures to this file")
    parser.add_argument("flags", nargs="*", help="further flags of serve, after --")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(parse())
