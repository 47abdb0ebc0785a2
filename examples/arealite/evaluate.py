"""Evaluate a model on a data set: servers, rewards and a report, without training.

    python3 -m arealite.launcher.local examples/arealite/evaluate.py \
        --config examples/arealite/configs/evaluate.yaml key=value ...

Every prompt gets one greedy completion and `gconfig.n_samples` samples. The same command continues an evaluation
that was interrupted.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import EvalConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.reward import load_rewards
from arealite.trainer.evaluation import Evaluation
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        evaluate(argv, cleanup)


def evaluate(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, EvalConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    _, dataset = load_datasets(config, tokenizer)
    assert dataset is not None, "EvalConfig has a valid_dataset"

    # Lock the run folder; samples of an interrupted evaluation are kept.
    evaluation = cleanup.enter_context(Evaluation(config, dataset))
    ft_spec = FinetuneSpec(total_train_epochs=1, dataset_size=len(dataset), train_batch_size=len(dataset))
    stats = cleanup.enter_context(StatsLogger(config.stats_logger, ft_spec, experiment=config))

    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    cleanup.callback(rollout.destroy)

    rewards = load_rewards(config.reward)
    for name, gconfig in {"greedy": config.eval_gconfig, "sampled": config.gconfig}.items():
        if gconfig is None:
            continue
        workflow = RLVRWorkflow(
            rewards,
            gconfig,
            tokenizer,
            reward_timeout=config.rollout.reward_timeout,
            num_reward_workers=config.rollout.reward_workers,
        )
        cleanup.callback(workflow.close)
        with stats.timer(name):
            stats.add(evaluation.run(name, rollout, workflow))

    stats.commit(0)
    stats.close({"solved": evaluation.solved})


if __name__ == "__main__":
    main(sys.argv[1:])
