"""Workflows and rewards that do everything wrong, through the real executor and the real reward runner.

Invariants: every failure is counted by its kind, and issued = trained + rejected + failed + pending; a reward function
that fails never becomes a number, and an honest one gets its own number back right after it; this process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from testing_workflows import IdleEngine, waiting_trajectory

from arealite.api.cli_args import InferenceEngineConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RewardError
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset.loader import PromptLoader
from arealite.reward.runner import RewardRunner
from arealite.rollout.account.audit import audit
from hostile.common import DEADLINE_S, Report, Usage, judge_account, settled
from hostile.rewards import RAISED, REWARDS, areward, reward

_EPISODE_S = 5.0
_REWARD_S = 5.0
_BATCH = 8
_CLOSE_S = 60.0

RETURNED: tuple[Callable[[], Any], ...] = (
    *(dict, list, object, ValueError, lambda: 5, lambda: "x", lambda: True, lambda: float("nan"), lambda: print),
    *(lambda: torch.ones(3), lambda: TensorDict({}, []), lambda: TensorDict({"x": torch.ones(2)}, [2])),
    *(lambda: {"input_ids": torch.ones(1, 2)}, lambda: [waiting_trajectory(0, 0)], lambda: (number for number in [1])),
    *(lambda: _changed(rewards=torch.tensor([float("nan")])), lambda: _changed(logprobs=torch.full((1, 3), -1e999))),
    *(lambda: _changed(input_ids=torch.tensor([[-1, 5, 5]])), lambda: _changed(input_ids=torch.rand(1, 3))),
    *(lambda: _changed(versions=torch.full((1, 3), 999)), lambda: _changed(loss_mask=torch.full((1, 3), 2))),
    *(lambda: _changed(logprobs=torch.full((1, 3), 5.0)), lambda: _changed(rewards=torch.ones(1, dtype=torch.cfloat))),
    *(lambda: _changed(loss_mask=torch.ones(2, 3)), lambda: _changed(more=torch.ones(7)), lambda: _changed(rewards=5)),
)  # fmt: skip


def _changed(**keys: Any) -> TensorDict:
    """Return a trajectory that is right but for some keys."""
    tensors = dict(waiting_trajectory(5, 0).items()) | keys
    return TensorDict({key: value for key, value in tensors.items() if value is not None}, [])


async def _swallow(seconds: float) -> None:
    """Ignore being cancelled, for a while."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.05)


async def _fork() -> None:
    if (child := os.fork()) == 0:
        os._exit(0)
    os.waitpid(child, 0)


async def _print() -> None:
    sys.stdout.buffer.write(b"\x1b]\xff\0" * 999)
    print("\x1b[2J\ud7ff" * 99, "Error: " * 999, file=sys.stderr)


async def _leak_thread() -> None:
    threading.Thread(target=threading.Event().wait, args=(3600.0,), daemon=True).start()


async def _change_process() -> None:
    asyncio.get_running_loop().set_exception_handler(None)
    sys.setrecursionlimit(10**6)
    asyncio.current_task().set_name("\ud800")  # type: ignore[union-attr]


DONE: tuple[Callable[[], Any], ...] = (_fork, _print, _leak_thread, _change_process, lambda: asyncio.sleep(0.1))
"""What comes before a good trajectory."""
ENDLESS: tuple[Callable[[], Any], ...] = (
    lambda: asyncio.get_running_loop().create_future(),
    lambda: asyncio.Event().wait(),
    lambda: _swallow(3 * _EPISODE_S),
    lambda: asyncio.to_thread(time.sleep, 3600.0),
)


