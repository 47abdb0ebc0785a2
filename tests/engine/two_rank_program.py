"""What each of two ranks runs in `test_fsdp_two_ranks.py`; results go to a folder."""

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from training_cases import (
    OPTIMIZER,
    SPEC,
    actor_config,
    critic_config,
    full_params,
    pair_batch,
    token_batch,
    train_config,
    trajectory_batch,
)

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import (
    CorrectionConfig,
    DPOEngineConfig,
    FSDPEngineConfig,
    LoRAConfig,
    MicroBatchSpec,
    OptimizerConfig,
)
from arealite.api.io_struct import SaveLoadMeta, WeightUpdateMeta
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import checkpoint_shapes, iter_full_params
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.ppo.critic import FSDPPPOCritic
from arealite.engine.sft.lm_engine import sft_loss_fn

BATCHES = [token_batch([9, 4, 12, 3, 7, 11], seed) for seed in range(3)]
SHARES = {"unequal": [[0, 3], [1, 2, 4, 5]], "empty": [[], [0, 1, 2, 3, 4, 5]]}
"""Rows of each rank."""
STEADY = {"optimizer": OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})}
"""Below eps AdamW is linear in the gradient: with its usual eps the sign of a gradient of pure rounding would count."""
LORA = {"lora": LoRAConfig(rank=3)}
"""Of odd shards."""
OFFLOADED = {"fsdp": FSDPEngineConfig(offload_params=True)}
REDUCED_ONCE = {"fsdp": FSDPEngineConfig(reduce_once=True)}
REPLICATED = {"fsdp": FSDPEngineConfig(dp_replicate=2)}
"""A whole model on each rank."""
ENGINES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "unequal": ("tied", "unequal", {}),
    "untied empty": ("untied", "empty", {}),
    "offloaded": ("tied", "empty", OFFLOADED),
    "untied empty reduced once": ("untied", "empty", REDUCED_ONCE),
    "replicated": ("tied", "unequal", REPLICATED),
    "untied empty replicated": ("untied", "empty", REPLICATED),
    "lora": ("tied", "unequal", LORA),
    "lora empty, offloaded": ("tied", "empty", LORA | OFFLOADED),
}
"""Model, share and config."""
LENGTHS = [9, 4, 12, 3, 7, 11, 8, 8]
TRAJECTORIES = trajectory_batch(LENGTHS, group_size=2)
TRAJECTORY_SHARES = [[5, 0, 6], [1, 2, 3, 4, 7]]
"""Groups 0, 2 and 3 are torn apart."""
ACTOR = {
    "group_size": 2,
    "baseline": "group_mean",
    "reward_scale": "group_std",
    "proximal": "recompute",
    "correction": CorrectionConfig(action="mask", upper=5.0),
    "ppo_n_minibatches": 3,
    "kl_ctl": 0.1,
}

OTHER_CHOICES = {
    "group_size": 2,
    "baseline": "group_mean",
    "reward_scale": "batch_std",
    "adv_norm": False,
    "aggregation": "prompt_mean",
    "proximal": "recompute",
    "sequence_mask_delta": 0.2,
    "kl_in": "loss",
    "kl_estimator": "k3",
    "kl_ctl": 0.1,
    "ppo_n_minibatches": 2,
}


