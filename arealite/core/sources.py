"""Sources of a master's batches with one interface: episodes on servers, or rows of a data set."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from tensordict import TensorDict

from arealite.api.cli_args import BaseExperimentConfig, GenerationHyperparameters
from arealite.api.errors import ConfigError
from arealite.api.io_struct import FinetuneSpec
from arealite.api.workflow_api import RolloutWorkflow, runs_of
from arealite.core.batch import RemoteBatch
from arealite.core.workers import Workers
from arealite.dataset import load_datasets
from arealite.dataset.loader import PromptLoader, sft_batches
from arealite.engine.metrics import MaskedMetrics, of_workflow
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.rollout.trajectory import assemble_batch, has_spread
from arealite.trainer.evaluator import Evaluator
from arealite.utils.frequency import Frequency
from arealite.weights.publish import publish_weights

MakeWorkflow = Callable[[GenerationHyperparameters, Any], RolloutWorkflow]
"""`(gconfig, tokenizer) -> workflow`, for training and for evaluations."""


class Episodes:
    """Batches of episodes from servers that get the weights of the published role."""

    rollout: RemoteInferenceEngine
    """Set by `start`."""

    def __init__(self, config: Any, make_workflow: MakeWorkflow | None, tokenizer: Any) -> None:
        if make_workflow is None:
            raise ConfigError("make_workflow must be given for a graph that generates: got None. Pass one to Master.")
        self._config = config
        self.dataloader, self._valid_dataset, self.ft_spec = _loaded(config, tokenizer)
        self._make_workflow = functools.partial(make_workflow, config.gconfig, tokenizer)
        self._workflow = self._make_workflow()
        self._eval_workflow = make_workflow(config.eval_gconfig, tokenizer)
        self._should_accept = has_spread if config.actor.dynamic_sampling else None

    def start(self, cleanup: ExitStack, workers: Workers) -> None:
        """Connect to the servers."""
        for workflow in (self._workflow, self._eval_workflow):
            cleanup.callback(getattr(workflow, "close", lambda: None))
        clients = workers.rollouts(self._make_workflow, self._should_accept)
        if clients is not None:
            cleanup.callback(clients.close)
        self._scatter = workers.scatter
        self.rollout = RemoteInferenceEngine(self._config.rollout, hand_out=self._hand_out, clients=clients)
        self.rollout.initialize(None, self.ft_spec)
        cleanup.callback(self.rollout.destroy)
        self.evaluator = Evaluator(self._config.evaluator, self.ft_spec, self._valid_dataset, self._eval_workflow)

    def _hand_out(self, trajectories: list[TensorDict]) -> RemoteBatch:
        per_row = [key for key, value in trajectories[0].items() if value.dim() == 1]
        batch = assemble_batch([one.select(*per_row) for one in trajectories])
        remote, runs, metrics = self._scatter(trajectories), runs_of(batch, batch["group_index"]), MaskedMetrics()
        metrics.add(torch.ones_like(runs.first_rows), of_workflow(batch, runs))
        remote.metrics = metrics.reduce()
        return remote

    @property
    def clocks(self) -> dict[str, Any]:
        """State of a checkpoint besides engines and data loader."""
        return {"evaluator": self.evaluator}

    def collect(self) -> Any:
        """Return the next batch of bounded staleness."""
        return self.rollout.prepare_batch(self.dataloader, self._workflow, self._should_accept)

    def evaluate(self, engine: Any, step: int, *, force: bool = False) -> Mapping[str, float] | None:
        """Evaluate the weights after `step` updates if due or forced."""
        return self.evaluator.evaluate(self.rollout, step, force=force)

    def publish(self, engine: Any, version: int) -> None:
        """Send the weights of an engine to every server."""
        publish_weights(engine, self.rollout, version=version)

    def metrics(self) -> Mapping[str, float]:
        """Return the counts of the rollout engine."""
        return self.rollout.metrics()


class Rows:
    """Batches of a data set for supervised training, without servers."""

    rollout = None

    def __init__(self, config: BaseExperimentConfig, make_workflow: MakeWorkflow | None, tokenizer: Any) -> None:
        drops, pad = config.train_dataset.drop_last, tokenizer.pad_token_id
        self.dataloader, valid_dataset, self.ft_spec = _loaded(config, tokenizer, drops_last=drops)
        self._batches = sft_batches(self.dataloader, pad)
        self._valid_batch: TensorDict | None = None
        if valid_dataset is not None:
            self._valid_batch = next(sft_batches(PromptLoader(valid_dataset, len(valid_dataset), shuffle=False), pad))
        self._evaluation = Frequency(config.evaluator, self.ft_spec.steps_per_epoch, is_first_due=True)

    def start(self, cleanup: ExitStack, workers: Workers) -> None:
        """Keep the function that sends a batch to the workers."""
        self._hand_out = workers.scatter

    @property
    def clocks(self) -> dict[str, Any]:
        """State of a checkpoint besides engines and data loader."""
        return {"evaluation": self._evaluation}

    def collect(self) -> Any:
        """Return the next rows."""
        return self._hand_out(next(self._batches))

    def evaluate(self, engine: Any, step: int, *, force: bool = False) -> Mapping[str, float] | None:
        """Measure the loss on held-out rows if due or forced."""
        if self._valid_batch is None or not self._evaluation.check(force=force):
            return None
        return {"eval/loss": engine.call("evaluate_lm", self._hand_out(self._valid_batch))}

    def publish(self, engine: Any, version: int) -> None:
        """Set the version of the weights; there are no servers."""
        engine.set_version(version)

    def metrics(self) -> Mapping[str, float]:
        """Return no metrics: there are no episodes."""
        return {}


def _loaded(
    config: BaseExperimentConfig, tokenizer: Any, *, drops_last: bool = False
) -> tuple[PromptLoader, Any, FinetuneSpec]:
    """Return the loader of training rows, the held-out rows if any, and the length of training."""
    train_dataset, valid_dataset = load_datasets(config, tokenizer)
    data = config.train_dataset
    loader = PromptLoader(train_dataset, data.batch_size, data.shuffle, config.seed, data.drop_last)
    epochs, steps = config.total_train_epochs, config.total_train_steps
    return loader, valid_dataset, FinetuneSpec(epochs, len(train_dataset), data.batch_size, steps, drops_last)
