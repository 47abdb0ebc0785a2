"""The order of a run's data, as a cursor that can be saved, and mixtures of several data sets.

The prompt at a position is a pure function of (seed, epoch, position), see `utils/data_order.py`. A loader that resumes
from a saved cursor yields exactly what the original would have yielded, and the cursor tells which prompts precede it.

An epoch of a mixture has as many rows of each data set as its weight asks for. Invariant: the row at an index of an
epoch is a pure function of sizes, weights and seed. A data set gives all its rows once before it gives one again, over
the epochs, so a small weight passes over all of them in time.
"""

import functools
import logging
import math
import os
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch.nn.utils.rnn import pad_sequence

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import DatasetConfig
from arealite.api.errors import ConfigError
from arealite.api.io_struct import PromptId
from arealite.dataset.rows import Row, Rows, checksum_of, digest_of, digest_of_row
from arealite.dataset.sources import SUFFIXES
from arealite.utils.data_order import length_of_epoch, order_of_epoch
from arealite.utils.images import decode_image, process_images
from arealite.utils.tensors import split_balanced

logger = logging.getLogger("arealite.dataset")
_NOT_INHERITED = ("path", "weight", "config_name", "split")


@dataclass(eq=False, repr=False)
class PromptLoader:
    """Batches of prompts without end, epoch after epoch.

    Each row is a copy of `dataset[index]` with `prompt_id = PromptId(epoch, index)`; a dataset with a method `at` is
    asked for `at(epoch, index)`. `len` is batches per epoch. All iterators share the loader's cursor, so a second one
    continues where the first stopped. With `drop_last` the rest of an epoch that fills no batch is skipped.
    """

    dataset: Sequence[dict[str, Any]]
    batch_size: int
    shuffle: bool = True
    seed: int = 1
    drop_last: bool = True

    def __post_init__(self) -> None:
        num_rows = len(self.dataset)
        if not 1 <= self.batch_size <= num_rows:
            raise ValueError(
                f"batch_size must lie in 1..{num_rows}, the rows of the dataset: got {self.batch_size}. "
                "Lower train_dataset.batch_size or use more data."
            )
        self._epoch_end = length_of_epoch(num_rows, batch_size=self.batch_size, drop_last=self.drop_last)
        self._epoch = self._position = 0
        self._order: list[int] = []
        self._move_to(0, 0)

    def __len__(self) -> int:
        return -(-self._epoch_end // self.batch_size)

    def __iter__(self) -> Iterator[list[dict[str, Any]]]:
        while True:
            if self._position >= self._epoch_end:
                self._move_to(self._epoch + 1, 0)
            epoch, start = self._epoch, self._position
            self._position = min(start + self.batch_size, self._epoch_end)
            indices = self._order[start : self._position]
            yield [self.fetch(PromptId(epoch, index)) for index in indices]

    def fetch(self, prompt_id: PromptId) -> dict[str, Any]:
        """Return the row of a prompt; the cursor does not matter."""
        if prompt_id.epoch < 0:
            raise ValueError(
                f"a prompt must be of this loader to be fetched: got {prompt_id}, which was submitted without a name. "
                "Give such rows a prompt_id, or wait for them before a checkpoint is taken."
            )
        at = getattr(self.dataset, "at", None)  # rows of a mixture differ between epochs
        row = self.dataset[prompt_id.index] if at is None else at(prompt_id.epoch, prompt_id.index)
        return {**row, "prompt_id": prompt_id}

    def source_of(self, prompt_id: PromptId) -> str | None:
        """Return the name of the source of a prompt in a mixture; None for one that is not of a mixture."""
        if isinstance(self.dataset, Mixture) and prompt_id.epoch >= 0:
            return self.dataset.source_of(prompt_id.index)
        return None

    def state_dict(self) -> dict[str, int]:
        """Return the cursor: prompts before it were yielded."""
        return {"epoch": self._epoch, "position": self._position, **self._identity, "dataset_checksum": self._checksum}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Move to a saved cursor. Raises ConfigError if the order differs; rows that differ are a warning."""
        for key, ours in {"mixture": None, **self._identity}.items():
            if (saved := state.get(key)) != ours:
                raise ConfigError(
                    f"{key} must be {saved}, as when the cursor was saved: got {ours}. "
                    "Resume with the configuration and the data of the original run."
                )
        if (saved := state.get("dataset_checksum", self._checksum)) != self._checksum:
            logger.warning(
                "dataset_checksum should be %d, as when the cursor was saved: got %d, so rows have changed. "
                "Resume with the data of the original run, unless only what no prompt depends on has changed.",
                saved,
                self._checksum,
            )
        self._move_to(state["epoch"], state["position"])

    @property
    def _identity(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "dataset_size": len(self.dataset),
            "batch_size": self.batch_size,
            "shuffle": self.shuffle,
            "drop_last": self.drop_last,
            **({"mixture": self.dataset.layout} if isinstance(self.dataset, Mixture) else {}),
        }

    @functools.cached_property
    def _checksum(self) -> int:
        """Checksum of all rows, which is computed here for data sets that do not have it."""
        if (known := getattr(self.dataset, "checksum", None)) is not None:
            return int(known)
        rows: Iterable[Any] = (self.dataset[index] for index in range(len(self.dataset)))
        if with_format := getattr(self.dataset, "with_format", None):  # of `datasets`: decode and transform nothing
            rows = (row.to_pylist()[0] for row in with_format("arrow"))
        return checksum_of(np.fromiter(map(digest_of_row, rows), np.int64))

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._order = order_of_epoch(len(self.dataset), epoch=epoch, seed=self.seed, shuffle=self.shuffle)


def sft_batches(
    loader: PromptLoader,
    pad_token_id: int,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    parallel: str = "",
    processor: Any = None,
) -> Iterator[TensorDict]:
    """Yield this rank's share of each global batch of demonstrations or pairs: the same on any number of ranks.

    A batch of pairs, which are counted as one row each, has the chosen answer in row 2i and the rejected one in 2i + 1,
    and the pair's `group_index`. Shares have about equal tokens, so not equally many rows: ranks wait for the one with
    the most. Without `drop_last`, the last share of an epoch may have no rows. `rank` and `world_size` default to
    torchrun's; `parallel` is the model's (`config.model.parallel`), since the ranks of a replica train on the same
    rows. `processor` makes patches of the images of rows that have some.
    """
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world_size = int(os.environ.get("WORLD_SIZE", "1")) if world_size is None else world_size
    if parallel:
        sizes = ParallelSizes.from_str(parallel)
        rank, world_size = sizes.data_rank(rank), sizes.data
    if loader.batch_size < world_size:
        raise ValueError(
            f"batch_size must be at least the number of shares: got {loader.batch_size} and {world_size}. Raise it."
        )
    for rows in loader:  # every rank reads them all: 7 ms for 128 rows of 1,800 tokens
        answers = [row.get("pair", [row]) for row in rows]
        lengths = [sum(len(answer["input_ids"]) for answer in both) for both in answers]
        share = split_balanced(lengths, world_size)[rank]
        batch = sft_collate([answer for index in share for answer in answers[index]], pad_token_id, processor)
        if "pair" in rows[0]:
            batch["group_index"] = torch.arange(len(batch)) // 2  # micro-batches keep a pair together
        yield batch


def sft_collate(rows: list[dict[str, Any]], pad_token_id: int = 0, processor: Any = None) -> TensorDict:
    """Pad rows of `{"input_ids", "loss_mask"}`, and images, on the right: the `collate_fn` of a torch DataLoader."""
    lengths = torch.tensor([len(row["input_ids"]) for row in rows], dtype=torch.int64)
    attention_mask = torch.arange(max(lengths.tolist(), default=1)) < lengths[:, None]
    batch = {"attention_mask": attention_mask}
    for key, absent in (("input_ids", pad_token_id), ("loss_mask", 0)):
        batch[key] = torch.full(attention_mask.shape, absent, dtype=torch.int64)
        values = np.concatenate([np.empty(0, np.int64), *(row[key] for row in rows)])
        if values.dtype.kind != "i":
            raise ValueError(f"{key} of a row must be integers: got {values.dtype}. Correct the data set.")
        batch[key][attention_mask] = torch.from_numpy(values)
    if rows and "images" in rows[0]:
        if processor is None:
            raise ValueError("processor must be given for rows with images: got None. Pass load_image_processor(...).")
        images = [process_images(processor, map(decode_image, row["images"])) for row in rows]
        batch["pixel_values"] = pad_sequence([patches.pixel_values for patches in images], batch_first=True)
        batch["image_grid_thw"] = pad_sequence([patches.grid_thw for patches in images], batch_first=True)
    return TensorDict(batch, batch_size=[len(rows)])


class Mixture(Sequence[Row]):
    """Rows of `parts`, one part after the other; an epoch is as long as all of them together.

    Part i has a share `weights[i] / sum(weights)` of it, to the nearest row; without weights, all its rows. `names` of
    parts are their numbers unless given.
    """

    checksum: int
    layout: int
    """A digest that differs between mixtures with different rows at an index."""

    def __init__(
        self, parts: Sequence[Rows], weights: Sequence[float] | None, seed: int, names: Sequence[str] = ()
    ) -> None:
        self._parts, self._seed = parts, seed
        self._names = names or [str(number) for number in range(len(parts))]
        sizes = [len(part) for part in parts]
        ends = [*accumulate(sizes if weights is None else weights)]
        self._starts = [0, *(round(sum(sizes) * end / ends[-1]) for end in ends)]
        if idle := [i for i, (start, end) in enumerate(pairwise(self._starts)) if start == end]:
            raise ValueError(
                f"every source of a mixture must give rows to an epoch of {sum(sizes)}: got none of source {idle[0]} "
                f"with the weights {weights}. Raise its weight, or leave it out."
            )
        self.layout = int(digest_of(repr((sizes, self._starts)).encode())[:12], 16)
        checksums = [(part.checksum, start) for part, start in zip(parts, self._starts, strict=False)]
        self.checksum = int(digest_of(repr(checksums).encode())[:12], 16)

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.at(0, number) for number in range(len(self))[index]]
        return self.at(0, range(len(self))[index])

    def at(self, epoch: int, index: int) -> Row:
        """Return the row at an index of an epoch."""
        which = self._which(index)
        part, start, end = self._parts[which], self._starts[which], self._starts[which + 1]
        if end - start == len(part):
            return part[index - start]
        times, position = divmod(epoch * (end - start) + index - start, len(part))
        draw = random.Random(f"mixture-{self._seed}-{which}-{times}")
        # A step that shares no factor with the length meets every row once.
        steps = iter(lambda: draw.randrange(1, len(part) + 1), 0)
        step = next(step for step in steps if math.gcd(step, len(part)) == 1)
        return part[(draw.randrange(len(part)) + step * position) % len(part)]

    def source_of(self, index: int) -> str:
        """Return the name of the part that gives the row at an index, of any epoch."""
        return self._names[self._which(index)]

    def _which(self, index: int) -> int:
        return bisect_right(self._starts, index) - 1


def other_sources(config: DatasetConfig) -> list[DatasetConfig]:
    """Return the blocks of the sources that a data set is mixed with."""
    own = {key: value for key, value in vars(config).items() if key not in _NOT_INHERITED}
    given = [{key: value for key, value in vars(block).items() if value is not None} for block in config.mixed_with]
    return [DatasetConfig(**{**own, "mixed_with": [], **keys}) for keys in given]


def names_of(config: DatasetConfig) -> list[str]:
    """Return the names of the sources of a mixture in metrics: the end of each path, and its `config_name`, in letters,
    digits and `_`; with a number from the second of a name on."""
    names: list[str] = []
    for source in (config, *other_sources(config)):
        file = re.split("[/:]", source.path.partition("?")[0].rstrip("/"))[-1]
        words = [file.removesuffix(next(filter(file.endswith, SUFFIXES), "")), source.config_name or ""]
        name = "_".join(filter(None, (re.sub(r"\W+", "_", word).strip("_") for word in words))) or "source"
        alike = (name, *(f"{name}_{number}" for number in range(2, len(names) + 2)))
        names.append(next(candidate for candidate in alike if candidate not in names))
    return names


def weights_of(config: DatasetConfig) -> list[float] | None:
    """Return the weights of a mixture, None if all rows are taken once."""
    weights = [config.weight, *(block.weight for block in config.mixed_with)]
    return None if None in weights else [weight for weight in weights if weight is not None]
