"""PPO with a critic on GSM8K: gsm8k_grpo.py with a critic's values in place of the group's mean.

    python3 -m arealite.launcher.local examples/arealite/gsm8k_ppo.py \
        --config examples/arealite/configs/gsm8k_ppo.yaml key=value ...

How it differs from textbook PPO: as gsm8k_grpo.py from GRPO; and actor and critic are two models, each with an
optimizer of its own. critic.path=FOLDER starts the critic from a reward model or the `critic/` of an earlier run.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import PPOConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.reward import load_rewards
from arealite.rollout.trajectory import has_spread
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer
from arealite.weights.publish import publish_weights
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, PPOConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    # Training questions, and held-out questions for evaluation.
    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    ft_spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps)
    recover = Recover(config.recover, ft_spec)  # lock the run folder

    # The workflow of an episode: sample a group of completions, then score each.
    rewards = load_rewards(config.reward)
    workflow, eval_workflow = (
        RLVRWorkflow(
            rewards,
            gconfig,
            tokenizer,
            reward_timeout=config.rollout.reward_timeout,
            num_reward_workers=config.rollout.reward_workers,
        )
        for gconfig in (config.gconfig, config.eval_gconfig)
    )
    should_accept = has_spread if config.actor.dynamic_sampling else None  # of the workflow's results
    cleanup.callback(workflow.close)
    cleanup.callback(eval_workflow.close)

    # The trained policy and critic, the frozen reference (if any), and the servers that sample.
    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, ft_spec)
    cleanup.callback(actor.destroy)
    critic = FSDPPPOCritic(config.critic)
    critic.initialize(None, ft_spec)
    cleanup.callback(critic.destroy)
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
    clocks = {"evaluator": evaluator, "saver": saver}
    start_step = recover.load(actor, train_dataloader, critic=critic, rollout=rollout, clocks=clocks)
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
            batch["values"] = critic.compute_values(batch)
        with stats.timer("update"):
            actor.compute_advantages(batch)
            stats.add(critic.ppo_update(batch))
            is_warm = step >= config.critic_warmup_steps  # before that only the critic is trained
            stats.add(actor.ppo_update(batch) if is_warm else actor.describe(batch))
        with stats.timer("weights"):
            publish_weights(actor, rollout, version=step + 1)
        saver.save(actor, step, critic=critic, tokenizer=tokenizer)
        stats.add(rollout.metrics())
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    # Write the final model, a last evaluation and the report.
    saver.save(actor, ft_spec.total_train_steps - 1, critic=critic, tokenizer=tokenizer, force=True)
    with stats.timer("eval"):
        stats.add(evaluator.evaluate(rollout, ft_spec.total_train_steps, force=True))
    stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
