"""Evaluates a model on a data set: samples are stored in the run folder as they arrive, and measured from there.

`rollouts/greedy` and `rollouts/sampled` have the rows, as in training. Invariants: a prompt with stored samples is not
sampled again by the same command; all samples are of one version of the weights.
"""

# R samples (runs of the workflow), P prompts

import copy
import itertools
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import torch
import yaml

from arealite.api.cli_args import EvalConfig, to_yaml
from arealite.api.errors import EpisodeError
from arealite.api.io_struct import PromptId
from arealite.api.run_folder import OF_LAUNCHER, RunFolder
from arealite.api.workflow_api import KEYS_OF_ROWS, RolloutWorkflow
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.rollout.account.rollout_file import read_rows
from arealite.rollout.account.store import RolloutStore
from arealite.rollout.evaluation import pass_metrics, sample_metrics
from arealite.rollout.prompts import Episode, Keep, Row
from arealite.trainer.step_line import compact
from arealite.utils import stop
from arealite.utils.files import empty_folder, file_lock, reading, require_object

logger = logging.getLogger("arealite.evaluation")

_LOCK_TIMEOUT_S = 5.0
_ASKED = ("seed", "model", "tokenizer_path", "valid_dataset", "reward", "gconfig", "eval_gconfig")
"""Keys that define the evaluation; samples stored under other values are moved aside."""
_STORE_EVERY_S = 5.0  # a killed command repeats the samples of this time
_EPOCHS = {"greedy": 0, "sampled": 1}  # epochs of prompt ids: each prompt has a seed per mode


