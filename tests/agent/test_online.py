"""Sessions over HTTP, as clients see them and as the run accounts for them: real door, real executor."""

import asyncio
import random

import aiohttp
import pytest
import torch
from testing_proxy import ScriptedModel, until
from testing_workflows import IdleEngine

from arealite.agent.online import OnlineSessions
from arealite.api.cli_args import AgentConfig, GenerationHyperparameters, InferenceEngineConfig, OnlineConfig
from arealite.api.errors import ConfigError, ServerError
from arealite.api.run_folder import RunFolder
from arealite.rollout.account.audit import audit

ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


class Sampler(IdleEngine):
    """Samples with the weights that it has."""

    model: ScriptedModel

    async def agenerate(self, req):
        version = self.version
        response = await self.model.agenerate(req)
        response.output_versions = [version] * response.output_len
        return response


class Service:
    """A run that trains on sessions, and a client of it."""

    def __init__(self, tokenizer, folder, http, *, n=1, rollout=(), **online):
        torch.set_num_threads(1)
        names = {"fileroot": str(folder), "experiment_name": "e", "trial_name": "t"}
        defaults = {"consumer_batch_size": 2, "max_head_offpolicyness": 1, "max_concurrent_rollouts": 64}
        config = InferenceEngineConfig(**(defaults | names | dict(rollout)))
        self.folder, self.http = RunFolder(config).path, http
        self.engine = Sampler(config)
        self.engine.model = ScriptedModel(lambda prompt: "Hello!", tokenizer)
        gconfig = GenerationHyperparameters(n_samples=n, max_new_tokens=200)
        self.sessions = OnlineSessions(
            gconfig, tokenizer, self.folder, config=AgentConfig(online=OnlineConfig(**online))
        )
        self.executor = self.engine.executor
        self.batch: asyncio.Task | None = None

    async def start(self):
        """Ask for a batch, which opens the door."""
        self.batch = asyncio.create_task(asyncio.to_thread(self.executor.prepare_batch, self.sessions, self.sessions))
        await until(lambda: self.sessions._door is not None or self.batch.done())

    def train(self):
        self.engine.set_version(self.engine.version + 1)

    @property
    def secret(self):
        return (self.folder / ".secret").read_text().strip()

    def count(self, name):
        return self.sessions.metrics()[f"agent/sessions_{name}"]

    def ledger(self, name):
        return self.executor._ledger.counts[name]

    async def post(self, path, body=None, key=None):
        """Return status and body of a reply, with the secret as the key unless another is given."""
        headers = {"Authorization": f"Bearer {self.secret if key is None else key}"}
        async with self.http.post(f"{self.sessions.address}{path}", json=body, headers=headers) as reply:
            return reply.status, await reply.json() | {"retry_after": reply.headers.get("Retry-After")}

    async def open(self, task_id=None):
        status, session = await self.post("/sessions", {} if task_id is None else {"task_id": task_id})
        assert status == 201, session
        assert session["base_url"] == f"{self.sessions.address}/v1"
        return session

    async def end(self, session, reward=1.0):
        """Ask once, reward that, and end."""
        assert (await self.post("/v1/chat/completions", ASKED, session["api_key"]))[0] == 200
        assert (await self.post(f"/sessions/{session['id']}/reward", {"reward": reward}, session["api_key"]))[0] == 200
        return await self.post(f"/sessions/{session['id']}/end", None, session["api_key"])

    async def close(self):
        if not self.executor._is_closed:
            await asyncio.to_thread(self.executor.close)
        await asyncio.to_thread(self.sessions.close)
        if self.batch is not None:
            await asyncio.wait({self.batch})
            self.batch.exception()  # it may have waited for more


@pytest.fixture
async def serve(tokenizer, tmp_path):
    made = []
    async with aiohttp.ClientSession() as http:

        async def make(**options):
            made.append(Service(tokenizer, tmp_path, http, **options))
            return made[-1]

        yield make
        for service in made:
            await service.close()


