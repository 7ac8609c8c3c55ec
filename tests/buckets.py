"""Object stores of this machine: a folder, and servers that speak S3 and the protocol of GCS.

fsspec's options are in the environment, as for a user; what tests start inherits it.
"""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KINDS = ("file", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("s3", "gs")))


@contextmanager
def bucket(kind: str, folder: Path) -> Iterator[str]:
    """The address of an empty bucket; the test is skipped without the store's packages."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "file":
            yield f"file://{folder}/bucket"
        elif kind == "s3":
            with _s3(patch):
                yield "s3://bucket"
        else:
            with _gs(patch):
                yield "gs://bucket"


@contextmanager
def _s3(patch: pytest.MonkeyPatch) -> Iterator[None]:
    fsspec = pytest.importorskip("fsspec")
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0)
    server.start()
    patch.setenv("AWS_ACCESS_KEY_ID", "a")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    host, port = server.get_host_and_port()
    for name in ("AWS_ENDPOINT_URL", "FSSPEC_S3_ENDPOINT_URL"):
        patch.setenv(name, f"http://{host}:{port}")
    fsspec.filesystem("s3", endpoint_url=f"http://{host}:{port}").mkdir("bucket")
    yield
    server.stop()


@contextmanager
def _gs(patch: pytest.MonkeyPatch) -> Iterator[None]:
    patch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")  # which emulators do not know
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    parse = emulator.BytesParser.parsebytes

    def parse_to_the_end(parser, data: bytes):
        """As is, it takes the last byte of a file, if that is a CR, for a part of what follows."""
        return parse(parser, data.replace(b"\n--==0==--", b"\r\n--==0==--"))

    patch.setattr(emulator.BytesParser, "parsebytes", parse_to_the_end)
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
    server.start()
    patch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    patch.setenv("FSSPEC_GS_TOKEN", "anon")
    yield
    server.stop()
