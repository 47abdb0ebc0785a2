"""Runs episodes of an environment of verifiers, in the interpreter that has it: this file imports nothing of ours.

    python verifiers_program.py '{"taskset": {"id": "my_env"}, ...}' FOLDER NUMBER

FOLDER goes on the path for modules, and NUMBER is the most tasks to read. The first line on stdout is a JSON list of
the tasks' prompts. Then each line on stdin asks for an episode, `{"run", "task", "base_url", "key"}`, or for the end of
one, `{"cancel": run}`, and each line on stdout is the end of one, `{"run", "reward", "error"}`.
What the environment prints goes to stderr. It ends when stdin does.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

MODEL = "policy"


async def serve(env: Any, tasks: list[Any], answer: Callable[[Any], None]) -> None:
    """Run what is asked for until stdin ends, then cancel what is left."""
    import verifiers.v1 as vf

    loop = asyncio.get_running_loop()
    running: dict[int, asyncio.Task[None]] = {}
    variables: dict[str, str] = {}  # by key: clients are kept by the name of the variable that holds theirs
    reader = asyncio.StreamReader(limit=2**26)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def run(asked: dict[str, Any]) -> None:
        variable = variables.setdefault(asked["key"], f"AREALITE_KEY_{len(variables)}")
        os.environ[variable] = asked["key"]
        client = vf.EvalClientConfig(base_url=asked["base_url"], api_key_var=variable)
        context = vf.ModelContext(client=client, model=MODEL, sampling=vf.SamplingConfig())
        (slot,) = env.slots(tasks[asked["task"]], 1)
        try:
            answer({"run": asked["run"], **judged(await env.run_slot(slot, context))})
        except BaseException as error:  # also of a cancelled one
            answer({"run": asked["run"], "error": f"{type(error).__name__}: {error}"})
        finally:
            running.pop(asked["run"], None)

    async with env.serving():
        while line := await reader.readline():
            asked = json.loads(line)
            if "cancel" not in asked:
                running[asked["run"]] = asyncio.create_task(run(asked))
            elif (task := running.get(asked["cancel"])) is not None:
                task.cancel()
            else:  # it has just ended
                answer({"run": asked["cancel"], "error": "cancelled"})
        left = [*running.values()]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def config_of(given: dict[str, Any]) -> Any:
    """Return the config of an environment. Agents run on this node, where verifiers would rent a sandbox, and chat with
    the task's tools, where it would give them a shell."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import default_harness_id, resolve_env_config

    for seat in agent_config_fields(resolve_env_config(given)):
        own = given.setdefault(seat, {})
        own.setdefault("runtime", {"type": "subprocess"})
        if default_harness_id(given["taskset"]["id"]) == "bash":
            own.setdefault("harness", {"id": "null"})
    return resolve_env_config(given)


def judged(episode: Any) -> dict[str, Any]:
    """Return the reward of an episode, the mean over the trained agents, or why it failed."""
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors[-1:] if not trace.ok)]
    if not episode.ok or not trained:
        last = errors[-1] if errors else None
        return {"error": "no trained agent ran" if last is None else f"{last.type}: {last.message}"}
    shared = [one.agent.name for one in episode.traces if not one.agent.trainable and one.agent.config.model == MODEL]
    if shared:
        return {"error": f"{shared[0]} is not trained and must have a model and client of its own"}
    return {"reward": sum(trace.reward for trace in trained) / len(trained), "error": None}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    config, folder, number = json.loads(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    sys.path[0] = folder  # not that of this file
    from verifiers.v1.utils.loaders import load_environment

    env = load_environment(config_of(config))
    tasks = list(islice(iter(env.taskset), number))

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")

    answer([task.data.prompt_text for task in tasks])
    asyncio.run(serve(env, tasks, answer))


if __name__ == "__main__":
    main()
