"""From presets and what is given to one value for every choice of an algorithm, or a refusal.

What is given wins over the preset, the preset over the defaults. Invariant: what `resolve_choices` returns resolves to
itself, so that a stored config means what it shows. A preset never sets learning rate, group size, `ppo_n_minibatches`
or `kl_ctl`. docs/algorithms.md has formulas and papers.
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
    choices: dict[str, Choice] = {}
    for name, field in PPOActorConfig.model_fields.items():
        fields = CorrectionConfig.model_fields if name == "correction" else {name: field}
        prefix = "correction." if name == "correction" else ""
        for leaf, declared in fields.items():
            choices |= {f"{prefix}{leaf}": mark for mark in declared.metadata if isinstance(mark, Choice)}
    return choices


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

_NO_VALUES = "none|group_mean|leave_one_out|length_weighted"
_OF_TEACHER = "The advantage of a token is its log ratio of teacher and student; rewards are only logged. Remove it."
_OF_PROXIMAL = "It compares the proximal with the rollout policy; set actor.proximal=recompute."
_GRADIENT = "The expected gradient of others is 0 there, at least near the reference."
_RULES = (
    ("baseline=none", "reward_scale=none|group_mean", "Equal rewards would be divided by 0; remove it."),
    ("baseline=critic", "reward_scale=none", "The critic learns the rewards themselves; remove it."),
    (f"baseline={_NO_VALUES}", "gae_lambda=1.0", "Without a critic it is a second discount; set actor.discount."),
    *(
        ("baseline=teacher", rule, _OF_TEACHER)
        for rule in (
            *("reward_scale=none", "adv_norm=false", "group_adv_norm=false", "discount=1.0", "gae_lambda=1.0"),
            *("reward_bias=0.0", "reward_scaling=1.0", "reward_clip=null", "overlong_buffer=null"),
            "truncated=keep|mask",
        )
    ),
    ("objective=reinforce|cispo|sapo|gmpo|dppo", "importance_sampling_level=token", "Remove it or the objective."),
    *(
        (one_ratio, rule, why)
        for one_ratio in ("objective=gmpo", "importance_sampling_level=sequence")
        for rule, why in (
            ("aggregation=sequence_mean", "Others weigh completions by their length; remove it."),
            ("discount=1.0", "Tokens of a completion must share its advantage."),
            (f"baseline={_NO_VALUES}", "Tokens of a completion must share its advantage."),
            ("correction.level=null|geometric|sequence", "The objective averages over tokens before bounds apply."),
        )
    ),
    ("kl_in=reward", "kl_estimator=k1", _GRADIENT),
    ("kl_in=loss", "kl_estimator=k2|k3", _GRADIENT),
    ("proximal=current", "ppo_n_minibatches=1", "Later steps have another policy; set actor.proximal=recompute."),
    ("proximal=rollout", "correction.action=none", _OF_PROXIMAL),
    ("proximal=rollout", "sequence_mask_delta=null", _OF_PROXIMAL),
    ("objective=dppo", "correction.action=none", "Its ratio is to the rollout policy already; remove it."),
    ("correction.action=truncate", "correction.level=token|sequence", "A geometric mean masks completions only."),
)
"""Choices, what another key must be with them, and why."""
_RULES_OF_PENALTIES = tuple(
    (condition, "kl_in=loss", "Rewards would differ over tokens and may be negative; set actor.kl_estimator=k3, too.")
    for condition in ("baseline=teacher", "objective=gmpo", "importance_sampling_level=sequence")
)
"""Rules for a KL penalty."""


def resolve_choices(config: ConfigT, defaults: Mapping[str, Any] = DEFAULTS) -> ConfigT:
    """Return a copy in which every choice has its value.

    `defaults` come before `DEFAULTS`. Raises ConfigError for choices that mean nothing together.
    """
    given = {key: value for key in DEFAULTS if (value := _value(config, key)) is not None}
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
    _check_rules(resolved)
    _check_rewards(resolved)
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
    return config.new(correction=correction, **plain)


def _choices_of(algorithm: str | None) -> Choices:
    require(
        algorithm is None or algorithm in PRESETS,
        f"actor.algorithm must be one of {', '.join(PRESETS)}: got {algorithm}. Choose one.",
    )
    return {} if algorithm is None else PRESETS[algorithm]


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


def _check_rules(actor: PPOActorConfig) -> None:
    """Refuse combinations that `_RULES` exclude."""
    for condition, rule, why in (*_RULES, *(_RULES_OF_PENALTIES if actor.kl_ctl > 0 else ())):
        (choice, values), (key, allowed) = ((*text.split("="),) for text in (condition, rule))
        if _word(actor, choice) in values.split("|"):
            require(
                _word(actor, key) in allowed.split("|"),
                f"actor.{key} must be {allowed.removeprefix('null|').replace('|', ' or ')} with actor.{choice} "
                f"{_word(actor, choice)}: got {_value(actor, key)}. {why}",
            )


def _word(actor: PPOActorConfig, key: str) -> str:
    value = _value(actor, key)
    return "null" if value is None else str(value).lower()


def _check_rewards(actor: PPOActorConfig) -> None:
    """Refuse rewards without the sign or the range that the choices need."""
    is_shaped_negative = actor.reward_bias < 0 or actor.reward_scaling <= 0 or actor.overlong_buffer is not None
    require(
        actor.reward_scale != "group_mean" or not is_shaped_negative,
        "actor.reward_scale must not be group_mean with rewards that may be negative: got reward_bias "
        f"{actor.reward_bias}, reward_scaling {actor.reward_scaling}, overlong_buffer {actor.overlong_buffer}. "
        "The mean of a group may be 0 or below; remove them or set actor.reward_scale=group_std.",
    )
    if actor.overlong_buffer is not None:
        longest = actor.max_new_tokens
        require(
            longest is not None and actor.overlong_buffer <= longest,
            f"actor.overlong_buffer must be at most actor.max_new_tokens: got {actor.overlong_buffer} and {longest}. "
            "Lower the first or give the second.",
        )
    require(
        actor.aggregation != "constant" or actor.loss_constant is not None,
        "actor.loss_constant must be given with actor.aggregation constant: got null. "
        "Set it, e.g. to the number of tokens of the longest completion.",
    )


def _check_correction(actor: PPOActorConfig) -> None:
    """Refuse bounds of the correction without an effect."""
    correction, lower, upper = actor.correction, actor.correction.lower, actor.correction.upper
    require(
        lower is None or upper is None or lower < upper,
        f"actor.correction.lower must be less than actor.correction.upper: got {lower} and {upper}. Exchange them.",
    )
    is_missing = upper is None and correction.action == "truncate"
    bounds_ratio = correction.action == "truncate" or (correction.action == "mask" and correction.metric != "k1")
    require(
        not is_missing and (upper is None or upper > 0 or not bounds_ratio),
        f"actor.correction.upper must be above 0 with actor.correction.action {correction.action}: got {upper}. "
        "Set e.g. actor.correction.upper=2.",
    )
    is_plain_weight = correction.level == "token" and correction.metric == "ratio"
    require(
        correction.action != "mask" or is_plain_weight or (lower, upper) != (None, None),
        f"actor.correction must have a bound with level {correction.level}, metric {correction.metric}: got none. "
        "Set actor.correction.upper.",
    )
