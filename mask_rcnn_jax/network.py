"""The only reader of http and https: limits of time, rate, bytes and addresses."""

import contextlib
import io
import ipaddress
import math
import socket
import string
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, unquote, urlsplit, urlunsplit

SCHEMES = ("http", "https")
_CHUNK = 1 << 20
_PUBLIC_6 = ipaddress.IPv6Network("2000::/3")
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
# Beside those that Python knows: reserved by the IETF, some clouds' own services among them, and
# Azure's.
_NOT_PUBLIC = [
    ipaddress.IPv4Network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "168.63.129.16/32")
]


@dataclass(frozen=True)
class Limits:
    """What a request may take, with its redirects."""

    silence: float = 20.0  # seconds to connect, and without a byte
    rate: int = 1000  # bytes a second, at least, over each `window`
    window: float = 10.0  # seconds
    seconds: float = math.inf  # in all
    public_only: bool = False  # connect to public addresses alone, and to no proxy


def is_web(address: str) -> bool:
    """Whether an address is one of http or https."""
    return address.partition("://")[0].lower() in SCHEMES and "://" in address


def open_url(
    address: str,
    limits: Limits,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
) -> HTTPResponse:
    """Send a request to an http or https address, and follow up to ten redirects to such.

    A user and a password in the address answer a server that asks for them. Reading the response
    stays within the limits, too, and may raise HTTPException.

    Raises OSError: HTTPError if the server answers with a status of an error, TimeoutError beyond
    the limits.
    """
    try:
        # Blanks and what is not ASCII are encoded, as browsers do; the rest, with its %20, stays.
        parts = urlsplit(quote(address, safe=string.punctuation))
        if parts.scheme not in SCHEMES:
            raise OSError(f"{parts.scheme}: is not read, only http and https")
        user, at, host = parts.netloc.rpartition("@")
        plain = urlunsplit(parts._replace(netloc=host))
        pace = _Pace(limits)
        handlers = [_Redirects(), _Connections(pace), urllib.request.HTTPErrorProcessor()]
        if at:
            handlers += _logins(plain, user)
        if not limits.public_only:
            handlers.append(urllib.request.ProxyHandler())
        opener = urllib.request.OpenerDirector()
        for handler in [*handlers, urllib.request.HTTPDefaultErrorHandler()]:
            opener.add_handler(handler)
        sent = {"User-Agent": "mask-rcnn-jax", **(headers or {})}
        request = urllib.request.Request(plain, headers=sent, method=method)
        response: Any = opener.open(request, timeout=pace.timeout())
        return response
    except HTTPError as error:
        error.close()
        raise
    except URLError as error:  # the reason alone, which is an exception or a text
        inner = error.reason
        raise (inner if isinstance(inner, OSError) else OSError(inner)) from error
    except ConnectionError:  # of which some are HTTPExceptions, too
        raise
    except (HTTPException, ValueError) as error:
        raise OSError(str(error) or type(error).__name__) from error


def read_url(
    address: str, most: int, limits: Limits, headers: Mapping[str, str] | None = None
) -> bytes:
    """Return what is at an address. OSError as from `open_url`, beyond `most` bytes, and if the
    connection ends early."""
    content = bytearray()
    try:
        with open_url(address, limits, headers=headers) as response:
            stated = response.length or 0
            while len(content) <= most and (piece := response.read1(_CHUNK)):
                content += piece
    except HTTPException as error:
        raise ConnectionError(str(error) or type(error).__name__) from error
    if len(content) > most:
        raise OSError(f"more than {most:,} bytes")
    if len(content) < stated:
        raise ConnectionError(f"the connection ended after {len(content):,} of {stated:,} bytes")
    return bytes(content)


