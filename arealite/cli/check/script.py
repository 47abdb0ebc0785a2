"""Checks of the script: its declaration, the reward on the first row, and the outputs."""

import ast
import asyncio
import functools
import inspect
import os
import runpy
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.run import declared_check, last_name
from arealite.api.errors import ConfigError, require
from arealite.api.run_folder import RunFolder
from arealite.api.script import line_of, lines_of_error, running, users_line
from arealite.chat.template import prompt_tokens
from arealite.cli.check.findings import Findings
from arealite.reward.functions import check_signature, load_rewards
from arealite.reward.runner import checked
from arealite.trainer.stats_logger import check_packages
from arealite.workflow.rlvr import reward_columns

_CALL_S = 10.0  # for one call of a reward function


def check_declared(findings: Findings, argv: Sequence[str], script: Path) -> object:
    """Call the function that the script declares by `launched(..., check=NAME)`, and return its value."""
    if (check := declared_check(script)) is None:
        return None
    with running(script):
        first, *rest = check.split(".")
        top_level = runpy.run_path(str(script), run_name="__mp_main__")
        function = functools.reduce(lambda value, name: getattr(value, name, None), rest, top_level.get(first))
        if not callable(function):
            change = "Define it at module level, as launchers and `arealite check` call it in processes of their own."
            raise ConfigError(f"check of launched must be a function of the script: got {check} in {script}. {change}")
        declared: object = function(list(argv))
    findings.add("ok", "what the script declares fits the config")
    return declared


def check_outputs(findings: Findings, config: Config) -> None:
    """Check that the run folder is writable and the packages of the loggers are installed."""
    folder = RunFolder(config).path.absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    require(
        there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        f"cluster.fileroot must be a folder that can be written: got {config.cluster.fileroot}, where {there} is not. "
        "Correct it.",
    )
    check_packages(config.stats_logger)
    findings.add("ok", f"{folder} can be written")


def check_reward(
    findings: Findings,
    config: Config,
    script: Path,
    calls: Sequence[ast.Call],
    row: dict[str, Any] | None,
    tokenizer: Any,
) -> None:
    """Call the reward functions that the config names, or the one that the script does, with the first row's answer."""
    names = {last_name(call.func) for call in calls}
    # A name that the script assigns to a function stands for it.
    nodes = ast.walk(ast.parse(script.read_bytes()))
    assigned = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
    given = [
        assigned.get(ast.unparse(argument), argument)
        for call in calls
        if last_name(call.func) in ("RLVRWorkflow", "VisionRLVRWorkflow")
        for argument in [*call.args[:1], *(one.value for one in call.keywords if one.arg == "reward_fn")]
    ]
    if row is None or "messages" not in row or not given:
        return findings.add("ok", "not called: the script has a workflow or data of its own")
    with running(script):
        # Imported as the reward's process imports it: a script without a main guard runs, and is refused.
        top_level = runpy.run_path(str(script), run_name="__mp_main__")
        if "load_rewards" in names and (named := getattr(config, "reward", None)):
            functions = [*load_rewards(named)]
        else:
            functions = [top_level[one.id] for one in given if isinstance(one, ast.Name) and one.id in top_level]
        prompt_ids, answer = prompt_tokens(tokenizer, [row["messages"]])[0], str(row.get("answer", ""))
        call = {
            **reward_columns(row),
            "prompt": tokenizer.decode(prompt_ids),
            "completions": answer,
            "prompt_ids": prompt_ids,
            "completion_ids": tokenizer(answer, add_special_tokens=False)["input_ids"],
        }
        for function in dict.fromkeys(functions):
            _call(findings, function, call)


def _call(findings: Findings, function: Any, call: dict[str, Any]) -> None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = f"reward function {function.__name__} at {line_of(code, None)}" if code else f"reward function {function}"
    check_signature(function)
    try:
        inspect.signature(function).bind(**call)
    except TypeError as error:
        problem = f"{name} must take {', '.join(sorted(call))} as keywords: {error}"
        return findings.add("problem", problem, "Name those it needs, and add **kwargs for the others.")
    signal.signal(signal.SIGALRM, _raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, _CALL_S)
    try:
        value = function(**call)
        kind, result = checked(asyncio.run(_awaited(value)) if inspect.isawaitable(value) else value)
    except Exception as error:
        # A service that the reward calls may start later.
        is_bug = type(error).__module__ == "builtins" and not isinstance(error, OSError)
        place = users_line(lines_of_error(error))
        problem = f"{name} must not raise: got {type(error).__name__}: {error}{', at ' if place else ''}{place or ''}"
        return findings.add("problem" if is_bug else "warning", problem)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if kind != "ok":
        return findings.add("problem", f"{name}: {result}")
    findings.add("ok", f"{name} gives the first row's own answer {result:g}")


async def _awaited(value: Any) -> Any:
    return await value


def _raise_timeout(number: int, frame: object) -> None:
    raise TimeoutError(f"no result within {_CALL_S:g} s")
