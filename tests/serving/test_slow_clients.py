"""Clients that are slow, silent, too many or gone: each is given up, and others are answered."""

import contextlib
import json
import socket
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest

from mask_rcnn_jax.serving import clients as clients_module
from mask_rcnn_jax.serving import handler as handler_module
from mask_rcnn_jax.serving import server as server_module
from tests.predict.stub_predictor import StubPredictor
from tests.serving.asking import (
    HEAD,
    HOST,
    ask,
    ask_on,
    classes,
    connect,
    error_of,
    opened,
    png,
    raw,
    said_on,
    serving,
    wait_until,
    waiting,
)


def promise(size: int) -> bytes:
    """The head of a request for an image of so many bytes."""
    return HEAD + f"Content-Length: {size}\r\n\r\n".encode()


def whole(image: bytes) -> bytes:
    """A request for this image, and no other on the same connection."""
    return promise(len(image)).replace(HOST, HOST + b"Connection: close\r\n") + image


def all_opened(stack, server, contents) -> list[socket.socket]:
    """Connections on which these bytes are sent, in the server's order; none gives way."""
    connections = []
    for content in contents:
        before = len(server.clients)
        connections.append(stack.enter_context(opened(server, content)))
        wait_until(lambda before=before: len(server.clients) != before)
    return connections


def has_ended(connection: socket.socket) -> bool:
    """Whether the server has closed it without a word."""
    try:
        connection.settimeout(0)
        assert connection.recv(1) == b""
        return True
    except BlockingIOError:
        return False
    except OSError:
        return True


ATTACKS = {
    "bodies of one byte": promise(1000) + b"x",
    "bodies that never come": promise(40_000),
    "silent connections": b"",
    "half a first line": HEAD[:9],
    "half a head": HEAD[:-1],
    "clients that do not close": b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n",
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_others_are_answered_meanwhile(attack, monkeypatch):
    """With fewer places for images, bytes and connections than there are attackers."""
    monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 6)
    monkeypatch.setattr(clients_module, "UNCOUNTED", 10)
    monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 0)
    limits = {"waiting": 2, "content": 50_000, "receiving": 100_000}
    with serving(StubPredictor(), **limits) as server, contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(opened(server, ATTACKS[attack]))
            started = time.monotonic()
            assert classes(ask(server, body=png(4))) == ["class 4"]
            assert ask(server, "GET", "/health").status == 200
            assert time.monotonic() - started < 2
        assert len(server.clients) <= 7


class TestBodies:
    def test_a_body_that_stops_is_refused(self, monkeypatch):
        monkeypatch.setattr(clients_module, "GRACE_SECONDS", 0.2)
        with serving(StubPredictor()) as server, opened(server, promise(1000) + b"x") as slow:
            said = said_on(slow)
            assert said.startswith(b"HTTP/1.1 408") and b"Connection: close" in said
            assert b"less than 16 kB a second" in said

    def test_a_byte_now_and_then_does_not_help(self, monkeypatch):
        monkeypatch.setattr(clients_module, "GRACE_SECONDS", 0.2)
        with serving(StubPredictor()) as server, opened(server, promise(1000)) as slow:
            slow.settimeout(0.02)
            said = b""
            while not said:
                with contextlib.suppress(TimeoutError):
                    said = slow.recv(100)
                    break
                slow.sendall(b"x")
            assert said.startswith(b"HTTP/1.1 408")

    def test_a_large_body_has_to_be_complete_in_time(self, monkeypatch):
        """16 kB a second would hold its bytes for an hour."""
        monkeypatch.setattr(clients_module, "GRACE_SECONDS", 0.2)
        with serving(StubPredictor()) as server, opened(server, promise(24_000_000)) as slow:
            slow.sendall(bytes(50_000))  # as much as 16 kB a second in 3 seconds
            assert b"less than 400 kB a second" in said_on(slow)

    def test_a_body_that_is_fast_enough_may_take_its_time(self, monkeypatch):
        monkeypatch.setattr(clients_module, "GRACE_SECONDS", 1.0)
        monkeypatch.setattr(handler_module, "BODY_RATE", 100.0)
        body = png(4) + bytes(1000)  # which the decoder ignores
        with serving(StubPredictor()) as server:
            sent = whole(body)
            with opened(server) as slow:
                for first in range(0, len(sent), 120):
                    slow.sendall(sent[first : first + 120])
                    time.sleep(0.15)
                assert b'"class 4"' in said_on(slow)

    def test_a_place_is_for_a_complete_body(self):
        with serving(StubPredictor(), waiting=1) as server, opened(server, promise(1000) + b"x"):
            wait_until(lambda: not all(c.idle for c in server.clients._clients.values()))
            assert waiting(server) == 0
            assert classes(ask(server, body=png(4))) == ["class 4"]

    def test_a_body_that_finds_no_place_any_more_is_refused(self):
        stub = StubPredictor()
        stub.hold.clear()
        first, second = whole(png(1)), whole(png(2))
        with serving(stub, waiting=1) as server, contextlib.ExitStack() as stack:
            stack.callback(stub.hold.set)
            both = all_opened(stack, server, [first[:-1], second[:-1]])
            wait_until(lambda: all(not c.idle for c in server.clients._clients.values()))
            both[0].sendall(first[-1:])
            wait_until(lambda: server.service._waiting == 1)
            both[1].sendall(second[-1:])
            assert said_on(both[1]).startswith(b"HTTP/1.1 503")
            stub.hold.set()
            assert b'"class 1"' in said_on(both[0])


