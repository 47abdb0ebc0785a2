"""Estimates the memory of training and serving a transformer, in bytes, from the shape of the model.

Parameters, gradients, moments and cache are exact. Activations assume grouped attention, a gated MLP (Llama, Qwen,
Mistral) and a memory-efficient kernel; the output layer is that of `algorithms/logprobs.py`. The caller adds a margin
for the device's context, communication buffers, fragmentation, and temporaries of the backward pass.
"""

from dataclasses import dataclass, replace
from typing import Any

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import OptimizerConfig, TrainEngineConfig

GIB = 2**30
FLOAT32 = 4
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LOGITS_BLOCK, MIN_COLUMNS = 2**25, 1024  # of `algorithms/logprobs.py`: logits at once, tokens of the vocabulary in them
_BLOCK_COPIES = 2
_MOMENT_BYTES = {"adam": FLOAT32, "adam_bf16": 2}
_MORE_RANKS = "{more}, use a smaller model, or {key}.fsdp.offload_params=true."
_KNOBS = {
    "AdamW moments": "{more}, use a smaller model, {key}.optimizer.type=adam_bf16, or {key}.fsdp.offload_params=true.",
    "activations": "Set {key}.gradient_checkpointing=true, lower {key}.mb_spec.max_tokens_per_mb, or raise c or "
    "t of the trainer in allocation_mode. On GPUs {key}.activation_offloading=true moves what is left to the host.",
    "gathered weights": "Raise t of the trainer in allocation_mode, or use a smaller model.",
    "output layer": "Raise t of the trainer in allocation_mode, or its c, or lower {key}.mb_spec.max_tokens_per_mb.",
    "whole gradients": "Set {key}.fsdp.reduce_once=false, or t or c instead of p in allocation_mode.",
    "servers' cache": "Lower lite.slots or lite.context.",
    "its server": "Lower what servers take: sglang.mem_fraction_static or vllm.gpu_memory_utilization.",
}

Parts = dict[str, int]  # bytes by purpose


@dataclass(frozen=True)
class ModelShape:
    """What memory depends on."""

    num_parameters: int  # tied ones count once
    layer_parameters: int  # of the largest layer
    outer_parameters: int  # of what is in no layer: embeddings, head, last norm
    num_layers: int
    hidden: int
    mlp: int  # what one token activates in a layer's MLP
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    has_qk_norm: bool
    is_tied: bool
    num_frozen: int = 0  # of the parameters
    expert_parameters: int = 0  # of all layers
    layer_experts: int = 0  # parameters of the experts of the largest layer
    expert_shards: int = 0  # ranks that share the experts of a rank; 0 where these are sharded as the rest
    is_stage: bool = False  # of p: its parameters stay gathered and its gradients whole until the last micro-batch


def model_shape(model: Any) -> ModelShape:
    """Read the shape off a Hugging Face model, which may be on the meta device."""
    config, outputs = model.config.get_text_config(), model.get_output_embeddings()
    classes = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in classes]
    widths = (getattr(config, name, None) for name in ("moe_intermediate_size", "intermediate_size"))
    width = next(filter(None, widths), 4 * config.hidden_size)
    return ModelShape(
        num_parameters=_count(model),
        layer_parameters=max(map(_count, layers), default=0),
        outer_parameters=_count(model) - sum(map(_count, layers)),
        num_layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        mlp=width * (getattr(config, "num_experts_per_tok", None) or 1),
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        vocab=1 if outputs is None else outputs.weight.shape[0],  # a classifier of one label has no logits
        has_qk_norm=any(name.endswith("q_norm.weight") for name, _ in model.named_parameters()),
        is_tied=bool(config.tie_word_embeddings),
        num_frozen=sum(parameter.numel() for parameter in model.parameters() if not parameter.requires_grad),
        expert_parameters=sum(map(_count_experts, layers)),
        layer_experts=max(map(_count_experts, layers), default=0),
    )


