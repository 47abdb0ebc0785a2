"""A reward model from pairs of a chosen and a rejected answer: the Bradley-Terry loss of their scores.

    python3 -m arealite.launcher.local examples/arealite/reward_model.py \
        --config examples/arealite/configs/reward_model.yaml key=value ...

The score is computed at the last token. The saved model is a Hugging Face sequence classifier of one label, which
`RewardModel(path, tokenizer)` uses as a reward and `critic.path` as a critic.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import RWConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.frequency import Frequency
from arealite.utils.hf import load_hf_tokenizer


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, RWConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    # Training pairs, and held-out pairs for evaluation.
    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    train_batches = sft_batches(train_dataloader, tokenizer.pad_token_id, parallel=config.model.parallel)
    ft_spec = FinetuneSpec(
        config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps, data.drop_last
    )
    recover = Recover(config.recover, ft_spec)  # lock the run folder

    # A language model whose output layer is replaced by a head with one score, initially 0.
    model = FSDPRWEngine(config.model)
    model.initialize(None, ft_spec)
    cleanup.callback(model.destroy)
    valid_batch = None
    if valid_dataset is not None:
        loader = PromptLoader(valid_dataset, len(valid_dataset), shuffle=False)
        valid_batch = next(sft_batches(loader, tokenizer.pad_token_id, parallel=config.model.parallel))
    evaluation = Frequency(config.evaluator, ft_spec.steps_per_epoch, is_first_due=True)
    saver = Saver(config.saver, ft_spec)

    # An interrupted run resumes from its last checkpoint; any other run starts at step 0.
    start_step = recover.load(model, train_dataloader, clocks={"evaluation": evaluation, "saver": saver})
    stats = StatsLogger(config.stats_logger, ft_spec, experiment=config, start_step=start_step)
    cleanup.enter_context(stats)
    cleanup.enter_context(recover)  # from here on a stop signal writes a checkpoint

    for step in range(start_step, ft_spec.total_train_steps):
        if valid_batch is not None and evaluation.check():
            with stats.timer("eval"):
                stats.add(model.evaluate_rw(valid_batch))
        with stats.timer("data"):
            batch = next(train_batches)
        with stats.timer("update"):
            stats.add(model.train_rw(batch))
        saver.save(model, step, tokenizer=tokenizer)
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    # Write the final model, its accuracy on held-out pairs, and the report.
    saver.save(model, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    if valid_batch is not None:
        stats.add(model.evaluate_rw(valid_batch))
        stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