class TestBytesOnTheirWay:
    LIMITS = {"content": 1_000_000, "receiving": 1_000_000}

    @pytest.fixture(autouse=True)
    def patience(self, monkeypatch):
        monkeypatch.setattr(clients_module, "GRACE_SECONDS", 30.0)

    def test_the_slowest_body_gives_way(self):
        with serving(StubPredictor(), **self.LIMITS) as server, contextlib.ExitStack() as stack:
            first, second = all_opened(stack, server, [promise(400_000)] * 2)
            wait_until(lambda: sum(c.held for c in server.clients._clients.values()) == 800_000)
            third = stack.enter_context(opened(server, promise(400_000) + b"x"))
            wait_until(lambda: has_ended(first))
            assert not has_ended(second) and not has_ended(third)

    def test_bodies_that_come_as_they_should_stay(self):
        """They are ahead of what is asked of them, and what comes later waits."""
        with serving(StubPredictor(), **self.LIMITS) as server, contextlib.ExitStack() as stack:
            sent = promise(1_000_000) + bytes(999_999)
            (first,) = all_opened(stack, server, [sent])
            (one,) = server.clients._clients.values()
            wait_until(lambda: one.since > time.monotonic() + 0.5)
            with opened(server, promise(300_000)) as second:
                said = said_on(second)
            assert said.startswith(b"HTTP/1.1 503") and b"Retry-After: 1" in said
            assert b"too many bytes are being received" in said
            assert ask(server, body=png(4)).status == 200  # small bodies always have room
            first.sendall(b"x")
            assert first.recv(12) == b"HTTP/1.1 400"  # no image
            assert ask(server, body=bytes(900_000)).status == 400

    def test_an_answered_body_counts_no_more(self):
        body = bytes(900_000)
        with serving(StubPredictor(), **self.LIMITS) as server:
            with contextlib.closing(connect(server)) as kept:
                assert ask_on(kept, body=body).status == 400
                assert ask(server, body=body).status == 400
                assert ask_on(kept, body=body).status == 400

    def test_one_that_could_not_be_had_drops_nobody(self):
        with serving(StubPredictor(), **self.LIMITS) as server, contextlib.ExitStack() as stack:
            silent, fast = all_opened(
                stack, server, [promise(300_000), promise(600_000) + bytes(599_999)]
            )
            found = server.clients._clients.values()
            wait_until(lambda: any(c.since > time.monotonic() + 0.5 for c in found))
            assert raw(server, promise(500_000)).startswith(b"HTTP/1.1 503")
            assert not has_ended(silent) and not has_ended(fast)

    def test_memory_is_bounded(self):
        """Whatever is promised and sent; without a bound it would be 80 MB."""
        size = 8_000_000
        limits = {"content": size, "receiving": 2 * size}
        with serving(StubPredictor(), **limits) as server, contextlib.ExitStack() as stack:
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for _ in range(10):
                connection = stack.enter_context(opened(server, promise(size)))
                with contextlib.suppress(OSError):  # refused meanwhile
                    connection.sendall(bytes(size - 1))
            wait_until(lambda: tracemalloc.get_traced_memory()[0] < 2.5 * size)
            assert sum(one.held for one in server.clients._clients.values()) <= 2 * size
            assert tracemalloc.get_traced_memory()[1] < 4.5 * size  # with what the test sends

    def test_a_body_may_be_larger_than_all_are_meant_to_be(self):
        with serving(StubPredictor(), content=500_000, receiving=1) as server:
            assert ask(server, body=bytes(400_000)).status == 400


