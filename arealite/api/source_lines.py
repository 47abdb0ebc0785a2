"""Lines of code as `file:line in function`, and which of a stack is the user's own.

User code is what lies neither in this package, nor in the standard library, nor among installed packages.
"""

import sysconfig
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType

_PACKAGE = str(Path(__file__).parents[1]) + "/"
_NOT_USERS = (_PACKAGE, *(sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "purelib", "platlib")))


@dataclass(frozen=True)
class SourceLine:
    """A place in a program."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """Whether this is user code; the examples that are installed with the package are."""
        if self.file.startswith(f"{_PACKAGE}examples/"):
            return True
        is_file = not self.file.startswith("<")
        return is_file and not self.file.startswith(_NOT_USERS) and "/site-packages/" not in self.file

    @property
    def room(self) -> str:
        """The folder of this package that holds the file, e.g. `inference`; empty for other code."""
        return self.file.removeprefix(_PACKAGE).partition("/")[0] if self.file.startswith(_PACKAGE) else ""


def line_of(code: CodeType, line: int | None) -> SourceLine:
    return SourceLine(code.co_filename, line or code.co_firstlineno, code.co_qualname)


def lines_of_frame(frame: FrameType | None) -> list[SourceLine]:
    """Return the stack of a frame, innermost first."""
    return [line_of(caller.f_code, line) for caller, line in traceback.walk_stack(frame)] if frame else []


def lines_of_error(error: BaseException) -> list[SourceLine]:
    """Return the lines of a traceback, innermost first."""
    return [line_of(frame.f_code, line) for frame, line in traceback.walk_tb(error.__traceback__)][::-1]


def users_line(lines: Iterable[SourceLine]) -> SourceLine | None:
    return next((line for line in lines if line.is_users), None)
