"""Supervised fine-tuning on GSM8K: the loss is the mean negative log-likelihood of the answers' tokens.

    torchrun --nproc-per-node 2 examples/arealite/gsm8k_sft.py \
        --config examples/arealite/configs/gsm8k_sft.yaml key=value ...
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import SFTConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.frequency import Frequency
from arealite.utils.hf import load_hf_tokenizer


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, SFTConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    # Training demonstrations, and held-out demonstrations for the evaluation loss.
    data = config.train_dataset
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    train_dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    train_batches = sft_batches(train_dataloader, tokenizer.pad_token_id, parallel=config.model.parallel)
    valid_batch = None
    if valid_dataset is not None:
        loader = PromptLoader(valid_dataset, len(valid_dataset), shuffle=False)
        valid_batch = next(sft_batches(loader, tokenizer.pad_token_id, parallel=config.model.parallel))
    ft_spec = FinetuneSpec(
        config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps, data.drop_last
    )
    recover = Recover(config.recover, ft_spec)  # lock the run folder

    model = FSDPLMEngine(config.model)
    model.initialize(None, ft_spec)
    cleanup.callback(model.destroy)
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
                stats.add({"eval/loss": model.evaluate_lm(valid_batch)})
        with stats.timer("data"):
            batch = next(train_batches)
        with stats.timer("update"):
            stats.add(model.train_lm(batch))
        saver.save(model, step, tokenizer=tokenizer)
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    # Write the final model, its held-out loss and the report.
    saver.save(model, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    if valid_batch is not None:
        stats.add({"eval/loss": model.evaluate_lm(valid_batch)})
        stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
