"""The chaos suite itself: its promises notice what is broken, faults follow from their seed, the proxy does its harm.

The runs under fire are `make chaos`, outside of `make test`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections import Counter
from http.client import HTTPException
from pathlib import Path

import pytest
from chaos import kills
from chaos.agent_promises import judge_agents
from chaos.agents import KINDS, PLANS
from chaos.experiment import Experiment
from chaos.flaky_proxy import FAULTS, REFUSED, FlakyProxy
from chaos.kills import Outcome
from chaos.moments import MOMENTS, Marks
from chaos.promises import judge
from harness.proxy import answering
from testing_rollouts import write_rows
from testing_server import ScriptedServer, serve

from arealite.api.io_struct import PromptId
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount

CURSOR = {"epoch": 0, "position": 4, "seed": 1, "dataset_size": 8, "batch_size": 2, "shuffle": False, "drop_last": True}


def write_run(folder: Path, *, num_forgotten: int = 0) -> Experiment:
    """Write what a whole run of two steps, two prompts each and two samples per prompt leaves."""
    experiment = Experiment(folder, folder / "model", "lite.d1+d1", steps=2, batch_size=2, group_size=2, bound=1)
    run = experiment.run_folder
    (run / "rollouts").mkdir(parents=True)
    experiment.temporary.mkdir()
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in range(3)))
    (run / "summary.json").write_text(json.dumps({"steps": 2}))
    (run / "report.html").touch()
    account = StalenessAccount(batch_size=2, max_head_offpolicyness=1, max_concurrent=4)
    ledger = Ledger(str(run / "ledger.sqlite"), account)
    prompts = [Prompt(PromptId(0, index)) for index in range(4)]
    ledger.issue(prompts, cursor=CURSOR)
    for step, of_step in enumerate((prompts[:2], prompts[2:])):
        account.set_version(step)
        for prompt in of_step:
            ledger.start(prompt, head_version=step)
            ledger.accept(prompt, [SampleRecord(sample, 2, 0.1, 0, "a:1") for sample in range(2)], 0.1)
        ledger.train(of_step, step)
        write_samples(run / "rollouts" / f"step_{step}", [str(prompt.prompt_id) for prompt in of_step], step)
    ledger.issue([Prompt(PromptId(1, index)) for index in range(num_forgotten)], cursor=None)
    ledger.close()
    return experiment


def write_samples(path: Path, prompts: list[str], version: int, **changes: object) -> None:
    """Write two samples of each prompt; `changes` are of the last one."""
    rows = [
        {
            "prompt_id": prompt,
            "row": sample,
            "sample": sample,
            "loss_mask": [0, 1, 1],
            "versions": [-1, version, version],
            "logprobs": [0.0, -0.5, -0.25],
            "reward": 0.0,
        }
        for prompt, sample in itertools.product(prompts, range(2))
    ]
    rows[-1] |= changes
    shutil.rmtree(path, ignore_errors=True)
    write_rows(path, rows)


def test_a_whole_run_breaks_no_promise(tmp_path: Path) -> None:
    verdict = judge(write_run(tmp_path), Outcome(num_fatal=1, causes=["a kill"], is_done=True))
    assert (verdict.broken, verdict.lost, verdict.repeated, verdict.staleness_max) == ([], 0, 0, 0)
    assert verdict.states == {"trained": 4}


def test_what_is_left_behind_is_found_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("harness.processes.LEFT_S", 0.5)
    experiment = write_run(tmp_path)
    program = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1]); time.sleep(600)"
    )
    command = [sys.executable, "-uc", program]
    with subprocess.Popen(command, env=experiment.environment, stdout=subprocess.PIPE) as orphan:
        assert orphan.stdout is not None
        port = int(orphan.stdout.readline())
        (experiment.temporary / "torchelastic_x").mkdir()
        (experiment.run_folder / "recover" / ".step_1.unfinished").mkdir(parents=True)
        broken = judge(experiment, Outcome(ports={port}, is_done=True)).broken
        assert orphan.wait(120) == -9
    assert len(broken) == 4
    assert broken[0] == f"no port may be left: got [{port}]"
    assert broken[1].startswith(f"no process may be left: got {orphan.pid} ")
    assert broken[2] == "no temporary file may be left: got ['torchelastic_x']"
    assert broken[3] == "nothing half done may be left: got ['recover/.step_1.unfinished']"


def test_every_broken_promise_is_told(tmp_path: Path) -> None:
    experiment = write_run(tmp_path)
    run = experiment.run_folder
    (run / "metrics.jsonl").write_text("".join(json.dumps({"step": step}) + "\n" for step in (0, 1, 1)))
    (run / "summary.json").write_text(json.dumps({"steps": 3}))
    write_samples(run / "rollouts" / "step_0", ["0-0", "0-1"], version=1)
    bad = {"versions": [-1, 1, -1], "logprobs": [0.0, float("nan"), -1.0], "reward": float("inf")}
    write_samples(run / "rollouts" / "step_1", ["0-0"], version=1, **bad)
    verdict = judge(experiment, Outcome(num_fatal=1, causes=["a kill", "an error"]))
    told = "\n".join(verdict.broken)
    for expected in (
        "it must reach its last step: it ended with ['an error']",
        "only faults may end it: 1 did, and it ended 2 times: a kill; an error",
        "summary and report must tell 2 steps: got 3",
        "metrics.jsonl must tell steps 0..2 once and in order: got [0, 1, 1]",
        "step 1 must train whole groups: got 2 samples of 1 prompts",
        "a prompt must be trained once: got 0-0 in steps 0 and 1",
        "sample 0 of 0-0 in step 0 must have versions in -1..0: got [1]",
        "sample 1 of 0-0 in step 1 must have versions in 0..1: got [-1, 1]",
        "sample 1 of 0-0 in step 1 must have finite logprobs",
        "sample 1 of 0-0 in step 1 must have a finite reward: got inf",
        "the audit must find nothing lost, repeated or missing: got {'lost_ids': ['0-2', '0-3'], ",
    ):
        assert expected in told
    assert (verdict.lost, verdict.repeated, verdict.staleness_max) == (2, 1, 2)


def test_prompts_that_a_resume_forgot_are_told(tmp_path: Path) -> None:
    assert judge(write_run(tmp_path / "a", num_forgotten=4), Outcome(is_done=True)).broken == []
    (broken,) = judge(write_run(tmp_path / "b", num_forgotten=5), Outcome(is_done=True)).broken
    assert broken.startswith("at most 4 prompts may be pending at the end") and broken.endswith("got 5")


def write_agents(folder: Path, *, lies: bool) -> Experiment:
    """Write what a run of agents leaves that has met each plan once; with `lies`, one thing of each kind is wrong."""
    experiment = Experiment(folder, folder / "model", "lite.d1+d1", steps=1)
    (experiment.run_folder / "rollouts").mkdir(parents=True)
    ledger = Ledger(
        str(experiment.run_folder / "ledger.sqlite"),
        StalenessAccount(batch_size=1, max_head_offpolicyness=99, max_concurrent=9),
    )
    rows, asked = [], []
    for index, plan in enumerate(PLANS):
        prompt = Prompt(PromptId(0, index))
        ledger.issue([prompt], cursor=CURSOR)
        kinds = [KINDS.get(act) for act in plan]
        if lies and plan[0].__name__ in ("talks", "hangs"):
            kinds = [None if kinds[0] else "agent", None]  # what must not fail does, and the other way round
        for attempt, kind in enumerate(kinds):
            ledger.start(prompt, head_version=0)
            if kind is None:
                break
            if attempt == 0:
                ledger.retry(prompt, kind)
            else:
                ledger.drop(prompt, "failed", kind, [], 0.1)
        else:
            continue
        if plan[0].__name__ == "rejects":
            ledger.drop(prompt, "rejected", "workflow", [], 0.1)
            continue
        ledger.accept(prompt, [], 0.1)
        ledger.train([prompt], 0)
        name = {"prompt_id": f"0-{index}", "attempt": attempt}
        response = {"input_tokens": [1, index], "output_tokens": [5, 6], "output_logprobs": [-0.5, -0.25]}
        response |= {"output_versions": [0, 1], "stop_reason": "stop", "num_interrupts": 1}
        row = {"input_ids": [1, index, 5, 6], "loss_mask": [0, 0, 1, 1], "logprobs": [0, 0, -0.5, -0.25]}
        rows += [name | {"sample": 0, "versions": [-1, -1, 0, 1]} | row]
        rows += [rows[-1] | {"input_ids": [1, index, 5, 6, 7], "loss_mask": [0] * 5, "logprobs": [0.0] * 5}]
        run = {"counts": {"retries": 1, "orphans": 1}, "turns": ["a"], "read": ["a"], "responses": [response]}
        asked.append(name | {"runs": {"0": run}})
    ledger.close()
    if lies:
        rows[0] |= {"input_ids": [1, 0, 5, 7]}
        asked[1]["runs"]["0"] |= {"read": ["a", "b"], "counts": {}}
    write_rows(experiment.run_folder / "rollouts" / "step_0", rows)
    (experiment.folder / "runs" / "asked.jsonl").write_text("".join(json.dumps(line) + "\n" for line in asked))
    return experiment


def test_agents_that_were_trained_and_failed_as_they_must_break_no_promise(tmp_path: Path) -> None:
    counts: Counter[str] = Counter()
    assert list(judge_agents(write_agents(tmp_path, lies=False), counts)) == []
    assert counts["turns"] == counts["turns_equal"] == counts["interrupted"] == counts["retries"] == 9
    assert (counts["failed_workflow"], counts["failed_timeout"], counts["failed_agent"]) == (3, 1, 5)


def test_what_was_trained_or_counted_wrongly_of_agents_is_told(tmp_path: Path) -> None:
    told = list(judge_agents(write_agents(tmp_path, lies=True), Counter()))
    run = "run ('0-0', 1, '0') must train on what was sampled"
    assert told == [
        f"{run}: row 0 trains on 2 tokens that no response has there, from 2 on",
        f"{run}: response 0 is trained on in 0 rows",
        "run ('0-1', 0, '0') must have every turn that a client has read: it lacks ['b']",
        "an attempt of prompt 0, talks then talks, must fail with None: got agent",
        "prompt 8, hangs then talks, must fail with timeout: got trained after []",
    ]


def test_ten_seeds_bring_every_role_to_every_moment() -> None:
    plans = [kills.draw(seed, number=3) for seed in range(1, 11)]
    met = Counter((kill.victim, kill.moment) for plan in plans for kill in plan)
    assert set(met) == set(itertools.product(kills.FATAL, MOMENTS)) and max(met.values()) == 2
    assert plans == [kills.draw(seed, number=3) for seed in range(1, 11)]
    for plan in plans:
        assert [kill.step for kill in plan] == sorted(kill.step for kill in plan)
        assert all(1 <= kill.step <= 11 + (kill.moment == "step") for kill in plan)
    short = [kill for seed in (1, 2) for kill in kills.draw(seed, number=2)]
    assert {kill.victim for kill in short} == set(kills.FATAL)


def test_marks_tell_what_a_run_does(tmp_path: Path) -> None:
    marks = Marks(tmp_path)
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "recover" / ".step_3.unfinished").mkdir(parents=True)
    for name in ("step_2", "step_10", "eval_step_11"):
        (tmp_path / "rollouts" / name).mkdir()
    (tmp_path / ".trainer.lock").write_text("17\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 8}\n{"step": 9}\n{"st')
    for _ in range(2):
        marks.look()
    assert {(mark.moment, mark.step) for mark in marks.seen} == {
        *(("batch", 10), ("checkpoint", 3), ("step", 9), ("resume", -1))
    }
    (tmp_path / "rollouts" / "step_10").rmdir()
    marks.look()
    assert (marks.seen[-1].moment, marks.seen[-1].step) == ("batch", 2)


def test_the_proxy_does_every_harm_and_the_server_survives() -> None:
    met: Counter[str] = Counter()
    with serve(ScriptedServer()) as server:
        proxy = FlakyProxy(server.address, seed="170", refused=-1)
        with answering(proxy.answer) as address:
            for _ in range(100):
                met[outcome_of(address)] += 1
        assert outcome_of(server.address) == "whole"
    faults = proxy.faults
    hung_up = sum(faults[kind] for kind in FAULTS if kind.startswith("hang_up"))
    assert met["hung up"] == hung_up > 0 and set(FAULTS) == set(faults) and faults[REFUSED] == 0
    for kind in ("status_500", "truncated_json", "nan_logprob"):
        assert met[kind] == faults[kind] > 0
    assert met["whole"] == 100 - sum(faults.values()) + faults["slow"]


def outcome_of(address: str) -> str:
    """Ask for a token and tell what came."""
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1, "ignore_eos": True}, "return_logprob": True}
    header = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"http://{address}/generate", json.dumps(body).encode(), header)
    try:
        with urllib.request.urlopen(request, timeout=120) as reply:
            answer = json.loads(reply.read())
    except urllib.error.HTTPError as error:
        return f"status_{error.code}"
    except json.JSONDecodeError:
        return "truncated_json"
    except (OSError, HTTPException):
        return "hung up"
    (pair,) = answer["meta_info"]["output_token_logprobs"]
    return "whole" if pair[0] <= 0 else "nan_logprob"
