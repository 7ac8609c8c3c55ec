"""A file at a web address, for readers of files."""

import contextlib
import io
import re
from http.client import HTTPException, HTTPResponse
from urllib.parse import unquote, urlsplit

from mask_rcnn_jax.network import Limits, open_url


class RemoteFile(io.RawIOBase):
    """A file at an address, read as it arrives. It can be sought in if the server knows ranges.

    Attributes:
        name: the last part of the address.

    Raises OSError, when it is opened or read, as `open_url` does, and if the connection ends early;
    what is read after that is empty.
    """

    def __init__(self, address: str, limits: Limits):
        self.name = unquote(urlsplit(address).path.rpartition("/")[2])
        self._address, self._limits = address, limits
        self._kept = b""  # what `peek` read
        self._position = 0
        self._has_failed = False
        self._arrived = 0  # the end of what this response has sent
        self._response = self._request(0)
        stated = self._response.headers.get("Content-Range") or ""
        of = re.fullmatch(r"bytes 0-\d+/(\d{1,18})", stated)
        self._size = int(of[1]) if of and self._response.status == 206 else None
        self._end = self._size or self._response.length or 0  # 0 if the server does not say

    def _request(self, start: int) -> HTTPResponse:
        response = open_url(self._address, self._limits, headers={"Range": f"bytes={start}-"})
        stated = response.headers.get("Content-Range") or ""
        if start and not (response.status == 206 and stated.startswith(f"bytes {start}-")):
            response.close()
            raise OSError(f"the server sent other bytes than those from {start} on")
        return response

    def peek(self, size: int) -> bytes:
        """Return the first bytes, `size` unless there are fewer, before anything is read."""
        while piece := self._receive(len(self._kept), size - len(self._kept)):
            self._kept += piece
        return self._kept

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if self._size is None:
            raise io.UnsupportedOperation("the server knows no ranges")
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, buffer) -> int:
        if self._has_failed:  # PyAV reads on, and would print a traceback of a second error
            return 0
        start, most = self._position, len(buffer)
        try:
            piece = self._kept[start : start + most] or self._receive(start, most)
        except OSError:
            self._has_failed = True
            raise
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)

    def _receive(self, start: int, most: int) -> bytes:
        """Return the bytes from `start` on that come next, at most so many; none at the end."""
        if not most or (self._size is not None and start >= self._size):
            return b""
        if start != self._arrived:
            self._response.close()
            self._response, self._arrived = self._request(start), start
        try:
            piece = self._response.read1(most)
        except HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error
        self._arrived += len(piece)
        if not piece and start < self._end:
            raise OSError(f"the connection ended after {start} of {self._end} bytes")
        return piece

    def close(self) -> None:
        with contextlib.suppress(AttributeError):  # it has none if the server could not be reached
            self._response.close()
        super().close()
