"""Whole runs through the launcher: servers, ranks, the example scripts, and what they leave in the run folder."""

import json
import math
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.processes import REPOSITORY
from testing_quickstart import WORD_PROBLEMS
from testing_rollouts import edit_rows, stored_rows
from testing_runs import arealite, launch, metrics, run
from testing_trace import assert_nested, read_spans, waits_of
from transformers import AutoModelForSequenceClassification

from arealite.rollout.account.rollout_file import read_update
from arealite.trainer.step_line import bounds
from arealite.weights.log import read_weights

PROCESSES = ("trainer-0", "trainer-1", "server-0", "server-1")
CONFIGS = REPOSITORY / "examples" / "arealite" / "configs"
pytestmark = pytest.mark.xdist_group("end_to_end")


def run_rl(
    model: Path,
    fileroot: Path,
    num_steps: int,
    *overrides: str,
    example: str = "gsm8k_grpo",
    script: Path | None = None,
) -> Path:
    """Run a few small steps of an example, or of a script with its config, and return the run folder."""
    launch(
        *(script or REPOSITORY / "examples" / "arealite" / f"{example}.py", CONFIGS / f"{example}_cpu.yaml"),
        *(f"actor.path={model}", f"cluster.fileroot={fileroot}"),
        *("experiment_name=e2e", "trial_name=t", f"total_train_steps={num_steps}", "train_dataset.batch_size=6"),
        *("gconfig.n_samples=4", "gconfig.max_new_tokens=24", f"train_dataset.path={WORD_PROBLEMS}?train=200&test=10"),
        *("launcher.preflight=false", "evaluator.freq_steps=2", *overrides),  # it takes seconds; test_docs.py has it
    )
    return fileroot / "e2e" / "t"


def check_run(folder: Path, *, num_steps: int, bound: int, num_servers: int) -> None:
    """Hold the files of a run to the invariants."""
    rows = metrics(folder)
    assert [row["step"] for row in rows] == list(range(num_steps + 1))
    trained, prompts, used_servers = rows[:num_steps], [], set()
    for step, row in enumerate(trained):
        samples = stored_rows(folder / "rollouts" / f"step_{step}")
        assert len(samples) == 24
        oldest = []
        for sample in samples:
            prompts.append((step, sample["prompt_id"]))
            used_servers.update(sample["server"].split(","))  # one that was interrupted went on elsewhere
            sampled = [version for version, is_sampled in zip(sample["versions"], sample["loss_mask"]) if is_sampled]
            oldest.append(step - min(sampled))
            assert step - bound <= min(sampled) and max(sampled) <= step and sample["trained_step"] == step
            assert all(math.isfinite(value) and value <= 0 for value in sample["logprobs"])
            lengths = {len(sample[key]) for key in ("input_ids", "logprobs", "versions", "loss_mask")}
            assert len(lengths) == 1
        assert row["staleness/max"] == max(oldest) <= bound
        assert row["staleness/mean"] == pytest.approx(sum(oldest) / len(oldest), abs=1e-6)
        assert row["reward/mean"] == pytest.approx(sum(sample["reward"] for sample in samples) / 24, abs=1e-6)
        updates = read_update(folder / f"rollouts/step_{step}/0.parquet", range(24))
        for sample, update in zip(samples, updates, strict=True):
            assert {len(values) for values in update.values()} == {len(sample["input_ids"])}
            assert ("log_ratio" in update) == ("policy/ratio" in row), "a critic may be trained first"
            assert {a for a, is_sampled in zip(update["advantages"], sample["loss_mask"]) if not is_sampled} == {0.0}
        gaps = [gap for update in updates for gap in update.get("logprob_gap", []) if not math.isnan(gap)]
        if gaps:
            mean_kl = sum(math.expm1(gap) - gap for gap in gaps) / len(gaps)
            assert mean_kl == pytest.approx(row["policy/mismatch_kl"], rel=0.005, abs=1e-9)
        if max(oldest) == 0:
            assert row["policy/mismatch_kl"] < 1e-8, "the servers' logprobs are the trainer's"
    assert len({prompt for _, prompt in prompts}) == 6 * num_steps, "no prompt is trained on twice"
    assert len(used_servers) == num_servers
    evaluated = sorted({0, 2, num_steps})
    assert [row["eval/version"] for row in rows if "eval/version" in row] == evaluated
    for version in evaluated:
        samples = stored_rows(folder / "rollouts" / f"eval_step_{version}")
        assert sorted(sample["prompt_id"] for sample in samples) == sorted(f"{version}-{i}" for i in range(10))
        assert {v for s in samples for v, m in zip(s["versions"], s["loss_mask"]) if m} == {version}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == num_steps and summary["max_head_offpolicyness"] == bound >= summary["staleness_max"]
    trained_tokens = sum(
        sum(sample["loss_mask"])
        for step in range(num_steps)
        for sample in stored_rows(folder / "rollouts" / f"step_{step}")
    )
    assert summary["trained_tokens"] == trained_tokens < summary["generated_tokens"]
    assert (folder / "report.html").stat().st_size > 10_000
    assert (folder / "checkpoints" / f"step_{num_steps - 1}" / "model.safetensors").exists()
    assert yaml.safe_load((folder / "config.yaml").read_text())["rollout"]["max_head_offpolicyness"] == bound


