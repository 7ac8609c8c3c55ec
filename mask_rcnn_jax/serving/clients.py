"""The clients that are connected: how slow each may be, and which gives way to others."""

import io
import math
import selectors
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

SPARE_CONNECTIONS = 8  # for `/health` alone, where all others are at work
GRACE_SECONDS = 2.0  # that a body may be behind
UNCOUNTED = 256 << 10  # bytes of a body that always has room
_YOUNG_SECONDS = 0.25  # that a connection may wait without giving way, while others are spare


class Client(io.RawIOBase):
    """A connection's input, with a limit on the time that it takes.

    Attributes:
        connection: as given.
        since: time.monotonic() when the server began to wait for the client, up to `GRACE_SECONDS`
            from now for a body that comes faster than it must; inf while a request is at work.
        idle: no request has come, or its head is incomplete, or it is answered.
        held: bytes of its body, by its Content-Length, until they are decoded.
        is_spare: it has one of the connections for `/health`.
        dropped: it gave way to another.
    """

    def __init__(self, connection: socket.socket, is_spare: bool):
        self.connection, self.is_spare = connection, is_spare
        self.idle, self.held, self.dropped = True, 0, False
        self.wait(math.inf)

    def wait(self, seconds: float, rate: float = 0.0) -> None:
        """Let reading raise TimeoutError from now on if it takes too long.

        Args:
            seconds: until the end.
            rate: lowest number of bytes a second.
        """
        self.since = time.monotonic()
        self._end, self._rate = self.since + seconds, rate

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        if self._rate:  # what has come already is read, since it may be the server that is late
            left = max(0.0, min(left, self.since + GRACE_SECONDS - time.monotonic()))
        self.connection.settimeout(left)
        try:
            count = self.connection.recv_into(buffer)
        except BlockingIOError as error:
            raise TimeoutError from error
        if self._rate:
            most = time.monotonic() + GRACE_SECONDS
            self.since = min(self.since + count / self._rate, most)
        return count

    def has_gone(self) -> bool:
        """Whether the client has closed the connection, or its half of it. Any thread may ask."""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(self.connection, selectors.EVENT_READ)
                return bool(selector.select(0)) and not self.connection.recv(1, socket.MSG_PEEK)
        except (OSError, ValueError):  # also closed by the server
            return True

    def shutdown(self, how: int) -> None:
        with suppress(OSError):
            self.connection.shutdown(how)


class Clients:
    """All clients. When there are too many, or too many bytes of bodies, the slowest gives way.

    Args:
        most: connections; there are `SPARE_CONNECTIONS` beyond.
        most_held: bytes of bodies, by their Content-Length, those up to `UNCOUNTED` aside.
    """

    def __init__(self, most: int, most_held: int):
        self._most, self._most_held = most, most_held
        self._clients: dict[socket.socket, Client] = {}
        self._changed = threading.Condition()
        self.stopping = False

    def __len__(self) -> int:
        return len(self._clients)

    def add(self, connection: socket.socket) -> bool:
        """Return whether there is room for another connection, perhaps in place of one."""
        with self._changed:
            if len(self._clients) >= self._most:
                is_last = len(self._clients) >= self._most + SPARE_CONNECTIONS
                slow = self._slow(self._clients.values(), 0.0 if is_last else _YOUNG_SECONDS)
                for client in slow[:1]:
                    self._drop(client)
            if len(self._clients) >= self._most + SPARE_CONNECTIONS:
                return False
            others = sum(not client.is_spare for client in self._clients.values())
            self._clients[connection] = Client(connection, others >= self._most)
            return True

    def of(self, connection: socket.socket) -> Client:
        """Return the client; ConnectionError if it gave way to another."""
        with self._changed:
            if connection not in self._clients:
                raise ConnectionAbortedError
            return self._clients[connection]

    def remove(self, connection: socket.socket) -> None:
        with self._changed:
            self._clients.pop(connection, None)
            self._changed.notify_all()

    def wait(self, client: Client, seconds: float) -> None:
        """Wait for the head of a request, or the end; ConnectionError if none may come."""
        with self._changed:
            if self.stopping:
                raise ConnectionAbortedError
            client.idle = True
            client.wait(seconds)

    def work(self, client: Client) -> None:
        """Keep the connection, as all has come; ConnectionError if it gave way to another."""
        with self._changed:
            if client.dropped:
                raise ConnectionAbortedError
            client.idle, client.since = False, math.inf

    def hold(self, client: Client, size: int) -> bool:
        """Return whether there is room for a body, perhaps in place of others."""
        if size <= UNCOUNTED:
            return True
        with self._changed:
            holding = [other for other in self._clients.values() if other.held]
            room = self._most_held - sum(other.held for other in holding)
            slow = self._slow(holding)
            if size > room + sum(other.held for other in slow):
                return False
            while size > room:
                room += slow[0].held
                self._drop(slow.pop(0))
            client.held = size
            return True

    def release(self, client: Client) -> None:
        """Count its body no longer."""
        with self._changed:
            client.held = 0

    def stop(self) -> bool:
        """End those without a request, and let no others come; False if that was done before."""
        with self._changed:
            before, self.stopping = self.stopping, True
            for client in self._clients.values():
                if client.idle:
                    client.shutdown(socket.SHUT_RD)
            return not before

    def join(self, seconds: float) -> int:
        """Wait for requests in flight; return how many are not finished."""
        with self._changed:
            self._changed.wait_for(lambda: not self._clients, seconds)
            return len(self._clients)

    def _slow(self, clients: Iterable[Client], seconds: float = 0.0) -> list[Client]:
        """Return those for which the server has waited so many seconds, the slowest first."""
        latest = time.monotonic() - seconds
        slow = [client for client in clients if client.since < latest]
        return sorted(slow, key=lambda client: client.since)

    def _drop(self, client: Client) -> None:
        client.dropped, client.held = True, 0
        client.shutdown(socket.SHUT_RDWR)  # its thread ends
        del self._clients[client.connection]
