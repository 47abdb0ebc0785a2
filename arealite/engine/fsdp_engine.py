"""Trains a Hugging Face model with FSDP2 on packed micro-batches, on CPUs (gloo) and GPUs (NCCL).

Invariant: the gradient is `sum(mean * weight) / sum(weight)` over all micro-batches of all ranks, so it depends on
neither packing nor the number of micro-batches or ranks.
"""

# B sequences, S padded tokens, N packed tokens, H hidden size

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from transformers import PretrainedConfig, PreTrainedModel

from arealite.api.alloc_mode import ParallelSizes
from arealite.api.cli_args import TrainEngineConfig
from arealite.api.engine_api import TrainEngine
from arealite.api.errors import CheckpointError, ConfigError
from arealite.api.io_struct import FinetuneSpec, FrozenWeights, ParamSpec, SaveLoadMeta, WeightSharing, WeightUpdateMeta
from arealite.api.script import refuse_import
from arealite.engine import fsdp_weights, hf_model, lora
from arealite.engine.checkpointing import CheckpointedEngine
from arealite.engine.load_balancing import balance_loss, check_balanced
from arealite.engine.metrics import UpdateCosts
from arealite.engine.optimizer import LRSchedule, make_adamw, optimizer_state
from arealite.engine.packed_attention import pick_attention, sequence_bounds, vision_inputs
from arealite.engine.parallel.context import over_context, own_slice
from arealite.engine.parallel.layers import check_sizes, with_experts
from arealite.engine.parallel.mesh import Mesh
from arealite.engine.parallel.pipeline import Pipeline
from arealite.engine.parallel.shards import clip_gradients, copy_from_rank0, shard, sum_gradients
from arealite.planner.memory import GIB, knob_of, model_shape, state_of, step_of
from arealite.utils import cores, distributed, heartbeat, tensors, trace
from arealite.utils.images import sees_images
from arealite.utils.seeding import seed_everything
from arealite.utils.tensors import MicroBatch
from arealite.utils.terminal import setup_logging

if TYPE_CHECKING:
    from arealite.api.engine_api import LossFn, LossWeightFn

logger = logging.getLogger("arealite.engine")

COLLECTIVE_TIMEOUT_S = 7200.0  # ranks block in a collective while rank 0 collects rollouts or downloads the model


