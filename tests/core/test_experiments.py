"""The graphs of experiments, and the one that docs/core.md shows, fit the configs of the examples."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.cli.check.findings import Findings
from arealite.cli.check.script import check_declared
from arealite.core import experiments
from arealite.core.experiments import grpo, ppo, sft
from arealite.core.graph import DataFlowGraph
from arealite.launcher.start import launched

REPOSITORY = Path(__file__).parents[2]
CONFIGS = {"grpo": GRPOConfig, "sync-ppo": PPOConfig, "async-ppo": PPOConfig, "sft": SFTConfig}
MAKE: dict[str, Any] = {"grpo": grpo, "sync-ppo": ppo, "async-ppo": ppo, "sft": lambda config: sft()}


def load(name: str, *overrides: str) -> Any:
    path = REPOSITORY / "training" / "configs" / f"{name}.yaml"
    return load_expr_config(["--config", str(path), *overrides], CONFIGS[name])[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_config_of_a_training_script_fits_its_graph(name: str) -> None:
    config: BaseExperimentConfig = load(name)
    assert config.workers is not None
    MAKE[name](config).check(config)


@pytest.mark.parametrize("name", ["main_sync_ppo", "main_async_ppo", "main_grpo", "main_sft"])
def test_a_training_script_can_be_planned_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = REPOSITORY / "training" / f"{name}.py"
    assert launched(str(script), print, ["--dry-run", "launcher.preflight=false"]) == 0
    config = re.search(r"main_\w+\.py --config (\S+)", told := capsys.readouterr().out)
    assert config is not None and "workers of trainer-0, on nodes that Ray chooses" in told
    limits = [] if name == "main_sft" else ["rollout.reward_timeout=3.5", "rollout.reward_workers=1"]
    declared: Any = check_declared(Findings(), ["--config", config[1], *limits], script)
    assert declared.graph.publishes in declared.graph.engines
    for runner in declared._make_workflow(declared.config.gconfig, None).rewards if limits else ():
        assert (runner.timeout, runner._threads._max_workers) == (3.5, 1)


def names(graph: DataFlowGraph) -> list[str]:
    return [call.name for call in graph.order()]


def test_a_graph_has_the_calls_that_its_algorithm_needs() -> None:
    assert names(grpo(load("grpo"))) == ["actor_gen", "actor_inf", "advantages", "actor_train"]
    direct = ("actor.proximal=rollout", "actor.correction.action=none", "actor.correction.upper=null")
    config = load("grpo", *direct, "actor.kl_ctl=0.1", "ref={}")
    assert names(grpo(config)) == ["actor_gen", "ref_inf", "advantages", "actor_train"]
    assert names(ppo(load("sync-ppo")))[1:] == [
        *("actor_inf", "critic_inf", "advantages", "actor_train", "critic_train")
    ]


def test_the_calls_of_models_that_see_images_get_them() -> None:
    graph = ppo(load("sync-ppo", "actor.kl_ctl=0.1", "ref={}"))
    images = {"pixel_values", "image_grid_thw"}
    keys = {key.removesuffix("?") for call in graph.calls for key in call.outputs} | images
    readers = [call.name for call in graph.order() if images <= {*call.inputs_among(keys)}]
    assert readers == ["actor_inf", "ref_inf", "advantages", "actor_train"]
    assert images <= {*graph.source.outputs_among(keys)}


def test_the_documented_graph_is_one() -> None:
    block = (REPOSITORY / "docs" / "core.md").read_text().split("```python\n")[1].split("```")[0]
    scope: dict[str, Any] = {}
    exec(block, scope)
    graph: DataFlowGraph = scope["ppo"]()
    graph.check(load("sync-ppo", "actor.kl_ctl=0.1", "ref={}"))
    assert names(graph)[-2:] == ["actor_train", "critic_train"]
    assert len(block.split("def ppo")[1].splitlines()) <= 40


def test_the_documented_graph_in_the_originals_words_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("arealite.core.names._REGISTERED", {"mfc": {}, "agent": {}})
    (block,) = [
        text.split("```")[0]
        for text in (REPOSITORY / "docs" / "migration.md").read_text().split("```python\n")
        if "GraphBuilder" in text
    ]
    scope: dict[str, Any] = {}
    exec(block, scope)
    config = load("grpo", "actor.proximal=rollout", "actor.correction.action=none", "actor.correction.upper=null")
    graph: DataFlowGraph = scope["graph"](config)
    graph.check(config)
    assert names(graph) == ["actor_gen", "actor_inf", "actor_train"]
    assert (graph.named["actor_inf"].run, graph.named["actor_inf"].outputs) == (scope["half_rewards"], ("advantages",))


def test_the_policy_waits_for_its_critic() -> None:
    class Actor:
        version = 1

        def get_version(self) -> int:
            return self.version

        def ppo_update(self, batch: TensorDict) -> dict[str, float]:
            return {"updated": batch["rewards"].sum().item()}

        def describe(self, batch: TensorDict) -> dict[str, float]:
            return {"described": batch["rewards"].sum().item()}

    actor: Any = Actor()
    batch = TensorDict({"rewards": torch.ones(3)}, batch_size=[3])
    assert experiments.update(actor, batch, warmup_steps=2) == {"described": 3.0}
    actor.version = 2
    assert experiments.update(actor, batch, warmup_steps=2) == {"updated": 3.0}