async def test_a_flood_is_refused_at_the_door_and_the_bound_holds(serve) -> None:
    service = await serve()
    await service.start()
    replies = await asyncio.gather(*(service.post("/sessions") for _ in range(40)))
    taken = [body for status, body in replies if status == 201]
    assert len(taken) == 4, "two batches of two: version 0 may be one version old"
    assert {(status, body["retry_after"]) for status, body in replies if status != 201} == {(429, "5")}
    for session in taken:
        assert await service.end(session) == (200, {"turns": 1, "is_rewarded": True, "retry_after": None})
    rng = random.Random(1)

    async def visit():
        status, session = await service.post("/sessions")
        if status == 201:
            await asyncio.sleep(rng.random() / 20)
            await service.end(session)

    for version in range(6):
        batch = await service.batch
        versions = batch["versions"][batch["loss_mask"].bool()]
        assert len(batch) == 2 and version - 1 <= versions.min() and versions.max() <= version
        service.train()
        service.batch = asyncio.create_task(
            asyncio.to_thread(service.executor.prepare_batch, service.sessions, service.sessions)
        )
        while not service.batch.done():
            await asyncio.gather(*(visit() for _ in range(10)))
    assert service.count("opened") == service.count("ended") and service.count("refused") > 36
    await service.batch
    report = await asyncio.to_thread(audited, service)
    assert report.is_clean and report.lost == 0 and report.trained == 14


def audited(service):
    service.executor.store.flush()
    service.executor._ledger.flush()
    return audit(service.folder)


async def test_sessions_of_a_task_are_one_group(serve) -> None:
    service = await serve(n=3, rollout={"consumer_batch_size": 1})
    await service.start()
    first = [await service.open("a") for _ in range(3)]
    assert service.ledger("running") == 1
    await service.open("a")
    assert service.ledger("running") == 2, "the group was full"
    assert (await service.post("/sessions", {"task_id": "b"}))[0] == 429
    for reward, session in enumerate(first):
        await service.end(session, float(reward))
    batch = await service.batch
    assert batch["rewards"].tolist() == [0.0, 1.0, 2.0] and batch["group_index"].tolist() == [0, 0, 0]
    assert batch["sample_index"].tolist() == [0, 1, 2] and batch["agent/turns"].tolist() == [1.0] * 3


async def test_who_is_idle_is_dropped_and_the_others_are_trained_on(serve) -> None:
    service = await serve(n=2, idle_s=3.0, rollout={"consumer_batch_size": 1})
    await service.start()
    idle, busy = [await service.open("a") for _ in range(2)]
    await service.end(busy)
    batch = await service.batch
    assert batch["rewards"].tolist() == [1.0] and service.count("dropped") == 1
    status, body = await service.post(f"/sessions/{idle['id']}/end")
    assert status == 409 and "dropped" in body["error"]["message"]
    assert (await service.post("/v1/chat/completions", ASKED, idle["api_key"]))[0] == 401


async def test_who_waits_for_an_answer_is_not_idle(serve) -> None:
    service = await serve(idle_s=1.0, rollout={"consumer_batch_size": 1})
    await service.start()
    session = await service.open()
    service.engine.model.may_answer = asyncio.Event()
    answer = asyncio.create_task(service.post("/v1/chat/completions", ASKED, session["api_key"]))
    await until(lambda: service.engine.model.num_running == 1)
    await asyncio.sleep(2.5)
    assert service.count("open") == 1
    service.executor.loop.call_soon(service.engine.model.may_answer.set)
    assert (await answer)[0] == 200


async def test_a_group_whose_time_is_up(serve) -> None:
    """What has ended is trained on; without any reward the group is rejected, which ends no run."""
    service = await serve(n=3, deadline_s=2.0, rollout={"consumer_batch_size": 1, "max_rejected_in_a_row": 1})
    await service.start()
    for _ in range(3):
        await service.open("a")
        await until(lambda: service.ledger("running") == 0)
    assert service.ledger("rejected_abandoned") == 3 and service.count("dropped") == 3
    await service.end(await service.open("b"), 0.5)
    assert (await service.batch)["rewards"].tolist() == [0.5]


async def test_overdue_sessions_end_with_their_episode(serve) -> None:
    service = await serve(rollout={"overdue": "drop", "consumer_batch_size": 1})
    await service.start()
    old = await service.open()
    service.train()
    service.train()
    await until(lambda: service.count("dropped") == 1)
    assert service.ledger("rejected_overdue") == 1
    assert (await service.post(f"/sessions/{old['id']}/end"))[0] == 409


async def test_who_may_do_what(serve) -> None:
    service = await serve()
    await service.start()
    for key in ("", "another", "x" * 64):
        status, body = await service.post("/sessions", {}, key)
        assert status == 401 and "must show the secret of the run" in body["error"]["message"]
    for wrong in ({"task_id": 7}, {"task_id": ""}, ["a"]):
        status, body = await service.post("/sessions", wrong)
        assert status == 400 and " must be a " in body["error"]["message"]
    one, other = await service.open(), await service.open()
    for verb in ("reward", "end"):
        path = f"/sessions/{one['id']}/{verb}"
        assert (await service.post(path, {"reward": 1.0}, other["api_key"]))[0] == 401
        assert (await service.post(f"/sessions/unknown/{verb}", {"reward": 1.0}))[0] == 404
        assert (await service.post(f"/sessions/unknown/{verb}", {"reward": 1.0}, one["api_key"]))[0] == 401
    assert service.count("open") == 2