class FSDPEngine(CheckpointedEngine, TrainEngine):
    """A sharded model with its optimizer; without `config.optimizer` it only evaluates (a reference).

    Parameters and optimizer state are float32 shards; a layer is gathered in the compute dtype while it runs. With
    `config.lora` only adapters are trained, and other parameters are stored in the compute dtype. With
    `has_value_head` the model is a sequence classifier with one label, whose head starts at 0 if the checkpoint has
    none; loss functions and hooks then get a float32 value per token, `[N]`, instead of `LazyLogits`.
    """

    def __init__(self, config: TrainEngineConfig, *, has_value_head: bool = False) -> None:
        refuse_import()
        if config.optimizer is not None and config.dtype == "float16":
            raise ValueError(
                "dtype of a trained model must be bfloat16 or float32: got float16, whose gradients underflow. "
                "Set dtype: bfloat16."
            )
        self.config = config
        self.has_value_head = has_value_head
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self._version = 0
        self._has_trained = False
        self.num_changes = 0
        self._balances = False  # the load of experts, by an auxiliary loss; the model returns logits of routers
        self._balance_losses: list[torch.Tensor]
        self._sender = fsdp_weights.WeightSender()
        self._shares: WeightSharing | None = None  # a server that samples from these parameters
        self._running: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        self._frozen: dict[str, str] = {}  # fingerprint of the frozen weights, stored in checkpoints
        self.frozen_weights: FrozenWeights | None = None  # with LoRA: weights that servers get only once
        self._attention: str
        self._outputs: Callable[[torch.Tensor, int], Any]  # hidden states to the argument of losses
        self.mesh: Mesh
        self.model: PreTrainedModel

    # Life

    def initialize(self, addr: str | None, ft_spec: FinetuneSpec | None, *, policy: FSDPEngine | None = None) -> None:
        """Join the process group, load the model, build optimizer and schedule.

        A reference that starts from the same path and dtype as a `policy` with LoRA loads no weights: it is the
        policy's model with its adapters disabled.
        """
        if addr is not None:
            raise ValueError(f"addr must be None for an engine whose ranks torchrun starts: got {addr!r}. Pass None.")
        setup_logging()  # every script of a rank initializes an engine before anything that logs
        cores.own_cores()
        distributed.join_default_group(COLLECTIVE_TIMEOUT_S)
        self._group: dist.ProcessGroup | None = dist.new_group(timeout=timedelta(seconds=COLLECTIVE_TIMEOUT_S))
        try:
            self._build(ft_spec, policy)
        except BaseException:
            self._leave_groups()
            raise

    def _build(self, ft_spec: FinetuneSpec | None, policy: FSDPEngine | None) -> None:
        has_gpu, num_ranks = torch.cuda.is_available(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if has_gpu else torch.device("cpu")
        if policy is not None and self.config.is_base_of(policy.config):
            self.model, self._outputs, self._attention = policy.model, policy._outputs, policy._attention
            self.mesh, self._pipeline = policy.mesh, None  # which refuses adapters
            self._running = functools.partial(lora.without_adapters, policy.model)
            return
        self._attention, why = pick_attention(self.config.attn_impl, self.device, self.dtype)
        if dist.get_rank() == 0:
            level = logging.INFO if has_gpu else logging.DEBUG  # a CPU has only one implementation
            logger.log(level, "attention of %s: %s, %s", self.config.path, self._attention, why)
        has_value_head, sizes = self.has_value_head, ParallelSizes.from_str(self.config.parallel or f"d{num_ranks}")
        attention = self._attention if sizes.context == 1 else over_context(self._attention)
        self.model = hf_model.build_meta_model(self.config.path, attention, has_value_head=has_value_head)
        check_sizes(self.model, sizes)
        check_balanced(self.model, self.config)
        self._balances = self.config.optimizer is not None and self.config.router_aux_loss_coef > 0
        num_copies, timeout = self.config.fsdp.dp_replicate, timedelta(seconds=COLLECTIVE_TIMEOUT_S)
        self.mesh = Mesh(with_experts(self.model, sizes), self.device, timeout, num_copies=num_copies)
        seed_everything(self.config.seed + self.mesh.data_rank)
        if self.config.lora is not None:
            lora.add_adapters(self.model, self.config)
        self._shape = model_shape(self.model)
        if self.config.disable_dropout:
            hf_model.disable_dropout(self.model)
        if has_value_head:
            self._outputs = hf_model.values_of(self.model, self.mesh.context)
        else:
            self._outputs = hf_model.logits_of(self.model, self.mesh.context, self.mesh.tensor)
        hf_model.return_hidden_states(self.model, with_routers=self._balances)
        if self.config.optimizer is not None:
            self.costs = UpdateCosts(self.model, self.device, self.dtype, self.mesh.sizes.block_size)
        self._partial = shard(self.model, self.config, self.device, self.mesh)
        self._pipeline = Pipeline(self.model, self.mesh, self.dtype) if self.mesh.stages is not None else None
        self.model.to_empty(device="cpu" if self.config.fsdp.offload_params else self.device)
        self._copy_whole_model(self.config.path, self.config.init_from_scratch)
        if self.config.optimizer is not None:
            self.optimizer = make_adamw(self.model.parameters(), self.config.optimizer)
            self.costs.optimizer = self.optimizer
            total_steps = None if ft_spec is None else ft_spec.total_train_steps
            self.lr_schedule = LRSchedule(self.optimizer, self.config.optimizer, total_steps)
            self._join_state_group()

    def _copy_whole_model(self, path: str, init_from_scratch: bool = False) -> None:
        """Load a model, or an adapter of the config's model, on rank 0 and distribute it (collective)."""
        self.begin_change()
        options: dict[str, Any] = {"has_value_head": self.has_value_head, "init_from_scratch": init_from_scratch}

        def load() -> PreTrainedModel:
            is_adapter = self.config.lora is not None and lora.is_adapter(path)
            base = self.config.path if is_adapter else path
            whole = hf_model.load_whole_model(base, seed=self.config.seed, **options)
            if self.config.lora is not None:
                lora.add_adapters(whole, self.config)
            if is_adapter:
                lora.read_adapter(whole, path)
            return whole

        copy_from_rank0(self.model, distributed.on_rank_0(load, self._group), self.device)
        if self.config.lora is not None:
            frozen = fsdp_weights.fingerprint_shards(self.model, only_frozen=True)
            self._frozen = {"frozen": f"{frozen} with adapters of alpha {self.config.lora.alpha}"}
            self.frozen_weights = FrozenWeights(frozen, fsdp_weights.frozen_names(self.model))

    def destroy(self) -> None:
        self._sender.close()
        del self.model
        if self.config.optimizer is not None:
            del self.optimizer, self.lr_schedule
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        self._leave_groups()

    def _leave_groups(self) -> None:
        for group in filter(None, (self._group, self._state_group)):
            dist.destroy_process_group(group)
        if hasattr(self, "mesh") and self._running is contextlib.nullcontext:  # else it is the policy's
            self.mesh.leave()
        self._group = self._state_group = None
        distributed.leave_default_group()

    @property
    def parallelism_group(self) -> dist.ProcessGroup:
        """The ranks that have other rows than this one and its block; sums over it are sums over the batch."""
        return self.mesh.data

    @property
    def model_config(self) -> PretrainedConfig:
        """The configuration of the model's text part."""
        return self.model.config.get_text_config()

    @property
    def num_threads(self) -> int:
        return torch.get_num_threads()

    def train(self, mode: bool = True) -> None:
        self.model.train(mode)

    def set_version(self, version: int) -> None:
        self._version = version

    def get_version(self) -> int:
        return self._version

    # Steps

    @heartbeat.waiting("all ranks in an update", on="ranks")
    def train_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, rows_per_unit: int = 1
    ) -> dict[str, float]:
        """Take one optimizer step and return `loss, grad_norm, lr, update_successful`, equal on all ranks.

        With `router_aux_loss_coef`, `router_aux_loss` is returned, too; it is no part of `loss`.

        The step is skipped (`update_successful` 0) when loss or gradient is not finite or nothing has a weight. Every
        `rows_per_unit` rows stay in one micro-batch.
        """
        if self.config.optimizer is None:
            raise ConfigError(
                "optimizer must be given for a model that is trained: got null, as for a reference. Pass "
                "optimizer=OptimizerConfig() to its config."
            )
        self.train()
        micro_batches, weights, total_weight = self._weigh(input_, loss_weight_fn, rows_per_unit)
        self._has_trained = True
        self._balance_losses = []
        self.optimizer.zero_grad()
        scale = self.mesh.num_shards / max(total_weight, 1e-12)  # FSDP averages gradients over ranks
        losses = self._run(micro_batches, functools.partial(self._weighted_loss, loss_fn), weights, scale)
        mean_loss = self._mean_over_ranks(losses, total_weight)
        largest, is_sound = self.config.optimizer.gradient_clipping, total_weight > 0 and math.isfinite(mean_loss)
        grad_norm, is_sound = self.take_step(largest, is_sound=is_sound)
        if not is_sound:
            message = "optimizer step skipped: loss %s, gradient norm %s, loss weight %s"
            logger.warning(message, mean_loss, grad_norm, total_weight)
        return {
            "loss": mean_loss,
            "grad_norm": grad_norm,
            "lr": self.lr_schedule.lr,
            "update_successful": float(is_sound),
        } | ({"router_aux_loss": float(torch.stack(self._balance_losses).mean())} if self._balances else {})

    @heartbeat.waiting("all ranks in a loss", on="ranks")
    def accumulate(self, input_: TensorDict, loss_fn: LossFn, *, with_gradient: bool = True) -> float:
        """Return the sum of `loss_fn` over the micro-batches of all ranks, and add its gradient to that of the next
        `take_step` (collective)."""
        self.train(with_gradient)
        micro_batches = self._split(input_)
        weights = [float(one.num_tokens > 0) for one in micro_batches]
        with torch.set_grad_enabled(with_gradient):
            finish = functools.partial(self._weighted_loss, loss_fn)
            losses = self._run(micro_batches, finish, weights, self.mesh.num_shards)
        self.model.reshard()
        return self._mean_over_ranks(losses, 1.0)

    def take_step(self, largest_norm: float, *, is_sound: bool = True) -> tuple[float, bool]:
        """Take an optimizer step with the gradients so far, clipped to a norm, and drop them; return their norm and
        whether it was taken (collective). It is not if a gradient is not finite."""
        if self.mesh.tensor is not None:
            sum_gradients(map(self.model.get_parameter, self._partial), self.mesh.tensor.get_group())
        grad_norm = clip_gradients(self.model.parameters(), largest_norm, self.mesh)
        is_sound = is_sound and math.isfinite(grad_norm)
        if is_sound:
            self.begin_change()
            with cores.taken():
                self.optimizer.step()
        self.optimizer.zero_grad()
        return grad_norm, is_sound

    @heartbeat.waiting("all ranks in a loss", on="ranks")
    @torch.no_grad()
    def eval_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: LossWeightFn, *, rows_per_unit: int = 1
    ) -> float:
        self.eval()
        micro_batches, weights, total_weight = self._weigh(input_, loss_weight_fn, rows_per_unit)
        losses = self._run(micro_batches, functools.partial(self._weighted_loss, loss_fn), weights)
        self.model.reshard()
        return self._mean_over_ranks(losses, total_weight)

    @heartbeat.waiting("all ranks in a forward pass", on="ranks")
    @torch.no_grad()
    def forward(self, input_: TensorDict, post_hook: Callable[[Any, TensorDict], torch.Tensor]) -> torch.Tensor:
        self.eval()
        micro_batches = self._split(input_)

        def finish(hidden_NH: torch.Tensor, packed: TensorDict, num_tokens: int, _: float) -> torch.Tensor:
            return post_hook(self._outputs(hidden_NH, num_tokens), packed) if num_tokens else hidden_NH[:0, 0]

        values = self._run(micro_batches, finish)
        self.model.reshard()
        pairs = [(value, one) for value, one in zip(values, micro_batches, strict=True) if one.num_tokens]
        return tensors.unpack_rows([value for value, _ in pairs], [one for _, one in pairs], input_)

    def step_lr_scheduler(self) -> None:
        if self._has_trained:  # scripts may call this after `ppo_update` or `train_lm`, which did already
            self.lr_schedule.set_step(self.lr_schedule.num_steps + 1)
        self._has_trained = False

    def _split(self, input_: TensorDict, rows_per_unit: int = 1) -> list[MicroBatch]:
        """Pack this rank's rows into micro-batches; every rank gets the same number, so that collectives match."""
        lengths, spec = tensors.unit_lengths(input_["attention_mask"], rows_per_unit), self.config.mb_spec
        count = tensors.count_micro_batches(lengths, spec.n_mbs, spec.max_tokens_per_mb)
        count = max(count, self.mesh.sizes.pipeline)  # to fill the stages; some may be empty
        (count_on_all,) = distributed.all_reduce_numbers([count], dist.ReduceOp.MAX, self.mesh.data)
        self.mesh.require_same_rows(input_)
        groups = tensors.split_rows(lengths, int(count_on_all), spec.max_tokens_per_mb, rows_per_unit=rows_per_unit)
        return [tensors.pack_rows(input_, rows) for rows in groups]

    def _weigh(
        self, input_: TensorDict, loss_weight_fn: LossWeightFn, rows_per_unit: int
    ) -> tuple[list[MicroBatch], list[float], float]:
        """Split a batch; return the micro-batches, their weights and the total over all ranks."""
        micro_batches = self._split(input_, rows_per_unit)
        weights = [float(loss_weight_fn(mb.packed)) if mb.num_tokens else 0.0 for mb in micro_batches]
        (total,) = distributed.all_reduce_numbers([sum(weights)], group=self.mesh.data)
        return micro_batches, weights, total

    def _out_of_memory(self, micro_batches: Sequence[MicroBatch]) -> MemoryError:
        """Return an error that names what needs most of a rank's memory, and the keys that change it."""
        micro, is_trained = max(one.num_tokens for one in micro_batches), self.config.optimizer is not None
        block, ranks, is_split = self.config, dist.get_world_size(), len(micro_batches) > 1
        parts = state_of(block, self._shape, ranks, is_trained)
        parts |= step_of(block, self._shape, ranks, micro, is_split=is_split, is_trained=is_trained)
        key = "critic" if self.has_value_head else "actor" if hasattr(block, "ppo_n_minibatches") else "model"
        largest, change = knob_of(parts, key=key, more="Use more trainer ranks in allocation_mode")
        need = f"{largest} need {parts[largest] / GIB:.2f} of about {sum(parts.values()) / GIB:.2f} GiB"
        problem = (
            f"a rank must have room for a micro-batch: got out of memory with one of {micro:,} tokens, where {need}"
        )
        return MemoryError(f"{problem}. {change} `arealite plan` shows all terms.")

    @cores.taken()
    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[[torch.Tensor, TensorDict, int, float], torch.Tensor],
        weights: Sequence[float] | None = None,
        scale: float = 1.0,
    ) -> list[torch.Tensor]:
        """Run the model on micro-batches; return what `finish` makes of hidden states, columns, tokens and weight.

        Where gradients are enabled, `finish` returns a loss, and the backward pass of it times `scale` follows.
        """
        weights = weights or [0.0] * len(micro_batches)
        try:
            return self._run_each(micro_batches, finish, weights, scale)
        except torch.OutOfMemoryError as error:
            raise self._out_of_memory(micro_batches) from error

    def _run_each(
        self,
        micro_batches: Sequence[MicroBatch],
        finish: Callable[[torch.Tensor, TensorDict, int, float], torch.Tensor],
        weights: Sequence[float],
        scale: float,
    ) -> list[torch.Tensor]:
        is_training, results = torch.is_grad_enabled(), []
        if self._pipeline is not None:
            columns = [tensors.on_device(one.packed, self.device) for one in micro_batches]
            length = max(1, *(one.num_tokens for one in micro_batches))
            inputs = [self._inputs(one, packed, length) for one, packed in zip(micro_batches, columns, strict=True)]

            def finish_one(index: int, hidden_NH: torch.Tensor) -> torch.Tensor:
                num_tokens = micro_batches[index].num_tokens
                return finish(self._own(hidden_NH, num_tokens), columns[index], num_tokens, weights[index])

            return self._pipeline.run(inputs, finish_one, scale)
        for index, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
            packed, num_tokens = tensors.on_device(micro_batch.packed, self.device), micro_batch.num_tokens
            with trace.span("micro-batch", tokens=num_tokens) if is_training else contextlib.nullcontext():
                if is_training:
                    is_last = index == len(micro_batches) - 1
                    self.model.set_requires_gradient_sync(is_last or not self.config.fsdp.reduce_once)
                    self.model.set_requires_all_reduce(is_last)  # replicas (HSDP) reduce their shards once
                with self._running():
                    outputs = self.model(**self._inputs(micro_batch, packed), use_cache=False)
                heartbeat.tick()
                hidden, routers = outputs if self._balances else (outputs, ())
                result = finish(self._own(hidden[0], num_tokens), packed, num_tokens, weight)
                if is_training:
                    total = result * scale
                    if self._balances:
                        total = total + self._balance(routers, num_tokens) / len(micro_batches)
                    total.backward()
            results.append(result.detach())
        return results

    def _balance(self, routers: Sequence[torch.Tensor], num_tokens: int) -> torch.Tensor:
        """Return what the loss of a micro-batch gets of the loss of load balancing, and note its value."""
        first = 0 if self.mesh.context is None else dist.get_rank(self.mesh.context) * routers[0].shape[-2]
        own, whole = balance_loss(routers, max(0, num_tokens - first), self.model, self.mesh.sizes)
        self._balance_losses.append(whole)
        return own * self.config.router_aux_loss_coef * self.mesh.num_shards

    def _own(self, hidden_NH: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Return hidden states without those of padding; slices of the tokens (c) keep it, to be of equal length."""
        return hidden_NH if self.mesh.context is not None and num_tokens else hidden_NH[:num_tokens]

    def _weighted_loss(
        self, loss_fn: LossFn, hidden_NH: torch.Tensor, packed: TensorDict, num_tokens: int, weight: float
    ) -> torch.Tensor:
        """Return mean loss times weight; 0 with a zero gradient for a micro-batch without weight."""
        if weight == 0:  # a zero-token forward pass: this rank must join the reduction of every gradient
            nothing = self._outputs(hidden_NH[:0], 0)
            return hidden_NH[:0].sum() + (nothing if self.has_value_head else nothing.dense()).sum()
        return loss_fn(self._outputs(hidden_NH, num_tokens), packed) * weight

    def _inputs(self, micro_batch: MicroBatch, packed: TensorDict, length: int = 0) -> dict[str, Any]:
        """Return the inputs of the model: a micro-batch's tokens padded to `length`, or this rank's slice of them.

        An empty micro-batch runs on one token per rank, which is dropped.
        """
        inputs: dict[str, Any] = {key: packed[key] for key in ("input_ids", "position_ids")}
        lengths = real = [length for length in micro_batch.packed["cu_seqlens"].diff().tolist() if length]
        if sees_images(self.model.config):
            inputs, lengths = vision_inputs(packed, lengths, self.model.config)
        num_tokens, num_slices = inputs["input_ids"].numel(), self.mesh.sizes.context
        padding = max(num_tokens, length, 1)
        padding += -padding % num_slices - num_tokens
        if padding:  # a sequence of its own
            positions = torch.arange(padding, device=self.device)
            inputs["input_ids"] = torch.nn.functional.pad(inputs["input_ids"], (0, padding))
            inputs["position_ids"] = torch.cat([inputs["position_ids"], positions])
            lengths = [*lengths, padding]
        if torch.is_grad_enabled():
            self.costs.add(real, inputs["input_ids"].numel())
        bounds = sequence_bounds(self._attention, lengths, self.device)
        if self.mesh.context is not None:
            inputs = {key: own_slice(value, self.mesh.context) for key, value in inputs.items()}
            bounds["context_group"] = self.mesh.context
        inputs |= {"input_ids": inputs["input_ids"][None], "position_ids": inputs["position_ids"].unsqueeze(-2)}
        return inputs | bounds

    def _mean_over_ranks(self, losses: Sequence[torch.Tensor], total_weight: float) -> float:
        """Return the mean over all ranks of the weighted losses; the only device sync of losses in a step."""
        local_sum = float(sum(loss.double() for loss in losses))
        (total,) = distributed.all_reduce_numbers([local_sum], group=self.mesh.data)
        return total / total_weight if total_weight else 0.0

    # Weights

    @heartbeat.waiting("all ranks in a checkpoint", on="ranks")
    def save(self, meta: SaveLoadMeta) -> None:
        """Write a Hugging Face checkpoint (collective): float32 with the optimizer, to resume exactly, else `dtype`.

        With LoRA it is a PEFT adapter, or the merged model with `lora.merge_on_save` and without the optimizer.
        """
        if self.config.lora is not None and (meta.with_optim or not self.config.lora.merge_on_save):
            fsdp_weights.write_whole_adapter(self.model, meta.path)
        else:
            fsdp_weights.write_whole_model(self.model, meta.path, torch.float32 if meta.with_optim else self.dtype)
        if meta.with_optim:
            fsdp_weights.save_optimizer(self.model, self.optimizer, self.lr_schedule.num_steps, meta.path)
        parts = [part for part in (meta.tokenizer, meta.processor) if part is not None]
        distributed.on_rank_0(lambda: [part.save_pretrained(meta.path) for part in parts])

    @heartbeat.waiting("all ranks in a checkpoint", on="ranks")
    def load(self, meta: SaveLoadMeta) -> None:
        """Read a Hugging Face checkpoint (collective), with the optimizer from any number of ranks."""
        self._copy_whole_model(meta.path)
        if meta.with_optim:
            self.lr_schedule.set_step(fsdp_weights.load_optimizer(self.model, self.optimizer, meta.path))

    def state_dict(self) -> dict[str, Any]:
        """Return the state of training, as shards and numbers for `torch.distributed.checkpoint`.

        Its weights are those in use, so reading a checkpoint into it changes them in place. Frozen ones are left out.
        """
        assert self.config.optimizer is not None, "only a model that is trained has a state"
        trained = ((name, one) for name, one in self.model.named_parameters() if one.requires_grad)
        weights = [*trained, *self.model.named_buffers()]
        return {
            "model": {name: tensor.detach() for name, tensor in weights},
            "optimizer": optimizer_state(self.model, self.optimizer),
            "num_steps": self.lr_schedule.num_steps,
            "version": self._version,
            **self._frozen,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict` into which a checkpoint of any layout of ranks was read."""
        self.begin_change()
        if any(state[key] != ours for key, ours in self._frozen.items()):
            raise CheckpointError(
                "a checkpoint with LoRA must be of the same weights in path, dtype, lora.alpha and target_modules: got "
                "other weights. Use the configuration of the run, and the model that it started from."
            )
        self.lr_schedule.set_step(int(state["num_steps"]))
        self.set_version(int(state["version"]))

    def get_param_specs(self, weight_chunked_mem_mb: int = 1024, num_senders: int | None = 1) -> list[list[ParamSpec]]:
        max_bytes, count = weight_chunked_mem_mb * 2**20, num_senders or distributed.num_nodes()
        return fsdp_weights.param_buckets(self.model, self.config.dtype, max_bytes, count)

    def fingerprint(self) -> str:
        """Return a checksum of the parameters, equal only if all bits are (collective)."""
        return fsdp_weights.fingerprint_shards(self.model)

    @property
    def transfer_group(self) -> str:
        """The broadcast group in which rank 0 and further senders send weights, "" without one."""
        return self._sender.update

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        """Send the weights in `dtype` to the folder or groups of `meta`, or share them with its server.

        Collective; `meta` of rank 0 applies. Resolves `uploaded` on rank 0; a failure raises on every rank.
        """
        try:
            meta = distributed.from_rank_0(meta, self._group)
            assert not meta.transfer.is_partial or meta.frozen == self.frozen_weights, "frozen weights have changed"
            if meta.transfer.is_shared:
                self._shares = meta.transfer.shares
                fsdp_weights.share_whole_model(self.model, meta, self.dtype)
            elif meta.type == "disk":
                fsdp_weights.publish_checkpoint(self.model, meta, self.dtype)
            else:
                self._sender.send(self.model, meta, self.dtype)
        except BaseException as error:
            self._sender.close()
            if not meta.transfer.uploaded.done():
                meta.transfer.uploaded.set_exception(error)
            raise
        if not meta.transfer.uploaded.done():
            meta.transfer.uploaded.set_result(None)
