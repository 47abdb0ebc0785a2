"""The memory that a config needs, by purpose: of each trainer rank or worker, and of a server; and whether it fits."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from arealite.api.alloc_mode import AllocationMode
from arealite.api.cli_args import BaseExperimentConfig as Config
from arealite.api.cli_args import TrainEngineConfig
from arealite.inference.backends.program import SHARED_MEMORY, ServerProgram
from arealite.launcher.plan.layout import foreign_servers, make_layout
from arealite.planner.memory import (
    BYTES,
    GIB,
    ModelShape,
    Parts,
    knob_of,
    kv_bytes_per_token,
    of_rank,
    state_of,
    step_of,
)

_TIGHT = 0.85  # of a device; the plan omits allocator and library overhead
_SERVER_SHARE = 0.9  # of a GPU: default of SGLang and vLLM
Level = Literal["ok", "warning", "problem"]


class Verdict(NamedTuple):
    """Whether something fits, and what to change if not."""

    level: Level
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Ranks:
    """The memory that each rank of a group always holds, and needs on top in a step of full-length sequences."""

    who: str
    key: str  # of the block whose step takes most
    more: str  # how to get more ranks
    count: int
    offloads: bool
    state: Parts
    step: Parts

    @property
    def on_gpu(self) -> Parts:
        """What is on a GPU in a step."""
        return self.step if self.offloads else self.state | self.step


@dataclass(frozen=True)
class Needs:
    """The memory of all processes of a run."""

    config: Config
    mode: AllocationMode
    ranks: Sequence[Ranks]  # of a script, one group; of workers, several
    server: Parts  # of each GPU of the servers, or on a CPU of each server
    kv_token: int  # bytes of a token in a server's cache, on each of its GPUs
    longest: int  # tokens of a sequence

    def verdicts(self, gpu: float | None, host: float) -> Iterator[Verdict]:
        """Compare the needs with the bytes of a GPU (on a cluster without GPUs, with those of the host)."""
        mode, server = self.mode, self.server
        if self.config.cluster.n_gpus_per_node == 0:
            together: Parts = {}
            for group in self.ranks:
                for name, size in (group.state | group.step).items():
                    together[name] = together.get(name, 0) + size * group.count
            together |= {f"servers' {name}": size * mode.gen_dp_size for name, size in server.items()}
            yield _fit("the run", together, host, self.ranks[0])
        elif gpu is None:
            yield Verdict("warning", "no GPU here to hold the plan against", "Compare it with the GPUs you will use.")
        else:
            for group in self.ranks:
                yield _fit(group.who, group.on_gpu, gpu, group)
                if mode.takes_turns:
                    awake = {"its server": int(gpu * _server_share(self.config))}
                    awake |= {} if group.offloads else group.state
                    yield _fit(f"{group.who} beside its server that is awake", awake, gpu, group)
                if group.offloads:
                    whole = {name: size * group.count for name, size in group.state.items()}
                    yield _fit("the host", whole, host, group)
            if server:
                yield self._completions(gpu)

    def fit(self, memory: float) -> bool:
        """Return whether ranks have room on such devices, with a margin, and servers for a completion."""
        is_known = self.server and self.config.cluster.n_gpus_per_node
        return self.ranks_fit(memory) and (not is_known or self.cache_tokens(memory) >= self.longest)

    def ranks_fit(self, memory: float) -> bool:
        """Return whether ranks have room, with a margin: on a CPU all together."""
        sizes = [sum(group.on_gpu.values()) for group in self.ranks]
        if self.config.cluster.n_gpus_per_node:
            return max(sizes) <= _TIGHT * memory
        return sum(size * group.count for size, group in zip(sizes, self.ranks, strict=True)) <= _TIGHT * memory

    def cache_tokens(self, gpu: float) -> int:
        """Return the tokens that fit the cache of a server of such GPUs."""
        others = sum(self.server.values()) - self.server["cache"]
        return max(0, (int(gpu * _server_share(self.config)) - others) // self.kv_token)

    def _completions(self, gpu: float) -> Verdict:
        """Compare the cache that fits a server with the completions it must hold at once."""
        room, asked = self.cache_tokens(gpu), self.server["cache"] // self.kv_token
        text = (
            f"a server's cache holds {room:,} of the {asked:,} tokens asked for at once, {self.longest:,} a completion"
        )
        if room >= asked:
            return Verdict("ok", text)
        knobs = "Raise t of the servers in allocation_mode, or lower gconfig.max_new_tokens or max_concurrent_rollouts."
        return Verdict("problem" if room < self.longest else "warning", text, knobs)


def positions_of(model: Any) -> float:
    """Return the longest sequence of a Hugging Face model, in tokens, by its config."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or math.inf


