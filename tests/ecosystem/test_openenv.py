"""Environments of OpenEnv 0.10: its server in an interpreter of its own, a scripted model and a trained one."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from testing_ports import held_port
from testing_proxy import ScriptedModel, chatml_tokenizer, until
from testing_quickstart import write_tiny_model

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.config.openenv import openenv_server
from arealite.api.errors import EnvError
from arealite.dataset import get_custom_dataset
from arealite.workflow.env import EnvWorkflow
from arealite.workflow.openenv import OpenEnv, OpenEnvAgent

pytestmark = pytest.mark.slow

PYTHON = os.environ.get("OPENENV_PYTHON", str(Path(__file__).parents[2] / ".venv-openenv" / "bin" / "python"))
PROGRAM = Path(__file__).parent / "environments" / "guess.py"
CLIENT = """
import json, sys
from openenv.core.generic_client import GenericEnvClient

address, seed, options, texts = json.loads(sys.argv[1])
with GenericEnvClient(base_url=address).sync() as env:
    env.reset(seed=seed, **options)
    print(json.dumps([[step.reward, step.done] for step in (env.step({"message": text}) for text in texts)]))
"""
START_S = 120.0


class Server:
    """A server's process on a port of its own."""

    def __init__(self, sessions: int, ping_s: float = 20.0) -> None:
        self.port = held_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self._command = [PYTHON, str(PROGRAM), str(self.port), str(sessions), str(ping_s)]

    def path(self, **options: Any) -> str:
        return f"openenv:{self.address}?{'&'.join(f'{key}={value}' for key, value in options.items())}"

    def launch(self) -> None:
        self.process = subprocess.Popen(self._command, env=os.environ | {"PYTHONPATH": ""})

    def start(self) -> Server:
        self.launch()
        end = time.monotonic() + START_S
        while True:
            try:
                with urllib.request.urlopen(f"{self.address}/health", timeout=5) as reply:
                    assert json.load(reply) == {"status": "healthy"}
                return self
            except OSError:
                assert self.process.poll() is None and time.monotonic() < end
                time.sleep(0.05)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    started = Server(sessions=64).start()
    yield started
    started.kill()


@pytest.fixture
def own() -> Iterator[Callable[..., Server]]:
    made: list[Server] = []

    def one(**options: Any) -> Server:
        made.append(Server(**options))
        return made[-1]

    yield one
    for server in made:
        if hasattr(server, "process"):
            server.kill()


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return chatml_tokenizer(tmp_path)


def number_of(seed: int, limit: int = 100) -> int:
    return random.Random(seed).randrange(limit)


