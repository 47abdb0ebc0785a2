"""What a master refuses before anything starts."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")
from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.core.experiments import ppo
from arealite.core.graph import MFC, DataFlowGraph
from arealite.core.master import Master
from arealite.core.workers import Workers
from arealite.engine.ppo.actor import FSDPPPOActor

CONFIG = Path(__file__).parents[2] / "training" / "configs" / "sync-ppo.yaml"
KEYS = ("input_ids", "attention_mask")


def graph(*roles: str) -> DataFlowGraph:
    """Return one that trains these roles."""
    trained = [MFC(f"{role}_train", role, "train_step", FSDPPPOActor.ppo_update, KEYS) for role in roles]
    calls = [MFC("gen", "rollout", "generate", outputs=KEYS), *trained]
    return DataFlowGraph(calls, dict.fromkeys(roles, FSDPPPOActor), publishes="actor")


def load(*given: str) -> Any:
    return load_expr_config(["--config", str(CONFIG), *given], PPOConfig)[0]


def test_a_batch_ahead_needs_a_bound_and_somebody_who_works_on_it() -> None:
    def load(*keys: str) -> PPOConfig:
        path = CONFIG.with_name("async-ppo.yaml")
        return load_expr_config(["--config", str(path), "workers.ahead=1", *keys], PPOConfig)[0]

    synchronous = (
        r"workers.ahead must be 0 if training is synchronous: got 1 and rollout.max_head_offpolicyness=0\. Its"
    )
    with pytest.raises(ConfigError, match=synchronous):
        load("async_training=false")
    with pytest.raises(ConfigError, match=r"workers.ahead must be 0 .* got 1 and rollout.max_head_offpolicyness=0"):
        load("rollout.max_head_offpolicyness=0")
    for beside in ((), ("ref={}", "actor.kl_ctl=0.1"), ("ref={}", "actor.kl_ctl=0.1", "workers.ref.share=critic")):
        config = load(*beside)
        with pytest.raises(
            ConfigError, match=r"workers.ahead must have a call that reads nothing but the batch, of a ro"
        ):
            Master(config, ppo(config))
    config = load("ref={}", "actor.kl_ctl=0.1", "workers.ref.ranks=1", "allocation_mode=sglang.d3p1t1+d2p1t1")
    Master(config, ppo(config))
    with pytest.raises(ConfigError, match=r"workers.ahead must be 0 in a script with a loop of its own: got 1"):
        Workers(config)


def test_any_number_of_roles_may_train() -> None:
    config = load()
    config.teacher = config.actor  # as the class of an experiment of one's own may have it
    Master(config, graph("actor", "critic", "teacher"))


def test_a_config_without_workers_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"workers must be given to a script of a master: got nothing\. Add `workers"):
        Master(load("workers=null"), graph("actor", "critic"))