def context_of(config: Config, positions: float) -> float:
    """Return the longest sequence of model and servers, in tokens, by the model's positions and the servers' flags."""
    if config.rollout is None or foreign_servers(config):
        return positions
    limit = str(ServerProgram(config).flags.get(config.server_kind.context_flag))
    return min(positions, int(limit)) if limit.isdecimal() else positions  # vLLM also takes 32k, and `auto`


def longest_sequence(config: Config, positions: float, prompt: int) -> int:
    """Return the tokens of the longest sequence with a prompt of so many."""
    new = config.sampling.max_new_tokens if config.sampling is not None else 0
    return int(min(prompt + new, context_of(config, positions)))


def needs_of(config: Config, shape: ModelShape, longest: int, others: Mapping[str, ModelShape] | None = None) -> Needs:
    """Add up what trainer ranks or workers and servers need; `others` are the shapes of roles whose model is not the
    trained one."""
    mode, key = AllocationMode.from_str(config.allocation_mode), config.trained[0]
    ranks = _groups(config, {key: shape, **(others or {})}, longest, mode.train_world_size)
    server, kv_token = _server_parts(config, shape, longest, mode)
    if mode.is_colocated:  # on the device of the only rank, in its steps, too
        (rank,), of_server = ranks, {f"servers' {name}": size for name, size in server.items()}
        ranks, server = [replace(rank, step=rank.step | of_server)], {}
    return Needs(config, mode, ranks, server, kv_token, longest)


def roles_beside(config: Config) -> list[str]:
    """Return the roles beside the trained one."""
    has = {"critic": config.has_critic, "ref": config.has_reference, "teacher": getattr(config, "teacher", None)}
    return [role for role, is_there in has.items() if is_there]


def block_of(config: Config, role: str) -> TrainEngineConfig:
    """Return the block of a role; a block that only the script reads is replaced by that of the trained model."""
    block = getattr(config, role)
    return block if isinstance(block, TrainEngineConfig) else config.trained[1]


def _groups(config: Config, shapes: Mapping[str, ModelShape], longest: int, ranks: int) -> list[Ranks]:
    """Return the ranks of a script, each with all roles, or the groups of workers."""
    key, roles = config.trained[0], (config.trained[0], *roles_beside(config))
    shapes = dict.fromkeys(roles, replace(shapes[key], num_frozen=0)) | dict(shapes)
    if config.workers is None:
        groups = [("a trainer rank", "Use more trainer ranks in allocation_mode", roles, ranks)]
    else:
        groups = [
            (f"a worker of {one.name}", f"Raise workers.{one.name}.ranks", one.roles, one.num_ranks)
            for one in make_layout(config, roles)
        ]
    ranks_of_groups = []
    for who, more, held, count in groups:
        first, *_ = own = [role for role in roles if role in held]  # the policy, else the critic
        state, step = _state(config, shapes, own, count), _step(config, shapes[first], longest, first, count)
        ranks_of_groups.append(Ranks(who, first, more, count, block_of(config, first).fsdp.offload_params, state, step))
    return ranks_of_groups


def _state(config: Config, shapes: Mapping[str, ModelShape], roles: Iterable[str], ranks: int) -> Parts:
    """Add up the memory that a rank holds for its roles."""
    (trained, own), state = config.trained, Parts()
    for role in roles:
        parts = state_of(block_of(config, role), shapes[role], ranks, role in (trained, "critic"), own.dtype)
        state |= parts if role == trained else {"reference" if role == "ref" else role: sum(parts.values())}
    return state


