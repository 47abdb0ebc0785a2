"""LoRA models of one base, which take turns in one engine, and their checkpoints.

The engine holds one model's adapter, or that of a checkpoint, at a time; those of the others, their moments and
gradients wait beside it. Adapters have the engine's rank: a model of a lower rank uses the first rows of A and columns
of B, and the others stay 0, as do their gradients.

Every method is collective; arguments and results are plain values, of rank 0.
"""

import json
import math
import re
import shutil
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch.distributed.tensor import DTensor, distribute_tensor

from arealite.algorithms.logprobs import LazyLogits, gather_logprobs
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine import fsdp_weights, lora
from arealite.engine.optimizer import local_part
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.inference.remote_engine import RemoteInferenceEngine
from arealite.tinker.losses import token_losses
from arealite.tinker.sampler import BASE
from arealite.utils.distributed import of_all_ranks, on_rank_0
from arealite.utils.files import publish_folder, reading
from arealite.utils.tensors import trimmed_rows
from arealite.weights.publish import publish_weights

PATH = re.compile(r"tinker://([\w:-]{1,100}/(?:sampler_)?weights/[A-Za-z0-9_][\w.-]{0,100})", re.ASCII)
_SETTINGS = "tinker.json"
_PROBE = 8  # tokens that show whether logits are finite


@dataclass(frozen=True)
class Settings:
    """What a client chose when it made a model."""

    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool


@dataclass(eq=False)
class _Model:
    settings: Settings
    adapter: list[torch.Tensor]  # this rank's parts, while the engine holds another model
    moments: defaultdict[torch.Tensor, Any] = field(default_factory=lambda: defaultdict(dict))
    gradients: list[torch.Tensor | None] = field(default_factory=list)


