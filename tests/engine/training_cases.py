"""Small models and batches that the tests of training share."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForSequenceClassification, Qwen3Config, Qwen3ForCausalLM

from arealite.api.cli_args import MicroBatchSpec, OptimizerConfig, PPOActorConfig, PPOCriticConfig, TrainEngineConfig
from arealite.api.io_struct import FinetuneSpec
from arealite.engine.fsdp_engine import FSDPEngine

VOCABULARY = 49
"""Odd, so that two ranks hold unequal shards."""
SPEC = FinetuneSpec(1, 100, 10)
OPTIMIZER = {"lr": 1e-2, "weight_decay": 0.0, "warmup_steps_proportion": 0.0, "gradient_clipping": 1e9}


def write_model(folder: Path, *, tie: bool = True, seed: int = 0) -> str:
    """Save a randomly initialised Qwen3 model of 10 thousand parameters."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=48,
        tie_word_embeddings=tie,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def write_classifier(folder: Path, *, num_labels: int = 1) -> str:
    """Save a classifier of the model of `write_model`, whose head is not 0."""
    path = write_model(folder / "lm")
    options = {"num_labels": num_labels, "dtype": torch.float32}
    model = AutoModelForSequenceClassification.from_pretrained(path, **options)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        model.score.weight.normal_()
    model.save_pretrained(folder)
    return str(folder)


def train_config(path: str, *, max_tokens: int | None = None, n_mbs: int = 1, **changes: Any) -> TrainEngineConfig:
    values = {"dtype": "float32", "optimizer": OptimizerConfig(**OPTIMIZER), "gradient_checkpointing": False} | changes
    return TrainEngineConfig(path=path, mb_spec=MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=max_tokens), **values)


def actor_config(path: str, **changes: Any) -> PPOActorConfig:
    values = {"dtype": "float32", "optimizer": OptimizerConfig(**OPTIMIZER), "gradient_checkpointing": False} | changes
    return PPOActorConfig(path=path, **values)


def critic_config(path: str, **changes: Any) -> PPOCriticConfig:
    values = {"dtype": "float32", "optimizer": OptimizerConfig(**OPTIMIZER), "gradient_checkpointing": False} | changes
    return PPOCriticConfig(path=path, **values)


def token_batch(lengths: list[int], seed: int = 0) -> TensorDict:
    """Random sequences whose first two tokens are the prompt."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    attention_mask = torch.arange(shape[1])[None] < torch.tensor(lengths)[:, None]
    input_ids = torch.randint(1, VOCABULARY, shape, generator=generator) * attention_mask
    return TensorDict(
        {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "loss_mask": (attention_mask & (torch.arange(shape[1]) >= 2)).int(),
        },
        batch_size=[len(lengths)],
    )


def trajectory_batch(lengths: list[int], group_size: int, seed: int = 0) -> TensorDict:
    """Random trajectories of version 0 in groups of `group_size`, with random rewards and server logprobs."""
    batch = token_batch(lengths, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    mask = batch["loss_mask"].bool()
    batch["logprobs"] = (torch.rand(mask.shape, generator=generator) - 4.5) * mask
    batch["versions"] = torch.where(mask, 0, -1)
    batch["rewards"] = torch.rand(len(lengths), generator=generator)
    batch["group_index"] = torch.arange(len(lengths)) // group_size
    return batch


def pair_batch(num_pairs: int, seed: int = 0) -> TensorDict:
    """Random pairs of answers of 1 to 9 tokens, row 2i the chosen one."""
    generator = torch.Generator().manual_seed(seed)
    return token_batch((torch.randint(3, 12, (2 * num_pairs,), generator=generator)).tolist(), seed)


def of_update(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of an update but its costs, which depend on ranks and micro-batches."""
    costs = ("perf/idle_share", "perf/idle_share_max", "perf/padding_share", "perf/memory_gib_max")
    costs += ("perf/memory_gib_weights", "perf/memory_gib_moments")
    return {key: value for key, value in metrics.items() if key not in costs}


def full_params(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in engine.model.named_parameters()}


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Read the last gradient off the first moments that one step left."""
    moments = {name: engine.optimizer.state[p] for name, p in engine.model.named_parameters() if p.requires_grad}
    return {name: moment["exp_avg"].full_tensor() / 0.1 for name, moment in moments.items()}


def plain_logprobs(model: torch.nn.Module, batch: TensorDict, temperature: float = 1.0) -> torch.Tensor:
    """Return the logprobs `[B, T]` of tokens by transformers alone, row by row without padding."""
    out_BT = torch.zeros(batch["input_ids"].shape)
    for row, ids in enumerate(batch["input_ids"]):
        length = int(batch["attention_mask"][row].sum())
        logprobs = (model(ids[None, :length]).logits[0].float() / temperature).log_softmax(-1)
        out_BT[row, 1:length] = logprobs[: length - 1].gather(1, ids[1:length, None]).squeeze(1)
    return out_BT


def gradient_norm(model: torch.nn.Module) -> float:
    return torch.nn.utils.get_total_norm([one.grad for one in model.parameters() if one.grad is not None]).item()
