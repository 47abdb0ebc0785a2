"""The rollouts of a run on disk: one JSON line per row, and batches read back bit for bit as they were handed out.

Invariant: lines of one file are in the order in which batches were handed out, and a write that failed raises at the
next call, so a run never continues without its record. A line holds one row without its padding (batches that are read
back are padded to their longest row, with zeros): `sample` says which run of the group it belongs to, `row` and
`num_rows` its place in the episode, `segments` the texts of what was given and sampled in turn; `more` has the keys
beyond the usual ones, `dtypes` the types that are not the usual ones. Patches of images are left out, as they are a
thousand times the size of all else.
"""

import copy
import itertools
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.api.workflow_api import RolloutWorkflow
from arealite.rollout.episode import Episode
from arealite.rollout.prompts import Dataloader, Row, ShouldAccept
from arealite.rollout.trajectory import assemble_batch
from arealite.utils.files import iter_jsonl, reading, writing
from arealite.utils.tensors import concat_padded_tensors, real_entries

_FLUSH_S = 120.0  # deadline for writing what is queued
_NOT_STORED = "pixel_values"
_PER_TOKEN = ("input_ids", "loss_mask", "logprobs", "versions")
_DTYPES = {
    "input_ids": "int64",
    "attention_mask": "bool",
    "loss_mask": "int64",
    "logprobs": "float32",
    "versions": "int64",
    "rewards": "float32",
}


class RolloutStore:
    """Appends accepted episodes to files in `<run folder>/rollouts`; with `folder` None it drops them."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arealite-store")
        self._last: Future[None] = Future()  # of what was queued last
        self._last.set_result(None)
        self._num_batches: Counter[Path] = Counter()
        self._tokenizers: dict[int, tuple[Any, Any]] = {}

    def append(self, name: str, episodes: Sequence[Episode], trained_step: int | None) -> None:
        """Queue the samples for `<name>.jsonl` and return at once."""
        self.check()
        if self.folder is not None:
            path = self.folder / f"{name}.jsonl"
            self._last = self._thread.submit(self._write, path, list(episodes), trained_step, self._last)

    def flush(self) -> None:
        """Wait until everything is written, and raise what went wrong."""
        try:
            self._last.result(_FLUSH_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"{self.folder} must take the rollouts of a batch within {_FLUSH_S:g} s: it did not. "
                "Put cluster.fileroot on a faster disk."
            ) from error

    def trim(self, version: int) -> None:
        """Remove the files of this version and later ones, which an earlier process left."""
        for path in self.folder.glob("*step_*.jsonl") if self.folder is not None else ():
            if int(path.stem.rpartition("_")[2]) >= version:
                path.unlink()

    def check(self) -> None:
        if self._last.done():
            self._last.result()

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._thread.shutdown(wait=self._last.done())

    def _write(self, path: Path, episodes: list[Episode], step: int | None, previous: Future[None]) -> None:
        previous.result()  # nothing follows what could not be written
        batch = self._num_batches[path]
        self._num_batches[path] += 1
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                ending = f', "trained_step": {json.dumps(step)}, "batch": {batch}}}\n'
                for one in episodes:
                    lines = one.lines or lines_of(one, one.trajectory, self._tokenizer_of(one.prompt.workflow))
                    file.writelines(line + ending for line in lines)

    def _tokenizer_of(self, workflow: object) -> Any:
        """Return a copy of the workflow's tokenizer for this thread: a tokenizer must not serve two."""
        original = getattr(workflow, "tokenizer", None)
        if original is None:
            return None
        if id(original) not in self._tokenizers:
            self._tokenizers[id(original)] = (original, copy.deepcopy(original))  # kept, so that its id stays its own
        return self._tokenizers[id(original)][1]


