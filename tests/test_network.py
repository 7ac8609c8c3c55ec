"""What comes over http: limits of rate, time, bytes, redirects and addresses."""

import base64
import socket

import pytest

from mask_rcnn_jax import network
from mask_rcnn_jax.network import Limits, is_public, open_url, read_url
from tests.web_server import redirect, serving

QUICK = Limits(window=0.2)
LARGE = b"x" * 100_000


@pytest.fixture
def server():
    with serving() as server:
        server.answers["/a"] = lambda handler: handler.send(b"content")
        yield server


def test_what_is_at_an_address_is_returned(server):
    server.answers["/b%20%C3%BC"] = lambda handler: handler.send(b"named")
    server.answers["/moved"] = redirect("/a")
    assert read_url(server.url("/a"), 7, Limits()) == b"content"
    assert read_url(server.url("/b ü"), 100, Limits()) == b"named"
    assert read_url(server.url("/moved"), 100, Limits()) == b"content"
    with pytest.raises(OSError, match="^more than 6 bytes$"):
        read_url(server.url("/a"), 6, Limits())


def dripping_head(handler):
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    handler.drip(b"X-A: b\r\n")


def dripping_chunk(handler):
    """Sizes of chunks in so many digits that none is ever complete."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    handler.drip(b"0")


def dripping_body(handler):
    handler.send(b"")
    handler.drip(b"x")


def dripping_redirect(handler):
    handler.wfile.write(b"HTTP/1.1 302 Found\r\n")
    handler.drip(b"X-A: b\r\n")


@pytest.mark.parametrize(
    "answer", [dripping_head, dripping_chunk, dripping_body, dripping_redirect]
)
def test_a_drip_ends_wherever_it_is(server, answer):
    """Each byte comes long before the time without a byte is over."""
    server.answers["/drip"] = answer
    server.answers["/to"] = redirect("/drip")
    for path in ("/drip", "/to"):
        with pytest.raises(TimeoutError, match=r"sent \d+ bytes in 0 seconds, fewer than 1000 a"):
            read_url(server.url(path), 10_000_000, QUICK)


def test_a_connection_that_ends_early_is_an_oserror(server):
    server.answers["/cut"] = lambda handler: handler.send(b"some", Content_Length="1000")
    with pytest.raises(OSError, match="the connection ended after 4 of 1,000 bytes"):
        read_url(server.url("/cut"), 10_000, Limits())


def test_silence_ends(server):
    def nothing(handler):
        handler.server.ended.wait()

    def nothing_more(handler):
        handler.send(b"some")
        handler.server.ended.wait()

    server.answers |= {"/nothing": nothing, "/more": nothing_more}
    for path in ("/nothing", "/more"):
        with pytest.raises(TimeoutError, match="sent nothing for 0 seconds"):
            read_url(server.url(path), 100, Limits(silence=0.2))


def test_an_answer_that_takes_its_time_to_begin_is_no_drip(server):
    def slow(handler):
        handler.server.ended.wait(0.5)
        handler.send(LARGE)

    server.answers["/slow"] = slow
    assert read_url(server.url("/slow"), len(LARGE), QUICK) == LARGE


@pytest.mark.parametrize("path", ["/endless", "/round"])
def test_the_whole_time_is_limited(server, path):
    def endless(handler):
        handler.send(b"")
        while not handler.server.ended.is_set():
            handler.wfile.write(LARGE)

    def wait_and_redirect(handler):
        handler.server.ended.wait(0.2)
        redirect("/round")(handler)

    server.answers |= {"/endless": endless, "/round": wait_and_redirect}
    with pytest.raises(TimeoutError, match="took longer than 0.3 seconds"):
        read_url(server.url(path), 1 << 40, Limits(seconds=0.3))


def test_redirects_are_counted_and_their_contents_left_unread(server):
    def endless(handler):
        redirect("/a")(handler)
        while not handler.server.ended.is_set():
            handler.wfile.write(LARGE)

    server.answers["/endless"] = endless
    assert read_url(server.url("/endless"), 100, Limits()) == b"content"
    for number in range(30):
        server.answers[f"/{number}"] = redirect(f"/{number + 1}")
    server.requests.clear()
    with pytest.raises(OSError, match="302: more redirects than are followed") as caught:
        read_url(server.url("/0"), 100, Limits())
    assert len(server.requests) == 11 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "target", ["file:///etc/passwd", "ftp://127.0.0.1/a", "data:,a", "gopher:a"]
)
def test_only_http_is_read(server, target):
    server.answers["/to"] = redirect(target)
    with pytest.raises(OSError, match=r"not allowed|expected http or https"):
        read_url(server.url("/to"), 100, Limits())
    with pytest.raises(OSError, match="is not read, only http and https"):
        read_url(target, 100, Limits())


@pytest.mark.parametrize(
    "address", ["http://", "http://[::1", "http://127.0.0.1:x/", "http://a..b/", "http:///a"]
)
def test_an_address_that_is_none_is_an_oserror(address):
    with pytest.raises(OSError):
        read_url(address, 100, Limits())


def test_what_is_no_http_is_an_oserror(server):
    server.answers["/ssh"] = lambda handler: handler.wfile.write(b"SSH-2.0\r\n")
    server.answers["/chunks"] = lambda handler: handler.wfile.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nnone\r\n"
    )
    for path in ("/ssh", "/chunks"):
        with pytest.raises(OSError):
            read_url(server.url(path), 100, Limits())


def test_a_user_in_the_address_is_for_its_server_alone(server):
    def login(handler):
        given = handler.headers["Authorization"]
        if given is None:
            handler.send(b"", 401, WWW_Authenticate='Basic realm="cameras"')
        else:
            handler.send(given.encode())

    server.answers["/login"] = login
    address = server.url("/login").replace("://", "://me:a%40b@")
    expected = b"Basic " + base64.b64encode(b"me:a@b")
    assert read_url(address, 100, Limits()) == expected
    with serving("127.0.0.2") as other:
        other.answers["/login"] = login
        server.answers["/to"] = redirect(other.url("/login"))
        with pytest.raises(OSError, match="401"):
            read_url(address.replace("/login", "/to"), 100, Limits())


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "127.8.9.1", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
        *("169.254.169.254", "100.64.0.1", "192.0.0.192", "192.0.2.1", "198.18.0.1", "224.0.0.1"),
        *("240.0.0.1", "255.255.255.255", "168.63.129.16"),
        *("::", "::1", "::7f00:1", "fe80::1", "fe80::1%eth0", "fec0::1", "fd00:ec2::254"),
        *("ff02::1", "ff0e::1", "2001:db8::1", "64:ff9b:1::808:808", "2001::1", "100::1"),
        *("::ffff:10.0.0.1", "::ffff:7f00:1", "64:ff9b::7f00:1", "2002:a00:1::"),
    ],
)
def test_addresses_of_ones_own_are_not_public(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    ["8.8.8.8", "172.32.0.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_addresses_of_others_are_public(address):
    assert is_public(address)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "0"])
def test_with_public_only_nothing_is_asked_of_this_machine(server, host):
    address = f"http://{host}:{server.server_port}/a"
    with pytest.raises(OSError, match="no public address"):
        read_url(address, 100, Limits(public_only=True))
    assert not server.requests


@pytest.fixture
def public_server(server, monkeypatch):
    """Another server of the same port, whose address counts as public."""
    monkeypatch.setattr(network, "is_public", lambda address: address == "127.0.0.2")
    with serving("127.0.0.2", server.server_port) as other:
        other.answers["/a"] = lambda handler: handler.send(b"public")
        yield other


def test_with_public_only_redirects_are_checked(server, public_server):
    public_server.answers["/to"] = redirect(server.url("/a"))
    public_server.answers["/on"] = redirect("/a")
    limits = Limits(public_only=True)
    assert read_url(public_server.url("/on"), 100, limits) == b"public"
    with pytest.raises(OSError, match="127.0.0.1 is at 127.0.0.1, no public address"):
        read_url(public_server.url("/to"), 100, limits)
    assert not server.requests


def test_a_name_that_moves_after_the_check_is_not_followed(server, public_server, monkeypatch):
    real, looked_up = socket.getaddrinfo, []

    def rebinding(host, *args, **options):
        if host == "moves.test":
            looked_up.append(host)
            host = "127.0.0.2" if len(looked_up) == 1 else "127.0.0.1"
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    address = f"http://moves.test:{server.server_port}/a"
    assert read_url(address, 100, Limits(public_only=True)) == b"public"
    assert public_server.requests == [("/a", f"moves.test:{server.server_port}")]
    with pytest.raises(OSError, match="moves.test is at 127.0.0.1, no public address"):
        read_url(address, 100, Limits(public_only=True))
    assert not server.requests and looked_up == ["moves.test"] * 2


def test_with_public_only_no_proxy_looks_names_up(server, public_server, monkeypatch):
    monkeypatch.setenv("http_proxy", server.url(""))
    monkeypatch.delenv("no_proxy", raising=False)
    address = public_server.url("/a")
    server.answers[address] = lambda handler: handler.send(b"by the proxy")
    assert read_url(address, 100, Limits()) == b"by the proxy"
    assert read_url(address, 100, Limits(public_only=True)) == b"public"


def test_the_next_address_of_a_host_is_tried(server, monkeypatch):
    real = socket.getaddrinfo
    places = [(2, 1, 6, "", (ip, server.server_port)) for ip in ("127.0.0.3", "127.0.0.1")]
    both = lambda host, *rest, **o: places if host == "two" else real(host, *rest, **o)  # noqa: E731
    monkeypatch.setattr(socket, "getaddrinfo", both)
    with open_url(f"http://two:{server.server_port}/a", Limits()) as response:
        assert response.read() == b"content"


def test_who_was_asked_alone_gets_the_login(server):
    """Names and ports count: another server of one machine is another."""
    sent = {}
    server.answers["/a"] = lambda h: (sent.update(a=h.headers["Authorization"]), h.send(b"a"))
    server.answers["/same"] = redirect("/a")
    with serving() as other:
        other.answers["/b"] = lambda h: (sent.update(b=h.headers["Authorization"]), h.send(b"b"))
        server.answers["/other"] = redirect(other.url("/b"))
        for path in ("/same", "/other"):
            read_url(server.url(path), 1, Limits(), {"Authorization": "Bearer secret"})
    assert sent == {"a": "Bearer secret", "b": None}
