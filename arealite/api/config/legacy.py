"""Keys of AReaLite v0.3 and AReaL, which load with one warning each, and our names for keys of other frameworks.

Renamed keys move to their new place. Dropped keys are removed; a key that would change results is accepted only with
the value that we implement. `arealite migrate` rewrites a file by the same tables.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, NoReturn

from annotated_types import MinLen
from omegaconf import OmegaConf
from pydantic import TypeAdapter, ValidationError

from arealite.api.config.launcher import Strategy
from arealite.api.config.model import FrozenActorConfig, PPOActorConfig
from arealite.api.config.rollout import InferenceEngineConfig
from arealite.api.config.types import ConfigBase, ConfigKey, PositiveInt, rule_of
from arealite.api.errors import ConfigError
from arealite.api.servers import KINDS

Tree = dict[str, Any]


@dataclass(frozen=True)
class Dropped:
    """A key without effect here."""

    reason: str
    accepts: tuple[Any, ...] | None = None  # the values that load; None is any


_PPO = (
    *("ppo_n_minibatches", "eps_clip", "c_clip", "discount", "gae_lambda", "adv_norm", "kl_ctl"),
    *("recompute_logprob", "use_decoupled_loss", "behav_imp_weight_cap"),
)
_GENERATION = ("max_new_tokens", "min_new_tokens", "greedy", "top_p", "top_k", "min_p", "temperature")
_ENGINES = ("actor", "critic", "ref", "model")

RENAMED = {
    "n_nodes": "cluster.n_nodes",
    "n_gpus_per_node": "cluster.n_gpus_per_node",
    "rollout.server_address": "rollout.server_addrs",
    "rollout.timeout": "rollout.request_timeout",
    "actor.weight_update_mode": "rollout.weight_update",
    "actor.behav_imp_weight_cap": "actor.correction.upper",
    **{f"{engine}.lr": f"{engine}.optimizer.lr" for engine in _ENGINES},
    **{f"{engine}.mb_spec.max_tokens_per_gpu": f"{engine}.mb_spec.max_tokens_per_mb" for engine in _ENGINES},
    **{f"ppo.{name}": f"actor.{name}" for name in _PPO},
    **{f"ppo.gen.{name}": f"gconfig.{name}" for name in _GENERATION},
    "ppo.value_eps_clip": "critic.value_eps_clip",
    "ppo.gen.n": "gconfig.n_samples",
    "dataset.path": "train_dataset.path",
    "dataset.max_length": "train_dataset.max_length",
    "dataset.max_prompt_len": "train_dataset.max_length",
    "dataset.train_bs_n_seqs": "train_dataset.batch_size",
    "rollout.n_seqs": "train_dataset.batch_size",
}
"""Keys of v0.3, AReaL and its Core that move, and their new places."""
CHOSEN: dict[str, tuple[Tree, Tree]] = {
    "actor.group_reward_norm": (
        {"actor.baseline": "none", "actor.reward_scale": "none"},
        {"actor.baseline": "group_mean", "actor.reward_scale": "group_std"},
    ),
    "actor.mask_no_eos_with_zero": ({"actor.truncated": "keep"}, {"actor.truncated": "zero"}),
    "actor.recompute_logprob": ({"actor.proximal": "rollout"}, {"actor.proximal": "recompute"}),
    "actor.use_decoupled_loss": (
        {"actor.correction.action": "none"},
        {"actor.correction.action": "mask", "actor.proximal": "recompute"},
    ),
}
"""Keys of v0.3 that choose an algorithm, and what false and true mean here."""
_CORE_BLOCKS = ("ppo", "ppo.gen", "dataset")
"""Blocks of AReaL's Core, whose keys have other places here."""

