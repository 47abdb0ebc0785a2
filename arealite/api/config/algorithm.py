"""From presets, older keys and what is given to one value for every choice of an algorithm, or a refusal.

What is given wins over the preset, the preset over the defaults. Invariant: what `resolve_choices` returns has no
older key left and resolves to itself, so that a stored config means what it shows. A preset never sets learning rate,
group size, `ppo_n_minibatches` or `kl_ctl`. docs/algorithms.md has formulas and papers.
"""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

from arealite.api.config.model import Choice, CorrectionConfig, PPOActorConfig
from arealite.api.errors import require

logger = logging.getLogger("arealite.config")

ConfigT = TypeVar("ConfigT", bound=PPOActorConfig)
Choices = dict[str, Any]
"""Values by key of the actor, dotted in its block `correction`; None is not given, or off."""


def _preset(baseline: str, reward_scale: str, objective: str, aggregation: str, kl: str, **others: Any) -> Choices:
    kl_estimator, _, kl_in = kl.split()
    choices = {"baseline": baseline, "reward_scale": reward_scale, "objective": objective, "aggregation": aggregation}
    return choices | {"kl_estimator": kl_estimator, "kl_in": kl_in, "adv_norm": False} | others


_LOSS, _REWARD = "k3 in loss", "k1 in reward"  # where a paper has no KL term: what kl_ctl > 0 adds
_OF_COMPLETIONS = {"correction.level": "geometric"}  # where a completion has one ratio, of which this is the length's

PRESETS: dict[str, Choices] = {
    "grpo": _preset("group_mean", "group_std", "ppo", "sequence_mean", _LOSS),
    "dr_grpo": _preset("group_mean", "none", "ppo", "constant", _LOSS),
    "dapo": _preset(
        "group_mean", "group_std", "ppo", "token_mean", _LOSS, eps_clip=0.2, eps_clip_higher=0.28, dynamic_sampling=True
    ),
    "gspo": _preset(
        *("group_mean", "group_std", "ppo", "sequence_mean", _LOSS),
        importance_sampling_level="sequence",
        eps_clip=3e-4,
        eps_clip_higher=4e-4,
        **_OF_COMPLETIONS,
    ),
    "cispo": _preset("group_mean", "group_std", "cispo", "token_mean", _LOSS),
    "rloo": _preset("leave_one_out", "none", "reinforce", "constant", _REWARD, loss_constant=1.0),
    "reinforce_plus_plus": _preset("none", "none", "ppo", "token_mean", _REWARD, adv_norm=True),
    "reinforce_plus_plus_baseline": _preset("group_mean", "none", "ppo", "token_mean", "k2 in loss", adv_norm=True),
    "ppo": _preset("critic", "none", "ppo", "token_mean", _REWARD, adv_norm=True, gae_lambda=0.95),
    "sapo": _preset("group_mean", "group_std", "sapo", "sequence_mean", _LOSS),
    "gmpo": _preset("group_mean", "group_std", "gmpo", "sequence_mean", _LOSS, **_OF_COMPLETIONS),
    "lite_ppo": _preset("group_mean", "batch_std", "ppo", "token_mean", _LOSS),
    "max_rl": _preset("group_mean", "group_mean", "reinforce", "constant", _LOSS, loss_constant=1.0),
    "dppo": _preset("group_mean", "none", "dppo", "token_mean", _LOSS),
    "opd": _preset("teacher", "none", "ppo", "token_mean", _LOSS),
}
"""Choices of `algorithm`; bounds that are not here are those of `DEFAULTS`."""


def _choices() -> dict[str, Choice]:
    """Return what the fields of the actor say of each choice, in the order in which they are shown."""
    found: dict[str, Choice] = {}
    for name, field in PPOActorConfig.model_fields.items():
        fields = CorrectionConfig.model_fields if name == "correction" else {name: field}
        prefix = "correction." if name == "correction" else ""
        for leaf, declared in fields.items():
            found |= {f"{prefix}{leaf}": mark for mark in declared.metadata if isinstance(mark, Choice)}
    return found


