"""The servers of a run: our own, which launchers start and stop, and those of others."""

import os

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig
from arealite.api.errors import ConfigError
from arealite.utils.network import addresses_in
from arealite.utils.processes import SERVER_ADDRS_VARIABLE


def foreign_servers(config: BaseExperimentConfig) -> list[str]:
    """Return the addresses of servers that this run neither starts nor stops."""
    if config.rollout is None:
        return []
    try:
        return config.rollout.server_addrs or addresses_in(os.environ.get(SERVER_ADDRS_VARIABLE, ""))
    except ValueError as error:
        raise ConfigError(f"{SERVER_ADDRS_VARIABLE} must name servers: {error}") from error


def num_own_servers(config: BaseExperimentConfig, mode: AllocationMode) -> int:
    """Return the number of servers that the launcher starts."""
    if mode.takes_turns and foreign_servers(config):
        raise ConfigError(
            f"{SERVER_ADDRS_VARIABLE} must be empty with allocation_mode={mode}, whose servers are ours: got "
            f"{', '.join(foreign_servers(config))}. Unset it, or write '+' in allocation_mode."
        )
    if config.rollout is None:
        if mode.gen_dp_size > 0:
            raise ConfigError(
                f"allocation_mode must name trainers only for an experiment without servers, such as supervised "
                f"fine-tuning: got {mode}. Write allocation_mode={mode.train}."
            )
        return 0
    if foreign_servers(config) or config.rollout.replay_from or mode.is_colocated:
        return 0
    if mode.gen_dp_size == 0:
        raise ConfigError(
            f"allocation_mode must name servers for reinforcement learning: got {mode}. "
            f"Write e.g. lite.d1+{mode}, or give rollout.server_addrs."
        )
    has_one_gpu = not config.server_kind.gpus_flag
    if mode.gen_pp_size > 1 or (has_one_gpu and mode.gen_tp_size > 1):
        limits = "p1t1" if has_one_gpu else "p1"
        raise ConfigError(f"servers of {mode.gen_backend} must have {limits} in allocation_mode: got {mode.gen}.")
    return mode.gen_dp_size