class Evaluation:
    """The samples of an evaluation. As a context it locks the run folder, and stops on a signal."""

    def __init__(self, config: EvalConfig, dataset: Sequence[Row]) -> None:
        self._config, self._dataset = config, dataset
        self._run = RunFolder(config.stats_logger)
        self._group_sizes = {"greedy": 1, "sampled": config.gconfig.n_samples}
        self._held = ExitStack()
        self.solved: list[int] = []
        """Number of prompts with 0, 1, ... correct samples; empty unless rewards are 0 or 1."""

    def __enter__(self) -> Self:
        """Lock the run folder, and move the samples of another evaluation aside."""
        self._held.enter_context(file_lock(self._run.trainer_lock, timeout_s=_LOCK_TIMEOUT_S))
        with reading(self._run.config, yaml.YAMLError):
            then = require_object(yaml.safe_load(self._run.config.read_text())) if self._run.config.exists() else {}
        now = yaml.safe_load(to_yaml(self._config))
        if any(then.get(key) != now[key] for key in _ASKED):
            empty_folder(self._run.path, keep=OF_LAUNCHER)
        self._store = RolloutStore(self._run.rollouts)
        self._held.callback(self._store.close)
        self._held.enter_context(stop.obeying())
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def run(self, name: str, rollout: RemoteInferenceEngine, workflow: RolloutWorkflow) -> dict[str, float]:
        """Sample the prompts without stored samples of mode `name` (greedy or sampled); return metrics of all."""
        path, size = self._run.rollouts / name, self._group_sizes[name]
        done = {group[0]["prompt_id"] for group in _groups(path, size)}
        prompts = [{**row, "prompt_id": PromptId(_EPOCHS[name], i)} for i, row in enumerate(self._dataset)]
        left = [row for row in prompts if str(row["prompt_id"]) not in done]
        if len(left) + len(done) > len(prompts):
            raise EpisodeError(
                f"{path} must have samples of the {len(prompts)} prompts of the data only: got {len(done)} prompts, "
                f"of which {len(prompts) - len(left)} are in it. The data has changed: take another trial_name."
            )
        if done:
            print(f"{name}: {len(done)} of {len(self._dataset)} prompts have kept samples in {path}", flush=True)

        if left:
            self._compare_models(rollout)
            with self._keeping(name) as keep:
                rollout.evaluate_each(left, workflow, keep)
        metrics = self._measure(name, path, size)
        print(f"{name}: {', '.join(f'{key} {compact(value)}' for key, value in metrics.items())}", flush=True)
        return {f"{name}/{key}": value for key, value in metrics.items()}

    @contextmanager
    def _keeping(self, name: str) -> Iterator[Keep]:
        """Yield the function that stores episodes, in files of a few seconds each."""
        waiting: list[Episode] = []
        written_s = -math.inf

        def store() -> None:
            if waiting:
                self._store.append(name, waiting, None)
                waiting.clear()

        def keep(episode: Episode) -> None:
            nonlocal written_s
            kept = copy.copy(episode)
            kept.trajectory = episode.trajectory.exclude("kept_ids", "kept_counts")  # evaluations compute no ratios
            waiting.append(kept)
            if time.monotonic() - written_s > _STORE_EVERY_S:
                store()
                written_s = time.monotonic()

        try:
            yield keep
        finally:
            store()
            self._store.flush()

    def _compare_models(self, rollout: RemoteInferenceEngine) -> None:
        """Warn about servers that report another model than the configured one."""
        path = self._config.model.path
        for server in rollout.servers.servers:
            if server.facts.model is not None and Path(server.facts.model).name != Path(path).name:
                logger.warning("%s serves %s: the report will call it %s", server.address, server.facts.model, path)

    def _measure(self, name: str, path: Path, size: int) -> dict[str, float]:
        measured: dict[str, list[tuple[float, dict[str, float]]]] = {}
        versions: set[int] = set()
        for group in _groups(path, size):
            of_group = [(rows[0]["reward"], _numbers(rows)) for rows in _samples(group).values()]
            measured[group[0]["prompt_id"]] = of_group
            for line in group:
                versions |= {version for version, mask in zip(line["versions"], line["loss_mask"]) if mask}
        if not measured:
            raise EpisodeError(
                f"at least one of {len(self._dataset)} prompts must be answered: got none ({name}). Look at the "
                "warnings above."
            )
        if len(versions) > 1:
            raise EpisodeError(
                f"an evaluation must use one version of the weights: got {sorted(versions)} in {path}. Use servers "
                "that nobody trains, and another trial_name."
            )
        # Sort, so that sums do not depend on the order of completions.
        samples = [sample for _, of_group in sorted(measured.items()) for sample in of_group]
        rewards_R = [reward for reward, _ in samples]
        keys = samples[0][1].keys()
        tensors = {key: torch.tensor([numbers[key] for _, numbers in samples], dtype=torch.float64) for key in keys}
        num_groups, num_prompts = len(measured), len(self._dataset)
        group_index_R = torch.arange(num_groups).repeat_interleave(size)
        metrics = sample_metrics(torch.tensor(rewards_R).double(), group_index_R, tensors, num_prompts)
        if name == "sampled" and "accuracy" in metrics:
            right_P = [int(sum(rewards_R[i : i + size])) for i in range(0, len(rewards_R), size)]
            right_P += [0] * (num_prompts - num_groups)
            self.solved = [Counter(right_P)[c] for c in range(size + 1)]
            metrics |= pass_metrics(right_P, size, self._config.pass_at_k or ())
        elif name == "sampled":
            logger.warning("pass@k is left out: it needs rewards of 0 and 1 that are no weighted sums.")
        return metrics


def _groups(path: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each prompt, which are stored at once."""
    for prompt_id, rows in itertools.groupby(read_rows(path), key=lambda row: row["prompt_id"]):
        group = list(rows)
        assert len(_samples(group)) == size, f"{path} must have {size} samples of {prompt_id}: got {len(group)} rows"
        yield group


def _samples(group: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each sample of a group."""
    samples: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in group:
        samples[line["sample"]].append(line)
    return samples


def _numbers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of a sample: means over its rows, and truncated_ratio if its rows have `no_eos`."""
    own = [key for key, value in rows[0]["more"].items() if not isinstance(value, list)]
    numbers = {key: sum(row["more"][key] for row in rows) / len(rows) for key in own if key not in KEYS_OF_ROWS}
    numbers["completion_tokens"] = sum(sum(row["loss_mask"]) for row in rows)
    if "no_eos" in rows[0]["more"]:
        numbers["truncated_ratio"] = max(row["more"]["no_eos"] for row in rows)
    return numbers