_CHOICES = _choices()
DEFAULTS: Choices = {name: choice.default for name, choice in _CHOICES.items()}
"""Every choice, with its value if neither the user nor a preset gives one."""

GRPO_DEFAULTS: Choices = {"baseline": "group_mean", "reward_scale": "group_std", "adv_norm": False}
"""What a GRPOConfig fills in without a preset."""

BELONGS_TO: dict[str, tuple[str, list[str]]] = {
    name: (choice.when.partition("=")[0], choice.when.partition("=")[2].split("|"))
    for name, choice in _CHOICES.items()
    if choice.when
}
"""Parameters, and the choice with the values under which they mean something; they are null under others."""

_ESTIMATORS = {"reward": ("k1",), "loss": ("k2", "k3")}  # those that have there the gradient of a KL divergence
_CORRECTION = tuple(key for key in DEFAULTS if key.startswith("correction."))
OLDER_KEYS: dict[str, tuple[str, ...]] = {
    "group_reward_norm": ("baseline", "reward_scale"),
    "mask_no_eos_with_zero": ("truncated",),
    "recompute_logprob": ("proximal",),
    "use_decoupled_loss": ("proximal", *_CORRECTION),
    "behav_imp_weight_cap": ("proximal", *_CORRECTION),
}
"""Older keys, and the choices that they make."""


def resolve_choices(config: ConfigT, defaults: Mapping[str, Any] = DEFAULTS) -> ConfigT:
    """Return a copy in which every choice has its value and older keys are None.

    `defaults` come before `DEFAULTS`. Raises ConfigError for choices that mean nothing together.
    """
    given = {key: value for key in DEFAULTS if (value := _value(config, key)) is not None}
    given |= _translated(config, given)
    choices = {**DEFAULTS, **defaults, **_choices_of(config.algorithm), **given}
    for key, (choice, values) in BELONGS_TO.items():
        if choices[choice] not in values:
            other = "" if config.algorithm is not None else f", or set actor.{choice}={values[0]}"
            require(
                key not in given,
                f"actor.{key} must be null with actor.{choice} {choices[choice]}: got {given.get(key)}. "
                f"Remove it{other}.",
            )
            choices[key] = None
    if choices["objective"] == "ppo" and choices["eps_clip_higher"] is None:
        choices["eps_clip_higher"] = choices["eps_clip"]
    if choices["baseline"] != "critic":
        if "gae_lambda" not in given:
            choices["gae_lambda"] = DEFAULTS["gae_lambda"]
    elif choices["returns_lambda"] is None:
        choices["returns_lambda"] = choices["gae_lambda"]
    if choices["baseline"] in ("none", "critic", "teacher") and "reward_scale" not in given:
        choices["reward_scale"] = "none"
    allowed = _ESTIMATORS[choices["kl_in"]]
    if "kl_in" in given and "kl_estimator" not in given and choices["kl_estimator"] not in allowed:
        choices["kl_estimator"] = allowed[-1]
    if choices["aggregation"] == "constant" and choices["loss_constant"] is None:
        choices["loss_constant"] = None if config.max_new_tokens is None else float(config.max_new_tokens)
    resolved = _with(config, choices)
    _check_clip(resolved, given)
    _check_rewards(resolved)
    _check_objective(resolved)
    _check_proximal(resolved)
    _check_correction(resolved)
    return resolved


def describe_choices(config: PPOActorConfig) -> str:
    """Return resolved choices as overrides, `algorithm=grpo baseline=group_mean ...`, without what is off."""
    values = {key: _value(config, key) for key in ("algorithm", *DEFAULTS)}
    values |= {key: getattr(config, key) for key in config.learning_keys() if key != "correction"}
    return " ".join(f"{key}={str(value).lower()}" for key, value in values.items() if value is not None)


def _value(config: PPOActorConfig, key: str) -> Any:
    block, _, leaf = key.rpartition(".")
    return getattr(getattr(config, block) if block else config, leaf)