def shape_of_rank(shape: ModelShape, sizes: ParallelSizes, *, copies: int = 1) -> ModelShape:
    """Return what FSDP has left to shard: the model as one of the ranks p, t and e has it.

    Experts over e are shards of one model, however many `copies` of the rest there are. A stage of p keeps activations
    of p micro-batches, as many as those of all layers; embeddings and output layer are on different stages.
    """
    t, p = sizes.tensor, sizes.pipeline
    e = max(t, sizes.expert) if shape.expert_parameters else 1  # experts lie over t where e is not given
    outer = shape.outer_parameters // (1 if p == 1 or shape.is_tied else 2)
    dense = (shape.num_parameters - shape.outer_parameters - shape.expert_parameters) // p + outer
    experts = shape.expert_parameters // p // (copies if e > 1 else 1)
    of_layer, of_experts = shape.layer_parameters - shape.layer_experts, shape.layer_experts // e
    return replace(
        shape,
        num_parameters=(dense + experts) // t,
        layer_parameters=of_layer // t + of_experts,
        layer_experts=of_experts,
        expert_shards=sizes.data * sizes.context * t // e if e > 1 else 0,
        outer_parameters=outer // t,
        mlp=shape.mlp // t,
        num_heads=shape.num_heads // t,
        num_kv_heads=max(1, shape.num_kv_heads // t),
        vocab=-(-shape.vocab // t),
        is_stage=p > 1,
    )


def of_rank(block: TrainEngineConfig, shape: ModelShape, ranks: int) -> tuple[ParallelSizes, ModelShape, int]:
    """Return how `ranks` divide a model, what of it one has before FSDP, and over how many ranks FSDP shards that."""
    sizes, copies = ParallelSizes.from_str(block.parallel or f"d{ranks}"), block.fsdp.dp_replicate
    return sizes, shape_of_rank(shape, sizes, copies=copies), sizes.data * sizes.context // copies or 1


def state_of(
    block: TrainEngineConfig, shape: ModelShape, ranks: int, has_optimizer: bool = True, dtype: str | None = None
) -> Parts:
    """Return what one of the ranks of a block always holds; frozen parameters have `dtype`, or the block's."""
    _, mine, num_shards = of_rank(block, shape, ranks)
    moments = _MOMENT_BYTES[(block.optimizer or OptimizerConfig()).type]
    options = {"compute_bytes": BYTES[dtype or block.dtype], "moment_bytes": moments}
    return training_state(mine, ranks=num_shards, has_optimizer=has_optimizer, **options)


def step_of(
    block: TrainEngineConfig,
    shape: ModelShape,
    ranks: int,
    micro: int,
    *,
    is_split: bool,
    is_trained: bool = True,
    is_gloo: bool = False,
) -> Parts:
    """Return what one of the ranks of a block needs on top for a micro-batch of `micro` tokens; `is_split` says whether
    it has several."""
    sizes, mine, num_shards = of_rank(block, shape, ranks)
    return training_step(
        mine if is_trained else replace(mine, num_layers=0, num_frozen=mine.num_parameters),
        tokens=-(-micro // sizes.context),
        ranks=num_shards,
        compute_bytes=BYTES[block.dtype],
        outer_bytes=FLOAT32 if block.cast_lm_head_to_fp32 else None,
        accumulates=is_split and block.fsdp.reduce_once,
        recomputes=block.gradient_checkpointing or not is_trained,
        offloads=block.activation_offloading,
        is_gloo=is_gloo,
    )


def knob_of(parts: Parts, *, key: str, more: str) -> tuple[str, str]:
    """Return the largest part and the keys that make it smaller; `key` is that of the block, `more` asks for ranks."""
    largest = max(parts, key=lambda name: parts[name])
    return largest, _KNOBS.get(largest, _MORE_RANKS).format(key=key, more=more)


def training_state(
    shape: ModelShape, *, ranks: int, has_optimizer: bool, compute_bytes: int = FLOAT32, moment_bytes: int = FLOAT32
) -> dict[str, int]:
    """Return what one of `ranks` that share a model holds all the time: its shard of the float32 parameters and
    gradients, of two moments, and of the frozen parameters in the compute dtype."""
    trained = -(-(shape.num_parameters - shape.num_frozen) // ranks)
    frozen = -(-shape.num_frozen // ranks) * compute_bytes
    learning = {"gradients": trained * FLOAT32, "AdamW moments": 2 * trained * moment_bytes}
    return {"parameters": trained * FLOAT32 + frozen} | (learning if has_optimizer else {})


def training_step(shape: ModelShape, *, accumulates: bool, **sizes: Any) -> dict[str, int]:
    """Return what a rank needs on top while it runs a micro-batch, in that of its `phases` which needs most.

    A rank that `accumulates`, or a stage, sums gradients over ranks once per step, and keeps the float32 one whole
    until then; a stage has its shard in it.
    """
    most = max(phases(shape, **sizes).values(), key=lambda parts: sum(parts.values()))
    whole = (shape.num_parameters - shape.num_frozen) * FLOAT32
    beyond_shard = whole - whole // sizes["ranks"] if shape.is_stage else whole if accumulates else 0
    return most | {"whole gradients": beyond_shard}


def phases(
    shape: ModelShape,
    *,
    tokens: int,
    ranks: int,
    compute_bytes: int,
    recomputes: bool,
    outer_bytes: int | None = None,
    offloads: bool = False,
    is_gloo: bool = False,
) -> dict[str, dict[str, int]]:
    """Return what a micro-batch of `tokens` needs in the output layer, in the backward pass of a layer, and at the end,
    when the gradient of what is in no layer is summed over ranks.

    Gathered is all that is in no layer, in `outer_bytes` (by default those of the compute dtype), and in a backward
    pass two layers: one runs, the next arrives. A gradient that is summed over `ranks` is there as it was computed, and
    in float32 as what is sent and its shard received. At the end nothing is gathered any more, and of gradients that
    were copied to what is sent only that of the output layer is left; gloo sends a copy. The output layer holds a block
    of logits and the gradients of its weight, unless frozen, and of the hidden states. A rank that `offloads` keeps the
    inputs of its layers on the host.
    """
    outer_bytes = outer_bytes or compute_bytes
    layer = layer_activations(shape, compute_bytes=compute_bytes)
    num_kept = min(shape.num_layers, 1) if offloads else shape.num_layers
    kept = tokens * num_kept * (shape.hidden * compute_bytes if recomputes else layer)
    block = tokens * min(shape.vocab, max(LOGITS_BLOCK // max(tokens, 1), MIN_COLUMNS))
    own = shape.layer_experts if shape.expert_shards else 0  # FSDP divides their sum, in a further copy
    received = own * (2 * FLOAT32 / max(1, shape.expert_shards) - FLOAT32 / ranks)
    head = (0 if shape.num_frozen else shape.vocab) * shape.hidden * outer_bytes
    hidden = tokens * shape.hidden * (outer_bytes + FLOAT32)
    trained = 0 if shape.num_frozen else 1
    sent = trained * (FLOAT32 + FLOAT32 / ranks)
    outer = shape.outer_parameters * outer_bytes
    gathered = outer + 2 * shape.layer_parameters * compute_bytes
    to_send = shape.layer_parameters * (sent + trained * compute_bytes) + trained * received
    if shape.is_stage:
        gathered = outer + (shape.num_parameters - shape.outer_parameters) * compute_bytes
        to_send = shape.layer_parameters * trained * compute_bytes
    copied = FLOAT32 if is_gloo and ranks > 1 else 0
    summed = head + round(trained * shape.outer_parameters * (FLOAT32 / ranks + copied))
    return {
        "output layer": {
            "gathered weights": gathered if shape.is_stage else outer,
            "activations": kept,
            "output layer": _BLOCK_COPIES * block * FLOAT32 + head + hidden,
        },
        "layer": {
            "gathered weights": gathered,
            "activations": kept + (tokens * layer if recomputes else 0),
            "output layer": head,
            "gradients to send": round(to_send),
        },
        "end": {"gradients to send": trained * shape.outer_parameters * FLOAT32 + max(trained * outer, summed)},
    }


def layer_activations(shape: ModelShape, *, compute_bytes: int) -> int:
    """Return the bytes per token that autograd keeps of one layer."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norm = FLOAT32 + compute_bytes  # an RMSNorm keeps its input in float32 and the normalized one
    norms = 2 * (shape.hidden * norm + FLOAT32 + shape.hidden * compute_bytes)
    attention = (3 * queries + 2 * keys) * compute_bytes + shape.num_heads * FLOAT32
    if shape.has_qk_norm:
        attention += (queries + keys) * norm + (shape.num_heads + shape.num_kv_heads) * FLOAT32
    return norms + attention + 4 * shape.mlp * compute_bytes


def kv_bytes_per_token(shape: ModelShape, *, value_bytes: int, gpus: int = 1) -> int:
    """Return the keys and values of a token on one of the `gpus` of a server, which share the heads."""
    return 2 * shape.num_layers * -(-shape.num_kv_heads // gpus) * shape.head_dim * value_bytes


def _count_experts(layer: Any) -> int:
    """Experts are fused: one parameter has a matrix of each."""
    return sum(parameter.numel() for parameter in layer.parameters() if parameter.ndim == 3)


def _count(module: Any) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