def rank_of_rewards(rewards: torch.Tensor, group_index: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """An advantage function that must see all answers of the batch."""
    return (rewards.argsort().argsort() - group_index * 0.1) / num_tokens


def of_one_group(rewards: torch.Tensor, group_index: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    """An advantage function that leaves a rank without a row to train on."""
    return torch.where(group_index == 1, rewards - 0.5, 0.0)


PPO_RUNS = {
    "ppo": (ACTOR, None),
    "other choices": (OTHER_CHOICES | {"baseline": "length_weighted"}, None),
    "own advantages": (OTHER_CHOICES, rank_of_rewards),
    "one live group": (OTHER_CHOICES | {"kl_ctl": 0.0, "ppo_n_minibatches": 1}, of_one_group),
}


PAIRS = pair_batch(5)
PAIR_SHARES = {"pairs": [[0, 1], [2, 3, 4, 5, 6, 7, 8, 9]], "pairs on one rank": [[], [*range(10)]]}


class BrokenTokenizer:
    def save_pretrained(self, path: str) -> None:
        raise OSError(28, "No space left on device")


def sft_steps(engine: FSDPEngine, batches: list[TensorDict]) -> dict[str, object]:
    """Take one step per batch and return what came of it."""
    losses = [engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] for batch in batches]
    return {"losses": losses, "params": full_params(engine)}


def ppo_steps(actor: FSDPPPOActor, batch: TensorDict) -> dict[str, object]:
    """Take two updates on one batch and return what came of it."""
    metrics = []
    batch["ref_logprobs"] = batch["logprobs"] * 0.9
    for _ in range(2):
        batch["proximal_logprobs"] = actor.compute_logprobs(batch)
        actor.compute_advantages(batch)
        metrics.append(actor.ppo_update(batch))
    return {"metrics": metrics, "params": full_params(actor), "advantages": batch["advantages"]}


def dpo_steps(path: str, rows: list[int]) -> dict[str, object]:
    """Take two steps of DPO on some rows and return what came of it."""
    spec = MicroBatchSpec(max_tokens_per_mb=30)
    config = DPOEngineConfig(path=path, dtype="float32", mb_spec=spec, **STEADY)
    engine = FSDPDPOEngine(config)
    engine.initialize(None, SPEC)
    batch = PAIRS[rows]
    batch["ref_logprobs"] = engine.compute_logprobs(batch) * 0.9
    metrics = [engine.train_dpo(batch) for _ in range(2)]
    params = full_params(engine)
    engine.destroy()
    return {"metrics": metrics, "params": params}


def critic_steps(actor: FSDPPPOActor, critic: FSDPPPOCritic, batch: TensorDict) -> dict[str, object]:
    """Take three updates of a critic on one batch and return what came of it."""
    metrics = []
    for _ in range(3):
        batch["values"] = critic.compute_values(batch)
        actor.compute_advantages(batch)
        metrics.append(critic.ppo_update(batch))
    return {"metrics": metrics, "params": full_params(critic), "advantages": batch["advantages"]}


def critic_run(path: str, batch: TensorDict, idle_batch: TensorDict | None = None) -> list[dict[str, object]]:
    actor = FSDPPPOActor(actor_config(path, algorithm="ppo", group_size=2, **STEADY))
    critic = FSDPPPOCritic(critic_config(path, group_size=2, ppo_n_minibatches=3))
    for engine in (actor, critic):
        engine.initialize(None, SPEC)
    found = [critic_steps(actor, critic, one) for one in (batch, idle_batch) if one is not None]
    for engine in (critic, actor):
        engine.destroy()
    return found


def owned_params(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Return the tensors that are gathered to this rank when every other one has another owner."""
    owners = [index % 2 for index, _ in enumerate(checkpoint_shapes(engine.model))]
    gathered = iter_full_params(engine.model, torch.float32, owners=owners)
    return {name: tensor for name, tensor in gathered if not tensor.is_meta}


def main(_: Connection, paths: dict[str, str], out: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, object] = {}
    for name, (model, share, changes) in ENGINES.items():
        engine = FSDPEngine(train_config(paths[model], max_tokens=15, **STEADY, **changes))
        engine.initialize(None, SPEC)
        rank = dist.get_rank()
        found[name] = sft_steps(engine, [batch[SHARES[share][rank]] for batch in BATCHES])
        if name == "replicated":
            found["owned"] = owned_params(engine)
            shapes = {one: tuple(parameter.to_local().shape) for one, parameter in engine.model.named_parameters()}
            found["replica"] = {"fingerprint": engine.fingerprint(), "shapes": shapes}
            engine.save(SaveLoadMeta(str(out / name), with_optim=True))
        if name == "lora":
            engine.save(SaveLoadMeta(str(out / name), with_optim=True))
            found["sent"] = owned_params(engine)
        engine.destroy()

    engine = FSDPEngine(train_config(paths["tied"], **STEADY))
    engine.initialize(None, SPEC)
    engine.load(SaveLoadMeta(paths["resumed"], with_optim=True))
    found["resumed"] = sft_steps(engine, [batch[SHARES["unequal"][rank]] for batch in BATCHES])
    engine.save(SaveLoadMeta(str(out / "saved"), with_optim=True))
    found["saved"], found["fingerprint"] = full_params(engine), engine.fingerprint()
    try:
        engine.save(SaveLoadMeta(str(out / "untold"), tokenizer=BrokenTokenizer()))
    except (RuntimeError, OSError) as error:
        found["save_error"] = f"{type(error).__name__}: {error}"
    try:
        engine.upload_weights(WeightUpdateMeta(type="disk", path=str(out / "missing" / "\0")))
    except (RuntimeError, ValueError, OSError) as error:
        found["upload_error"] = f"{type(error).__name__}: {error}"
    engine.destroy()

    for name, (choices, advantage_fn) in PPO_RUNS.items():
        actor = FSDPPPOActor(actor_config(paths["tied"], **STEADY, **choices), advantage_fn=advantage_fn)
        actor.initialize(None, SPEC)
        found[name] = ppo_steps(actor, TRAJECTORIES[TRAJECTORY_SHARES[rank]])
        if name == "ppo":  # a rank without a single trajectory takes part in everything and reports the same metrics
            found["idle"] = ppo_steps(actor, TRAJECTORIES[[] if rank == 0 else list(range(len(TRAJECTORIES)))])
        actor.destroy()
    for name, rows in PAIR_SHARES.items():
        found[name] = dpo_steps(paths["tied"], rows[rank])
    rows = [[], list(range(len(TRAJECTORIES)))][rank]
    found["critic"], found["idle critic"] = critic_run(
        paths["tied"], TRAJECTORIES[TRAJECTORY_SHARES[rank]], TRAJECTORIES[rows]
    )
    torch.save(found, out / f"rank{rank}.pt")
