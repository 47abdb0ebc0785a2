"""The secret of a run: a bearer token for its servers and its registry.

It is stored in the run folder, readable by its owner only, and passed to processes by environment. HTTP is not
encrypted: the secret protects from clients that can connect, not from listeners on the network.
"""

import hmac
import os
import secrets
from ipaddress import ip_address
from pathlib import Path

from arealite.utils.files import reading, write_atomically

SECRET_FILE = ".secret"
SECRET_VARIABLE = "AREALITE_SECRET"
"""Secret of the run, which its servers require with every request. Here, as servers of other environments read it."""
_SCHEME = "Bearer "
_MIN_LENGTH, _MAX_LENGTH = 16, 1024


def ensure_secret(run_folder: Path) -> str:
    """Return the secret of a run, created if missing; a secret in the environment wins and is stored for joiners.

    Raises ValueError if other users may know it, or may have planted it.
    """
    path = run_folder / SECRET_FILE
    given = secret_of_environment()
    if given is not None:
        check_length(SECRET_VARIABLE, given, "Set a longer one (openssl rand -hex 32).")
    if given is not None or not path.exists():
        secret = given or secrets.token_hex(32)
        write_atomically(path, f"{secret}\n", mode=0o600)
        return secret
    file = path.stat()
    fix = f"Remove it, for a new one, or set {SECRET_VARIABLE} if its file system keeps no owner or mode (SMB, FUSE)."
    if file.st_uid != os.geteuid():
        raise ValueError(f"{path} must be yours: got one of user {file.st_uid}. {fix}")
    if file.st_mode & 0o077:
        raise ValueError(f"{path} must be readable by its owner alone: got mode {file.st_mode & 0o777:04o}. {fix}")
    with reading(path):
        secret = path.read_text(encoding="utf-8").strip()
    check_length(path, secret, fix)
    return secret


def check_length(what: str | Path, secret: str, advice: str) -> None:
    """Raise ValueError for a secret that can be guessed, or that an HTTP header can't hold."""
    if not _MIN_LENGTH <= len(secret) <= _MAX_LENGTH or not (secret.isascii() and secret.isprintable()):
        bounds = f"{_MIN_LENGTH} to {_MAX_LENGTH} characters"
        raise ValueError(f"{what} must be {bounds}, of printable ASCII: got {len(secret)}. {advice}")


def secret_of_environment() -> str | None:
    """Return the secret from the environment, stripped: a header can't hold the newline of a secret file."""
    return os.environ.get(SECRET_VARIABLE, "").strip() or None


def environment_without_secret() -> dict[str, str]:
    """Return this process's environment for a child that needs no access to servers."""
    return {name: value for name, value in os.environ.items() if name != SECRET_VARIABLE}


def authorization(secret: str | None) -> dict[str, str]:
    """Return the Authorization header, or no header without a secret."""
    return {"Authorization": f"{_SCHEME}{secret}"} if secret else {}


def without_secret(body: bytes, header: str | None) -> bytes:
    """Remove the secret of an Authorization header from a reply: error pages echo requests."""
    return body.replace(header.removeprefix(_SCHEME).encode(), b"***") if header else body


def is_authorized(header: str | None, secret: str) -> bool:
    """Return True if an Authorization header has the secret, in constant time."""
    return hmac.compare_digest((header or "").encode(errors="replace"), f"{_SCHEME}{secret}".encode())


def refusal(method: str, path: str) -> str:
    """Return the error message for a request without the secret."""
    return (
        f"{method} {path} must show the secret of the run: got none or another one. Send `Authorization: Bearer "
        f"<secret>`; our programs do if {SECRET_VARIABLE} is set to what is in the run folder's {SECRET_FILE}."
    )


def check_exposed(host: str, secret: str | None) -> None:
    """Raise ValueError for a server without a secret to which other nodes can connect."""
    if not secret and not is_loopback(host):
        raise ValueError(
            f"a server at an address that others reach must have a secret: got --host {host} and none. "
            f"Set {SECRET_VARIABLE} (for a run: to what is in its folder's {SECRET_FILE}), or listen on 127.0.0.1."
        )


def is_loopback(host: str) -> bool:
    """Return True if only this node can connect to an address; the only such name is `localhost`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