def lines_of(one: Episode, trajectory: TensorDict, tokenizer: Any) -> list[str]:
    """Return the rows of an episode as JSON, without what is known when they are written; `read_batches` inverts it."""
    tensors = dict(sorted(trajectory.exclude(_NOT_STORED).items()))
    dtypes = {key: str(tensor.dtype).removeprefix("torch.") for key, tensor in tensors.items()}
    real = {key: real_entries(trajectory, key) for key in tensors}
    lines = []
    for number in range(num_rows := trajectory.batch_size[0]):
        row = {key: tensor[number] for key, tensor in tensors.items()}
        row |= {key: row[key][mask[number]] for key, mask in real.items() if mask is not None}  # no padding
        columns = {key: value.tolist() for key, value in row.items()}
        values = {
            "prompt_id": str(one.prompt_id),
            "row": number,
            "num_rows": num_rows,
            "sample": columns.get("sample_index", number),
            "attempt": one.attempt,
            "segments": tokenizer and _segments(tokenizer, columns["input_ids"], columns["loss_mask"]),
            **{key: columns[key] for key in _PER_TOKEN},
            "reward": columns["rewards"],
            "more": {key: value for key, value in columns.items() if key not in _DTYPES},
            "dtypes": {key: dtype for key, dtype in dtypes.items() if dtype != _DTYPES.get(key)},
            "server": ",".join(sorted(one.servers)),
        }
        lines.append(json.dumps(values).removesuffix("}"))
    return lines


class Replay:
    """Takes the executor's place on rank 0: returns the run's batches of the engine's version in their order."""

    def __init__(self, folder: str, engine: InferenceEngine) -> None:
        self._folder = RunFolder(folder).rollouts
        self._engine = engine
        self._left: dict[Path, deque[TensorDict]] = {}

    def submit(self, row: Row, workflow: RolloutWorkflow) -> None:
        """Start nothing: what became of the episode is stored."""

    def wait(self, count: int, timeout: float | None = None, should_accept: ShouldAccept | None = None) -> TensorDict:
        return self._next("step")

    def prepare_batch(
        self, dataloader: Dataloader, workflow: RolloutWorkflow, should_accept: ShouldAccept | None = None
    ) -> TensorDict:
        return self._next("step")

    def run_all(self, rows: Sequence[Row], workflow: RolloutWorkflow, *, is_evaluation: bool = False) -> TensorDict:
        """Return the next batch, or the next one that was evaluated."""
        return self._next("eval_step" if is_evaluation else "step")

    def _next(self, name: str) -> TensorDict:
        path = self._folder / f"{name}_{self._engine.get_version()}.jsonl"
        if path not in self._left:
            self._left[path] = deque(read_batches(path) if path.exists() else [])
        if not self._left[path]:
            raise ConfigError(
                f"{path} must hold each batch that the script asks for: got no more. "
                "Replay with the script and config of the run."
            )
        return self._left[path].popleft()


def read_batches(path: Path) -> list[TensorDict]:
    """Return the batches of a file in the order in which they were handed out."""
    batches: list[list[list[TensorDict]]] = []
    with reading(path, RuntimeError):  # of torch
        for line in iter_jsonl(path):
            if line["batch"] == len(batches):
                batches.append([])
            if line["row"] == 0:
                batches[-1].append([])
            batches[-1][-1].append(_row(line))
        found = [assemble_batch([concat_padded_tensors(rows) for rows in episodes]) for episodes in batches]
    if any("image_grid_thw" in batch for batch in found):
        raise ConfigError(f"a run that is replayed must have no images: got {path}, which lacks their patches.")
    return found


def _segments(tokenizer: Any, tokens: list[int], loss_mask: list[int]) -> list[dict[str, str]]:
    """Return the texts of a row, in turn what was given and what was sampled."""
    segments, start = [], 0
    for is_sampled, run in itertools.groupby(map(bool, loss_mask)):
        end = start + len(list(run))
        segments.append({"sampled" if is_sampled else "given": tokenizer.decode(tokens[start:end])})
        start = end
    return segments


def _row(line: Mapping[str, Any]) -> TensorDict:
    """Return the one row of a line as a trajectory."""
    values = {key: line[key] for key in _PER_TOKEN} | line["more"]
    values |= {"attention_mask": [1] * len(line["input_ids"]), "rewards": line["reward"]}
    dtypes = _DTYPES | line["dtypes"]
    row = {key: torch.tensor([value], dtype=getattr(torch, dtypes[key])) for key, value in values.items()}
    return TensorDict(row, batch_size=[1])
