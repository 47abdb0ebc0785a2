"""What docs/metrics.md says of metric keys."""

import re
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"


def undocumented(keys: Iterable[str]) -> set[str]:
    """Return the keys of a row of metrics for which the page has no row of its own or with `<...>`."""
    cells = re.findall(r"^\| (`.*?) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}
    general = {name for name in names if "<" in name and not name.startswith("eval/<")}
    pattern = re.compile("|".join([*map(re.escape, names - general), *(re.sub(r"<\w+>", r"\\w+", n) for n in general)]))
    return {key for key in keys if key != "step" and not pattern.fullmatch(key)}
