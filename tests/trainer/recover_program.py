"""A scripted loop on the real engine, for `test_recover.py`: trains on batches that the data cursor picks."""

from __future__ import annotations

import os
import random
import signal
import sys
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tensordict import TensorDict

sys.path.append(str(Path(__file__).parents[1] / "engine"))
from training_cases import OPTIMIZER, critic_config, token_batch, train_config

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import LoRAConfig, OptimizerConfig, RecoverConfig, SaverConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec
from arealite.dataset.loader import PromptLoader
from arealite.engine import checkpointing
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.trainer.recover import Recover
from arealite.trainer.saver import Saver
from arealite.utils import stop

SPEC = FinetuneSpec(1, 40, 4)
LENGTHS = [9, 4, 12, 3, 7, 11]


class Counter:
    """A rollout engine as far as recovery knows it."""

    def __init__(self) -> None:
        self.num_episodes = 0
        self.noted: list[tuple[int, int]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"ledger_position": self.num_episodes} if dist.get_rank() == 0 else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_episodes = state.get("ledger_position", 0)

    def note_checkpoint(self, step: int, position: int) -> None:
        self.noted.append((step, position))


def full(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()


def state_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Weights and optimizer state, whole."""
    state = engine.state_dict()
    found = {name: full(tensor) for name, tensor in state["model"].items()}
    for name, values in state["optimizer"].items():
        found |= {f"{name}.{key}": full(value) for key, value in values.items()}
    return found


def learn_values(critic: FSDPPPOCritic, batch: TensorDict) -> float:
    """Take two optimizer steps towards returns that the tokens determine, and return the loss."""
    batch["group_index"] = torch.arange(len(batch)) // 2
    batch["values"] = critic.compute_values(batch)
    batch["returns_mask"] = batch["loss_mask"].bool()
    batch["returns"] = batch["input_ids"] / 49 * batch["returns_mask"]
    return critic.ppo_update(batch)["value/loss"]


def train(
    model: str,
    folder: Path,
    *,
    steps: int,
    stop_after: int | None = None,
    fail_after: int | None = None,
    ask_in: int | None = None,
    interrupt_in: int | None = None,
    asked_rank: int = 0,
    trial_name: str = "t",
    publishes: bool = True,
    has_critic: bool = False,
    has_rollout: bool = True,
    lora: LoRAConfig | None = None,
    **config: Any,
) -> dict[str, Any]:
    """Run up to `steps` steps, or be cut off; return what came of it."""
    names = {"experiment_name": "e", "trial_name": trial_name, "fileroot": str(folder)}
    options = {"mode": "auto", "freq_steps": 2} | config
    recover = Recover(RecoverConfig(**names, **options), SPEC)
    engine = FSDPEngine(train_config(model, seed=3, lora=lora))
    falling = OptimizerConfig(**OPTIMIZER, lr_scheduler_type="linear")
    critic_options = critic_config(model, seed=4, group_size=2, ppo_n_minibatches=2, optimizer=falling)
    critic = FSDPPPOCritic(critic_options) if has_critic else None
    engines = [engine] if critic is None else [engine, critic]
    for one in engines:
        one.initialize(None, SPEC)
    loader = PromptLoader([{"number": number} for number in range(40)], 4)
    rollout, saver = Counter() if has_rollout else None, Saver(SaverConfig(**names, freq_steps=3), SPEC)
    found: dict[str, Any] = {"losses": {}, "draws": {}, "saved": [], "values": {}}
    batches, rank = iter(loader), dist.get_rank()
    try:
        with recover:
            start = found["start"] = recover.load(
                engine, loader, critic=critic, rollout=rollout, clocks={"saver": saver}
            )
            for step in range(start, steps):
                if step in (ask_in, interrupt_in) and rank == asked_rank:
                    signal.raise_signal(signal.SIGTERM)
                drawn = next(batches)  # as `prepare_batch` does before it waits
                if step == interrupt_in:
                    random.random()  # as workflows may, which the next run does again
                    raise stop.stopped()
                batch = token_batch(LENGTHS, seed=drawn[0]["number"])
                rows = list(range(rank, len(LENGTHS), dist.get_world_size()))
                metrics = engine.train_batch(batch[rows], sft_loss_fn, count_loss_tokens)
                engine.step_lr_scheduler()
                if critic is not None:
                    found["values"][step] = learn_values(critic, batch[rows])
                engine.set_version(step + publishes)
                found["losses"][step] = metrics["loss"]
                found["draws"][step] = (random.random(), torch.rand(1).item())
                if rollout is not None:
                    rollout.num_episodes += 6
                if saver.save(engine, step, critic=critic) is not None:
                    found["saved"].append(step)
                recover.save(step)
                if step == fail_after:
                    raise ZeroDivisionError
                if step == stop_after:
                    break
    except stop.RunStopped as error:
        return found | {"status": error.code}
    else:
        state = {
            f"{index}.{name}": one for index in range(len(engines)) for name, one in state_of(engines[index]).items()
        }
        return found | {"state": state, "noted": rollout and rollout.noted, "version": engine.get_version()}
    finally:
        for one in reversed(engines):
            one.destroy()


def train_on_ranks(_: Connection, model: str, out: Path, runs: list[dict[str, Any]]) -> None:
    """Do runs one after the other on all ranks, and keep what each rank found."""
    torch.set_num_threads(1)
    rank = os.environ["RANK"]
    for index, options in enumerate(runs):
        is_broken = options.pop("broken_rank", None) == int(rank)
        with (
            mock.patch.object(checkpointing, "rng_state", object) if is_broken else nullcontext()
        ):  # no file can hold it
            try:
                found = train(model, out, **options)
            except CheckpointError as error:
                found = {"error": str(error)}
        torch.save(found, out / f"found_{index}_rank{rank}.pt")
