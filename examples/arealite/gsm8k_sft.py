"""Supervised fine-tuning on GSM8K: the loss is the mean negative log-likelihood of the answers' tokens.

    torchrun --nproc-per-node 2 examples/arealite/gsm8k_sft.py \
        --config examples/arealite/configs/gsm8k_sft.yaml key=value ...
"""

import sys

from arealite.api.cli_args import SFTConfig, load_expr_config
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset import get_custom_dataset
from arealite.dataset.loader import PromptLoader, sft_batches, sft_collate
from arealite.engine.sft.lm_engine import FSDPLMEngine
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger
from arealite.utils.frequency import Frequency
from arealite.utils.hf import load_hf_tokenizer


def main(argv: list[str]) -> None:
    config, _ = load_expr_config(argv, SFTConfig)
    tokenizer = load_hf_tokenizer(config.tokenizer_path)

    data = config.train_dataset
    train_dataset = get_custom_dataset(
        data.path, type="sft", split="train", tokenizer=tokenizer, max_length=data.max_length, seed=config.seed
    )
    dataloader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    train_batches = sft_batches(dataloader, tokenizer.pad_token_id)
    ft_spec = FinetuneSpec(config.total_train_epochs, len(train_dataset), data.batch_size, config.total_train_steps)

    model = FSDPLMEngine(config.model)
    model.initialize(None, ft_spec)
    saver = Saver(config.saver, ft_spec)
    stats = StatsLogger(config.stats_logger, ft_spec, experiment=config)
