"""Keys that other versions of AReaLite read and this one does not. Each loads with one warning.

Renamed keys move to their new place. Deprecated keys are dropped; one that would change results is accepted only with
the value that we implement. `arealite migrate` writes a file anew by the same tables.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from arealite.api.config.schema import ConfigKey
from arealite.api.errors import ConfigError

logger = logging.getLogger("arealite.config")
# All ranks of a run read the same config: one of them says what is wrong with it.
logger.addFilter(lambda record: os.environ.get("RANK", "0") == "0")


@dataclass(frozen=True)
class DeprecatedKey:
    """Why a key is dropped, and which values it may have (None is any)."""

    reason: str
    accepts: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Change:
    """What becomes of an old key of a file: our keys and their values; none, and why, if it has no effect."""

    old: str
    new: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""

    def tell(self, changes: list[Change], *, as_words: str = "") -> None:
        """Warn once, in words of its own if given, and note the change."""
        effect = f"is now {as_words or ' '.join(self.new)}. Rename it." if self.new else f"has no effect: {self.why}."
        logger.warning("%s %s%s", self.old, effect, "" if self.new else " Remove it.")
        changes.append(self)


RENAMED = {
    "n_nodes": "cluster.n_nodes",
    "n_gpus_per_node": "cluster.n_gpus_per_node",
    "rollout.server_address": "rollout.server_addrs",
    "rollout.timeout": "rollout.request_timeout",
    "actor.weight_update_mode": "rollout.weight_update",
} | {
    f"{engine}.{old}": f"{engine}.{new}"
    for engine in ("actor", "critic", "ref", "model")
    for old, new in {"lr": "optimizer.lr", "mb_spec.max_tokens_per_gpu": "mb_spec.max_tokens_per_mb"}.items()
}
_PPO = (
    *("ppo_n_minibatches", "eps_clip", "c_clip", "discount", "gae_lambda", "adv_norm", "kl_ctl"),
    *("recompute_logprob", "use_decoupled_loss", "behav_imp_weight_cap"),
)
_GENERATION = ("max_new_tokens", "min_new_tokens", "greedy", "top_p", "top_k", "min_p", "temperature")
RENAMED |= {f"ppo.{name}": f"actor.{name}" for name in _PPO}
RENAMED |= {f"ppo.gen.{name}": f"gconfig.{name}" for name in _GENERATION}
RENAMED |= {
    "ppo.value_eps_clip": "critic.value_eps_clip",
    "ppo.gen.n": "gconfig.n_samples",
    "dataset.path": "train_dataset.path",
    "dataset.max_length": "train_dataset.max_length",
    "dataset.max_prompt_len": "train_dataset.max_length",
    "dataset.train_bs_n_seqs": "train_dataset.batch_size",
    "rollout.n_seqs": "train_dataset.batch_size",
}
_CORES_BLOCKS = ("ppo", "ppo.gen", "dataset")
"""Of the original's Core, whose keys have other places here."""

_MODEL_TYPE = DeprecatedKey("the files of a model tell its type")

_LOSS_SCALE = DeprecatedKey("compute is bfloat16 or float32, whose losses are not scaled")
_NAME_RESOLVE = DeprecatedKey("the run itself is the registry of its servers")

