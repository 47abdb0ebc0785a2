"""Diagrams: GitHub draws the Mermaid of a page; the site has pictures, which need neither script nor network."""

import hashlib
import re

_FENCE = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def drawn(text: str, depth: int) -> tuple[str, dict[str, str]]:
    """Return a page with pictures in place of its Mermaid, and the Mermaid of each by the picture's path in the site.

    `depth` is the number of folders that the page lies in.
    """
    found: dict[str, str] = {}

    def picture(match: re.Match[str]) -> str:
        path = f"assets/diagrams/{hashlib.sha256(match[1].encode()).hexdigest()[:16]}.svg"
        found[path] = match[1]
        link = "../" * depth + path
        return f"[![diagram, larger at a click]({link}){{ .diagram }}]({link})"

    return _FENCE.sub(picture, text), found