THEIR_WORDS = {
    "path": "model_name_or_path model_name model_path",
    "optimizer.lr": "learning_rate max_lr",
    "optimizer.warmup_steps_proportion": "warmup_ratio warmup_steps lr_warmup_steps_ratio",
    "optimizer.gradient_clipping": "max_grad_norm grad_clip clip_grad",
    "dtype": "bf16 torch_dtype mixed_precision",
    "gradient_checkpointing": "enable_gradient_checkpointing activation_checkpointing",
    "fsdp.offload_params": "offload param_offload cpu_offload",
    "lora.rank": "lora_rank lora_r r",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
    "mb_spec.max_tokens_per_mb": "gradient_accumulation_steps micro_batch_size ppo_micro_batch_size_per_gpu "
    "ppo_max_token_len_per_gpu",
    "actor.algorithm": "adv_estimator advantage_estimator loss_type loss_mode",
    "actor.kl_ctl": "beta kl_coef kl_loss_coef",
    "actor.kl_in": "use_kl_loss use_kl_in_reward",
    "actor.kl_estimator": "kl_loss_type kl_penalty",
    "actor.eps_clip": "epsilon clip_ratio cliprange",
    "actor.eps_clip_higher": "epsilon_high clip_ratio_high",
    "actor.reward_scale": "scale_rewards norm_adv_by_std_in_grpo reward_norm",
    "actor.aggregation": "loss_agg_mode",
    "actor.entropy_ctl": "entropy_coeff",
    "actor.truncated": "mask_truncated_completions",
    "actor.dynamic_sampling": "filter_groups",
    "actor.gae_lambda": "lam lambda",
    "actor.discount": "gamma",
    "critic.optimizer.lr": "critic_lr vf_coef",
    "critic.value_eps_clip": "cliprange_value",
    "actor.proximal": "prox_logp_method",
    "actor.correction.action": "vllm_importance_sampling_mode",
    "actor.correction.upper": "importance_sampling_cap vllm_importance_sampling_cap",
    "actor.ppo_n_minibatches": "ppo_mini_batch_size num_mini_batches num_iterations ppo_epochs",
    "gconfig.n_samples": "num_generations rollouts_per_example n",
    "gconfig.max_new_tokens": "max_completion_length max_response_length max_tokens",
    "rollout.max_head_offpolicyness": "max_staleness max_async_level max_off_policy_steps staleness_threshold",
    "rollout.server_addrs": "vllm_server_host base_url",
    "allocation_mode": "use_vllm vllm_mode tensor_model_parallel_size tensor_parallel_size",
    "vllm": "gpu_memory_utilization vllm_gpu_memory_utilization",
    "train_dataset.path": "dataset_name train_files dataset_path",
    "valid_dataset.path": "val_files",
    "train_dataset.batch_size": "train_batch_size per_device_train_batch_size rollout_batch_size",
    "train_dataset.max_length": "max_prompt_length max_seq_length seq_len",
    "reward": "reward_funcs custom_reward_function reward_model",
    "total_train_steps": "max_steps total_training_steps",
    "total_train_epochs": "num_train_epochs total_epochs",
    "experiment_name": "project_name",
    "trial_name": "run_name",
    "cluster.fileroot": "output_dir default_local_dir",
    "saver.freq_steps": "save_steps save_freq",
    "evaluator.freq_steps": "eval_steps test_freq",
    "recover.mode": "resume_from_checkpoint resume_mode",
    "stats_logger": "report_to logger",
}
"""Last parts of keys of TRL, verl, prime-rl and AReaL, by the end of our key. docs/migration.md shows this table."""
OURS = {theirs: ours for ours, words in THEIR_WORDS.items() for theirs in words.split()}

_ALGORITHM = sorted(PPOActorConfig.model_fields.keys() - FrozenActorConfig.model_fields.keys())
"""Keys of an actor that its frozen copies do not have."""
_MODEL_TYPE = Dropped("the files of a model tell its type")
_FROZEN = Dropped("a reference or teacher is never trained")
_LOSS_SCALE = Dropped("compute is bfloat16 or float32, whose losses are not scaled")
_NAME_RESOLVE = Dropped("the run itself is the registry of its servers")

