"""Tensor and expert parallelism: the layers of a model over t and e ranks, by the plans that its family declares.

transformers has the parallel layers. The output layer is split by tokens of the vocabulary; it never runs as a layer,
since losses compute logits from its weight.
"""

import math
from dataclasses import replace
from typing import Any

from transformers import PreTrainedModel

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.errors import ConfigError
from arealite.engine.parallel.context import check_heads
from arealite.engine.parallel.mesh import Mesh
from arealite.engine.parallel.pipeline import check_stages

try:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism, get_kv_heads_per_rank
except ImportError:  # before 5.21
    get_kv_heads_per_rank = None

_PARTIAL = "replicated_with_grad_allreduce"  # plan of a norm of heads, of which each t rank has some


def with_experts(model: PreTrainedModel, sizes: ParallelSizes) -> ParallelSizes:
    """Return the sizes, with experts over t where e is not given: a rank has whole experts, which checkpoints keep."""
    if sizes.tensor > sizes.expert and getattr(model, "ep_plan", None):
        return replace(sizes, expert=sizes.tensor)
    return sizes


def check_sizes(model: PreTrainedModel, sizes: ParallelSizes) -> None:
    """Refuse a model on the meta device that ranks of these sizes can't divide; also before a run starts."""
    check_heads(model.config, sizes)
    check_stages(model, sizes)
    sizes = with_experts(model, sizes)
    name, config = type(model).__name__, model.config.get_text_config()
    for letter, size, kind in (("t", sizes.tensor, "tensor"), ("e", sizes.expert, "expert")):
        if size > 1 and not getattr(model, f"{letter}p_plan", None):
            raise ConfigError(
                f"a model with {letter}{size} must have a plan of {kind} parallelism in transformers: got {name}, "
                f"which has none. Write {letter}1 in allocation_mode."
            )
    if sizes.tensor == 1 and sizes.expert == 1:
        return
    of_tensor, of_experts = _plans(model, sizes)
    if packed := sorted(rule for rule, style in of_tensor.items() if style.startswith("packed")):
        raise ConfigError(
            f"a model with t{sizes.tensor} must have no fused layer in its plan: got {packed[0]} in {name}. Write t1."
        )
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    if sizes.tensor > 1 and get_kv_heads_per_rank(of_tensor, heads, sizes.tensor) is None:
        raise ConfigError(
            f"t of allocation_mode must divide the key heads of the model: got t{sizes.tensor} and {heads} in {name}. "
            f"Write t{max(size for size in range(1, sizes.tensor) if heads % size == 0)}."
        )
    num = next((one.num_experts for one in _dispatching(model, of_experts)), 0)
    if num % sizes.expert:
        common = math.gcd(num, sizes.data * sizes.context * sizes.tensor)
        multiples = range(sizes.tensor, sizes.expert, sizes.tensor)
        fits = max((size for size in multiples if common % size == 0), default=1)
        raise ConfigError(
            f"e of allocation_mode must divide the experts of a layer: got e{sizes.expert} and {num} in {name}. "
            f"Write e{fits}."
        )


def _plans(model: PreTrainedModel, sizes: ParallelSizes) -> tuple[dict[str, str], dict[str, str]]:
    """Return how modules and parameters are split over t, and how over e, by their names."""
    if get_kv_heads_per_rank is None:
        raise ConfigError(
            f"transformers must be 5.21 or later for t and e in allocation_mode: got {sizes}. Upgrade it."
        )
    data = sizes.data * sizes.context
    plans = DistributedConfig(tp_size=sizes.tensor, fsdp_size=data, ep_size=sizes.expert)
    of_tensor, of_experts, _ = model._resolve_parallel_plans(plans)
    return of_tensor, of_experts


def _dispatching(model: PreTrainedModel, of_experts: dict[str, str]) -> list[Any]:
    """Return the modules that send tokens to the ranks of their experts."""
    return [model.get_submodule(rule) for rule, style in of_experts.items() if style == "ep_dispatch_experts"]


def split_layers(model: PreTrainedModel, mesh: Mesh) -> tuple[list[Any], list[str]]:
    """Split a model on the meta device, which `check_sizes` has seen, over t and e.

    Return the modules whose parameters are over e, and the names of the parameters whose gradients are sums over t.
    """
    sizes = mesh.sizes
    if sizes.tensor == 1 and sizes.expert == 1:
        return [], []
    of_tensor, of_experts = _plans(model, sizes)
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())  # a tied weight comes once
    if sizes.tensor > 1:
        assert mesh.tensor is not None
        assert not any(".lora_" in name for name in parameters), "configs refuse t with adapters"
        output = model.get_output_embeddings()
        own = {
            rule: style
            for rule, style in of_tensor.items()
            if style != _PARTIAL and (rule in parameters or modules.get(rule, output) != output)
        }
        apply_tensor_parallelism(model, mesh.tensor, own)
    experts = _dispatching(model, of_experts)
    if sizes.expert > 1:
        assert mesh.tensor is not None and mesh.experts is not None
        apply_expert_parallelism(model, mesh.experts["e"], mesh.tensor, of_experts)
    model.tie_weights()
    return experts, [rule for rule, style in of_tensor.items() if style == _PARTIAL and rule in parameters]