async def test_one_reward_and_one_end(serve) -> None:
    service = await serve(rollout={"consumer_batch_size": 1})
    await service.start()
    session = await service.open()
    path, key = f"/sessions/{session['id']}", session["api_key"]
    _, answer = await service.post("/v1/chat/completions", ASKED, key)
    for wrong in ("good", {"another": 1.0}, [1.0]):
        assert (await service.post(f"{path}/reward", {"reward": wrong}, key))[0] == 400
    status, body = await service.post(f"{path}/reward", {}, key)
    assert status == 400 and 'the body must be {"reward": ...}' in body["error"]["message"]
    reward = {"reward": {answer["id"]: 0.25}}
    assert [(await service.post(f"{path}/reward", reward, key))[0] for _ in range(2)] == [200, 200]
    assert (await service.post(f"{path}/reward", {"reward": 1.0}, key))[0] == 409
    assert [(await service.post(f"{path}/end", None, key))[0] for _ in range(2)] == [200, 200]
    assert (await service.post(f"{path}/reward", reward, key))[0] == 409
    assert (await service.batch)["rewards"].tolist() == [0.25] and service.count("ended") == 1


async def test_sessions_without_reward_or_turns_are_not_trained_on(serve) -> None:
    service = await serve(n=3, rollout={"consumer_batch_size": 1})
    await service.start()
    silent, rejected, good = [await service.open("a") for _ in range(3)]
    await service.post(f"/sessions/{silent['id']}/reward", {"reward": 1.0})
    assert (await service.post(f"/sessions/{silent['id']}/end"))[1]["turns"] == 0
    assert not (await service.end(rejected, None))[1]["is_rewarded"]
    await service.end(good, 0.5)
    assert (await service.batch)["rewards"].tolist() == [0.5]


async def test_the_failure_of_a_server_is_counted_and_asks_nobody_again(serve) -> None:
    service = await serve(rollout={"episode_retries": 3})
    await service.start()
    session = await service.open()
    service.engine.model.errors = [ServerError("no server is left")]
    status, _ = await service.post("/v1/chat/completions", ASKED, session["api_key"])
    assert status in (400, 409), "the run may end before the answer is written"
    await until(lambda: service.count("dropped") == 1)
    assert (await service.post(f"/sessions/{session['id']}/end"))[0] == 409
    await until(lambda: service.ledger("failed_server_error") == 1)
    assert service.ledger("running") == 0 and not service.ledger("retried_server_error")


async def test_no_session_begins_while_the_run_is_paused(serve) -> None:
    service = await serve()
    await service.start()
    await asyncio.to_thread(service.executor.pause)
    assert (await service.post("/sessions"))[0] == 429
    await asyncio.to_thread(service.executor.resume)
    await service.open()


async def test_after_a_restart_open_sessions_are_gone(serve) -> None:
    service = await serve(rollout={"consumer_batch_size": 1, "max_head_offpolicyness": 3})
    await service.start()
    await service.end(await service.open())
    await service.batch
    service.train()
    lost = await service.open()
    await service.end(await service.open())
    await until(lambda: service.ledger("accepted") == 1)
    state = await asyncio.to_thread(service.executor.state_dict)
    await service.end(await service.open())  # which no checkpoint knows
    await service.close()

    again = await serve(rollout={"consumer_batch_size": 1})
    again.executor.load_state_dict(state)
    again.train()
    await again.start()
    await until(lambda: again.ledger("rejected_gone") == 2)
    assert (await again.post(f"/sessions/{lost['id']}/end"))[0] == 404
    await again.end(await again.open())
    assert len(await again.batch) == 1
    report = await asyncio.to_thread(audited, again)
    assert report.is_clean and report.lost == 0 and (report.issued, report.trained, report.rejected) == (4, 2, 2)


async def test_a_deadline_beyond_that_of_episodes(serve) -> None:
    service = await serve(deadline_s=100.0, rollout={"episode_timeout": 50.0})
    await service.start()
    with pytest.raises(ConfigError, match=r"agent.online.deadline_s must be less than rollout.episode_timeout = 50"):
        await service.batch