DROPPED = {
    "defaults": Dropped(
        "Hydra's config groups are not read: write the keys of those files into this one, each under its block, e.g. "
        "`cluster: {n_gpus_per_node: 8}`",
        (["_self_"], []),
    ),
    "checkpointer": Dropped("`recover` replaces it"),
    "server_only": Dropped("allocation_mode alone says it, e.g. sglang.d4 starts only servers", (False,)),
    "total_train_n_seqs": Dropped("total_train_steps bounds training", (None,)),
    "scheduler": Dropped("the launcher that you start places processes"),
    "*.scheduling_*": Dropped("allocation_mode and the launcher block place processes"),
    "perf_tracer": Dropped("perf_trace=true traces all processes of a run"),
    "enable_offload": Dropped("fsdp.offload_params offloads parameters and optimizer", (False,)),
    "cluster.cluster_name": Dropped("no cluster has settings of its own"),
    "cluster.name_resolve": _NAME_RESOLVE,
    "rollout.name_resolve": _NAME_RESOLVE,
    "rollout.enable_rollout_tracing": Dropped("every trained sample is stored in the run folder's rollouts/"),
    "rollout.dump_to_file": Dropped("every trained sample is stored in the run folder's rollouts/"),
    "rollout.schedule_policy": Dropped("requests go to the server that should finish them first"),
    "critic.init_critic_from_actor": Dropped("critic.path follows actor.path, and a language model gets a head"),
    "*.init_critic_from_actor": Dropped("only a critic has a head of values", (False,)),
    "*.backend": Dropped("the training engine is the class that the script constructs", ("fsdp", "", None)),
    **dict.fromkeys(("actor.type", "critic.type", "ref.type"), _MODEL_TYPE),
    "*.use_lora": Dropped("a lora block switches LoRA on, e.g. lora.rank=16", (False,)),
    "*.bf16": Dropped("dtype is bfloat16 unless it is set", (True,)),
    "*.ds_auto_tp": Dropped("the training engine is FSDP2"),
    "*.fsdp.ulysses_sp_size": Dropped("sequences are not split over devices", (1,)),
    "*.optimizer.offload": Dropped("fsdp.offload_params offloads the optimizer with the parameters", (False,)),
    **dict.fromkeys(
        ("*.optimizer.*_loss_scale", "*.optimizer.loss_scale_window", "*.optimizer.hysteresis"), _LOSS_SCALE
    ),
    "*gconfig.frequency_penalty": Dropped("the trainer could not reproduce such logprobs", (0, None)),
    "*_dataset.pin_memory": Dropped("engines move batches to their device themselves"),
    "*_dataset.num_workers": Dropped("the loop reads rows itself, when a batch needs them"),
    "*_dataset.reward_fn": Dropped("the script passes the reward function to the workflow"),
    **{f"{role}.{key}": _FROZEN for role in ("ref", "teacher") for key in _ALGORITHM},
    **{f"ref.{key.removeprefix('actor.')}": _FROZEN for key in ("actor.behav_imp_weight_cap", *CHOSEN)},
    **dict.fromkeys(CHOSEN, Dropped("only true and false choose, what docs/algorithms.md says", (None,))),
    "stats_logger.swanlab.api_key": Dropped("secrets stay out of stored configs: export SWANLAB_API_KEY", (None,)),
}
"""Patterns of keys without effect here; the first pattern that matches counts."""

MEANS = {None: "none", "group": "group_mean"}
DEVIATIONS = {None: "none", "group": "group_std", "batch": "batch_std"}
"""Levels of AReaL's `reward_norm` and `adv_norm`, and our `baseline` and `reward_scale`."""

ONCE_NULL = ("*gconfig.stop", "*_dataset.type")
"""Keys whose default was null; a stored config may spell it out."""


def migrate(
    sources: Mapping[str, Tree],
    keys: Mapping[str, ConfigKey],
    problems: list[str],
    changes: list[str],
    *,
    has_others: bool = False,
) -> dict[str, Tree]:
    """Return what was given, by place, with old keys moved or dropped; keys in `keys` stay as they are.

    `changes` gets a sentence for each old key, `problems` one for each value that we do not implement. With
    `has_others`, blocks that are not in `keys` belong to the script and stay.
    """
    migrated = {}
    translated = {place: _translated(given, changes) for place, given in sources.items()}
    _drop_cap(translated.values(), changes)
    for place, given in translated.items():
        others = {name: given.pop(name) for name in ("defaults", *_CORE_BLOCKS) if has_others and name in given}
        moved: dict[str, Tree] = {}
        migrated[place] = _sort(given, "", keys, moved, problems, changes) | others
        for old, new in moved.items():
            for key, value in new.items():
                _put(migrated[place], key, value, old)
    return _without_placements(migrated, changes)


def _renamed(old: str, new: Mapping[str, Any]) -> str:
    """Return a sentence on an old key in whose place our keys stand, written as overrides."""
    words = " ".join(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in new.items())
    return f"{old} is now {words}. Rename it."


def _translated(given: Tree, changes: list[str]) -> Tree:
    """Return a copy in which AReaL's blocks of normalisation and its backends with sizes have become our keys."""
    given = copy.deepcopy(given)
    names = ("rollout", "actor", "critic", "model", "ref")
    blocks: dict[str, Tree] = {name: given[name] for name in names if isinstance(given.get(name), dict)}
    for name, block in blocks.items():
        for norm in ("adv_norm", "reward_norm"):
            if choices := _norm_choices(norm, block):
                changes.append(_renamed(f"{name}.{norm}", {f"{name}.{key}": value for key, value in choices.items()}))
                del block[norm]
                block |= {key: value for key, value in choices.items() if key not in block}
    sizes = {name: str(block.get("backend")) for name, block in blocks.items() if name not in ("ref", "critic")}
    sizes = {name: size for name, size in sizes.items() if re.fullmatch(rf"({'|'.join(('fsdp', *KINDS))}):\w+", size)}
    if sizes.keys() - {"rollout"} and "allocation_mode" not in given:
        given["allocation_mode"] = "+".join(sizes.values())
        for name in sizes:
            del blocks[name]["backend"]
    mode = given.get("allocation_mode")
    if isinstance(mode, str) and re.search(r"\w:\w", mode):
        given["allocation_mode"] = mode.replace("fsdp:", "").replace(":", ".")
        changes.append(_renamed("allocation_mode", {"allocation_mode": given["allocation_mode"]}))
    return given