def _with(config: ConfigT, choices: Choices) -> ConfigT:
    correction = CorrectionConfig(**{key.partition(".")[2]: choices[key] for key in _CORRECTION})
    plain: Choices = {key: value for key, value in choices.items() if key not in _CORRECTION}
    return config.new(correction=correction, **plain | dict.fromkeys(OLDER_KEYS))


def _choices_of(algorithm: str | None) -> Choices:
    require(
        algorithm is None or algorithm in PRESETS,
        f"actor.algorithm must be one of {', '.join(PRESETS)}: got {algorithm}. Choose one.",
    )
    return {} if algorithm is None else PRESETS[algorithm]


def _translated(config: PPOActorConfig, given: Choices) -> Choices:
    """Return the choices that older keys make; one made by both is refused."""
    older = {key: value for key in OLDER_KEYS if (value := getattr(config, key)) is not None}
    for key, value in older.items():
        for choice in OLDER_KEYS[key]:
            require(
                choice not in given,
                f"actor.{key} must not be given with actor.{choice}: got {value} and {given.get(choice)}. "
                f"Remove actor.{key}, the older key.",
            )
    choices: Choices = {}
    if "group_reward_norm" in older:
        is_on = older["group_reward_norm"]
        choices["baseline"], choices["reward_scale"] = ("group_mean", "group_std") if is_on else ("none", "none")
    if "mask_no_eos_with_zero" in older:
        choices["truncated"] = "zero" if older["mask_no_eos_with_zero"] else "keep"
    if "recompute_logprob" in older:
        choices["proximal"] = "recompute" if older["recompute_logprob"] else "rollout"
    is_decoupled = older.get("use_decoupled_loss")
    if is_decoupled:
        require(
            choices.get("proximal") != "rollout",
            "actor.recompute_logprob must be true if actor.use_decoupled_loss is: got false. "
            "The decoupled loss needs the recomputed logprobs; set actor.recompute_logprob=true.",
        )
        choices |= {"proximal": "recompute", "correction.action": "mask"}
        choices["correction.upper"] = older.get("behav_imp_weight_cap")
    elif is_decoupled is False:
        choices["correction.action"] = "none"
    if "behav_imp_weight_cap" in older and not is_decoupled:
        logger.warning("actor.behav_imp_weight_cap has no effect: actor.use_decoupled_loss is not true.")
    return choices


def _check_clip(actor: PPOActorConfig, given: Choices) -> None:
    """Refuse one bound of a preset beside a bound of the user: the pair of the paper belongs together."""
    preset = _choices_of(actor.algorithm)
    if "eps_clip_higher" in preset and "eps_clip_higher" not in given:
        require(
            given.get("eps_clip", preset["eps_clip"]) == preset["eps_clip"],
            f"actor.eps_clip_higher must be given with actor.eps_clip and actor.algorithm {actor.algorithm}: got null "
            f"and {actor.eps_clip}. Remove actor.eps_clip for the bounds of the paper, {preset['eps_clip']:g} and "
            f"{preset['eps_clip_higher']:g}, or give both.",
        )