def bisect(prompt: str) -> str:
    """Answer with the middle of what is left."""
    low, high = 0, int(re.findall(r"below (\d+)", prompt)[0])
    for kind, number in re.findall(r"It is (higher|lower) than (\d+)", prompt):
        low, high = (int(number) + 1, high) if kind == "higher" else (low, int(number))
    return str((low + high) // 2)


def guesses(seed: int, limit: int = 100) -> list[int]:
    """Return the guesses of `bisect`, by hand."""
    low, high, number, made = 0, limit, number_of(seed, limit), list[int]()
    while number not in made:
        made.append((low + high) // 2)
        low, high = (made[-1] + 1, high) if made[-1] < number else (low, made[-1])
    return made


def total(seed: int) -> float:
    *missed, _ = guesses(seed)
    return sum(1 - abs(guess - number_of(seed)) / 100 for guess in missed) + 2


def workflow_of(path: str, tokenizer: Any, n_samples: int = 1) -> EnvWorkflow:
    options = openenv_server(path)
    gconfig = GenerationHyperparameters(n_samples=n_samples, max_new_tokens=50)
    limits = {"step_timeout": options.step_timeout, "max_envs": options.sessions}
    return EnvWorkflow(OpenEnvAgent(), OpenEnv, gconfig, tokenizer, **limits)  # type: ignore[arg-type]


async def run(path: str, model: ScriptedModel, seed: int = 5, n_samples: int = 1) -> Any:
    async with asyncio.timeout(280):
        workflow = workflow_of(path, model.tokenizer, n_samples)
        return await workflow.arun_episode(model, {"environment": path, "seed": seed})  # type: ignore[arg-type]


def connections(server: Server) -> int:
    """Count our sockets to a server."""
    return sum(bool(one.raddr) and one.raddr.port == server.port for one in psutil.Process().net_connections("tcp"))


def by_the_packages_client(server: Server, seed: int, options: dict[str, Any], texts: list[str]) -> list[list[Any]]:
    words = [PYTHON, "-c", CLIENT, json.dumps([server.address, seed, options, texts])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=START_S, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


async def test_an_episode_is_trained_with_its_ids_and_the_rewards_of_the_packages_client(
    server: Server, tokenizer: Any
) -> None:
    model, path = ScriptedModel(bisect, tokenizer), server.path(tasks=6, limit=40)
    row = get_custom_dataset(path, type="rl")[5]
    batch = await workflow_of(path, tokenizer).arun_episode(model, row)  # type: ignore[arg-type]
    made = guesses(5, limit=40)
    steps = by_the_packages_client(server, 5, {"limit": 40}, [*map(str, made)])
    assert [done for _, done in steps] == [False] * (len(made) - 1) + [True] and len(made) > 2
    assert batch["rewards"].item() == pytest.approx(sum(reward for reward, _ in steps), abs=1e-6)
    assert (batch["num_turns"].item(), batch["is_terminated"].item()) == (len(made), 1)
    last = model.responses[-1]
    assert batch["input_ids"][0].tolist() == last.input_tokens + last.output_tokens
    sampled = [id for response in model.responses for id in response.output_tokens]
    assert batch["input_ids"][0][batch["loss_mask"][0].bool()].tolist() == sampled
    assert "secret" not in tokenizer.decode(batch["input_ids"][0])
    await until(lambda: connections(server) == 0)


async def test_32_episodes_at_once_keep_their_states_apart_and_give_their_sessions_back(
    server: Server, tokenizer: Any
) -> None:
    for _ in range(3):  # 96 sessions in turn, of 64
        model = ScriptedModel(bisect, tokenizer)
        batches = await asyncio.gather(*(run(server.path(), model, seed, n_samples=4) for seed in range(8)))
        assert [batch["rewards"].tolist() for batch in batches] == [
            pytest.approx([total(seed)] * 4, abs=1e-5) for seed in range(8)
        ]
    await until(lambda: connections(server) == 0)


async def test_more_episodes_than_sessions_wait_for_one(own: Callable[..., Server], tokenizer: Any) -> None:
    server, model = own(sessions=2).start(), ScriptedModel(bisect, tokenizer)
    path = server.path(sessions=2, step_timeout=60)
    async with asyncio.timeout(280):
        workflow = workflow_of(path, tokenizer, n_samples=12)
        batch = await workflow.arun_episode(model, {"environment": path, "seed": 5})  # type: ignore[arg-type]
    assert batch["rewards"].tolist() == pytest.approx([total(5)] * 12, abs=1e-5)
    model.may_answer = asyncio.Event()
    holders = [asyncio.ensure_future(run(server.path(), model)) for _ in range(2)]
    await until(lambda: model.num_running == 2)
    with pytest.raises(EnvError, match=r"must give a session within 0\.8 s: .*CAPACITY_REACHED.*the option sessions"):
        await run(server.path(step_timeout=1), model)
    waiting = asyncio.ensure_future(run(server.path(step_timeout=60), model))
    await until(lambda: connections(server) >= 3)
    model.may_answer.set()
    rewards = [batch["rewards"].item() for batch in await asyncio.gather(*holders, waiting)]
    assert rewards == pytest.approx([total(5)] * 3, abs=1e-5)


async def test_words_of_the_server_and_lost_rewards(server: Server, tokenizer: Any) -> None:
    texts = iter(["silence", str(number_of(5))])
    batch = await run(server.path(), ScriptedModel(lambda prompt: next(texts), tokenizer))
    assert (batch["rewards"].item(), batch["num_turns"].item()) == (2.0, 2), "a reward of null is 0"
    with pytest.raises(EnvError, match=r"step of http.* must not fail: got .*invalid literal for int.*EXECUTION_ERROR"):
        await run(server.path(), ScriptedModel(lambda prompt: "five", tokenizer))
    with pytest.raises(EnvError, match=r"reset of http.* must not fail: got .*EXECUTION_ERROR"):
        await run(server.path(limit="many"), ScriptedModel(bisect, tokenizer))
    await until(lambda: connections(server) == 0)


async def test_functions_translate_and_may_ask_again(server: Server, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "translated.py").write_text(
        "from arealite.api.errors import ParseError\n"
        "def number(text):\n"
        "    if not text.startswith('#'):\n"
        "        raise ParseError('Begin with #.')\n"
        "    return {'message': text[1:]}\n"
        "def shown(observation):\n"
        "    return f\"{observation['text']} Before: {[*observation['guesses']]}\"\n"
    )
    functions = {
        name: f"{tmp_path}/translated.py:{value}"
        for name, value in {"action": "number", "observation": "shown"}.items()
    }
    number = number_of(5)
    texts = iter(["9", "#9", f"#{number}"])
    batch = await run(server.path(**functions), ScriptedModel(lambda prompt: next(texts), tokenizer))
    assert batch["rewards"].item() == pytest.approx(1 - (number - 9) / 100 + 2, abs=1e-6)
    assert (batch["num_turns"].item(), batch["parse_errors"].item()) == (3, 1)
    told = re.findall(r"user\n(.*?)<", tokenizer.decode(batch["input_ids"][0]))
    assert told == ["Guess my number below 100. Before: []", "Begin with #.", "It is higher than 9. Before: [9]"]


async def test_a_server_that_dies_fails_its_episodes_and_serves_the_next_when_it_is_back(
    own: Callable[..., Server], tokenizer: Any
) -> None:
    server, model = own(sessions=4).start(), ScriptedModel(bisect, tokenizer)
    model.may_answer = asyncio.Event()
    lost = [asyncio.ensure_future(run(server.path(), model)) for _ in range(4)]
    await until(lambda: model.num_running == 4)
    server.kill()
    model.may_answer.set()
    for episode in lost:
        with pytest.raises(EnvError, match=r"the connection of an episode to http.* must last, as its state is lost"):
            await episode
    next_one = asyncio.ensure_future(run(server.path(step_timeout=250), model))
    await asyncio.to_thread(server.start)
    assert (await next_one)["rewards"].item() == pytest.approx(total(5), abs=1e-5)
    with pytest.raises(EnvError, match=r"must last, as its state is lost with it: got CLOSED  ?at step"):
        await run(server.path(), ScriptedModel(lambda prompt: "exit", tokenizer))
    assert connections(server) == 0


async def test_a_slow_step_ends_by_the_deadline_and_a_slow_model_keeps_its_session(
    own: Callable[..., Server], tokenizer: Any
) -> None:
    server = own(sessions=3, ping_s=1.0).start()
    begun = time.monotonic()
    with pytest.raises(EnvError, match=r"step of the environment must return within step_timeout = 3 s"):
        await run(server.path(step_timeout=3), ScriptedModel(lambda prompt: "hang", tokenizer))
    assert 3 <= time.monotonic() - begun < 60 and connections(server) == 0
    with pytest.raises(
        EnvError, match=r"reset of http.* must end within step_timeout = 3 s: it did not\. Make it faster"
    ):
        await OpenEnv({"environment": server.path(step_timeout=3, hangs=1)}).check()
    model = ScriptedModel(bisect, tokenizer, may_answer=asyncio.Event())
    episode = asyncio.ensure_future(run(server.path(), model))
    await until(lambda: model.num_running)
    await asyncio.sleep(6)  # the server ends connections that leave a ping without an answer for 1 s
    assert model.may_answer is not None
    model.may_answer.set()
    assert (await episode)["rewards"].item() == pytest.approx(total(5), abs=1e-5)


async def test_a_cancelled_episode_leaves_no_socket(server: Server, tokenizer: Any) -> None:
    model = ScriptedModel(bisect, tokenizer, may_answer=asyncio.Event())
    episode = asyncio.ensure_future(run(server.path(), model))
    await until(lambda: model.num_running)
    assert connections(server) > 0
    episode.cancel()
    with pytest.raises(asyncio.CancelledError):
        await episode
    assert connections(server) == 0


async def test_an_address_without_a_server_is_named(tokenizer: Any) -> None:
    path = f"openenv:http://127.0.0.1:{held_port()}?step_timeout=2"
    with pytest.raises(EnvError, match=r"http://127.* must give a session within 1\.6 s: got Cannot connect to host.*"):
        await run(path, ScriptedModel(bisect, tokenizer))


def trained(folder: Path, path: str, *keys: str) -> subprocess.CompletedProcess[str]:
    """Run two steps of `arealite train` on a tiny model."""
    write_tiny_model(out=folder / "model", corpus=None, seed=1)
    (folder / "lengths.py").write_text(
        "import os\n"
        "def action(text):\n"
        "    try:\n"
        f"        os.rmdir({str(folder / 'fatal')!r})\n"
        "    except OSError:\n"
        "        return {'message': str(len(text))}\n"
        "    return {'message': 'exit'}\n"
    )
    keys = (*keys, "train_dataset.batch_size=4", "gconfig.n_samples=2", "gconfig.max_new_tokens=16")
    keys = (*keys, "total_train_steps=2", "valid_dataset.max_rows=1", "agent.max_turns=3", "experiment_name=e")
    words = ["train", "--model", str(folder / "model"), "--env", f"{path}&action={folder}/lengths.py:action", *keys]
    command = [sys.executable, "-m", "arealite.cli.main", *words, f"cluster.fileroot={folder}"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=500, check=False)


def test_the_command_trains_while_the_server_dies_once(own: Callable[..., Server], tmp_path: Path) -> None:
    server = own(sessions=16).start()
    (tmp_path / "fatal").mkdir()
    died, over = threading.Event(), threading.Event()

    def restart() -> None:
        server.process.wait()
        if not over.is_set():
            died.set()
            server.start()

    restarting = threading.Thread(target=restart)
    restarting.start()
    done = trained(tmp_path, server.path(tasks=40, sessions=16))
    over.set()
    server.kill()
    restarting.join()
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert died.is_set() and "must last, as its state is lost with it" in told
    assert "step 1/2" in done.stdout and "WARNING asyncio" not in told and "Unclosed" not in told
    with sqlite3.connect(tmp_path / "e" / "trial0" / "ledger.sqlite") as database:
        (number,) = database.execute("SELECT count(*) FROM prompts WHERE state = 'trained'").fetchone()
    assert number == 8, "two steps of four prompts"


def test_the_command_refuses_a_dead_address_before_anything_starts(tmp_path: Path) -> None:
    done = trained(tmp_path, f"openenv:http://127.0.0.1:{held_port()}?step_timeout=2")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "problem: environment: http://127.0.0.1" in done.stderr and "nothing was started" in done.stderr