class Models:
    """The models of all clients."""

    def __init__(self, actor: FSDPPPOActor, rollout: RemoteInferenceEngine, folder: Path, max_tokens: int) -> None:
        self._actor, self.rollout, self._folder = actor, rollout, folder
        assert actor.config.lora is not None, "the config has adapters"
        self.lora_rank, self._alpha = actor.config.lora.rank, actor.config.lora.alpha
        self._names = lora.adapter_parameters(actor.model)
        self._parameters = list(self._names.values())
        self.base_model, self.num_ids, self.max_tokens = actor.config.path, actor.model_config.vocab_size, max_tokens
        self._models: dict[str, _Model] = {}
        self._held: _Model | str | None = None  # a model, the path of a checkpoint, or neither

    def create(self, model: str, settings: Settings, seed: int) -> None:
        """Make a model whose A depends only on `seed`, and whose B is 0."""
        random, adapter = torch.Generator().manual_seed(seed), []
        for name, parameter in self._names.items():
            whole = torch.zeros(parameter.shape)
            if ".lora_A." in name:  # uniform as in PEFT
                bound = 1 / math.sqrt(whole.shape[1])
                whole[: settings.lora_rank].uniform_(-bound, bound, generator=random)
            adapter.append(_own_part(whole, parameter).clone())
        self._models[model] = _Model(settings, adapter)

    def unload(self, model: str) -> None:
        """Forget a model; its checkpoints stay."""
        if self._held is self._models.pop(model, None):
            self._held = None

    def forward_backward(
        self, model: str, batch: TensorDict, loss: str, config: dict[str, float], *, with_gradient: bool
    ) -> tuple[torch.Tensor, float]:
        """Return the logprob `[B, S]` of each target token and the loss, and add its gradient to the model's."""
        self._hold(model)
        mesh, place = self._actor.mesh, torch.arange(batch["input_ids"].numel()).view_as(batch["input_ids"])
        part = trimmed_rows(batch.set("place", place), range(len(batch))[mesh.data_rank :: mesh.sizes.data])
        found: list[tuple[torch.Tensor, torch.Tensor]] = []

        def loss_of(logits: LazyLogits, packed: TensorDict) -> torch.Tensor:
            logprobs_N = gather_logprobs(logits, packed["target_tokens"])
            found.append((packed["place"].cpu(), logprobs_N.detach().cpu()))
            return token_losses(loss, logprobs_N, packed, config).sum()

        total = self._actor.accumulate(part, loss_of, with_gradient=with_gradient)
        logprobs_BS = torch.zeros(batch["input_ids"].shape)
        for pairs in of_all_ranks(found):
            for place_N, logprobs_N in pairs:
                logprobs_BS.view(-1)[place_N] = logprobs_N
        return logprobs_BS, total

    def optim_step(self, model: str, params: dict[str, float]) -> float:
        """Take a step of AdamW with the gradients so far, and return their norm before clipping."""
        held = self._hold(model)
        if all(parameter.grad is None for parameter in self._parameters):
            raise ValueError("optim_step must follow a forward_backward: got no gradient. Call it first.")
        for name, parameter in self._names.items():
            if not (held.settings.train_attn if "att" in name else held.settings.train_mlp):
                parameter.grad = None
        options = {name: params[name] for name in ("eps", "weight_decay")}
        for group in self._actor.optimizer.param_groups:
            group.update(options, lr=params["learning_rate"], betas=(params["beta1"], params["beta2"]))
        norm, is_sound = self._actor.take_step(params["grad_clip_norm"] or math.inf)
        if not is_sound:
            raise ValueError(f"gradients must be finite: got a norm of {norm}. Look at the weights and advantages.")
        return norm

    def save(self, model: str, path: str, *, with_optim: bool) -> None:
        """Write a checkpoint: an adapter in PEFT's format, with the moments of AdamW if asked for."""
        held, folder = self._hold(model), self.folder_of(path)
        partial = folder.with_name(f".{folder.name}.partial")
        on_rank_0(lambda: shutil.rmtree(partial, ignore_errors=True))
        self._actor.save(SaveLoadMeta(str(partial), with_optim=with_optim))

        def publish() -> None:
            (partial / _SETTINGS).write_text(json.dumps(asdict(held.settings)), encoding="utf-8")
            publish_folder(partial, folder)

        on_rank_0(publish)

    def load(self, model: str, path: str, *, with_optim: bool) -> None:
        """Continue a model from a checkpoint of the same rank, with new moments unless asked for."""
        held, found = self._hold(model), self.settings_of(path)
        if found.lora_rank != held.settings.lora_rank:
            ranks = f"got {found.lora_rank} instead of {held.settings.lora_rank}"
            raise ValueError(f"{path} must be of the model's lora_rank: {ranks}. Make a model of that rank.")
        self._read(path)
        self._actor.optimizer.zero_grad()
        held.moments.clear()
        if with_optim:
            fsdp_weights.load_optimizer(self._actor.model, self._actor.optimizer, str(self.folder_of(path)))

    def publish(self, path: str, version: int) -> None:
        """Let the servers sample from a checkpoint, or from the base model."""
        if not all(map(math.isfinite, self.logprobs(path, [*range(min(_PROBE, self.num_ids))]))):
            raise ValueError(f"{path} must give finite logits: got others. Train it again with a lower learning rate.")
        publish_weights(self._actor, self.rollout, version)

    def logprobs(self, path: str, tokens: list[int]) -> list[float]:
        """Return the logprob of each token of a text after those before it, 0 for the first."""
        self._show(path)
        batch = TensorDict({"input_ids": torch.tensor([tokens])}, batch_size=1)
        return self._actor.compute_logprobs(batch.set("attention_mask", torch.ones(1, len(tokens)).bool()))[0].tolist()

    def folder_of(self, path: str) -> Path:
        """Return the folder of a checkpoint. Raises ValueError for what is no path of one."""
        if (match := PATH.fullmatch(path)) is None:
            form = "tinker://MODEL/weights/NAME or tinker://MODEL/sampler_weights/NAME"
            raise ValueError(f"the path of a checkpoint must be {form}: got {path}. Use what saving returned.")
        return self._folder / match[1]

    def settings_of(self, path: str) -> Settings:
        """Return the settings of a checkpoint. Raises ValueError if there is none."""
        file = self.folder_of(path) / _SETTINGS
        if not file.is_file():
            raise ValueError(f"{path} must be a checkpoint of this server: got none in {self._folder}. Save it first.")
        with reading(file):
            settings = Settings(**json.loads(file.read_text(encoding="utf-8")))
        if settings.base_model != self.base_model:
            raise ValueError(f"{path} must be of the base model that is served: got one of {settings.base_model}.")
        return settings

    def _hold(self, name: str) -> _Model:
        """Give the engine a model's adapter, moments and gradients."""
        model = self._models[name]
        if self._held is not model:
            self._stash()
            self._write(model.adapter, model.settings.lora_rank)
            self._actor.optimizer.state = model.moments
            for parameter, gradient in zip(self._parameters, model.gradients):
                parameter.grad = gradient
            self._held = model
        return model

    def _show(self, path: str) -> None:
        """Give the engine the adapter of a checkpoint, to sample from it."""
        if self._held == path:
            return
        self._stash()
        if path == BASE:
            self._write([torch.zeros_like(local_part(one)) for one in self._parameters], self.lora_rank)
        else:
            self._read(path)
        self._held = path

    def _stash(self) -> None:
        """Keep what the engine has of a model."""
        if isinstance(self._held, _Model):
            self._held.adapter = [local_part(one.detach()).clone() for one in self._parameters]
            self._held.gradients = [one.grad for one in self._parameters]
        self._held = None
        for parameter in self._parameters:
            parameter.grad = None

    def _read(self, path: str) -> None:
        folder, settings = self.folder_of(path), self.settings_of(path)
        whole = load_file(folder / lora.FILE)
        if any(whole[name].shape != one.shape for name, one in self._names.items()):
            raise ValueError(f"{path} must be of a server with the same --lora-rank: got another. Start such a one.")
        self._write([_own_part(whole[name], one) for name, one in self._names.items()], settings.lora_rank)

    @torch.no_grad()
    def _write(self, adapter: list[torch.Tensor], lora_rank: int) -> None:
        """Overwrite this rank's parts of the adapter, and set the scale of its rank."""
        self._actor.begin_change()
        for parameter, part in zip(self._parameters, adapter, strict=True):
            local_part(parameter).copy_(part)
        lora.set_scale(self._actor.model, self._alpha / lora_rank)


def _own_part(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor that is split as a parameter; every rank has all of it."""
    assert isinstance(parameter, DTensor), "parameters are sharded"
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(whole.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
