"""What a device takes for serving and training a transformer, by its shape and a profile of the device, and the
scenario of a config at such costs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import yaml

from arealite.api.cli_args import BaseExperimentConfig, GRPOConfig
from arealite.api.errors import require
from arealite.planner.memory import ModelShape, kv_bytes_per_token, of_rank
from arealite.planner.scenario import GroupLengths, Scenario, ServerProfile
from arealite.utils.files import reading

PROFILES = Path(__file__).with_name("gpus.yaml")
_MAX_TOKENS = 256  # of a simulated completion: one simulated token stands for several of a longer one
_SLOTS = 256  # of a server whose config does not say
_NUM_DRAWN = 10_000  # lognormal lengths
_KEPT = ("overdue", "episode_timeout", "episode_retries", "request_timeout", "weight_update_timeout")


def load_gpu(name: str) -> dict[str, float]:
    """Return a profile by its name in gpus.yaml, or from a file with the same keys. Raises ConfigError or FileError."""
    known, file = yaml.safe_load(PROFILES.read_text(encoding="utf-8")), Path(name)
    names = sorted(known.keys() - {"usual"})
    if name in names:
        return dict(known[name])
    require(file.is_file(), f"--gpu must be {', '.join(names)} or a file: got {name}. Copy a profile of {PROFILES}.")
    with reading(file, yaml.YAMLError):
        found = {key: float(value) for key, value in yaml.safe_load(file.read_text(encoding="utf-8")).items()}
    wrong = sorted(known["h100"].keys() ^ found.keys())
    require(not wrong, f"{name} must have the keys of a profile and no other: got {wrong} wrong. See {PROFILES}.")
    return found


def server_profile(shape: ModelShape, gpu: Mapping[str, float], *, num_gpus: int, slots: int) -> ServerProfile:
    """Return what a server of so many GPUs costs. A decode step reads all weights and caches once."""
    flops, bandwidth = _flops_per_token(shape) / num_gpus, gpu["bandwidth"] * gpu["decode_bandwidth"]
    reduced = 2 * shape.num_layers * (num_gpus > 1)  # blocks whose outputs a server's GPUs sum
    kv_bytes = kv_bytes_per_token(shape, value_bytes=1, gpus=num_gpus) * gpu["value_bytes"]
    weights = shape.num_parameters * gpu["value_bytes"] / num_gpus
    free = gpu["server_share"] * gpu["memory"] - gpu["other_bytes"] - weights
    require(free > 0, f"a server's weights must fit its GPUs: got {-free / 1e9:.1f} GB too many on each. Raise t.")
    return ServerProfile(
        step_s=_read_parameters(shape) / num_gpus * gpu["value_bytes"] / bandwidth
        + gpu["step_s"]
        + reduced * gpu["all_reduce_s"],
        sequence_s=flops / (gpu["flops"] * gpu["decode_flops"]) / 2  # half of it passes while weights are read
        + gpu["sequence_s"]
        + reduced * 2 * shape.hidden * gpu["value_bytes"] / gpu["link"],
        context_s=kv_bytes / bandwidth,
        prefill_s=flops / (gpu["flops"] * gpu["prefill_flops"]),
        request_s=gpu["request_s"],
        slots=slots,
        cache_tokens=free / kv_bytes,
        bytes_per_s=gpu["network"] * gpu["network_share"],
        swap_s=gpu["swap_s"],
        round_trip_s=0.001,
    )


def _read_parameters(shape: ModelShape) -> int:
    """Return the parameters that a decode step reads: all but those of a lookup, also of experts."""
    return shape.num_parameters - (0 if shape.is_tied else shape.vocab * shape.hidden)


def _flops_per_token(shape: ModelShape) -> float:
    """Return the operations of a forward pass without attention: two per parameter that a token uses."""
    used = 3 * shape.num_layers * shape.hidden * shape.mlp  # of experts
    return 2.0 * (_read_parameters(shape) - max(0, shape.expert_parameters - used))


def training_s(
    config: BaseExperimentConfig, shape: ModelShape, gpu: Mapping[str, float], *, num_tokens: float, context: float
) -> float:
    """Return the seconds in which the ranks of a trainer compute a batch of so many tokens; `context` is the length of
    the sequence that a token is in, on average.

    Micro-batches wait for the weights that FSDP gathers, where these take longer than what is computed meanwhile; sums
    over t, and stages of p that wait for the first micro-batch and after the last, add to it. Not counted: what c and
    e send.
    """
    (_, block), mode = config.trained, config.allocation
    ranks = mode.train.world_size if mode else 1
    sizes, mine, shards = of_rank(block, shape, ranks)
    more = (getattr(block, "proximal", "") == "recompute") + config.has_reference  # forward passes
    num_passes = 3 + block.gradient_checkpointing + more
    micro = num_tokens / sizes.data / block.mb_spec.n_mbs
    micro = min(micro, block.mb_spec.max_tokens_per_mb or micro)
    attended = 2 * shape.num_layers * shape.num_heads * shape.head_dim * context  # half of it is masked
    flops = _flops_per_token(shape) + attended
    seconds = micro * (flops * num_passes / (gpu["flops"] * gpu["mfu"]) + gpu["train_token_s"]) / sizes.block_size
    # A layer sums its outputs over t twice in each direction, and as often where it is computed again.
    summed = 2 * (num_passes - 1) * 2 * (sizes.tensor - 1) / sizes.tensor * micro / sizes.context * shape.hidden
    seconds += summed * shape.num_layers / sizes.pipeline * gpu["value_bytes"] / gpu["link"]
    per_node = config.cluster.n_gpus_per_node or ranks
    bandwidth = gpu["link"] if ranks <= per_node else gpu["network"] * gpu["network_share"]
    gathered = 0.0 if sizes.pipeline > 1 else mine.num_parameters * gpu["value_bytes"] * (2 + more)
    gathered_s = gathered * (shards - 1) / shards / bandwidth
    num_micro = num_tokens / sizes.data / micro
    return gpu["train_s"] + (num_micro + sizes.pipeline - 1) * max(seconds, gathered_s)


def lognormal(lengths: Sequence[float], seed: int) -> Scenario:
    """Return work that costs nothing yet: prompts of so many tokens, completions with this mean and sigma."""
    prompt, mean, sigma = lengths
    drawn = np.random.default_rng(seed).lognormal(np.log(mean) - sigma**2 / 2, sigma, _NUM_DRAWN)
    return Scenario(lengths=GroupLengths(drawn.round().astype(int).tolist(), 1, seed), prompt=round(prompt))


def tokens_of(work: Scenario, longest: float = np.inf) -> Any:
    """Return the tokens of sequences, with completions cut at `longest`."""
    return work.prompt + np.minimum(cast("GroupLengths", work.lengths).tokens, longest)


def estimated(config: GRPOConfig, shape: ModelShape, gpu: Mapping[str, float], work: Scenario) -> Scenario:
    """Return what work of known lengths costs on GPUs of a kind."""
    tokens = tokens_of(work, config.gconfig.max_new_tokens)
    num_tokens = float(tokens.mean()) * config.train_dataset.batch_size * config.gconfig.n_samples
    context = float((tokens**2).mean() / tokens.mean())
    seconds = training_s(config, shape, gpu, num_tokens=num_tokens, context=context)
    num_gpus = config.allocation.gen_tp_size if config.allocation else 1
    return replace(
        work,
        server=server_profile(shape, gpu, num_gpus=num_gpus, slots=slots_of(config)),
        train_s=gpu["train_s"],
        train_token_s=(seconds - gpu["train_s"]) / num_tokens * num_ranks_of(config),
        publish_s=gpu["publish_s"],
        weight_bytes=shape.num_parameters * gpu["value_bytes"],
    )


def scenario(config: GRPOConfig, costs: Scenario, **options: Any) -> Scenario:
    """Return what a config asks for at costs in tokens of the model and for one rank of the trainer; `options` are
    other fields of a scenario."""
    rollout, longest = config.rollout, config.gconfig.max_new_tokens
    grain, lengths = -(-longest // _MAX_TOKENS), cast("GroupLengths", costs.lengths)
    keys = {name: getattr(rollout, name) for name in _KEPT} | {"seed": options["seed"]}
    keys["pause_mode"] = "abort" if rollout.pause_mode == "abort" else "retract"
    return replace(
        costs,
        num_servers=rollout.num_servers or 1,
        server=replace(costs.server, grain=grain, cache_tokens=costs.server.cache_tokens / grain),
        batch_size=config.train_dataset.batch_size,
        group=config.gconfig.n_samples,
        bound=rollout.max_head_offpolicyness,
        concurrency=rollout.max_concurrent_rollouts,
        lengths=lambda prompt, sample: max(1, round(min(longest, lengths(prompt, sample)) / grain)),
        max_new_tokens=-(-longest // grain),
        prompt=max(2, round(costs.prompt / grain)),
        train_token_s=costs.train_token_s * grain / num_ranks_of(config),
        rollout=keys,
        **options,
    )


def num_ranks_of(config: GRPOConfig) -> int:
    """Return the ranks of the trainer."""
    return max(1, config.allocation.train_world_size) if config.allocation else 1


def slots_of(config: GRPOConfig) -> int:
    """Return the sequences that a server decodes together."""
    return config.lite.slots if config.rollout.backend == "lite" else _SLOTS
