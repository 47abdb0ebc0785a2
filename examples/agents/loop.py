"""A loop for custom workflows: the loop of `examples/arealite/gsm8k_grpo.py`, which explains its steps.

`make_workflow(config, gconfig, tokenizer)` is called for training and for evaluation. The loop has no reference.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.api.workflow_api import RolloutWorkflow
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.rollout.trajectory import has_spread
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer
from arealite.weights.publish import publish_weights

MakeWorkflow = Callable[[GRPOConfig, GenerationHyperparameters, Any], RolloutWorkflow]


def main(argv: list[str], make_workflow: MakeWorkflow) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, make_workflow, cleanup)


def train(argv: list[str], make_workflow: MakeWorkflow, cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    ft_spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps)
    recover = Recover(config.recover, ft_spec)

    workflow = make_workflow(config, config.gconfig, tokenizer)
    eval_workflow = make_workflow(config, config.eval_gconfig, tokenizer)
    for one in (workflow, eval_workflow):
        cleanup.callback(getattr(one, "close", lambda: None))
    should_accept = has_spread if config.actor.dynamic_sampling else None  # of the workflow's results

    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, ft_spec)
    cleanup.callback(actor.destroy)
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    cleanup.callback(rollout.destroy)
    evaluator = Evaluator(config.evaluator, ft_spec, valid_dataset, eval_workflow)
    saver = Saver(config.saver, ft_spec)

    start_step = recover.load(actor, train_dataloader, rollout=rollout, clocks={"evaluator": evaluator, "saver": saver})
    stats = StatsLogger(config.stats_logger, ft_spec, experiment=config, start_step=start_step)
    cleanup.enter_context(stats)
    cleanup.enter_context(recover)
    publish_weights(actor, rollout, version=start_step)

    for step in range(start_step, ft_spec.total_train_steps):
        with stats.timer("eval"):
            stats.add(evaluator.evaluate(rollout, step))
        with stats.timer("rollout"):
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow, should_accept=should_accept)
        with stats.timer("logprobs"):
            if config.actor.proximal == "recompute":
                batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        with stats.timer("update"):
            actor.compute_advantages(batch)
            stats.add(actor.ppo_update(batch))
        with stats.timer("weights"):
            publish_weights(actor, rollout, version=step + 1)
        saver.save(actor, step, tokenizer=tokenizer)
        stats.add(rollout.metrics())
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    saver.save(actor, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    with stats.timer("eval"):
        stats.add(evaluator.evaluate(rollout, ft_spec.total_train_steps, force=True))
    stats.commit(ft_spec.total_train_steps)
    stats.close()
