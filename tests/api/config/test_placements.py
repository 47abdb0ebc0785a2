"""The words of the original's Core in a YAML file: placement groups per call, `ppo.*`, `dataset.path`, hydra's list."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from arealite.api.cli_args import GRPOConfig, PPOConfig, load_expr_config
from arealite.api.config.run import load_run_config
from arealite.api.errors import ConfigError

BASE = """
experiment_name: ppo-math
trial_name: run
actor: {path: Qwen/Qwen3-1.7B}
train_dataset: {path: data, batch_size: 4}
gconfig: {max_new_tokens: 64}
rollout: {backend: sglang}
cluster: {n_nodes: 4}
"""
PER_CALL = """
allocation_mode:
  actor_train:
    placement_group:
      strategy: STRICT_PACK
      bundles:
        - GPU: 8
  actor_gen:
    placement_group:
      strategy: SPREAD
      bundles:
        - GPU: 2
"""


def load(folder: Path, text: str, *overrides: str, cls: type[GRPOConfig] = PPOConfig) -> Any:
    (folder / "c.yaml").write_text(BASE + text)
    return load_expr_config(["--config", str(folder / "c.yaml"), *overrides], cls)[0]


def placed(name: str, *sizes: int, strategy: str = "PACK") -> str:
    group = {"strategy": strategy, "bundles": [{"GPU": size} for size in sizes]}
    return f"allocation_mode.{name}={yaml.safe_dump({'placement_group': group}, default_flow_style=True).strip()}"


def mistake(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *overrides)
    return str(caught.value)


def test_placement_groups_are_servers_and_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(tmp_path, PER_CALL)
    assert config.allocation_mode == "sglang.d2p1t1+d8p1t1"
    assert (config.workers.actor.ranks, config.workers.actor.strategy) == (8, "STRICT_PACK")
    assert (config.workers.ref.ranks, config.workers.ref.share) == (None, None)
    assert [record.getMessage() for record in caplog.records] == [
        "allocation_mode.actor_gen.placement_group.strategy has no effect: servers fill the nodes in order. Remove it.",
        "allocation_mode is now allocation_mode=sglang.d2p1t1+d8p1t1 workers.actor.ranks=8 "
        "workers.actor.strategy=STRICT_PACK. Rename it.",
    ]


def test_calls_of_all_roles(tmp_path: Path) -> None:
    more = [placed("ref-inf", 1, 1, strategy="SPREAD"), placed("critic_train", 4, 2), placed("critic_inf", 4, 2)]
    teacher = placed("teacher_inf", 4)
    workers = load(tmp_path, PER_CALL, *more, teacher, "workers={ref: {threads: 3}, call_timeout: 60}").workers
    assert (workers.actor.ranks, workers.actor.strategy) == (8, "STRICT_PACK")
    assert (workers.critic.ranks, workers.critic.strategy) == (6, "PACK")
    assert (workers.teacher.ranks, workers.teacher.strategy) == (4, "STRICT_PACK"), "a bundle never leaves a node"
    assert (workers.ref.ranks, workers.ref.strategy, workers.ref.threads) == (2, "SPREAD", 3)


def test_the_command_line_changes_a_placement_or_replaces_all(tmp_path: Path) -> None:
    config = load(tmp_path, PER_CALL, placed("actor_gen", 1, 1, 1), "rollout.backend=vllm")
    assert config.allocation_mode == "vllm.d3p1t1+d8p1t1"
    config = load(tmp_path, PER_CALL, "allocation_mode=sglang.d4+d2")
    assert (config.allocation_mode, config.workers) == ("sglang.d4+d2", None)


@pytest.mark.parametrize("empty", ["workers:\n", "workers:\n  actor:\n"])
def test_an_empty_block_keeps_the_placement(tmp_path: Path, empty: str) -> None:
    """Its keys may all be commented out."""
    workers = load(tmp_path, PER_CALL + empty).workers
    assert (workers.actor.ranks, workers.actor.strategy) == (8, "STRICT_PACK")


PLACEMENTS = [
    (["rollout.backend=tgi"], "rollout.backend", "'tgi'"),
    (["workers.actor=2"], "workers.actor.ranks", "actor=2 and a placement_group"),
    ([placed("actor", 1)], "allocation_mode", "actor"),
    ([placed("ref_gen", 1)], "allocation_mode", "ref_gen"),
    (
        [placed("actor_inf", 4)],
        "allocation_mode.actor_inf",
        "{'ranks': 4, 'strategy': 'STRICT_PACK'} and {'ranks': 8, 'strategy': 'STRICT_PACK'}",
    ),
    (["allocation_mode.ref_inf=4"], "allocation_mode.ref_inf", "4"),
    ([placed("ref_inf", 1, strategy="PACKED")], "allocation_mode.ref_inf.placement_group.strategy", "PACKED"),
    (["allocation_mode.ref_inf.placement_group.bundles=[]"], "allocation_mode.ref_inf.placement_group.bundles", "[]"),
    (
        ["allocation_mode.actor_train.placement_group.bundles=[{GPU: 8, CPU: 32}]"],
        "allocation_mode.actor_train.placement_group.bundles.0.CPU",
        "32",
    ),
    (
        ["allocation_mode.actor_train.placement_group.bundles=[{GPU: 0.5}]"],
        "allocation_mode.actor_train.placement_group.bundles.0.GPU",
        "0.5",
    ),
    ([placed("actor_train", 8, 8, strategy="STRICT_SPREAD")], "allocation_mode.actor_train", "[8, 8]"),
    (
        ["workers.actor.ranks=4"],
        "workers.actor.ranks",
        "it as a placement_group too",
    ),
]


@pytest.mark.parametrize(("overrides", "subject", "got"), PLACEMENTS)
def test_placements_that_mean_nothing(tmp_path: Path, overrides: list[str], subject: str, got: str) -> None:
    message = mistake(tmp_path, PER_CALL, *overrides)
    assert message.startswith(f"{subject} must ") and f": got {got}. " in message


def test_servers_of_no_kind_are_the_usual_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "BASE", BASE.replace("rollout: {backend: sglang}", ""))
    assert load(tmp_path, PER_CALL).allocation_mode == "sglang.d2p1t1+d8p1t1"


def test_nothing_trains(tmp_path: Path) -> None:
    assert "must place actor_train or model_train: got nothing." in mistake(tmp_path, "allocation_mode: {}\n")
    assert "must place actor_train or model_train: got ref_inf." in mistake(tmp_path, "", placed("ref_inf", 1))


def test_hydras_groups_are_refused(tmp_path: Path) -> None:
    message = mistake(tmp_path, "defaults:\n  - _self_\n  - cluster: slurm-gpu\n  - ppo: default\n")
    assert message.startswith("defaults must ") and "got ['_self_', {'cluster': 'slurm-gpu'}, {'ppo': " in message
    assert load(tmp_path, f"{PER_CALL}defaults: [_self_]\n").workers.actor.ranks == 8


def test_blocks_of_the_original_have_their_places_here(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    theirs = "ppo: {ppo_n_minibatches: 2, kl_ctl: 0.2, discount: 0.9, gae_lambda: 0.8, eps_clip: 0.3, gen: {n: 3}}\n"
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(
            tmp_path,
            f"{theirs}dataset: {{max_length: 77}}\n",
            *("ref={}", "actor.type=qwen2", "ppo.value_eps_clip=0.1"),
        )
    actor = config.actor
    assert (actor.ppo_n_minibatches, actor.kl_ctl, actor.discount, actor.gae_lambda, actor.eps_clip) == (
        *(2, 0.2, 0.9, 0.8, 0.3),
    )
    assert (config.gconfig.n_samples, config.train_dataset.max_length, config.critic.value_eps_clip) == (3, 77, 0.1)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 9 and "ppo.gen.n is now gconfig.n_samples=3. Rename it." in messages
    assert "actor.type has no effect: the files of a model tell its type. Remove it." in messages
    assert mistake(tmp_path, "ppo: {kl_coef: 0.2}\n").startswith("ppo.kl_coef must have a counterpart here: got")
    assert mistake(tmp_path, "dataset: {eps_clip: 0.2}\n").startswith("dataset.eps_clip must have a counterpart here: ")
    told_twice = mistake(tmp_path, "dataset: {path: other}\n")
    assert told_twice.startswith("train_dataset.path must be given once: got it as dataset.path too.")


def test_blocks_of_a_script_of_ones_own_are_left_to_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "c.yaml").write_text(f"{BASE}dataset: {{path: mine}}\ndefaults: [1]\n")
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load_run_config(["--config", str(tmp_path / "c.yaml")])
    assert (config.train_dataset.path, caplog.records) == ("data", [])
