"""The script of `arealite tinker`: a trainer and servers that clients of the Tinker API command.

Rank 0 serves the API; every rank runs what clients ask for, in order, until the run is stopped.
"""

import logging
import queue
import sys
from contextlib import ExitStack

import torch.distributed as dist

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.api.run_folder import RunFolder
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.planner.needs import context_of, positions_of
from arealite.tinker.api import KEY, Command, TinkerApi
from arealite.tinker.models import Models
from arealite.utils import heartbeat, stop
from arealite.utils.distributed import from_rank_0
from arealite.utils.files import write_atomically
from arealite.utils.secret import ensure_secret
from arealite.weights.publish import publish_weights

logger = logging.getLogger("arealite.tinker")
CHECKPOINTS = "tinker_checkpoints"
"""Folder beside those of the trials, as checkpoints outlive the server that wrote them."""
_MAX_TOKENS = 2**20
_IDLE_S = 1.0  # between two looks at whether the run is to stop


def serve(argv: list[str], cleanup: ExitStack) -> None:
    """Run commands of clients until the run is stopped."""
    config, _ = load_expr_config(argv, GRPOConfig)
    if config.actor.lora is None or config.rollout.colocated is not None or config.rollout.servers_sleep:
        raise ConfigError(
            "a server of the Tinker API must have actor.lora, and servers beside the trainer: got allocation_mode "
            f"{config.allocation_mode}. Join them by '+', and give actor.lora."
        )
    actor = FSDPPPOActor(config.actor)
    actor.initialize(None, None)
    cleanup.callback(actor.destroy)
    rollout = RemoteInferenceEngine(config.rollout)
    rollout.initialize(None, None)
    cleanup.callback(rollout.destroy)
    folder = RunFolder(config.rollout).path
    max_tokens = int(min(context_of(config, positions_of(actor.model)), _MAX_TOKENS))
    models = Models(actor, rollout, folder.parent / CHECKPOINTS, max_tokens)
    publish_weights(actor, rollout, version=0)
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    if dist.get_rank() == 0:
        online, key = config.agent.online, f"{KEY}{ensure_secret(folder)}"
        api = TinkerApi(online, models, key, commands)
        cleanup.callback(api.close)
        file, address = folder / "tinker.env", f"http://{online.host}:{api.port}"
        write_atomically(file, f"export TINKER_BASE_URL={address} TINKER_API_KEY={key}\n", mode=0o600)
        print(f"the Tinker API is served at {address}; clients need what `. {file}` sets", flush=True)
    while not from_rank_0(stop.is_asked()):
        _run_next(models, commands)


def _run_next(models: Models, commands: queue.SimpleQueue[Command]) -> None:
    """Run the next command, if rank 0 has one. A ValueError is the client's, and every rank raises it; other errors of
    several ranks, or of servers, end the run."""
    command = None
    if dist.get_rank() == 0:
        try:
            command = commands.get(timeout=_IDLE_S)
        except queue.Empty:
            heartbeat.tick()
    method, arguments = from_rank_0(("", {}) if command is None else command[:2])
    if not method:
        return
    try:
        with heartbeat.waiting(f"{method} of the Tinker API"):
            result = getattr(models, method)(**arguments)
    except Exception as error:
        if command is not None:
            command.outcome.set_exception(error)
        if not isinstance(error, ValueError) and (method == "publish" or dist.get_world_size() > 1):
            raise
        logger.warning("%s failed: %s", method, error)
    else:
        if command is not None:
            command.outcome.set_result(result)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder, whose modules would hide others
    with ExitStack() as stack, stop.obeying():
        serve(sys.argv[1:], stack)
