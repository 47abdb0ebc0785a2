"""Links that leave docs/: their targets become part of the site, which needs neither network nor repository."""

import posixpath
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = {"README.md": "readme.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""Pages of the repository's root, and their paths in the site."""
_LINK = re.compile(r"(\]\()([^)#\s:]+)(#[^)\s]*)?\)")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".sh": "sh"}


def site_url() -> str | None:
    """Return the site's address from the package's metadata; None if it is not published."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    urls: dict[str, str] = project.get("urls", {})
    return urls.get("Documentation")


def with_inner_links(text: str, origin: str, place: str) -> str:
    """Return a page with its relative links changed to those of the site.

    `origin` is the page's path in the repository, `place` that in the site.
    """

    def inner(match: re.Match[str]) -> str:
        target = place_of(posixpath.normpath(posixpath.join(posixpath.dirname(origin), match[2])))
        return f"{match[1]}{posixpath.relpath(target, posixpath.dirname(place) or '.')}{match[3] or ''})"

    return _outside_fences(text, lambda part: _LINK.sub(inner, part))


def place_of(path: str) -> str:
    """Return the site's path of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    is_shown = path.endswith(tuple(_LANGUAGES)) or (REPOSITORY / path).is_dir()
    return PAGES.get(path) or (f"source/{path}.md" if is_shown else f"source/{path}")


def linked(pages: dict[str, str]) -> set[str]:
    """Return the paths outside docs/ that pages link to, by their text and their path in the repository."""
    found = set()
    for origin, text in pages.items():
        targets = [match[2] for part in _parts(text)[::2] for match in _LINK.finditer(part)]
        found |= {posixpath.normpath(posixpath.join(posixpath.dirname(origin), target)) for target in targets}
    return {path for path in found if not path.startswith("docs/") and path not in PAGES}


def shown(path: str) -> str:
    """Return the page of a source file, or of a folder: the list of its files."""
    file = REPOSITORY / path
    if file.is_dir():
        names = sorted(one.name for one in file.iterdir() if one.suffix in _LANGUAGES)
        return f"# `{path}/`\n\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    return f"# `{path}`\n\n```{_LANGUAGES[file.suffix]}\n{file.read_text(encoding='utf-8')}```\n"


def _parts(text: str) -> list[str]:
    """Split a page into alternating parts: outside fences, and fences."""
    return re.split(r"(^ *```.*?^ *```$)", text, flags=re.MULTILINE | re.DOTALL)


def _outside_fences(text: str, change: Callable[[str], str]) -> str:
    return "".join(part if index % 2 else change(part) for index, part in enumerate(_parts(text)))
