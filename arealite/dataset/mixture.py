"""Several data sets as one: an epoch has as many rows of each as its weight asks for.

Invariant: the row at an index of an epoch is a pure function of sizes, weights and seed. A data set gives all
its rows once before it gives one again, over the epochs, so a small weight passes over all of them in time.
"""

import math
import random
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

from arealite.api.cli_args import DatasetConfig
from arealite.dataset.rows import Row, Rows, digest_of
from arealite.dataset.sources import SUFFIXES

_NOT_INHERITED = ("path", "weight", "config_name", "split")


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