@pytest.fixture(scope="module")
def asynchronous(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps on two servers and two ranks; each step moves the weights away from wrong answers."""
    return run_rl(
        *(model, tmp_path_factory.mktemp("asynchronous"), 4),
        *("allocation_mode=lite.d2p1t1+d2p1t1", "rollout.max_concurrent_rollouts=12"),
        *("actor.adv_norm=false", "actor.baseline=none", "actor.reward_bias=-0.5"),
        *("recover.mode=auto", "recover.freq_steps=2", "perf_trace=true"),
    )


def test_asynchronous_two_servers_two_ranks_broadcast(asynchronous: Path) -> None:
    check_run(asynchronous, num_steps=4, bound=2, num_servers=2)
    logs = {log.name for log in (asynchronous / "logs").iterdir()}
    assert logs >= {"server-0.log", "server-1.log", "trainer-0.log", "trainer-1.log"}


def test_the_trace_of_all_processes_agrees_with_the_metrics(asynchronous: Path) -> None:
    spans = read_spans(asynchronous / "trace.json.gz")
    assert_nested(spans)
    processes = {name: [one for one in spans if one.process.split()[0] == name] for name in PROCESSES}
    assert sum(map(len, processes.values())) == len(spans)
    rank_0 = processes["trainer-0"]
    for row in metrics(asynchronous)[:4]:
        (step,) = (one for one in rank_0 if one.name == f"step {row['step']}")
        inside = [one for one in rank_0 if one.thread == step.thread and step.began_s <= one.began_s < step.ended_s]
        times = {key: sum(one.length_s for one in inside if one.name == key[5:-2]) for key in row if "time/" in key}
        times["time/step_s"] = step.length_s
        assert times == pytest.approx({key: row[key] for key in times}, abs=1e-5), "by one look at the clock"
        waits = waits_of(spans, step)
        told = {kind: row.get(f"wait/{kind}_s", 0.0) for kind in ("servers", "reward", "workflow")}
        told["servers"] += row.get("wait/servers_full_s", 0.0)
        assert {kind: waits[kind] for kind in told} == pytest.approx(told, rel=0.05, abs=0.1)
        found = bounds(times | {f"wait/{kind}_s": waits[kind] for kind in told})
        assert found == pytest.approx({key: row[key] for key in found}, abs=0.1)
    names = {name: Counter(one.name for one in processes[name]) for name in PROCESSES}
    assert names["trainer-0"]["episode"] >= 24 and names["trainer-0"]["reward"] >= 96
    assert names["trainer-0"]["servers take weights"] == 5, "the first weights and those of each step"
    for rank in ("trainer-0", "trainer-1"):
        assert names[rank]["all ranks in an update"] >= 4 <= names[rank]["micro-batch"]
    for server in ("server-0", "server-1"):
        assert names[server]["decode"] > 50 and names[server]["load weights"] > 0 < names[server]["paused"]


@pytest.mark.long
@pytest.mark.slow
def test_a_step_is_replayed_from_the_initial_model(asynchronous: Path) -> None:
    weights = read_weights(asynchronous)
    assert sorted(weights) == [0, 1, 2, 3, 4] and len(set(weights.values())) == 5
    before = sorted(asynchronous.rglob("*"))
    out = arealite("replay", str(asynchronous), "--step", "1")
    assert f"step 1 replayed: weights of version 2 are bit-identical (fingerprint {weights[2]})" in out
    assert sorted(asynchronous.rglob("*")) == before


@pytest.mark.long
@pytest.mark.slow
def test_a_replay_names_the_first_step_that_differs(asynchronous: Path, tmp_path: Path) -> None:
    """From a checkpoint: neither are earlier rollouts needed nor does step 2 differ."""
    folder = tmp_path / "e2e" / "t"
    shutil.copytree(asynchronous, folder)
    shutil.rmtree(folder / "rollouts" / "step_0")

    def with_another_reward(samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        samples[7]["reward"] += 1.0
        return samples

    edit_rows(folder / "rollouts" / "step_3", with_another_reward)
    out = arealite("replay", str(folder), "--step", "3", status=1)
    assert "resuming after step 1" in out
    expected = read_weights(folder)[4]
    differs = rf"step 3 replayed: weights of version 4 DIFFER: .* {expected}, these [0-9a-f]{{16}}\n"
    assert re.search(differs, out), out


@pytest.mark.long
@pytest.mark.slow
def test_synchronous_disk_with_a_reference(model: Path, tmp_path: Path) -> None:
    folder = run_rl(
        *(model, tmp_path, 3),
        *("async_training=false", "rollout.weight_update=disk", "ref.path=${actor.path}", "actor.kl_ctl=0.01"),
        *("actor.ppo_n_minibatches=2", "actor.proximal=recompute", "tokenizer_path=${actor.path}"),
    )
    check_run(folder, num_steps=3, bound=0, num_servers=1)


@pytest.mark.long
@pytest.mark.slow
def test_one_process_samples_and_trains(model: Path, tmp_path: Path) -> None:
    folder = run_rl(
        *(model, tmp_path, 4, "allocation_mode=lite.d1|d1", "rollout.max_concurrent_rollouts=12"),
        *("actor.adv_norm=false", "actor.baseline=none", "actor.reward_bias=-0.5"),
        *("actor.ppo_n_minibatches=3", "actor.proximal=recompute", "recover.mode=auto", "recover.freq_steps=2"),
    )
    check_run(folder, num_steps=4, bound=2, num_servers=1)
    assert not list((folder / "logs").glob("server-*"))
    assert max(row["staleness/max"] for row in metrics(folder)[:4]) > 0
    assert "\nlost 0\nrepeated 0\n" in arealite("ledger", str(folder))
    assert "are bit-identical" in arealite("replay", str(folder), "--step", "3")


BRANCHING = """
from arealite.api.io_struct import ModelRequest
from arealite.chat.template import prompt_tokens
from arealite.workflow.rlvr import RLVRWorkflow
from arealite.workflow.trajectory import TrajectoryBuilder, sample_group


class Branching(RLVRWorkflow):
    async def arun_episode(self, engine, data):
        return await sample_group(lambda sample: self.converse(engine, data, sample), self.gconfig.n_samples)

    async def converse(self, engine, data, sample):
        gconfig = self.gconfig.new(n_samples=1, max_new_tokens=6 + sample)
        (prompt,) = prompt_tokens(self.tokenizer, [data["messages"]])
        builder = TrajectoryBuilder(prompt)
        for _ in range(1 + sample):
            response = await engine.agenerate(ModelRequest(builder.ids, gconfig, seed_key=str(sample)))
            builder.add(response, reward=response.output_len / 10)
            builder.branch([*prompt, *response.output_tokens[:2]])
        return builder.finish(sample_index=sample)
"""


@pytest.mark.slow
def test_runs_of_several_rows_are_trained_audited_and_replayed(model: Path, tmp_path: Path) -> None:
    (tmp_path / "branching.py").write_text(BRANCHING)
    script = (REPOSITORY / "examples" / "arealite" / "gsm8k_grpo.py").read_text()
    of_rlvr, of_branching = "from arealite.workflow.rlvr import RLVRWorkflow", "from branching import Branching"
    (tmp_path / "grpo.py").write_text(script.replace(of_rlvr, f"{of_branching} as RLVRWorkflow"))
    two_ranks = "allocation_mode=lite.d2p1t1+d2p1t1"
    folder = run_rl(
        model, tmp_path, 3, two_ranks, "recover.mode=auto", "recover.freq_steps=2", script=tmp_path / "grpo.py"
    )
    rows = metrics(folder)
    for step in range(3):
        lines = stored_rows(folder / "rollouts" / f"step_{step}")
        assert [line["sample"] for line in lines] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3] * 6
        assert [line["row"] for line in lines] == [*range(10)] * 6
        runs = {(line["prompt_id"], line["sample"]): line["reward"] for line in lines}
        assert rows[step]["reward/mean"] == pytest.approx(sum(runs.values()) / 24, rel=1e-5)
        assert all(set(line["segments"][-1]) == {"sampled"} and len(line["segments"]) == 2 for line in lines)
    assert "\nlost 0\nrepeated 0\n" in arealite("ledger", str(folder))
    assert "are bit-identical" in arealite("replay", str(folder), "--step", "2")


@pytest.mark.slow
def test_ppo_with_a_critic_that_starts_another(model: Path, tmp_path: Path) -> None:
    folder = run_rl(model, tmp_path, 3, "actor.reward_bias=-0.5", "critic_warmup_steps=1", example="gsm8k_ppo")
    check_run(folder, num_steps=3, bound=2, num_servers=1)
    rows = metrics(folder)
    assert rows[0]["value/mean"] == 0.0 and rows[0]["value/return"] == pytest.approx(rows[0]["reward/mean"] - 0.5)
    assert rows[2]["value/mean"] < -0.05, "towards the reward"
    assert all(row["value/skipped_steps"] == 0 for row in rows[:3])
    assert ["optim/lr" in row for row in rows] == [False, True, True, False], "warm-up"
    weights = read_weights(folder)
    assert weights[0] == weights[1] != weights[2] != weights[3]
    critic = AutoModelForSequenceClassification.from_pretrained(folder / "checkpoints" / "step_2" / "critic")
    assert critic.config.num_labels == 1 and critic.score.weight.abs().max() > 0


@pytest.mark.slow
def test_fine_tuning_by_torchrun(model: Path, tmp_path: Path) -> None:
    out = run(
        *("-m", "torch.distributed.run", "--nproc-per-node", "2", "--log-dir", tmp_path / "torchrun"),
        *(REPOSITORY / "examples" / "arealite" / "gsm8k_sft.py", "--config", CONFIGS / "gsm8k_sft_cpu.yaml"),
        *(f"model.path={model}", f"cluster.fileroot={tmp_path}", "trial_name=t", "total_train_steps=20"),
        *(f"train_dataset.path={WORD_PROBLEMS}?train=400&test=40", "train_dataset.batch_size=15"),
        "stats_logger.line_freq_steps=1",
    )
    assert out.count("step ") == 21
    rows = metrics(tmp_path / "gsm8k-sft-cpu" / "t")
    assert rows[20]["eval/loss"] < 0.7 * rows[0]["eval/loss"]
    assert rows[0]["sft/loss"] == pytest.approx(rows[0]["eval/loss"], rel=0.1)