DEPRECATED = {
    "checkpointer": DeprecatedKey("`recover` replaces it"),
    "server_only": DeprecatedKey("allocation_mode alone says it, e.g. sglang.d4 starts only servers", (False,)),
    "total_train_n_seqs": DeprecatedKey("total_train_steps bounds training", (None,)),
    "scheduler": DeprecatedKey("the launcher that you start places processes"),
    "*.scheduling_*": DeprecatedKey("allocation_mode and the launcher block place processes"),
    "perf_tracer": DeprecatedKey("perf_trace=true traces all processes of a run"),
    "enable_offload": DeprecatedKey("fsdp.offload_params offloads parameters and optimizer", (False,)),
    "cluster.cluster_name": DeprecatedKey("no cluster has settings of its own"),
    "cluster.name_resolve": _NAME_RESOLVE,
    "rollout.name_resolve": _NAME_RESOLVE,
    "rollout.enable_rollout_tracing": DeprecatedKey("every trained sample is stored in the run folder's rollouts/"),
    "rollout.dump_to_file": DeprecatedKey("every trained sample is stored in the run folder's rollouts/"),
    "rollout.schedule_policy": DeprecatedKey("requests go to the server that should finish them first"),
    "critic.init_critic_from_actor": DeprecatedKey("critic.path follows actor.path, and a language model gets a head"),
    "*.init_critic_from_actor": DeprecatedKey("only a critic has a head of values", (False,)),
    "*.backend": DeprecatedKey("the training engine is the class that the script constructs", ("fsdp", "", None)),
    **dict.fromkeys(("actor.type", "critic.type", "ref.type"), _MODEL_TYPE),
    "*.use_lora": DeprecatedKey("a lora block switches LoRA on, e.g. lora.rank=16", (False,)),
    "*.bf16": DeprecatedKey("dtype is bfloat16 unless it is set", (True,)),
    "*.ds_auto_tp": DeprecatedKey("the training engine is FSDP2"),
    "*.fsdp.ulysses_sp_size": DeprecatedKey("sequences are not split over devices", (1,)),
    "*.optimizer.offload": DeprecatedKey("fsdp.offload_params offloads the optimizer with the parameters", (False,)),
    **dict.fromkeys(
        ("*.optimizer.*_loss_scale", "*.optimizer.loss_scale_window", "*.optimizer.hysteresis"), _LOSS_SCALE
    ),
    "*gconfig.frequency_penalty": DeprecatedKey("the trainer could not reproduce such logprobs", (0, None)),
    "*_dataset.pin_memory": DeprecatedKey("engines move batches to their device themselves"),
    "*_dataset.num_workers": DeprecatedKey("the loop reads rows itself, when a batch needs them"),
    "*_dataset.reward_fn": DeprecatedKey("the script passes the reward function to the workflow"),
    "rollout.blocking_call_s": DeprecatedKey("a workflow that blocks the event loop is reported after one second"),
    "launcher.on_stall": DeprecatedKey("a stall ends the run with exit status 4", ("stop",)),
    "*.node_timeout": DeprecatedKey("a rank ends 30 s after another node has fallen silent"),
    "stats_logger.swanlab.api_key": DeprecatedKey(
        "secrets stay out of stored configs: export SWANLAB_API_KEY", (None,)
    ),
}

MEANS = {None: "none", "group": "group_mean"}
DEVIATIONS = {None: "none", "group": "group_std", "batch": "batch_std"}
"""Levels of AReaL's `reward_norm` and `adv_norm`, and our `baseline` and `reward_scale`."""

ONCE_NULL = ("*gconfig.stop", "*_dataset.type")
"""Keys whose default was null; a stored config may spell it out."""


def migrate(
    given: dict[str, Any],
    keys: Mapping[str, ConfigKey],
    problems: list[str],
    changes: list[Change],
    *,
    has_others: bool = False,
) -> dict[str, Any]:
    """Return what was given with old keys moved or dropped, noted in `changes`; today's `keys` stay as they are.

    Values that we do not implement are added to `problems`. `has_others`: blocks that are not in `keys` are someone's.
    """
    moved: dict[str, Any] = {}
    given = _translated(given, changes)
    others = {name: given.pop(name) for name in ("defaults", *_CORES_BLOCKS) if has_others and name in given}
    if isinstance(groups := given.get("defaults"), list) and "defaults" not in keys:
        del given["defaults"]
        if read := [group for group in groups if group != "_self_"]:
            problems.append(
                f"defaults must name nothing but _self_: got {read}. Hydra's config groups are not read: write the "
                "keys of those files into this one, each under its block, e.g. `cluster: {n_gpus_per_node: 8}`."
            )
    kept = _sort(given, "", keys, moved, problems, changes)
    kept |= others
    for old, value in moved.items():
        _put(kept, RENAMED[old], value, old)
    return kept


def _translated(given: dict[str, Any], changes: list[Change]) -> dict[str, Any]:
    """Spell as we do what AReaL writes: normalisations are blocks, backends have sizes in place of an allocation."""
    given = copy.deepcopy(given)
    names = ("rollout", "actor", "critic", "model", "ref")
    blocks: dict[str, dict[str, Any]] = {name: given[name] for name in names if isinstance(given.get(name), dict)}
    for name, block in blocks.items():
        for norm in ("adv_norm", "reward_norm"):
            choices = _norm_choices(norm, block)
            if choices:
                words = ", ".join(f"{key}: {str(value).lower()}" for key, value in choices.items())
                new = {f"{name}.{key}": value for key, value in choices.items()}
                Change(f"{name}.{norm}", new).tell(changes, as_words=words)
                del block[norm]
                block |= {key: value for key, value in choices.items() if key not in block}
    sizes = {name: str(block.get("backend")) for name, block in blocks.items() if name not in ("ref", "critic")}
    sizes = {name: size for name, size in sizes.items() if re.fullmatch(r"(fsdp|sglang|vllm):\w+", size)}
    if sizes.keys() - {"rollout"} and "allocation_mode" not in given:
        given["allocation_mode"] = "+".join(sizes.values())
        for name in sizes:
            del blocks[name]["backend"]
    mode = given.get("allocation_mode")
    if isinstance(mode, str) and re.search(r"\w:\w", mode):
        given["allocation_mode"] = mode.replace("fsdp:", "").replace(":", ".")
        new = {"allocation_mode": given["allocation_mode"]}
        Change("allocation_mode", new).tell(changes, as_words=given["allocation_mode"])
    return given


