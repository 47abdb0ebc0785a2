"""What a master refuses before anything starts."""

from pathlib import Path

import pytest

pytest.importorskip("ray")
from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.core.graph import MFC, DataFlowGraph
from arealite.core.master import Master
from arealite.engine.ppo.actor import FSDPPPOActor

CONFIG = Path(__file__).parents[2] / "training" / "configs" / "sync-ppo.yaml"


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
