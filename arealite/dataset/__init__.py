"""Data sets as sequences of rows: prompts for reinforcement learning, tokens for supervised fine-tuning, and pairs.

Rows stay on the disk and are converted at access. One process of those that share the cache of `datasets` checks and
tokenizes them; the others wait for it and read the result.

Every process that loads prompts reads all of them, in the order of the source, so that an index names the same prompt
for the whole run. Demonstrations and pairs are sharded: every rank gets equally many rows and no row is on two ranks.
"""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from arealite.api.cli_args import BaseExperimentConfig, DatasetConfig
from arealite.dataset.loader import Mixture, names_of, other_sources, weights_of
from arealite.dataset.prepare import prepare_rows
from arealite.dataset.rows import Row, Rows
from arealite.dataset.sources import SUFFIXES, MissingSplitError, read_rows

logger = logging.getLogger(__name__)

TYPES = ("sft", "rl", "dpo", "rw")
_HELD_OUT = 0.05  # of the rows of a source without a test split
_MAX_HELD_OUT = 1000


def get_custom_dataset(
    path: str,
    rank: int = 0,
    world_size: int = 1,
    type: Literal["sft", "rl", "dpo", "rw"] = "sft",
    split: str | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    max_rows: int | None = None,
    seed: int = 1,
    processor: Any = None,
    **columns: Any,
) -> Rows:
    """Load a data set; `columns` are the other keys of a `DatasetConfig`, such as `prompt_key`.

    `rl` rows are `{"messages", "answer", ...}` with all columns of the source, never sharded. `sft` rows are this
    rank's share of `{"input_ids", "loss_mask"}`, `dpo` and `rw` rows of `{"pair": [chosen, rejected]}`, each like a row
    of `sft`; up to `world_size - 1` rows at the end are left out so that all shares are equal. `max_rows` keeps
    the first so many rows of the source; `max_length` drops longer rows (for `rl`: longer prompts) and logs how many.
    `seed` is for data that a function generates, `processor` counts the tokens of images (`image_key`), which rows then
    have as `images`.
    """
    if type not in TYPES:
        raise ValueError(f"dataset type must be one of {', '.join(TYPES)}: got {type!r}. Set train_dataset.type.")
    if tokenizer is None and (type != "rl" or max_length is not None):
        raise ValueError(
            f"tokenizer must be given for type={type!r} or max_length: got None. Pass load_hf_tokenizer(...)."
        )
    if columns.keys() & {"mixed_with", "weight"}:
        raise ValueError("get_custom_dataset must get one source: got mixed_with or weight. Use load_datasets(config).")
    config = DatasetConfig(path=path, type=type, max_length=max_length, max_rows=max_rows, **columns)
    rows = prepare_rows(read_rows(config, split or "train", seed), config, tokenizer, processor)
    if type == "rl" or world_size == 1:
        return rows
    share = len(rows) // world_size
    return rows[rank : share * world_size : world_size]


def load_datasets(
    config: BaseExperimentConfig, tokenizer: Any, processor: Any = None
) -> tuple[Sequence[Row], Rows | None]:
    """Load training rows and held-out ones (None without a `valid_dataset` block), whole. See `get_custom_dataset`.

    Without a split of their own, the held-out rows are the last ones of the source, and never trained on. In an
    evaluation, which trains on none, they are all rows of the source. A mixture holds out rows of its first source.
    """
    train, valid = config.train_dataset, config.valid_dataset
    if tokenizer.chat_template is None:
        logger.warning("the tokenizer has no chat template: prompts are plain texts, without roles.")
    if not train.path and valid is not None:
        return Rows([]), prepare_rows(_read_whole(valid, config.seed), valid, tokenizer, processor)
    rows, held_out, first_held_out = read_rows(train, train.split or "train", config.seed), None, 0
    if valid is not None:
        is_file = valid.path.endswith(SUFFIXES)  # which has no splits
        is_other_config = valid.config_name != train.config_name and not is_file
        is_own = valid.path != train.path or valid.split is not None or is_other_config
        try:
            if is_own or not is_file:
                held_out = read_rows(valid, valid.split or "test", config.seed)
        except MissingSplitError:
            if is_own:
                raise
        if held_out is None:
            if len(rows) < 2:
                raise ValueError(
                    f"{train.path} must have a row for training and one to hold out: got one. Add rows, or set "
                    "valid_dataset=null."
                )
            num = min(max(1, round(_HELD_OUT * len(rows))), _MAX_HELD_OUT)
            message = "%s has no test split: its last %d of %d rows are held out for evaluation, not trained on."
            logger.warning(message, train.path, num, len(rows))
            rows, held_out = rows[:-num], rows[-num:]
            first_held_out = len(rows)
    mixed = [(read_rows(block, block.split or "train", config.seed), block) for block in other_sources(train)]
    parts = [prepare_rows(rows, block, tokenizer, processor) for rows, block in ((rows, train), *mixed)]
    train_rows = Mixture(parts, weights_of(train), config.seed, names_of(train)) if mixed else parts[0]
    return train_rows, held_out and prepare_rows(held_out, valid or train, tokenizer, processor, first_held_out)


def _read_whole(config: DatasetConfig, seed: int) -> Rows:
    """Read the test split, or the training split if there is none; a split that the config names must exist."""
    try:
        return read_rows(config, config.split or "test", seed)
    except MissingSplitError:
        if config.split:
            raise
        logger.warning("%s has no test split: all rows of its training split are used.", config.path)
        return read_rows(config, "train", seed)
