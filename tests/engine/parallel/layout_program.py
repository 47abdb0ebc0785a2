"""What each rank of a layout runs in `test_layouts.py`; the results of all steps go to a folder."""

import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from tensordict import TensorDict
from testing_images import vision_batch
from testing_quickstart import make_tiny_vision_model
from training_cases import OPTIMIZER, SPEC, actor_config, of_update, pair_batch, trajectory_batch

from arealite.algorithms.logprobs import count_loss_tokens, packed_logprobs_entropy
from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import (
    CorrectionConfig,
    DPOEngineConfig,
    MicroBatchSpec,
    OptimizerConfig,
    RWEngineConfig,
    TrainEngineConfig,
)
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.dpo.dpo_engine import FSDPDPOEngine
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import checkpoint_shapes, iter_full_params
from arealite.engine.optimizer import MOMENTS
from arealite.engine.parallel.shards import every_parameter, gathered
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.rw.rw_engine import FSDPRWEngine
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.utils.tensors import TOKENS

VOCABULARY = 509
"""Prime, so that no layout divides it."""
LENGTHS = (7, 31, 12, 5, 19, 24, 3, 11)


def write_model(folder: Path, kind: str) -> str:
    """Save a small model of a family, with weights large enough that all terms of a gradient count."""
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
    }
    experts = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "qwen2_5_vl":
        make_tiny_vision_model(folder, tie=False)
        config = transformers.AutoConfig.from_pretrained(folder)
        config.text_config.num_key_value_heads = 2
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
        return str(folder)
    if kind == "qwen3":
        config: Any = transformers.Qwen3Config(**common | {"tie_word_embeddings": True})
    elif kind == "llama":
        config = transformers.LlamaConfig(**common)
    elif kind == "qwen2":
        config = transformers.Qwen2Config(**common)
    elif kind == "qwen3_moe":
        config = transformers.Qwen3MoeConfig(**common, **experts, num_experts=8, decoder_sparse_step=1)
    elif kind == "mixtral":
        config = transformers.MixtralConfig(**common, num_local_experts=8, num_experts_per_tok=2)
    elif kind == "deepseek_v3":
        latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
        routed = {
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        }
        heads = {"num_key_value_heads": 4, "head_dim": 8}
        config = transformers.DeepseekV3Config(**common | heads, **experts, **latent, **routed)
    else:
        config = getattr(transformers, f"{kind}Config")(**common, bos_token_id=1, eos_token_id=2)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(noise * 0.1 if parameter.ndim > 1 else 1 + noise * 0.2)
    model.save_pretrained(folder)
    return str(folder)


def batch() -> TensorDict:
    """Rows of random tokens, of which some were sampled from kept sets."""
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor(LENGTHS)
    mask = torch.arange(int(lengths.max())) < lengths[:, None]
    ids = torch.randint(1, VOCABULARY, mask.shape, generator=generator) * mask
    counts = torch.randint(0, 4, mask.shape, generator=generator) * mask
    counts[:, 0] = 0
    kept = torch.zeros(len(LENGTHS), int(counts.sum(1).max()), dtype=torch.long)
    for row in range(len(LENGTHS)):
        sets = [
            [int(ids[row, place]), *torch.randint(1, VOCABULARY, (count - 1,), generator=generator).tolist()]
            for place, count in enumerate(counts[row].tolist())
            if count
        ]
        flat = [one for ids_of_token in sets for one in ids_of_token]
        kept[row, : len(flat)] = torch.tensor(flat)
    columns = {"input_ids": ids, "attention_mask": mask, "kept_ids": kept, "kept_counts": counts}
    columns["loss_mask"] = mask & (torch.arange(mask.shape[1]) > 0)
    return TensorDict(columns, batch_size=[len(LENGTHS)])