class TestConnections:
    def test_the_longest_idle_one_gives_way(self, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 3)
        monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 0)
        with serving(StubPredictor()) as server, contextlib.ExitStack() as stack:
            kept = stack.enter_context(contextlib.closing(connect(server)))
            assert ask_on(kept, "GET", "/health").status == 200
            first, second = all_opened(stack, server, [b"", HEAD])
            assert ask_on(kept, "GET", "/health").status == 200  # which makes it the youngest
            assert classes(ask(server, body=png(4))) == ["class 4"]
            wait_until(lambda: has_ended(first))
            assert not has_ended(second)
            assert ask_on(kept, "GET", "/health").status == 200

    def test_those_at_work_stay_and_health_has_room(self, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
        monkeypatch.setattr(clients_module, "SPARE_CONNECTIONS", 1)
        stub = StubPredictor()
        stub.hold.clear()
        with (
            serving(stub) as server,
            ThreadPoolExecutor(2) as pool,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(stub.hold.set)
            at_work = [pool.submit(ask, server, body=png(v)) for v in (1, 2)]
            wait_until(lambda: server.service._waiting == 2)
            refused = ask(server, body=png(3))
            assert refused.status == 503 and refused.headers["Retry-After"] == "1"
            assert error_of(refused) == "too many connections"
            wait_until(lambda: len(server.clients) == 2)
            health = ask(server, "GET", "/health")
            assert health.status == 200 and json.loads(health.body)["waiting"] == 2
            assert health.headers["Connection"] == "close"
            wait_until(lambda: len(server.clients) == 2)
            monkeypatch.setattr(clients_module, "SPARE_CONNECTIONS", 0)
            turned_away = raw(server, b"")
            assert turned_away.startswith(b"HTTP/1.1 503") and b"Retry-After" in turned_away
            stub.hold.set()
            assert [classes(one.result()) for one in at_work] == [["class 1"], ["class 2"]]
            wait_until(lambda: not len(server.clients))
            assert classes(ask(server, body=png(3))) == ["class 3"]

    def test_many_that_come_at_once_give_way(self, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 2)
        monkeypatch.setattr(clients_module, "SPARE_CONNECTIONS", 1)
        monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 3600)
        with serving(StubPredictor()) as server, contextlib.ExitStack() as stack:
            first, *_ = all_opened(stack, server, [b""] * 3)
            assert classes(ask(server, body=png(4))) == ["class 4"]
            assert has_ended(first)

    def test_the_place_of_a_spare_one_is_no_other(self, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
        monkeypatch.setattr(clients_module, "SPARE_CONNECTIONS", 1)
        monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 0)
        stub = StubPredictor()
        stub.hold.clear()
        with (
            serving(stub) as server,
            ThreadPoolExecutor(1) as pool,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(stub.hold.set)
            at_work = pool.submit(ask, server, body=png(1))
            wait_until(lambda: server.service._waiting == 1)
            with opened(server, promise(1000)) as refused:  # and its body is waited for
                assert refused.recv(12) == b"HTTP/1.1 503"
                assert error_of(ask(server, body=png(2))) == "too many connections"
            assert ask(server, "GET", "/health").status == 200
            stub.hold.set()
            assert classes(at_work.result()) == ["class 1"]

    def test_a_request_that_comes_too_late_is_not_answered(self, monkeypatch):
        """Its connection gave way to another while its last bytes came."""
        monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 0)
        clients = clients_module.Clients(most=1, most_held=0)
        with contextlib.ExitStack() as stack:
            first, second, *_ = (
                stack.enter_context(one) for _ in range(2) for one in socket.socketpair()
            )
            assert clients.add(first)
            late = clients.of(first)
            assert clients.add(second) and clients.of(second).since < time.monotonic()
            for use in (lambda: clients.work(late), lambda: clients.of(first)):
                with pytest.raises(ConnectionAbortedError):
                    use()
            clients.work(clients.of(second))

    def test_slow_heads_end(self, monkeypatch):
        monkeypatch.setattr(handler_module, "HEAD_SECONDS", 0.4)
        with serving(StubPredictor()) as server, contextlib.ExitStack() as stack:
            silent, half = all_opened(stack, server, [b"", HEAD[:20]])
            assert classes(ask(server, body=png(4))) == ["class 4"]
            half.sendall(b"x")  # a byte now and then does not help
            assert silent.recv(100) == half.recv(100) == b""

    def test_a_client_who_does_not_read_the_answer_is_dropped(self, monkeypatch):
        """The page is asked for again and again until the answers fill all buffers."""
        monkeypatch.setattr(handler_module, "SEND_SECONDS", 0.2)
        with serving(StubPredictor()) as server:
            with opened(server) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                with contextlib.suppress(OSError):
                    for _ in range(4000):
                        connection.sendall(b"GET /serve_page.js HTTP/1.1\r\n" + HOST + b"\r\n")
                wait_until(lambda: not len(server.clients))
            assert ask(server, "GET", "/health").status == 200

    def test_half_a_head_is_no_request(self):
        with serving(StubPredictor()) as server:
            assert raw(server, b"GET /health HTTP/1.0\r\nA: b\r\n") == b""
            assert raw(server, b"GET /health HTTP/1.0") == b""


class TestRefusedUploads:
    def test_the_answer_reaches_a_client_that_goes_on_sending(self):
        """For longer than the server's and the client's buffers would hold."""
        with serving(StubPredictor(), content=50_000) as server:
            with opened(server, promise(30_000_000)) as connection:
                for _ in range(6):
                    connection.sendall(bytes(5_000_000))
                    time.sleep(0.5)
                assert said_on(connection).startswith(b"HTTP/1.1 413")

    def test_taking_the_rest_gives_way_to_others(self, monkeypatch):
        monkeypatch.setattr(server_module, "MAX_CONNECTIONS", 1)
        monkeypatch.setattr(clients_module, "_YOUNG_SECONDS", 0)
        with serving(StubPredictor(), content=50_000) as server:
            with opened(server, promise(30_000_000)) as connection:
                assert said_on(connection).startswith(b"HTTP/1.1 413")
                assert classes(ask(server, body=png(4))) == ["class 4"]


class TestVanishedClients:
    def test_they_leave_nothing_behind(self):
        stub = StubPredictor()
        sent = whole(png(1))
        with serving(stub, waiting=4) as server:
            stub.hold.clear()
            for content in (b"", HEAD, sent[:-5], sent, sent):
                raw(server, content, wait=False)
            stub.hold.set()
            for value in (2, 3):
                assert classes(ask(server, body=png(value))) == [f"class {value}"]
            wait_until(lambda: not len(server.clients))
            assert waiting(server) == 0

    def test_nothing_is_computed_for_them(self):
        stub = StubPredictor()
        stub.hold.clear()
        with (
            serving(stub) as server,
            ThreadPoolExecutor(2) as pool,
            contextlib.ExitStack() as stack,
        ):
            stack.callback(stub.hold.set)
            first = pool.submit(ask, server, body=png(1))
            assert stub.started.wait(30)
            gone = [opened(server, whole(png(v))) for v in (2, 3)]
            wait_until(lambda: waiting(server) == 3)
            last = pool.submit(ask, server, body=png(4))
            wait_until(lambda: waiting(server) == 4)
            for connection in gone:
                connection.close()
            stub.hold.set()
            assert classes(first.result()) == ["class 1"]
            assert classes(last.result()) == ["class 4"]
            assert stub.values == [1, 4]
            assert json.loads(ask(server, "GET", "/health").body)["answered"] == 2

    def test_nor_decoded(self):
        stub = StubPredictor()
        with serving(stub) as server:
            decoders = server.service._decoders
            free = 0
            while decoders.acquire(blocking=False):
                free += 1
            decoded = []
            prepare = stub.prepare
            stub.prepare = lambda *image: decoded.append(image) or prepare(*image)
            with opened(server, whole(png(2))):
                wait_until(lambda: waiting(server) == 1)
            with opened(server, whole(png(3))) as stays:
                wait_until(lambda: waiting(server) == 2)
                decoders.release(free)
                assert b'"class 3"' in said_on(stays)
            wait_until(lambda: waiting(server) == 0)
            assert len(decoded) == 1