def _step(config: Config, shape: ModelShape, longest: int, role: str, ranks: int) -> Parts:
    """Return the needs of a rank in a step of full-length sequences: a frozen role keeps one layer, and no logits."""
    block = block_of(config, role)
    is_trained, rows = role in (config.trained[0], "critic"), config.train_dataset.batch_size
    if config.rollout is not None and config.sampling is not None:
        num_minibatches = getattr(block, "ppo_n_minibatches", 1) if is_trained else 1
        rows = -(-config.rollout.consumer_batch_size // num_minibatches) * config.sampling.n_samples
    (sizes, *_), spec = of_rank(block, shape, ranks), block.mb_spec
    tokens = -(-rows // sizes.data) * max(longest, 1)
    micro = -(-tokens // spec.n_mbs)
    if spec.max_tokens_per_mb is not None:
        micro = min(micro, max(spec.max_tokens_per_mb, longest))
    if role == "critic":
        shape = replace(shape, vocab=1)
    is_gloo = config.cluster.n_gpus_per_node == 0
    return step_of(block, shape, ranks, micro, is_split=micro < tokens, is_trained=is_trained, is_gloo=is_gloo)


def _server_parts(config: Config, shape: ModelShape, longest: int, mode: AllocationMode) -> tuple[Parts, int]:
    """Return the needs of a GPU of a server (of the whole server on a CPU), and the cache's bytes per token."""
    rollout, sampling = config.rollout, config.sampling
    if rollout is None or sampling is None or mode.gen_dp_size == 0 or foreign_servers(config):
        return {}, 0
    kind = config.server_kind
    num_bytes = BYTES.get(str(ServerProgram(config).flags.get("dtype", config.trained[1].dtype)), 2)  # or `auto`
    weights = shape.num_parameters * num_bytes // mode.gen_tp_size
    kv_token = kv_bytes_per_token(shape, value_bytes=num_bytes, gpus=mode.gen_tp_size)
    sequences = -(-rollout.concurrency * sampling.n_samples // mode.gen_dp_size)
    if not kind.is_embedded:
        return {"weights": weights, "cache": sequences * longest * kv_token}, kv_token
    slots = min(sequences, config.lite.slots) + 1  # the spare one
    held = {"cache": slots * min(longest, config.lite.context) * kv_token}
    if config.cluster.n_gpus_per_node if mode.is_colocated else config.lite.device == "cuda":  # from the start
        held = {"cache": (config.lite.slots + 1) * config.lite.context * kv_token}
    if mode.is_colocated:
        return _colocated_parts(config, weights, shape) | held, kv_token
    if config.lite.device == "cuda":  # new weights wait on the host
        return {"weights": weights} | held, kv_token
    return {"weights": weights, "next weights": weights} | held, kv_token


def _colocated_parts(config: Config, weights: int, shape: ModelShape) -> Parts:
    """Return the weights of a server in the trainer's process beside the trainer's own: none, or a copy in the server's
    dtype, and during a publication another in the published dtype."""
    trained = config.trained[1]
    if trained.lora is None and trained.dtype == config.lite.dtype == "float32":
        return {}
    return {"weights": weights, "next weights": shape.num_parameters * BYTES[trained.dtype]}


def _fit(who: str, parts: Parts, device: float, ranks: Ranks) -> Verdict:
    """Compare the sum of the parts with a device; if it does not fit, name the knob of the largest part."""
    needed = sum(parts.values())
    text = f"{who} needs about {needed / GIB:.2f} of {device / GIB:.1f} GiB"
    if needed <= _TIGHT * device:
        return Verdict("ok", text)
    largest, change = knob_of(parts, key=ranks.key, more=ranks.more)
    text += f", most of it {largest} ({parts[largest] / GIB:.2f})"
    return Verdict("problem" if needed > device else "warning", text, change)


def _server_share(config: Config) -> float:
    """Return the share of a GPU of a server that is awake."""
    program, takes_turns = ServerProgram(config), AllocationMode.from_str(config.allocation_mode).takes_turns
    return float(program.flags.get(program.kind.memory_flag) or (SHARED_MEMORY if takes_turns else _SERVER_SHARE))