def _norm_choices(norm: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return what AReaL's block of a mean and a deviation is here; nothing if it is none, or has no counterpart.

    `adv_norm` with two levels stands for an algorithm, e.g. LitePPO: group mean, deviation of the batch.
    """
    levels = block.get(norm)
    if norm not in block or not isinstance(levels, dict if norm == "adv_norm" else dict | None):
        return {}
    mean, deviation = ((levels or {}).get(f"{one}_level") for one in ("mean", "std"))
    if norm == "adv_norm" and mean == deviation:
        whitened: dict[Any, dict[str, Any]] = {"batch": {"adv_norm": True}, "group": {"group_adv_norm": True}}
        return whitened.get(mean, {})
    if mean not in MEANS or deviation not in DEVIATIONS or (norm == "adv_norm" and block.get("reward_norm")):
        return {}
    is_left_out = mean == "group" and levels is not None and levels.get("mean_leave1out")
    choices = {"baseline": "leave_one_out" if is_left_out else MEANS[mean], "reward_scale": DEVIATIONS[deviation]}
    return choices | ({"adv_norm": False} if norm == "adv_norm" else {})


def _sort(
    block: dict[str, Any],
    prefix: str,
    keys: Mapping[str, ConfigKey],
    moved: dict[str, Any],
    problems: list[str],
    changes: list[Change],
) -> dict[str, Any]:
    """Return what stays in a block, and put what moves into `moved`, by dotted name."""
    kept: dict[str, Any] = {}
    is_passed_through = prefix[:-1] in keys and keys[prefix[:-1]].block is None
    matches = operator.eq if is_passed_through else fnmatchcase  # `backend` may be an option of a server
    for name, value in block.items():
        key = f"{prefix}{name}"
        if key in keys and isinstance(value, dict):
            kept[name] = _sort(value, f"{key}.", keys, moved, problems, changes)
        elif key in keys:
            if value is not None or not any(fnmatchcase(key, pattern) for pattern in ONCE_NULL):
                kept[name] = value
        elif isinstance(value, dict) and key in _CORES_BLOCKS:
            left = _sort(value, f"{key}.", keys, moved, problems, changes)
            kept |= {name: left} if left else {}
        elif key in RENAMED:
            moved[key] = "broadcast" if value == "xccl" else value
            Change(key, {RENAMED[key]: moved[key]}).tell(changes)
        elif deprecated := next((entry for pattern, entry in DEPRECATED.items() if matches(key, pattern)), None):
            problems += _drop(key, value, deprecated, changes)
        else:
            kept[name] = value
    return kept


def _drop(key: str, value: Any, deprecated: DeprecatedKey, changes: list[Change]) -> list[str]:
    """Warn about a deprecated key, or return what is wrong with its value."""
    is_reference = isinstance(value, str) and value.startswith("${")
    said = value.partition(":")[0] if isinstance(value, str) else value  # AReaL's `fsdp:d4`
    if deprecated.accepts is not None and said not in deprecated.accepts and not is_reference:
        got = "another value" if key.endswith("api_key") else repr(value)  # a secret must not reach the logs
        return [f"{key} must be {deprecated.accepts[0]!r}: got {got}. Remove it: {deprecated.reason}."]
    Change(key, why=deprecated.reason).tell(changes)
    return []


def _put(tree: dict[str, Any], key: str, value: Any, old: str) -> None:
    """Set a dotted key that must not be there yet."""
    *parents, name = key.split(".")
    for parent in parents:
        if tree.get(parent) is None:
            tree[parent] = {}
        if not isinstance(tree[parent], dict):
            raise ConfigError(f"{key} must stand in a block: got {parent}={tree[parent]!r} and {old}. Remove {old}.")
        tree = tree[parent]
    if name in tree:
        raise ConfigError(f"{key} must be given once: got it as {old} too. Remove {old}.")
    tree[name] = value
