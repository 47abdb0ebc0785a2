"""GRPO on images: gsm8k_grpo.py for a vision-language model, here counting the objects of clevr_count_70k.

    python3 -m arealite.launcher.local examples/arealite/clevr_count_70k_grpo.py \
        --config examples/arealite/configs/clevr_count_70k_grpo.yaml key=value ...

Servers and trainer each compute patches of the images with the model's image processor. For other data,
`train_dataset.image_key` names the column of the images (configs/geometry3k_grpo.yaml), `reward` the reward.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.reward import load_rewards
from arealite.rollout.trajectory import has_spread
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer, load_image_processor
from arealite.weights.publish import publish_weights
from arealite.workflow.vision_rlvr import VisionRLVRWorkflow


class CountingConfig(GRPOConfig):
    """GRPO with a reward for answers such as [4]."""

    reward: str | dict[str, float] = "arealite.reward.counting:clevr_count_70k_reward_fn"
    """Reward function, or several with weights, `FILE.py:FUNCTION` or `module:FUNCTION`."""


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, CountingConfig)
    tokenizer, processor = load_hf_tokenizer(config.tokenizer_path), load_image_processor(config.tokenizer_path)

    # Training questions, and held-out questions for evaluation.
    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer, processor)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    ft_spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps)
    recover = Recover(config.recover, ft_spec)  # lock the run folder

    # The workflow of an episode: sample a group of completions, then score each.
    rewards = load_rewards(config.reward)
    workflow, eval_workflow = (
        VisionRLVRWorkflow(
            rewards,
            gconfig,
            tokenizer,
            processor,
            reward_timeout=config.rollout.reward_timeout,
            num_reward_workers=config.rollout.reward_workers,
        )
        for gconfig in (config.gconfig, config.eval_gconfig)
    )
    should_accept = has_spread if config.actor.dynamic_sampling else None  # of the workflow's results
    cleanup.callback(workflow.close)
    cleanup.callback(eval_workflow.close)

    # The trained policy, the frozen reference (if any), and the servers that sample.
    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, ft_spec)
    cleanup.callback(actor.destroy)
    ref = None
    if config.ref is not None:
        ref = FSDPPPOActor(config.ref)
        ref.initialize(None, ft_spec, policy=actor)
        cleanup.callback(ref.destroy)
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, ft_spec)
    cleanup.callback(rollout.destroy)

    evaluator = Evaluator(config.evaluator, ft_spec, valid_dataset, eval_workflow)
    saver = Saver(config.saver, ft_spec)

    # An interrupted run resumes from its last checkpoint; any other run starts at step 0.
    start_step = recover.load(actor, train_dataloader, rollout=rollout, clocks={"evaluator": evaluator, "saver": saver})
    stats = StatsLogger(config.stats_logger, ft_spec, experiment=config, start_step=start_step)
    cleanup.enter_context(stats)
    cleanup.enter_context(recover)  # from here on a stop signal writes a checkpoint

    # The servers have loaded `actor.path`; this sends them the actor's weights.
    publish_weights(actor, rollout, version=start_step)

    for step in range(start_step, ft_spec.total_train_steps):
        with stats.timer("eval"):
            stats.add(evaluator.evaluate(rollout, step))
        with stats.timer("rollout"):
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow, should_accept=should_accept)
        with stats.timer("logprobs"):
            if config.actor.proximal == "recompute":
                batch["proximal_logprobs"] = actor.compute_logprobs(batch)
            if ref is not None:
                batch["ref_logprobs"] = ref.compute_logprobs(batch)
        with stats.timer("update"):
            actor.compute_advantages(batch)
            stats.add(actor.ppo_update(batch))
        with stats.timer("weights"):
            publish_weights(actor, rollout, version=step + 1)
        saver.save(actor, step, tokenizer=tokenizer, processor=processor)
        stats.add(rollout.metrics())
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    # Write the final model, a last evaluation and the report.
    saver.save(actor, ft_spec.total_train_steps - 1, tokenizer=tokenizer, processor=processor, force=True)
    with stats.timer("eval"):
        stats.add(evaluator.evaluate(rollout, ft_spec.total_train_steps, force=True))
    stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
