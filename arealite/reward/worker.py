"""The process in which a plain reward function runs: one function, one call at a time, over one socket.

A call is a pickle in a pickle, a reply a line of JSON: number of the call, kind and value. What the function prints
goes to stderr, Ctrl-C is left to the parent. It ends when the socket closes or, stuck in a call, is killed by the
kernel when its parent dies. Started by `runner.WorkerProcess`.
"""

import itertools
import json
import math
import multiprocessing.spawn
import os
import pickle
import signal
import sys
import traceback
from typing import Any

from arealite.api.source_lines import lines_of_error, users_line
from arealite.utils import heartbeat
from arealite.utils.processes import die_with_parent

Reply = tuple[str, Any]  # `("ok", number)`, or the kind of a RewardError and an explanation
_MAX_EXPLANATION = 20_000  # characters


def main() -> None:
    """Serve calls until the parent closes the socket. Arguments: file descriptor of the socket, parent's pid."""
    descriptor, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heartbeat.answer_stack_requests("reward-worker")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    with os.fdopen(descriptor, "rb") as calls, os.fdopen(os.dup(descriptor), "wb") as replies:

        def reply(number: int, kind: str, value: Any) -> None:
            try:
                replies.write(json.dumps([number, kind, value]).encode() + b"\n")
                replies.flush()
            except OSError:
                os._exit(1)  # the function closed the socket, and its threads would hold up an orderly end

        try:
            preparation, pickled_function = pickle.load(calls)
            multiprocessing.spawn.prepare(preparation)
            reward_fn = pickle.loads(pickled_function)
        except BaseException as error:
            reply(0, "exception", explained(error))
            return
        reply(0, "ready", "")
        for number in itertools.count(1):
            try:
                call = pickle.load(calls)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                return  # the parent has ended, perhaps with a reply unread or half a call sent
            reply(number, *_answer(reward_fn, call))


def _answer(reward_fn: Any, call: bytes) -> Reply:
    try:
        return checked(reward_fn(**pickle.loads(call)))
    except BaseException as error:
        return "exception", explained(error)


def explained(error: BaseException) -> str:
    """Return the user's line that raised, on a line of its own, and the traceback below our first frame."""
    below = error.__traceback__.tb_next if error.__traceback__ else None
    text, half = "".join(traceback.format_exception(type(error), error, below)), _MAX_EXPLANATION // 2
    text = text if len(text) <= 2 * half else f"{text[:half]}\n...\n{text[-half:]}"
    return f"{users_line(lines_of_error(error)) or ''}\n{text}"


def checked(value: Any) -> Reply:
    """Accept a finite real number (also of numpy or a tensor with one element)."""
    if not hasattr(type(value), "__float__"):
        is_list = isinstance(value, list | tuple)
        advice = "Score one completion, not a list as in TRL" if is_list else "Return a float"
        return "contract", f"reward must be a number: got {value!r:.200}. {advice}."
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        return "contract", f"reward must be one number: got {value!r:.200} ({error}). Return a float."
    if not math.isfinite(number):
        return "contract", f"reward must be finite: got {number}. Return a finite float."
    return "ok", number