def is_public(address: str) -> bool:
    """Whether an IP address, also one of IPv4 within IPv6, belongs to the public internet."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        within = ip.ipv4_mapped or ip.sixtofour
        if ip in _NAT64:
            within = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if within is not None:
            return is_public(str(within))
        return ip in _PUBLIC_6 and ip.is_global
    reserved = any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not ip.is_multicast and not reserved


class _Pace:
    """Connects and waits within the limits of one request."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._end = monotonic() + limits.seconds
        self._bytes, self._waited = 0, 0.0  # of the current window

    def timeout(self) -> float:
        """Seconds that may be waited now."""
        left = self._end - monotonic()
        if left <= 0:
            raise TimeoutError(f"took longer than {self._limits.seconds:g} seconds")
        return min(self._limits.silence, left)

    def received(self, size: int, seconds: float) -> None:
        """Count bytes and the time that they were waited for."""
        self._bytes += size
        self._waited += seconds
        if self._waited >= self._limits.window:
            if self._bytes < self._limits.rate * self._waited:
                sent = f"{self._bytes} bytes in {self._waited:.0f} seconds"
                raise TimeoutError(
                    f"the server sent {sent}, fewer than {self._limits.rate} a second"
                )
            self._bytes, self._waited = 0, 0.0

    def connect(self, place: tuple[str, int], *_) -> socket.socket:
        """Connect to a host. With `public_only`, a name is looked up once: what is connected to
        is the address that was checked."""
        host, port = place
        found = [info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        addresses = [str(ip) for ip in found if not self._limits.public_only or is_public(str(ip))]
        if not addresses:
            raise OSError(f"{host} is at {found[0]}, no public address")
        for address in addresses[:-1]:
            with contextlib.suppress(OSError):
                return socket.create_connection((address, port), self.timeout())
        return socket.create_connection((addresses[-1], port), self.timeout())


class _Paced(io.RawIOBase):
    """The bytes of a connection, within its limits."""

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, pace: _Pace):
        self._raw, self._connection, self._pace = raw, connection, pace
        self._has_begun = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        timeout, start = self._pace.timeout(), monotonic()
        self._connection.settimeout(timeout)
        try:
            size = self._raw.readinto(buffer) or 0
        except TimeoutError as error:
            self._pace.timeout()  # says it if the time is over
            raise TimeoutError(f"the server sent nothing for {timeout:.0f} seconds") from error
        if size and self._has_begun:  # a server may think before it answers
            self._pace.received(size, monotonic() - start)
        self._has_begun = True
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Response(HTTPResponse):
    def __init__(self, sock: socket.socket, *args, pace: _Pace, **options):
        super().__init__(sock, *args, **options)
        raw: Any = self.fp.detach()
        self.fp = io.BufferedReader(_Paced(raw, sock, pace))


class _Connections(urllib.request.AbstractHTTPHandler):
    def __init__(self, pace: _Pace):
        super().__init__()
        self._pace = pace

    def http_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, HTTPConnection), request)

    def https_open(self, request: urllib.request.Request) -> HTTPResponse:
        return self.do_open(partial(self._connection, HTTPSConnection), request)

    http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    def _connection(self, kind: type[HTTPConnection], host: str, **options) -> HTTPConnection:
        connection: Any = kind(host, **options)
        connection._create_connection = self._pace.connect
        connection.response_class = partial(_Response, pace=self._pace)
        return connection


class _Redirects(urllib.request.HTTPRedirectHandler):
    inf_msg = "more redirects than are followed, the last: "

    def redirect_request(self, req, fp, code, msg, headers, newurl):
        fp.close()  # unread: it may be endless
        if not is_web(newurl):
            raise OSError(f"redirects to {newurl}, expected http or https")
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request and (request.type, request.host) != (req.type, req.host):
            request.remove_header("Authorization")  # is for the one who was asked
        return request


def _logins(address: str, user: str) -> list[urllib.request.BaseHandler]:
    name, _, password = map(unquote, user.partition(":"))
    known = urllib.request.HTTPPasswordMgrWithDefaultRealm()
    known.add_password(None, address, name, password)
    basic = urllib.request.HTTPBasicAuthHandler(known)
    return [basic, urllib.request.HTTPDigestAuthHandler(known)]
