"""The user's script as a program: its lines in a stack, how its uncaught errors are shown, and no training on import.

An error with a message of ours is one line; any other shows the user's own lines, innermost first. User code is code
outside of this package, the standard library and installed packages. The launcher keeps the whole traceback in the log.
"""

import contextlib
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType

from arealite.api.errors import AReaLiteError, ConfigError, exit_status_of

TRACEBACK_VARIABLE = "AREALITE_TRACEBACK"
"""`1` shows uncaught errors as Python does; `log` marks the lines of the whole traceback as `FOR_LOG`."""
FOR_LOG = "\x1e"
"""Begins a line that a launcher writes to the log of a process and not to the console."""
_OUT_OF_MEMORY = ("can't allocate memory", "can't start new thread", "out of memory", "Cannot allocate memory")
_LESS_MEMORY = (
    "  memory ran out: lower max_tokens_per_mb in mb_spec, use more ranks, or raise the limit of the process; "
    "`arealite plan` estimates the need"
)
_MAX_CHARS = 600  # of an error in one line
_MAX_LINES = 5  # of the user's code, of a message that is not ours, and of its notes
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


@contextlib.contextmanager
def running(script: Path) -> Iterator[None]:
    """Set sys.path and sys.argv as in a process that runs the script."""
    argv, path = sys.argv, sys.path[:]
    sys.argv, sys.path[:] = [str(script)], [str(script.parent), *path]
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path


def show_errors_briefly() -> None:
    """Show uncaught errors of a script in few lines, and end it by the exit status that launchers know the error by.

    Notebooks, tests and our own programs keep their hook, except as a rank of a trainer.
    """
    main = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_script = main.endswith(".py") and (SourceLine(main, 1, "").is_users or "RANK" in os.environ)
    hook = sys.excepthook
    is_usual = hook is sys.__excepthook__ or hook.__module__.startswith("ray.")  # Ray sets its own when it is imported
    if is_script and is_usual:
        sys.excepthook = _show


def refuse_import() -> None:
    """Refuse to train in a process that imports the script, as those of rewards do for a function defined there."""
    for frame, line in traceback.walk_stack(None):
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__mp_main__":
            raise ConfigError(
                f"the script must train only when it is started: got {frame.f_code.co_filename}:{line} in a process "
                'that imports it for a function. Put the script\'s last lines under `if __name__ == "__main__":`.'
            )


def show_refusal(error: Exception, *, name: str = "") -> None:
    """Print an error that ends a command."""
    print(f"{name or type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Excepthook that bypasses the one of torch.distributed, which would prefix each line with the rank."""
    whole = [line for text in traceback.format_exception(kind, error, trace) for line in text.splitlines()]
    shown = os.environ.get(TRACEBACK_VARIABLE)
    lines = whole if shown == "1" else brief(error) or whole
    if shown == "log":
        lines = [*(FOR_LOG + line for line in whole), *lines]
    elif lines is not whole:
        lines.append(f"({TRACEBACK_VARIABLE}=1 shows the whole traceback)")
    print("\n".join(lines), file=sys.__stderr__, flush=True)
    if (status := exit_status_of(error)) is not None:
        raise SystemExit(status)


def is_sentence(error: BaseException) -> bool:
    """Return whether the message is ours, so that a traceback would add nothing."""
    lines = lines_of_error(error)
    return isinstance(error, AReaLiteError) or (" must " in str(error) and bool(lines and lines[0].room))


def in_one_line(error: BaseException) -> str:
    """Return an error in one line: a sentence of ours as it is, any other with the user's line that it comes from."""
    if is_sentence(error):
        return str(error)
    place = users_line(lines_of_error(error))
    text = " ".join(f"{type(error).__name__}: {error}".split())[:_MAX_CHARS]
    return f"{text}, at {place}" if place and not isinstance(error, SyntaxError) else text


def brief(error: BaseException) -> list[str]:
    """Return an error in few lines; none for one in which there is no line of the user's."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    notes = [line for source in (error, error.__cause__) for line in _notes(source)][:_MAX_LINES]
    if is_sentence(error):
        return [f"{type(error).__name__}: {error}", *notes]
    users = users_code(error)
    if not users:
        return []
    message = "".join(traceback.format_exception_only(error)).splitlines()
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    after = [] if before is None else traceback.format_exception_only(before)[-1].splitlines()[:1]
    is_memory = isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
    return [
        *message[: len(message) - len(_notes(error))][:_MAX_LINES],
        *notes,
        *users,
        *(f"  after {line}" for line in after),
        *([_LESS_MEMORY] if is_memory else []),
    ]


def users_code(error: BaseException) -> list[str]:
    """Return the innermost lines of the user's that an error has passed, with their places."""
    users = [line for line in lines_of_error(error) if line.is_users][:_MAX_LINES]
    return [f"  {line}: {linecache.getline(line.file, line.line).strip()}" for line in users]


def _notes(error: BaseException | None) -> list[str]:
    return [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
