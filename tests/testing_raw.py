"""Bytes that whatever is at a server's port may answer with, and need not be HTTP."""

from harness.proxy import answering
from harness.proxy import reply as json_reply

__all__ = ["REPLIES", "answering", "json_reply"]

_OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
_MOVED = b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: "

REPLIES = {
    "ssh": b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "redis": b"-ERR unknown command 'GET'\r\n",
    "zeros": bytes(64),
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-",
    "no status": b"HTTP/1.1 99 X\r\n\r\n",
    "length": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "long header": _OK + b"X: " + b"a" * 9000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "bad chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "cut chunk": _OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    "cut body": _OK + b"Content-Length: 20\r\n\r\n{",
    "bad gzip": _OK + b"Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
    "bad redirect": _MOVED + b"http://x:99999/\r\n\r\n",
    "redirect": _MOVED + b"/elsewhere\r\n\r\n",
    "other protocol": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
}
"""None of them is an answer of an inference server."""
