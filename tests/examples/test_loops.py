"""Loops of the example scripts, with everything that they call replaced: what they pass on."""

import importlib.util
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from arealite.rollout.trajectory import has_spread

EXAMPLES = Path(__file__).parents[2] / "examples"
REPLACED = """load_datasets load_hf_tokenizer load_image_processor PromptLoader FinetuneSpec Recover RewardModel Saver
    RLVRWorkflow VisionRLVRWorkflow FSDPPPOActor FSDPPPOCritic RemoteInferenceEngine Evaluator StatsLogger
    publish_weights"""


@pytest.mark.parametrize(("algorithm", "accepts"), [("dapo", has_spread), ("grpo", None)])
@pytest.mark.parametrize(
    ("script", "config", "keys"),
    [
        ("arealite/gsm8k_grpo.py", "arealite/configs/gsm8k_grpo_cpu.yaml", ()),
        ("arealite/gsm8k_ppo.py", "arealite/configs/gsm8k_ppo_cpu.yaml", ("actor.baseline=critic",)),
        ("arealite/clevr_count_70k_grpo.py", "arealite/configs/clevr_count_70k_grpo_cpu.yaml", ()),
        ("arealite/tldr_grpo.py", "arealite/configs/tldr_grpo_cpu.yaml", ("reward_model=r",)),
        ("agents/loop.py", "agents/configs/cpu.yaml", ("train_dataset.path=d",)),
    ],
)
def test_groups_without_spread_are_sampled_anew_if_the_algorithm_says_so(
    script: str,
    config: str,
    keys: tuple[str, ...],
    algorithm: str,
    accepts: object,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    spec = importlib.util.spec_from_file_location("loop_of_an_example", EXAMPLES / script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    for name in REPLACED.split():
        monkeypatch.setattr(module, name, MagicMock(), raising=False)
    module.load_datasets.return_value = [MagicMock(), MagicMock()]
    module.FinetuneSpec.return_value.total_train_steps = 2
    module.Recover.return_value.load.return_value = 1
    argv = [
        "--config",
        str(EXAMPLES / config),
        *keys,
        "actor.path=m",
        f"cluster.fileroot={tmp_path}",
        f"actor.algorithm={algorithm}",
    ]
    with ExitStack() as stack:
        module.train(argv, *([MagicMock()] if script == "agents/loop.py" else []), stack)
    (call,) = module.RemoteInferenceEngine.return_value.prepare_batch.call_args_list
    assert call.kwargs.get("should_accept") is accepts