class Hostile(RolloutWorkflow):
    """Does with each prompt what its number says; `expected` tells what must become of it."""

    def __init__(self, plan: list[tuple[str, Any]]) -> None:
        self.plan = plan
        self.num_sleepers = 0  # threads of the user, which nobody can end

    def expected(self, index: int) -> set[str]:
        return expected(*self.plan[index])

    def name_of(self, index: int) -> str:
        kind, act = self.plan[index]
        return f"{kind} {getattr(act, '__name__', act)}"

    async def arun_episode(self, engine: InferenceEngine, data: dict[str, Any]) -> Any:
        kind, act = self.plan[data["prompt_id"].index]
        if kind == "raise":
            raise act()
        if kind == "return":
            return act()
        if kind == "reject":
            return None
        if kind == "block":
            time.sleep(0.2)
        elif kind != "good":
            self.num_sleepers += act in (ENDLESS[-1], _leak_thread)  # a loaded machine begins more epochs of the plan
            await act()
        return waiting_trajectory(data["prompt_id"].index, engine.get_version())


def expected(kind: str, act: Any) -> set[str]:
    """Return the states that a prompt may end in."""
    if kind in ("good", "block", "do"):
        return {"trained", "accepted"}
    if kind == "reject":
        return {"rejected_workflow"}
    if kind == "return":
        return {"failed_trajectory"}
    if kind == "hang":
        return {"failed_timeout"} | ({"trained", "accepted"} if act is ENDLESS[2] else set())  # it ends after all
    if act is RAISED[-1]:
        return {"failed_reward_exception"}
    return {"failed_environment"} if act is RAISED[-2] else {"failed_workflow"}


