"""What a config would need and take on devices of a kind, and the splits of its devices that take least."""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig, TrainEngineConfig
from arealite.api.errors import ConfigError
from arealite.planner.cost import estimated, scenario, tokens_of, training_s
from arealite.planner.memory import ModelShape
from arealite.planner.needs import Needs, longest_sequence, needs_of
from arealite.planner.predict import Moments, Step, moments, predict
from arealite.planner.scenario import Scenario

_SIZES = (1, 2, 4, 8)
_NUM_STEPS = 8  # of a simulation
_NUM_UNITS = 16  # devices are given to servers and trainer in so many parts


@dataclass(frozen=True)
class Candidate:
    """A config on devices of a kind."""

    needs: Needs
    step: Step
    asked: Scenario | None = None  # of a config with servers
    lengths: Moments | None = None  # of its completions


@dataclass(frozen=True)
class Device:
    """Where a run is planned: the model, the GPU's profile, and the work at no cost."""

    shape: ModelShape
    others: Mapping[str, ModelShape]  # of roles whose model is another
    positions: float  # of the model: its longest sequence
    gpu: Mapping[str, float]
    work: Scenario

    def needs(self, config: BaseExperimentConfig, longest: int | None = None) -> Needs:
        """Return the memory that a config needs, for sequences of full length or of `longest` tokens."""
        if longest is None:
            prompt = config.train_dataset.max_length or self.work.prompt
            longest = longest_sequence(config, self.positions, prompt)
        return needs_of(config, self.shape, longest, self.others)

    def judge(self, config: BaseExperimentConfig, lengths: Moments | None = None) -> Candidate:
        """Return what a config needs and takes; ConfigError for servers whose weights don't fit."""
        needs = self.needs(config)
        if not isinstance(config, GRPOConfig):
            tokens = tokens_of(self.work)
            num_tokens, context = tokens.mean() * config.train_dataset.batch_size, (tokens**2).mean() / tokens.mean()
            seconds = training_s(config, self.shape, self.gpu, num_tokens=num_tokens, context=context)
            return Candidate(needs, Step(seconds, {"trainer": seconds}, num_tokens, seconds))
        costs, bound = estimated(config, self.shape, self.gpu, self.work), config.rollout.max_head_offpolicyness
        asked = scenario(config, costs, warm_up=bound + 2, steps=_NUM_STEPS, seed=1)
        if "|" in config.allocation_mode:  # one side rests while the other computes
            asked = replace(asked, bound=0)
        lengths = lengths or moments(asked)
        return Candidate(needs, predict(asked, lengths), asked, lengths)


def splits(device: Device, config: GRPOConfig, can_divide: Callable[[ParallelSizes], bool]) -> list[Candidate]:
    """Return the ways to split the cluster's devices that fit, the fastest first: for each size of a server and number
    of servers, the fastest layout of the trainer among those that divide the model least."""
    mode, cluster = AllocationMode.from_str(config.allocation_mode), config.cluster
    num_devices = cluster.n_nodes * cluster.n_gpus_per_node or mode.num_devices
    per_node, found, lengths = cluster.n_gpus_per_node or num_devices, list[Candidate](), None
    for tensor in (size for size in _SIZES if size <= per_node and (size == 1 or config.server_kind.gpus_flag)):
        unit = max(1, num_devices // _NUM_UNITS // tensor) * tensor
        for serving in range(unit, num_devices, unit):
            gen, fitting = ParallelSizes(data=serving // tensor, tensor=tensor), list[Candidate]()
            for sizes in _layouts(num_devices - serving, device.shape, per_node):
                if fitting and sizes.block_size > 2 * fitting[0].needs.mode.train.block_size:
                    break
                if not can_divide(sizes):
                    continue
                with contextlib.suppress(ConfigError):
                    one = device.judge(_with(config, AllocationMode(mode.gen_backend, gen, sizes, "+")), lengths)
                    lengths = one.lengths
                    fitting += [one] if one.needs.fit(device.gpu["memory"]) else []
            found += sorted(fitting, key=lambda one: one.step.step_s)[:1]
    return sorted(found, key=lambda one: one.step.step_s)


def _layouts(ranks: int, shape: ModelShape, per_node: int) -> Iterator[ParallelSizes]:
    """Yield how so many ranks may divide a model, into the fewest parts first."""
    experts = [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or shape.expert_parameters]
    every = sorted(itertools.product(_SIZES, _SIZES, _SIZES, experts), key=lambda sizes: math.prod(sizes[:3]))
    for tensor, context, stages, expert in every:
        block = tensor * context * stages
        if ranks % block == 0 and tensor <= per_node and stages <= shape.num_layers and expert <= ranks // stages:
            yield ParallelSizes(ranks // block, stages, tensor, context, expert)


def _with(config: GRPOConfig, mode: AllocationMode) -> GRPOConfig:
    """Return the config with another allocation, as far as the planner reads it."""
    changed = copy.copy(config)
    changed.allocation_mode = str(mode)
    is_plain = mode.train == ParallelSizes(data=mode.train.data)
    for key, block in vars(config).items():
        if isinstance(block, TrainEngineConfig):
            setattr(changed, key, block.new(parallel="" if is_plain else str(mode.train)))
    changed.rollout = config.rollout.new(num_servers=mode.gen_dp_size, servers_sleep=False)
    return changed