def _norm_choices(norm: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """Return our keys for AReaL's block of a mean and a deviation; none if `norm` is no block with a counterpart.

    `adv_norm` with two levels stands for an algorithm, e.g. LitePPO: group mean, deviation of the batch.
    """
    levels = block.get(norm)
    if norm not in block or not isinstance(levels, dict if norm == "adv_norm" else dict | None):
        return {}
    mean, deviation = ((levels or {}).get(f"{moment}_level") for moment in ("mean", "std"))
    if norm == "adv_norm" and mean == deviation:
        whitened: dict[Any, dict[str, Any]] = {"batch": {"adv_norm": True}, "group": {"group_adv_norm": True}}
        return whitened.get(mean, {})
    if mean not in MEANS or deviation not in DEVIATIONS or (norm == "adv_norm" and block.get("reward_norm")):
        return {}
    is_left_out = mean == "group" and levels is not None and levels.get("mean_leave1out")
    choices = {"baseline": "leave_one_out" if is_left_out else MEANS[mean], "reward_scale": DEVIATIONS[deviation]}
    return choices | ({"adv_norm": False} if norm == "adv_norm" else {})


def _drop_cap(sources: Collection[Tree], changes: list[str]) -> None:
    """Leave out the bound of a loss that is not used."""
    blocks = [tree[name] for tree in sources for name in ("actor", "ppo") if isinstance(tree.get(name), dict)]
    is_used = [block["use_decoupled_loss"] for block in blocks if block.get("use_decoupled_loss") is not None]
    for block in blocks if is_used[-1:] != [True] else ():
        if block.pop("behav_imp_weight_cap", None) is not None:
            changes.append("actor.behav_imp_weight_cap has no effect: actor.use_decoupled_loss is not true. Remove it.")


def _moved(old: str, value: Any) -> Tree:
    """Return our keys in whose place an old one stands; none if it does not move."""
    key = old
    while key in RENAMED:  # those of `ppo` may be old ones of `actor`
        key = RENAMED[key]
    if key in CHOSEN:
        return CHOSEN[key][value] if isinstance(value, bool) else {}
    return {} if key == old else {key: "broadcast" if value == "xccl" else value}


def _sort(
    block: Tree,
    prefix: str,
    keys: Mapping[str, ConfigKey],
    moved: dict[str, Tree],
    problems: list[str],
    changes: list[str],
) -> Tree:
    """Return the block without old keys, and put our keys for those that move into `moved`, by their dotted names."""
    kept: Tree = {}
    is_passed_through = prefix[:-1] in keys and keys[prefix[:-1]].block is None
    matches = operator.eq if is_passed_through else fnmatchcase  # `backend` may be an option of a server
    for name, value in block.items():
        key = f"{prefix}{name}"
        if key in keys and isinstance(value, dict):
            kept[name] = _sort(value, f"{key}.", keys, moved, problems, changes)
        elif key in keys:
            if value is not None or not any(fnmatchcase(key, pattern) for pattern in ONCE_NULL):
                kept[name] = value
        elif isinstance(value, dict) and key in _CORE_BLOCKS:
            for left in _sort(value, f"{key}.", keys, moved, problems, changes):
                problems.append(f"{key}.{left} must have a counterpart here: got it. Remove it; --help lists all keys.")
        elif new := _moved(key, value):
            moved[key] = new
            changes.append(_renamed(key, new))
        elif dropped := next((entry for pattern, entry in DROPPED.items() if matches(key, pattern)), None):
            problems += _drop(key, value, dropped, changes)
        else:
            kept[name] = value
    return kept


def _drop(key: str, value: Any, dropped: Dropped, changes: list[str]) -> list[str]:
    """Warn about a dropped key, or return a sentence if its value is not accepted."""
    is_reference = isinstance(value, str) and value.startswith("${")
    plain = value.partition(":")[0] if isinstance(value, str) else value  # AReaL's `fsdp:d4`
    if dropped.accepts is not None and plain not in dropped.accepts and not is_reference:
        got = "another value" if key.endswith("api_key") else repr(value)  # a secret must not reach the logs
        return [f"{key} must be {dropped.accepts[0]!r}: got {got}. Remove it: {dropped.reason}."]
    changes.append(f"{key} has no effect: {dropped.reason}. Remove it.")
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
    if tree.get(name) not in (None, value):
        raise ConfigError(f"{key} must be given once: got it as {old} too. Remove {old}.")
    tree[name] = value


class _Bundle(ConfigBase):
    GPU: PositiveInt


class _PlacementGroup(ConfigBase):
    strategy: Strategy | None = None
    bundles: Annotated[list[_Bundle], MinLen(1)]


class _Call(ConfigBase):
    placement_group: _PlacementGroup


_CALLS = TypeAdapter(dict[str, _Call])
_EXAMPLE = "placement_group: {strategy: PACK, bundles: [{GPU: 8}]}"


def _without_placements(sources: Mapping[str, Tree], changes: list[str]) -> dict[str, Tree]:
    """Return what was given, by place, with AReaL Core's mapping of `allocation_mode` as our string and `workers`.

    `<role>_train` and `<role>_inf` are the workers of a role; `actor_gen` is the servers, of the kind that
    `rollout.backend` names, or of its default. Raises ConfigError.
    """
    key = "allocation_mode"
    given = {place: tree[key] for place, tree in sources.items() if key in tree}
    if not any(isinstance(value, dict) for value in given.values()):
        return dict(sources)
    plain = {place: {name: tree[name] for name in tree if name != key} for place, tree in sources.items()}
    *_, last = given
    if not isinstance(given[last], dict):
        plain[last][key] = given[last]
        return plain
    placements = OmegaConf.merge(*(value for value in given.values() if isinstance(value, dict)))
    blocks = [tree["rollout"] for tree in sources.values() if isinstance(tree.get("rollout"), dict)]
    backends = [block["backend"] for block in blocks if block.get("backend")]
    mode, workers = _servers_and_workers(placements, (backends or [InferenceEngineConfig().backend])[-1], changes)
    new = {f"workers.{role}.{name}": value for role, wish in workers.items() for name, value in wish.items()}
    changes.append(_renamed(key, {key: mode, **new}))
    for tree in plain.values():  # so that what stands beside it anywhere is refused
        for name, value in {key: mode, **new}.items():
            _put(tree, name, value, "a placement_group")
    return plain


def _servers_and_workers(placements: Any, backend: str, changes: list[str]) -> tuple[str, dict[str, Tree]]:
    """Return the string, and ranks and strategy by role."""
    try:
        calls = _CALLS.validate_python(OmegaConf.to_container(placements))
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, ("allocation_mode", *problem["loc"])))
        _fail(f"{name} must be {rule_of(problem)}", problem["input"], f"Write {_EXAMPLE}.")
    servers, workers = "", dict[str, Tree]()
    for name, call in calls.items():
        key, words = f"allocation_mode.{name}", re.fullmatch(r"(\w+)_(train|inf|gen)", name.replace("-", "_"))
        if words is None or (words[2] == "gen" and words[1] != "actor"):
            _fail("allocation_mode must name actor_gen, or calls such as actor_train and ref_inf", name, "Rename it.")
        sizes, strategy = [bundle.GPU for bundle in call.placement_group.bundles], call.placement_group.strategy
        if words[2] == "gen":
            servers = f"{backend}.d{sum(sizes)}p1t1+"
            if strategy is not None:
                changes.append(
                    f"{key}.placement_group.strategy has no effect: servers fill the nodes in order. Remove it."
                )
            continue
        if len(sizes) == 1:
            strategy = "STRICT_PACK"  # a bundle never leaves a node
        elif max(sizes) > 1 and strategy is not None and "SPREAD" in strategy:
            change = "Use PACK, which fills node after node."
            _fail(f"{key} must have bundles of 1 GPU with {strategy}, as each worker has one", sizes, change)
        wish = {"ranks": sum(sizes), "strategy": strategy or "PACK"}
        if workers.setdefault(words[1], wish) != wish:
            rule = "must be the placement of the other call of its role, which has one group of workers"
            _fail(f"{key} {rule}", f"{wish} and {workers[words[1]]}", f"Remove {name}.")
    trained = next((role for role in ("actor", "model") if role in workers), None)
    if trained is None:
        change = f"Add actor_train: {{{_EXAMPLE}}}."
        _fail("allocation_mode must place actor_train or model_train", ", ".join(calls) or "nothing", change)
    return f"{servers}d{workers[trained]['ranks']}p1t1", workers


def _fail(rule: str, got: Any, change: str) -> NoReturn:
    raise ConfigError(f"{rule}: got {got}. {change}")
