"""Direct preference optimisation (https://arxiv.org/abs/2305.18290) on pairs of a chosen and a rejected answer.

    python3 -m arealite.launcher.local examples/arealite/dpo.py \
        --config examples/arealite/configs/dpo.yaml key=value ...

`model.loss_type=ipo` is IPO (https://arxiv.org/abs/2310.12036). The reference stays in memory beside the policy, and
its logprobs are computed batch by batch.
"""

import sys
from contextlib import ExitStack

from arealite.api.cli_args import DPOConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.frequency import Frequency
from arealite.utils.hf import load_hf_tokenizer


def main(argv: list[str]) -> None:
    with ExitStack() as cleanup:  # stops everything started below, also after an error
        train(argv, cleanup)


def train(argv: list[str], cleanup: ExitStack) -> None:
    config, _ = load_expr_config(argv, DPOConfig)
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

    # The trained policy, and the frozen reference from which it starts.
    model = FSDPDPOEngine(config.model)
    model.initialize(None, ft_spec)
    cleanup.callback(model.destroy)
    ref = FSDPDPOEngine(config.ref)
    ref.initialize(None, ft_spec, policy=model)
    cleanup.callback(ref.destroy)
    valid_batch = None
    if valid_dataset is not None:
        loader = PromptLoader(valid_dataset, len(valid_dataset), shuffle=False)
        valid_batch = next(sft_batches(loader, tokenizer.pad_token_id, parallel=config.model.parallel))
        valid_batch["ref_logprobs"] = ref.compute_logprobs(valid_batch)
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
                stats.add(model.evaluate_dpo(valid_batch))
        with stats.timer("data"):
            batch = next(train_batches)
        with stats.timer("logprobs"):
            batch["ref_logprobs"] = ref.compute_logprobs(batch)
        with stats.timer("update"):
            stats.add(model.train_dpo(batch))
        saver.save(model, step, tokenizer=tokenizer)
        stats.commit(step)
        with stats.timer("recover"):
            recover.save(step)

    # Write the final model, its accuracy on held-out pairs, and the report.
    saver.save(model, ft_spec.total_train_steps - 1, tokenizer=tokenizer, force=True)
    if valid_batch is not None:
        stats.add(model.evaluate_dpo(valid_batch))
        stats.commit(ft_spec.total_train_steps)
    stats.close()


if __name__ == "__main__":
    main(sys.argv[1:])