def _check_rewards(actor: PPOActorConfig) -> None:
    """Refuse contradictions of rewards, baseline and scale."""
    require(
        actor.baseline != "none" or actor.reward_scale not in ("group_std", "batch_std"),
        f"actor.reward_scale must not be {actor.reward_scale} with actor.baseline none: got both. Where all rewards "
        "are equal they would be divided by 0; remove it, or set actor.baseline=group_mean.",
    )
    require(
        actor.baseline in ("critic", "teacher") or actor.gae_lambda == 1,
        f"actor.gae_lambda must be 1 without a critic: got {actor.gae_lambda}. Where values are 0 it is a second "
        "discount; remove it, or set actor.discount.",
    )
    require(
        actor.baseline != "critic" or actor.reward_scale == "none",
        f"actor.reward_scale must be none with actor.baseline critic: got {actor.reward_scale}. The critic learns the "
        "rewards themselves; remove it.",
    )
    if actor.baseline == "teacher":
        _check_teacher(actor)
    is_shaped_negative = actor.reward_bias < 0 or actor.reward_scaling <= 0 or actor.overlong_buffer is not None
    require(
        actor.reward_scale != "group_mean" or not is_shaped_negative,
        "actor.reward_scale must not be group_mean with rewards that may be negative: got reward_bias "
        f"{actor.reward_bias}, reward_scaling {actor.reward_scaling}, overlong_buffer {actor.overlong_buffer}. "
        "The mean of a group may be 0 or below; remove them or set actor.reward_scale=group_std.",
    )
    if actor.reward_scale == "group_mean" and actor.baseline == "leave_one_out":  # which takes rewards minus penalty
        _check_no_penalised_rewards(actor, "actor.reward_scale group_mean and actor.baseline leave_one_out")
    if actor.overlong_buffer is not None:
        longest = actor.max_new_tokens
        require(
            longest is not None and actor.overlong_buffer <= longest,
            f"actor.overlong_buffer must be at most actor.max_new_tokens: got {actor.overlong_buffer} and {longest}. "
            "Lower the first or give the second.",
        )


def _check_teacher(actor: PPOActorConfig) -> None:
    """Refuse shaped rewards with a teacher, whose log ratios are the advantages; rewards are only logged."""
    neutral = {"reward_scale": "none", "adv_norm": False, "group_adv_norm": False, "discount": 1.0, "gae_lambda": 1.0}
    neutral |= {"reward_bias": 0.0, "reward_scaling": 1.0, "reward_clip": None, "overlong_buffer": None}
    for key, only in neutral.items():
        value = getattr(actor, key)
        require(
            value == only,
            f"actor.{key} must be {'null' if only is None else str(only).lower()} with actor.baseline teacher: got "
            f"{value}. The advantage of a token is its log ratio of teacher and student; remove it.",
        )
    require(
        actor.truncated != "zero",
        "actor.truncated must be keep or mask with actor.baseline teacher: got zero. Rewards are only logged.",
    )
    _check_no_penalised_rewards(actor, "actor.baseline teacher")


def _check_objective(actor: PPOActorConfig) -> None:
    """Refuse contradictions of objective, aggregation and KL penalty."""
    require(
        actor.importance_sampling_level == "token" or actor.objective == "ppo",
        f"actor.importance_sampling_level must be token with actor.objective {actor.objective}: got sequence. "
        "Remove it, or set actor.objective=ppo.",
    )
    if _has_one_ratio(actor):
        is_gmpo = actor.objective == "gmpo"
        _check_one_ratio(actor, "actor.objective gmpo" if is_gmpo else "actor.importance_sampling_level sequence")
    require(
        actor.aggregation != "constant" or actor.loss_constant is not None,
        "actor.loss_constant must be given with actor.aggregation constant: got null. "
        "Set it, e.g. to the number of tokens of the longest completion.",
    )
    allowed = _ESTIMATORS[str(actor.kl_in)]
    require(
        actor.kl_estimator in allowed,
        f"actor.kl_estimator must be {' or '.join(allowed)} with actor.kl_in {actor.kl_in}: got {actor.kl_estimator}, "
        f"whose expected gradient there is 0, at least near the reference. Set actor.kl_estimator={allowed[-1]}.",
    )


def _has_one_ratio(actor: PPOActorConfig) -> bool:
    """Tell whether all tokens of a completion share a ratio."""
    return actor.objective == "gmpo" or actor.importance_sampling_level == "sequence"


def _check_no_penalised_rewards(actor: PPOActorConfig, other: str) -> None:
    """Refuse a KL penalty in the rewards next to another choice."""
    require(
        actor.kl_ctl == 0 or actor.kl_in == "loss",
        f"actor.kl_in must be loss with {other}: got reward. Rewards would differ over tokens and may be negative; set "
        "actor.kl_in=loss and actor.kl_estimator=k3, or remove actor.kl_ctl.",
    )