def loss_of_entropy(logits: Any, micro_batch: TensorDict) -> torch.Tensor:
    """A loss of logprobs under kept sets, of entropies with a gradient, and of dense logits."""
    from arealite.algorithms.logprobs import kept_sets

    logprobs_N, entropy_N = packed_logprobs_entropy(
        logits, micro_batch["input_ids"], micro_batch["cu_seqlens"], 0.7, kept=kept_sets(micro_batch), entropy_grad=True
    )
    mask_N = micro_batch["loss_mask"]
    dense_N = logits.dense().square().mean(1)
    return (0.3 * entropy_N - logprobs_N * logprobs_N.detach().exp() + 0.01 * dense_N)[mask_N].sum() / mask_N.sum()


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Read the last gradients off the first moments that one step left; whole on rank 0."""
    found = {}
    for name, parameter, place in every_parameter(engine.model):
        moment = parameter if place is not None else engine.optimizer.state[parameter]["exp_avg"]
        found[name] = gathered(moment, torch.float32, engine.mesh, place=place) / 0.1
    return found


def steps(engine: FSDPEngine, rows: list[int]) -> dict[str, Any]:
    """Return logprobs and entropies, and the loss, norm and gradients of two steps."""
    columns, found = batch()[rows], {"rows": rows}
    for index, name in enumerate(("logprobs", "entropies")):
        found[name] = engine.forward(
            columns.select(*TOKENS, strict=False),
            lambda logits, mb, index=index: packed_logprobs_entropy(logits, mb["input_ids"], mb["cu_seqlens"])[index],
        )
    result = engine.train_batch(columns.exclude("kept_ids", "kept_counts"), sft_loss_fn, count_loss_tokens)
    found |= {"first": result, "gradients": gradients(engine)}
    found["second"] = engine.train_batch(columns, loss_of_entropy, count_loss_tokens)
    found["weights"] = dict(iter_full_params(engine.model, torch.float32))
    found["fingerprint"] = engine.fingerprint()
    owners = [index % dist.get_world_size() for index, _ in enumerate(checkpoint_shapes(engine.model))]
    sent = iter_full_params(engine.model, torch.float32, owners=owners)
    found["sent"] = {name: tensor for name, tensor in sent if not tensor.is_meta}
    return found


def main(_: Connection, path: str, layout: str, changes: dict[str, Any], out: Path) -> None:
    torch.set_num_threads(1)
    optimizer = OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})
    spec = MicroBatchSpec(max_tokens_per_mb=40)
    config = TrainEngineConfig(
        path=path,
        parallel=layout,
        optimizer=optimizer,
        **{"dtype": "float32", "gradient_checkpointing": False, "mb_spec": spec} | changes,
    )
    engine = FSDPEngine(config)
    engine.initialize(None, SPEC)
    sizes = ParallelSizes.from_str(layout)
    rows = list(range(len(LENGTHS)))[sizes.data_rank(dist.get_rank()) :: sizes.data]
    found = steps(engine, rows)
    try:  # rank 0 has a row less than others of its block
        engine.eval_batch(batch()[rows[int(dist.get_rank() == 0) :]], sft_loss_fn, count_loss_tokens)
    except ValueError as error:
        found["refused"] = str(error)
    torch.save(found, out / f"rank{dist.get_rank()}.pt")
    engine.destroy()


def see(_: Connection, path: str, layout: str, out: Path) -> None:
    """Take two steps on rows with images."""
    torch.set_num_threads(1)
    optimizer = OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})
    engine = FSDPEngine(TrainEngineConfig(path=path, parallel=layout, dtype="float32", optimizer=optimizer))
    engine.initialize(None, SPEC)
    sizes, rank = ParallelSizes.from_str(layout), dist.get_rank()
    columns = vision_batch(path)[sizes.data_rank(rank) :: sizes.data]
    columns["loss_mask"] = columns["attention_mask"] & (torch.arange(columns["input_ids"].shape[1]) > 0)
    steps = [engine.train_batch(columns, sft_loss_fn, count_loss_tokens) for _step in range(2)]
    weights = dict(iter_full_params(engine.model, torch.float32))
    torch.save({"steps": steps, "weights": weights, "fingerprint": engine.fingerprint()}, out / f"rank{rank}.pt")
    engine.destroy()


def state_of(engine: FSDPEngine) -> dict[str, dict[str, torch.Tensor]]:
    """Return whole weights and moments, on rank 0."""
    found: dict[str, dict[str, torch.Tensor]] = {"weights": {}, **{name: {} for name in MOMENTS}}
    for name, parameter, place in every_parameter(engine.model):
        state = {} if place is not None else engine.optimizer.state[parameter]
        for kind, values in found.items():
            values[name] = gathered(state.get(kind, parameter), torch.float32, engine.mesh, place=place)
    return found


def resume(_: Connection, path: str, layouts: list[str], layout: str, folder: Path) -> None:
    """Take a step in a layout and write checkpoints, or read those of the first layout and compare them."""
    torch.set_num_threads(1)
    config = TrainEngineConfig(path=path, parallel=layout, dtype="float32", optimizer=OptimizerConfig(**OPTIMIZER))
    engine = FSDPEngine(config)
    engine.initialize(None, SPEC)
    sizes = ParallelSizes.from_str(layout)
    rows = list(range(len(LENGTHS)))[sizes.data_rank(dist.get_rank()) :: sizes.data]
    columns = batch()[rows].exclude("kept_ids", "kept_counts")
    if layout == layouts[0]:
        for _step in range(2):
            engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
        engine.keep_rng()
        engine.keep_state()
        engine.write_state(str(folder / "state"))
        engine.save(SaveLoadMeta(str(folder / "saved"), with_optim=True))
        if dist.get_rank() == 0:
            torch.save(state_of(engine), folder / "expected.pt")
        else:
            state_of(engine)
    else:
        saved = SaveLoadMeta(str(folder / "saved"), with_optim=True)
        for read in (lambda: engine.read_state(str(folder / "state")), lambda: engine.load(saved)):
            read()
            found = state_of(engine)
            if dist.get_rank() == 0:
                expected = torch.load(folder / "expected.pt", weights_only=False)
                differ = [
                    (kind, name)
                    for kind, values in expected.items()
                    for name, tensor in values.items()
                    if not torch.equal(found[kind][name], tensor)
                ]
                assert not differ, differ
            engine.train_batch(columns, sft_loss_fn, count_loss_tokens)
    engine.destroy()


ALGORITHMS: dict[str, dict[str, Any]] = {
    "gspo": {"algorithm": "gspo", "entropy_ctl": 0.1, "group_size": 2},
    "grpo": {"group_size": 2, "kl_ctl": 0.1, "kl_in": "loss", "proximal": "recompute", "aggregation": "prompt_mean"},
    "opd": {"algorithm": "opd", "proximal": "recompute", "correction": CorrectionConfig(action="mask", upper=5.0)},
}


def update(_: Connection, path: str, layout: str, out: Path) -> None:
    """Take updates of policies, and of one by preference pairs."""
    torch.set_num_threads(1)
    sizes, rank = ParallelSizes.from_str(layout), int(os.environ["RANK"])
    common = {"parallel": layout, "mb_spec": MicroBatchSpec(max_tokens_per_mb=40)}
    optimizer = OptimizerConfig(**OPTIMIZER | {"eps": 1e-2})
    found: dict[str, Any] = {}
    for name, choices in ALGORITHMS.items():
        actor = FSDPPPOActor(actor_config(path, optimizer=optimizer, ppo_n_minibatches=2, **common, **choices))
        actor.initialize(None, SPEC)
        groups = torch.arange(len(LENGTHS)) // 2
        columns = trajectory_batch(list(LENGTHS), group_size=2)[groups % sizes.data == sizes.data_rank(rank)]
        columns["ref_logprobs"] = columns["logprobs"] * 0.9
        found[name] = []
        for _step in range(2):
            columns["proximal_logprobs"] = actor.compute_logprobs(columns)
            columns["teacher_logprobs"] = columns["proximal_logprobs"] * 0.9
            actor.compute_advantages(columns)
            found[name].append(of_update(actor.ppo_update(columns)))
        found[f"{name} per token"] = {key: values.nan_to_num(9.0) for key, values in actor.per_token.items()}
        actor.destroy()
    engine = FSDPDPOEngine(DPOEngineConfig(path=path, dtype="float32", optimizer=optimizer, **common))
    engine.initialize(None, SPEC)
    pairs = pair_batch(6)
    pairs = pairs[torch.arange(len(pairs)) // 2 % sizes.data == sizes.data_rank(rank)]
    pairs["ref_logprobs"] = engine.compute_logprobs(pairs) * 0.9
    found["dpo"] = [of_update(engine.train_dpo(pairs)) for _step in range(2)]
    engine.destroy()
    rewards = FSDPRWEngine(RWEngineConfig(path=path, dtype="float32", optimizer=optimizer, **common))
    rewards.initialize(None, SPEC)
    found["rw"] = [of_update(rewards.train_rw(pairs)) for _step in range(2)]
    rewards.destroy()
    torch.save(found, out / f"rank{rank}.pt")
