"""Evaluates a model on a data set: servers' samples are kept in the run folder as they come, and measured from there.

`rollouts/greedy.jsonl` and `rollouts/sampled.jsonl` have a line per row, as in training. Invariants: a prompt all of
whose samples are kept is not asked again by the same command; one version of the weights has sampled them all.
"""

# R samples, each a run of the workflow, P prompts

import copy
import json
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
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
from arealite.rollout.account.store import RolloutStore
from arealite.rollout.episode import Episode
from arealite.rollout.evaluation import is_binary, pass_metrics, sample_metrics
from arealite.rollout.prompts import Row
from arealite.trainer.step_line import compact
from arealite.utils import stop
from arealite.utils.files import empty_folder, file_lock, reading

logger = logging.getLogger("arealite.evaluation")

_LOCK_TIMEOUT_S = 5.0
_ASKED = ("seed", "model", "tokenizer_path", "valid_dataset", "reward", "gconfig", "eval_gconfig")
"""Keys that say what is asked; samples that were kept under others are moved aside."""
_EPOCHS = {"greedy": 0, "sampled": 1}  # of prompt ids, so that every prompt has a seed for each


class Evaluation:
    """The samples of an evaluation; as a context it holds the run folder, and obeys an order to stop."""

    def __init__(self, config: EvalConfig, dataset: Sequence[Row]) -> None:
        self._config, self._dataset = config, dataset
        self._run = RunFolder(config.stats_logger)
        self._group_sizes = {"greedy": 1, "sampled": config.gconfig.n_samples}
        self._held = ExitStack()
        self.solved: list[int] = []
        """How many prompts have 0, 1, .. right ones among their samples; empty where rewards are not 0 and 1."""

    def __enter__(self) -> Self:
        """Lock the run folder, and move aside what is not of this evaluation."""
        self._held.enter_context(file_lock(self._run.trainer_lock, timeout_s=_LOCK_TIMEOUT_S))
        with reading(self._run.config, yaml.YAMLError):
            then = yaml.safe_load(self._run.config.read_text()) if self._run.config.exists() else {}
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
        """Let servers answer the prompts that lack samples called `name` (greedy or sampled); return metrics of all."""
        path, size = self._run.rollouts / f"{name}.jsonl", self._group_sizes[name]
        done = {group[0]["prompt_id"] for group in _whole_groups(path, size)}
        prompts = [{**row, "prompt_id": PromptId(_EPOCHS[name], i)} for i, row in enumerate(self._dataset)]
        left = [row for row in prompts if str(row["prompt_id"]) not in done]
        if len(left) + len(done) > len(prompts):
            raise EpisodeError(
                f"{path} must have samples of the {len(prompts)} prompts of the data only: got {len(done)} prompts, "
                f"of which {len(prompts) - len(left)} are in it. The data has changed: take another trial_name."
            )
        if done:
            print(f"{name}: {len(done)} of {len(self._dataset)} prompts have kept samples in {path}", flush=True)

        def keep(episode: Episode) -> None:
            kept = copy.copy(episode)
            kept.trajectory = episode.trajectory.exclude("kept_ids", "kept_counts")  # for ratios, which nobody needs
            self._store.append(name, [kept], None)

        if left:
            self._compare_models(rollout)
            rollout.evaluate_each(left, workflow, keep)
            self._store.flush()
        metrics = self._measure(name, path, size)
        print(f"{name}: {', '.join(f'{key} {compact(value)}' for key, value in metrics.items())}", flush=True)
        return {f"{name}/{key}": value for key, value in metrics.items()}

    def _compare_models(self, rollout: RemoteInferenceEngine) -> None:
        """Warn of servers that say they have loaded another model than the one whose tokenizer we use."""
        path = self._config.model.path
        for server in rollout.servers.servers:
            if server.facts.model is not None and Path(server.facts.model).name != Path(path).name:
                logger.warning("%s serves %s: the report will call it %s", server.address, server.facts.model, path)

    def _measure(self, name: str, path: Path, size: int) -> dict[str, float]:
        rewards_R: list[float] = []
        columns: dict[str, list[float]] = defaultdict(list)
        versions: set[int] = set()
        num_groups = 0
        for group in _whole_groups(path, size):
            num_groups += 1
            for rows in _samples(group).values():
                rewards_R.append(rows[0]["reward"])
                for key, value in _numbers(rows).items():
                    columns[key].append(value)
            for line in group:
                versions |= {version for version, mask in zip(line["versions"], line["loss_mask"]) if mask}
        if num_groups == 0:
            raise EpisodeError(
                f"at least one of {len(self._dataset)} prompts must be answered: got none ({name}). Look at the "
                "warnings above."
            )
        if len(versions) > 1:
            raise EpisodeError(
                f"an evaluation must use one version of the weights: got {sorted(versions)} in {path}. Use servers "
                "that nobody trains, and another trial_name."
            )
        tensors = {key: torch.tensor(values, dtype=torch.float64) for key, values in columns.items()}
        group_index_R = torch.arange(num_groups).repeat_interleave(size)
        num_prompts = len(self._dataset)
        metrics = sample_metrics(torch.tensor(rewards_R).double(), group_index_R, tensors, num_prompts)
        if name == "sampled" and is_binary(rewards_R):
            right_P = [int(sum(rewards_R[i : i + size])) for i in range(0, len(rewards_R), size)]
            right_P += [0] * (num_prompts - num_groups)
            self.solved = [Counter(right_P)[c] for c in range(size + 1)]
            metrics |= pass_metrics(right_P, size, self._config.pass_at_k or ())
        elif name == "sampled":
            logger.warning("pass@k is left out: it needs rewards of 0 and 1, and there are others.")
        return metrics


def _whole_groups(path: Path, size: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of each prompt, and cut off what a crash has left of the last one's."""
    group: list[dict[str, Any]] = []
    end = whole_end = 0
    if not path.exists():
        return
    with reading(path), path.open("rb") as lines:
        for text in lines:
            if not text.endswith(b"\n"):
                break
            group.append(line := json.loads(text))
            if (line["prompt_id"], line["row"]) != (group[0]["prompt_id"], len(group) - 1):
                raise ValueError(f"row {line['row']} of {line['prompt_id']} out of order")
            end += len(text)
            if len(group) == line["num_rows"]:
                if len(_samples(group)) != size:
                    raise ValueError(f"{len(_samples(group))} samples of {line['prompt_id']}, and not {size}")
                yield group
                group, whole_end = [], end
    os.truncate(path, whole_end)


def _samples(group: list[dict[str, Any]]) -> dict[int, list[dict[str, Any]]]:
    """Return the rows of each sample of a group."""
    samples: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in group:
        samples[line["sample"]].append(line)
    return samples


def _numbers(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the metrics of one sample: the mean of its rows' own, and whether one of them was cut off."""
    own = [key for key, value in rows[0]["more"].items() if not isinstance(value, list)]
    numbers = {key: sum(row["more"][key] for row in rows) / len(rows) for key in own if key not in KEYS_OF_ROWS}
    numbers["completion_tokens"] = sum(sum(row["loss_mask"]) for row in rows)
    return numbers | {"truncated_ratio": max(row["more"]["no_eos"] for row in rows)}