def _check_one_ratio(actor: PPOActorConfig, one_ratio: str) -> None:
    """Require equal weight and advantage for the tokens of a completion that share a ratio."""
    require(
        actor.aggregation == "sequence_mean",
        f"actor.aggregation must be sequence_mean with {one_ratio}: got {actor.aggregation}, which weighs completions "
        "by their length. Remove it.",
    )
    _check_no_penalised_rewards(actor, one_ratio)
    require(
        actor.discount == 1 and actor.baseline not in ("critic", "teacher"),
        f"actor.discount must be 1, without a critic or teacher, with {one_ratio}: got {actor.discount} and baseline "
        f"{actor.baseline}. Tokens of a completion must share its advantage.",
    )
    require(
        actor.correction.level != "token",
        f"actor.correction.level must be geometric or sequence with {one_ratio}: got token, which bounds what the "
        "objective averages. Set actor.correction.level=geometric.",
    )
    require(
        actor.second_moment_limit is None,
        f"actor.second_moment_limit must be null with {one_ratio}: got {actor.second_moment_limit}. It leaves out "
        "tokens, which share their ratio; set actor.correction.action=mask.",
    )


def _check_proximal(actor: PPOActorConfig) -> None:
    """Refuse corrections that need a proximal policy which differs from the rollout policy."""
    require(
        actor.proximal != "current" or actor.ppo_n_minibatches == 1,
        f"actor.proximal must be recompute with actor.ppo_n_minibatches {actor.ppo_n_minibatches}: got current. From "
        "the second optimizer step on it is another policy; set it, or actor.ppo_n_minibatches=1.",
    )
    corrects = {
        "correction.action": actor.correction.action != "none",
        "sequence_mask_delta": actor.sequence_mask_delta is not None,
        "second_moment_limit": actor.second_moment_limit is not None,
    }
    for key, is_on in corrects.items():
        require(
            not is_on or actor.proximal != "rollout",
            f"actor.{key} must not be given with actor.proximal rollout: got {_value(actor, key)}. It compares the "
            "proximal with the rollout policy; set actor.proximal=recompute.",
        )
    require(
        not corrects["second_moment_limit"] or actor.proximal == "recompute",
        "actor.proximal must be recompute with actor.second_moment_limit: got current. The mask is chosen over the "
        "whole batch before the update; set it.",
    )
    require(
        not corrects["correction.action"] or actor.objective != "dppo",
        f"actor.correction.action must be none with actor.objective dppo: got {actor.correction.action}. Its ratio is "
        "to the rollout policy already; remove it.",
    )


def _check_correction(actor: PPOActorConfig) -> None:
    """Refuse bounds of the correction without an effect."""
    correction, lower, upper = actor.correction, actor.correction.lower, actor.correction.upper
    levels = "sequence" if _has_one_ratio(actor) else "token or sequence"
    require(
        lower is None or upper is None or lower < upper,
        f"actor.correction.lower must be less than actor.correction.upper: got {lower} and {upper}. Exchange them.",
    )
    require(
        correction.action != "truncate" or (upper is not None and upper > 0 and correction.level != "geometric"),
        f"actor.correction.upper must be above 0, and level {levels}, with action truncate: got "
        f"{upper} and {correction.level}. Set e.g. actor.correction.upper=2.",
    )
    require(
        correction.action != "mask" or correction.metric == "k1" or upper is None or upper > 0,
        f"actor.correction.upper must be above 0 with action mask and metric {correction.metric}: got {upper}. "
        "Every token would be left out; raise it.",
    )
    is_plain_weight = correction.level == "token" and correction.metric == "ratio"
    require(
        correction.action != "mask" or is_plain_weight or (lower, upper) != (None, None),
        f"actor.correction must have a bound with level {correction.level}, metric {correction.metric}: got none. "
        "Set actor.correction.upper.",
    )
