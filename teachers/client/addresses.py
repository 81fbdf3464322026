"""Addresses of teacher servers and the token they ask for, checked before anything is sent. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from opd.errors import UserError


def is_address(name: str) -> bool:
    """Whether it is meant for a server: one address, or several replicas' separated by commas."""
    return name.startswith(("http://", "https://"))


def check_addresses(urls: Sequence[str], field: str) -> None:
    """Refuses what is no `http://HOST:PORT` or `https://HOST:PORT`, maybe with a path, and an address given twice.

    Raises `UserError` naming `field`.
    """
    if not urls:
        raise UserError(f"{field}: has no address; give one such as http://127.0.0.1:8400")
    for url in urls:
        _check_address(url, field)
        if urls.count(url) > 1:
            raise UserError(f"{field}: {url} is given twice; name each replica once")


def read_token(path: str, field: str) -> str:
    """The bearer token in a file, without the whitespace around it. The message of an error never holds it.

    Raises `UserError` naming `field` when the file cannot be read, is empty, or holds more than one word of ASCII.
    """
    try:
        token = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise UserError(f"{field}: {path} cannot be read: {error.strerror}; name the file with the server's token") from None
    if not token:
        raise UserError(f"{field}: {path} is empty; write the server's token into it")
    if not all(0x21 <= byte <= 0x7E for byte in token):
        raise UserError(f"{field}: {path} holds more than one word of ASCII; write nothing but the server's token into it")
    return token.decode("ascii")


def _check_address(url: str, field: str) -> None:
    shown = repr(url[:100])
    if not url.isascii() or any(c.isspace() or not c.isprintable() for c in url):
        raise UserError(f"{field}: {shown} holds characters that no address has")
    if not is_address(url):
        raise UserError(f"{field}: {shown} must begin with http:// or https://, as in http://127.0.0.1:8400")
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise UserError(f"{field}: {shown} is no address: {error}") from None
    if "@" in parts.netloc:  # not shown: it may hold a password
        raise UserError(f"{field}: an address holds a user name or password; put the server's token into token_file instead")
    if not host:
        raise UserError(f"{field}: {shown} names no host")
    if "?" in url or "#" in url:
        raise UserError(f"{field}: {shown} must end with its host, port or path; leave out what begins with ? or #")
