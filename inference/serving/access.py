"""Access to the endpoint: the address it listens at, the API key that clients send, the name of a request in answers and logs."""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import re
import socket
import uuid
from pathlib import Path

from aiohttp import web

from headstart.heads.errors import UserError

NAME = web.RequestKey("name", str)
HEADER = "X-Request-Id"
ABSENT = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # errors of ::1, which /etc/hosts may name for localhost though IPv6 is off
LONGEST_KEY = 4096  # bytes of a file with a key


def listen(host: str, port: int) -> list[socket.socket]:
    """A socket bound to each address of ``host``. They are bound before the model is loaded, and accept connections once aiohttp listens.

    ``port`` 0: any free port, the same for all addresses. Raises UserError where an address cannot be bound.
    """
    if not host:
        raise UserError("host is empty: 127.0.0.1 is this machine only, 0.0.0.0 everyone who reaches it")
    if not 0 <= port < 1 << 16:
        raise UserError(f"port must be 0 to 65535, found {port}")
    found: list[socket.socket] = []
    absent: OSError | None = None
    try:
        for family, kind, protocol, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            same = found[0].getsockname()[1] if found else port
            try:
                found.append(_bound(socket.socket(family, kind, protocol), (address[0], same, *address[2:])))
            except OSError as error:
                if error.errno not in ABSENT:
                    raise
                absent = error
        if not found and absent is not None:
            raise absent
    except (OSError, UnicodeError) as error:
        for place in found:
            place.close()
        raise UserError(f"cannot listen on host={host} port={port}: {error}") from None
    return found


def _bound(place: socket.socket, address: tuple[str | int, ...]) -> socket.socket:
    try:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if place.family == socket.AF_INET6:
            place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        place.bind(address)
    except OSError:
        place.close()
        raise
    return place


def key_of(setting: str | None) -> str | None:
    """The key in the environment variable that ``setting`` names, else in the file of that name; None without a ``setting``. Raises
    UserError if there is neither, or no valid key in it. The error does not repeat ``setting``: by mistake it may be the key itself.
    """
    if setting is None:
        return None
    key, held = os.environ.get(setting), b""
    try:
        if key is None and Path(setting).is_file():
            with Path(setting).open("rb") as file:
                held = file.read(LONGEST_KEY + 1)
            key = held[:LONGEST_KEY].decode()
    except (OSError, ValueError) as error:
        raise UserError(f"api_key: the file cannot be read ({type(error).__name__})") from None
    if len(held) > LONGEST_KEY:
        raise UserError(f"api_key: the file it names has more than {LONGEST_KEY} bytes: it must hold nothing but the key")
    if key is None:
        raise UserError("api_key must name an environment variable or a file that holds the key (not be the key itself): there is neither")
    if not re.fullmatch(r"[\x21-\x7e]+", key.strip()):
        raise UserError("api_key: what it names holds no key: it must be one word of printable ASCII")
    return key.strip()


class Lock:
    """Checks that a request carries the key. Only the key's digest is kept; the comparison takes the same time for every wrong key."""

    def __init__(self, key: str) -> None:
        self.digest = hashlib.sha256(key.encode()).digest()

    def opens(self, request: web.Request) -> bool:
        """Whether the request carries the key. Takes the same time whatever is wrong with it."""
        scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
        digest = hashlib.sha256(shown.strip().encode(errors="surrogateescape")).digest()
        return scheme.lower() == "bearer" and hmac.compare_digest(digest, self.digest)


def name_of(request: web.Request) -> str:
    """The name of a request: the client's ``X-Request-Id`` if it is one word of at most 128 characters, else a new one."""
    given = request.headers.get(HEADER, "")
    return given if re.fullmatch(r"[\x21-\x7e]{1,128}", given) else uuid.uuid4().hex


async def sign(request: web.Request, response: web.StreamResponse) -> None:
    """Put the request's name into the headers of every response, errors and streams included."""
    if NAME in request:
        response.headers[HEADER] = request[NAME]
