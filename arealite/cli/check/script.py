"""Checks of the script: its declaration, the reward on the first rows, and the outputs."""

import ast
import asyncio
import builtins
import functools
import inspect
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.config.run import declared_check, last_name
from arealite.api.errors import ConfigError, RewardError, require
from arealite.api.run_folder import RunFolder
from arealite.api.script import line_of, running
from arealite.chat.template import prompt_tokens
from arealite.cli.check.findings import Findings
from arealite.reward.functions import check_signature, load_rewards
from arealite.reward.runner import RewardRunner
from arealite.trainer.stats_logger import check_packages
from arealite.workflow.rlvr import reward_columns


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
    rows: Sequence[dict[str, Any]],
    tokenizer: Any,
) -> None:
    """Call the reward functions that the config names, or the script's, on rows' own answers in their real workers."""
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
    for found in (one for one in given if isinstance(one, ast.Lambda)):
        place = f"{script.name}:{found.lineno}"
        problem = f"a reward function must be importable, as it runs in another process: got a lambda at {place}"
        return findings.add("problem", problem, "Define it by `def` at module level, or make it an `async def`.")
    if not rows or "messages" not in rows[0] or not given:
        return findings.add("ok", "not called: the script has a workflow or data of its own")
    with running(script):
        # Imported as the reward's process imports it: a script without a main guard runs, and is refused.
        main = ModuleType("__mp_main__")
        main.__dict__.update(runpy.run_path(str(script), run_name=main.__name__), __file__=str(script), __spec__=None)
        if "load_rewards" in names and (named := getattr(config, "reward", None)):
            functions: list[Any] = [*load_rewards(named)]
        else:
            functions = [getattr(main, one.id, None) for one in given if isinstance(one, ast.Name)]
        calls_of_rows = [_call(row, tokenizer) for row in rows]
        options = {} if config.rollout is None else {"timeout": config.rollout.reward_timeout}
        with mock.patch.dict(sys.modules, __main__=main, __mp_main__=main):  # so that workers find it
            for function in dict.fromkeys(filter(None, functions)):
                _try(findings, function, calls_of_rows, options)


def _call(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the keywords of a reward function for a row's own answer."""
    prompt_ids, answer = prompt_tokens(tokenizer, [row["messages"]])[0], str(row.get("answer", ""))
    return {
        **reward_columns(row),
        "prompt": tokenizer.decode(prompt_ids),
        "completions": answer,
        "prompt_ids": prompt_ids,
        "completion_ids": tokenizer(answer, add_special_tokens=False)["input_ids"],
    }


def _try(findings: Findings, function: Any, calls: Sequence[dict[str, Any]], options: dict[str, Any]) -> None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    name = f"reward function {function.__name__} at {line_of(code, None)}" if code else f"reward function {function}"
    check_signature(function)
    try:
        inspect.signature(function).bind(**calls[0])
    except TypeError as error:
        problem = f"{name} must take {', '.join(sorted(calls[0]))} as keywords: {error}"
        return findings.add("problem", problem, "Name those it needs, and add **kwargs for the others.")
    runner = RewardRunner(function, num_workers=len(calls), **options)
    try:
        results = asyncio.run(_results(runner, calls))
    finally:
        runner.close()
    for number, failure in enumerate(results, start=1):
        if not isinstance(failure, BaseException):
            continue
        if not isinstance(failure, RewardError):
            raise failure
        told = str(failure).partition("\n")[0].removeprefix(f"reward function {runner.name} ")
        name += f", called for row {number}" if number > 1 else ""
        if failure.kind == "exception":
            told += f"{', at ' if failure.place else ''}{failure.place}"
            kind = getattr(builtins, told.partition("got ")[2].partition(":")[0], None)
            is_bug = isinstance(kind, type) and not issubclass(kind, OSError)  # a service may start later
            return findings.add("problem" if is_bug else "warning", f"{name} {told}")
        return findings.add("problem", f"{name}{':' if failure.kind == 'contract' else ''} {told}")
    findings.add("ok", f"{name} gives the first rows' own answers {', '.join(f'{result:g}' for result in results)}")


async def _results(runner: RewardRunner, calls: Sequence[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(runner(**call) for call in calls), return_exceptions=True)
