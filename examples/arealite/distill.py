"""On-policy distillation on GSM8K: a student learns from a teacher's logprobs of the student's completions.

    python3 -m arealite.launcher.local examples/arealite/distill.py \
        --config examples/arealite/configs/distill.yaml key=value ...

The advantage of a token is the teacher's logprob minus the student's, without discount: a policy gradient towards the
smallest KL(student || teacher) on the student's own completions (https://arxiv.org/abs/2306.13649 has the divergence
over the whole vocabulary). Rewards are measured, not trained on.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.reward import load_rewards
from arealite.trainer.evaluator import Evaluator
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.hf import load_hf_tokenizer, require_same_vocabulary
from arealite.weights.publish import publish_weights
from arealite.workflow.rlvr import RLVRWorkflow


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, GRPOConfig)
    if config.teacher is None:
        raise ConfigError("teacher must be a block: got null. Give teacher.path, and set actor.algorithm=opd.")
    tokenizer = load_hf_tokenizer(config.tokenizer_path)
    require_same_vocabulary(tokenizer, config.teacher.path)

    # Training questions, and held-out questions for evaluation.
    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    ft_spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps)
    recover = Recover(config.recover, ft_spec)  # lock the run folder

    # The workflow of an episode: sample completions, then score each, for the metrics only.
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
    cleanup.callback(workflow.close)
    cleanup.callback(eval_workflow.close)

    # The trained student, the frozen teacher that scores each of its tokens, and the servers that sample.
    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, ft_spec)
    cleanup.callback(actor.destroy)
    teacher = FSDPPPOActor(config.teacher)
    teacher.initialize(None, ft_spec)
    cleanup.callback(teacher.destroy)
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
            batch = rollout.prepare_batch(train_dataloader, workflow=workflow)
        with stats.timer("logprobs"):
            if config.actor.proximal == "recompute":
                batch["proximal_logprobs"] = actor.compute_logprobs(batch)
            batch["teacher_logprobs"] = teacher.compute_logprobs(batch)
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

    # Write the final model, a last evaluation and the report.
    saver.save(actor, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    with stats.timer("eval"):
        stats.add(evaluator.evaluate(rollout, ft_spec.total_train_steps, force=True))
    stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
