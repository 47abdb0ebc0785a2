"""What a master refuses before anything starts."""

from pathlib import Path

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


def test_what_trains_and_would_be_in_no_checkpoint_is_refused() -> None:
    config, _ = load_expr_config(["--config", str(CONFIG)], PPOConfig)
    config.teacher = config.actor  # as the class of an experiment of one's own may have it
    keys = ("input_ids", "attention_mask")
    calls = [
        MFC("gen", "rollout", "generate", outputs=keys),
        *(MFC(f"{role}_train", role, "train_step", FSDPPPOActor.ppo_update, keys) for role in ("actor", "teacher")),
    ]
    graph = DataFlowGraph(calls, {"actor": FSDPPPOActor, "teacher": FSDPPPOActor}, publishes="actor")
    with pytest.raises(ConfigError, match=r"roles that train must be actor and critic, .*: got teacher\. Rename it"):
        Master(config, graph)