def attack(report: Report, folder: Path, rng: random.Random, *, short: bool) -> None:
    """Run hostile workflows, then those that end everything, then hostile rewards."""
    torch.set_num_threads(1)
    before = Usage.of(os.getpid())
    plan = [("raise", act) for act in RAISED] + [("return", act) for act in RETURNED]
    plan += [("hang", act) for act in ENDLESS] + [("do", act) for act in DONE] + [("block", None), ("reject", None)]
    plan = plan * (1 if short else 3)
    plan += [("good", None)] * (len(plan) // 2)
    rng.shuffle(plan)
    workflow = Hostile(plan)
    run_workflows(report, folder / "runs", workflow)
    for error in (SystemExit, KeyboardInterrupt):
        end_the_loop(report, folder / error.__name__, error)
    asyncio.run(run_rewards(report, rng, repeat=1 if short else 2))
    allowed = Usage(before.files, before.threads + workflow.num_sleepers, before.children, before.log_bytes)
    report.leaks += settled(lambda: allowed.leaks(Usage.of(os.getpid()), what="the trainer", inputs=report.tried))


def run_workflows(
    report: Report,
    fileroot: Path,
    workflow: Any,
    *,
    engine_type: type[IdleEngine] = IdleEngine,
    episode_s: float = _EPISODE_S,
) -> None:
    """Train on what good prompts return, until every prompt has ended, and compare the account with the plan."""
    plan = workflow.plan
    config = InferenceEngineConfig(
        experiment_name="e", trial_name="t", fileroot=str(fileroot), consumer_batch_size=_BATCH, episode_retries=0,
        max_concurrent_rollouts=2 * _BATCH, max_head_offpolicyness=10**6, max_failed_share=1.0, failure_window=10**4,
        max_rejected_in_a_row=10**6, episode_timeout=episode_s, queue_size=_BATCH,
    )  # fmt: skip
    rows = [{"x": number} for number in range(len(plan))]
    num_good = sum("trained" in workflow.expected(index) for index in range(len(plan)))
    engine, loader = engine_type(config), PromptLoader(rows, len(plan), shuffle=False)
    try:
        for version in range(num_good // _BATCH):
            engine.executor.prepare_batch(loader, workflow)
            engine.set_version(version + 1)
        deadline = time.monotonic() + DEADLINE_S
        while engine.executor.stats.running and time.monotonic() < deadline:
            time.sleep(0.1)
    except BaseException as error:
        report.broken.append(f"hostile workflows must cost their episodes only: got {type(error).__name__}: {error}")
    finally:
        close(report, engine, "hostile workflows")
    found = audit(fileroot / "e" / "t")
    report.broken += judge_account(
        {"trained": found.trained, "rejected": found.rejected, "failed": found.failed, "pending": found.pending},
        found.issued,
    )
    with contextlib.closing(sqlite3.connect(fileroot / "e" / "t" / "ledger.sqlite")) as database:
        ended = "SELECT epoch, idx, state || coalesce('_' || reason, '') FROM prompts ORDER BY epoch"
        for epoch, index, state in database.execute(ended):
            report.count(state)
            states = workflow.expected(index)
            if state not in states and not (epoch > 0 and state in ("issued", "running")):
                text = f"a workflow that does {workflow.name_of(index)} must end as one of {states}: got {state}"
                report.broken.append(text)


def close(report: Report, engine: IdleEngine, what: str) -> None:
    """Close the executor, which must take no longer than its deadline."""
    began = time.monotonic()
    try:
        engine.executor.close()
    except BaseException as error:
        report.broken.append(f"close after {what} must not fail: got {type(error).__name__}: {error}")
    if time.monotonic() - began > _CLOSE_S:
        report.broken.append(f"close after {what} must take at most {_CLOSE_S:g} s: got {time.monotonic() - began:.0f}")


def end_the_loop(report: Report, fileroot: Path, error: type[BaseException]) -> None:
    """Let a workflow end the process: the trainer must learn of it at once, with the cause."""
    config = InferenceEngineConfig(consumer_batch_size=2, max_concurrent_rollouts=4, episode_timeout=3600.0)
    engine = IdleEngine(config)
    what = f"a workflow that raises {error.__name__}"
    try:
        engine.executor.prepare_batch(PromptLoader([{"x": 1}] * 4, 4), Hostile([("raise", error)] * 4))
        report.broken.append(f"{what} must end the run: it goes on")
    except RuntimeError as told:
        report.count(type(told).__name__)
        if not isinstance(told.__cause__, error):
            report.broken.append(f"{what} must be told as the cause: got {told!r} of {told.__cause__!r}")
    except BaseException as other:
        report.broken.append(f"{what} must end the run with a RuntimeError: got {other!r}")
    finally:
        close(report, engine, what)


async def run_rewards(report: Report, rng: random.Random, *, repeat: int) -> None:
    """Call every hostile reward, and honest ones beside and after it, whose numbers must be their own."""
    names = [*REWARDS] * repeat
    rng.shuffle(names)
    in_loop = RewardRunner(areward, timeout=_REWARD_S)
    runner = RewardRunner(reward, timeout=_REWARD_S, num_workers=2, max_growth_gib=0.25)
    for number, name in enumerate(names):
        values = [number + part / 4 for part in range(4)]
        calls = [runner(what=name, value=0.0), *(runner(what="", value=value) for value in values[:2])]
        outcome, *found = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)
        judge_reward(report, name, outcome)
        calls = [runner(what="", value=value) for value in values[2:]]
        found += await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), DEADLINE_S)
        if found != values:
            report.broken.append(f"honest rewards beside and after one that {name} must be {values}: got {found}")
        if name.startswith(("raises", "returns")):
            (outcome,) = await asyncio.gather(in_loop(what=name, value=0.0), return_exceptions=True)
            judge_reward(report, name, outcome)
    await asyncio.to_thread(runner.close)
    in_loop.close()


def judge_reward(report: Report, name: str, outcome: Any) -> None:
    """Say whether a reward has ended as it must, and never as a number that it is not."""
    kind = outcome.kind if isinstance(outcome, RewardError) else "ok" if isinstance(outcome, float) else repr(outcome)
    report.count(f"reward {kind:.40}")
    if kind not in REWARDS[name][1]:
        report.broken.append(f"a reward that {name} must end with {REWARDS[name][1]}: got {outcome!r:.500}")
