"""Choices of an algorithm: what presets stand for, what is refused, and that resolving is final."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.cli_args import CorrectionConfig, GRPOConfig, PPOActorConfig, PPOConfig, load_expr_config, to_yaml
from arealite.api.config.algorithm import (
    BELONGS_TO,
    DEFAULTS,
    GRPO_DEFAULTS,
    PRESETS,
    describe_choices,
    resolve_choices,
)
from arealite.api.config.types import config_keys
from arealite.api.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]
COMMON = "experiment_name: e\ntrial_name: t\ntrain_dataset: {path: p, batch_size: 8}\n"
TABLE = """
preset                       baseline      scale      norm  objective aggregation   kl           bounds
grpo                         group_mean    group_std  False ppo       sequence_mean k3 in loss   0.2 0.2
dr_grpo                      group_mean    none       False ppo       constant      k3 in loss   0.2 0.2 512.0
dapo                         group_mean    group_std  False ppo       token_mean    k3 in loss   0.2 0.28
gspo                         group_mean    group_std  False ppo       sequence_mean k3 in loss   0.0003 0.0004
cispo                        group_mean    group_std  False cispo     token_mean    k3 in loss   5.0
rloo                         leave_one_out none       False reinforce constant      k1 in reward 1.0
reinforce_plus_plus          none          none       True  ppo       token_mean    k1 in reward 0.2 0.2
reinforce_plus_plus_baseline group_mean    none       True  ppo       token_mean    k2 in loss   0.2 0.2
ppo                          critic        none       True  ppo       token_mean    k1 in reward 0.2 0.2
sapo                         group_mean    group_std  False sapo      sequence_mean k3 in loss   1.0 1.05
gmpo                         group_mean    group_std  False gmpo      sequence_mean k3 in loss   0.4
lite_ppo                     group_mean    batch_std  False ppo       token_mean    k3 in loss   0.2 0.2
max_rl                       group_mean    group_mean False reinforce constant      k3 in loss   1.0
dppo                         group_mean    none       False dppo      token_mean    k3 in loss   0.2
opd                          teacher       none       False ppo       token_mean    k3 in loss   0.2 0.2
""".strip().splitlines()[1:]
"""Section 3 of the design, by hand; bounds are those that are not null, in the order of the keys."""
BOUNDS = [key for key, (choice, _) in BELONGS_TO.items() if choice in ("objective", "aggregation")]


def actor(**changes: Any) -> PPOActorConfig:
    correction = {key[1:]: changes.pop(key) for key in list(changes) if key[0] == "_"}  # _upper is correction.upper
    return PPOActorConfig(path="m", correction=CorrectionConfig(**correction), **{"max_new_tokens": 512, **changes})


def load(folder: Path, text: str, *overrides: str, cls: type[GRPOConfig] = GRPOConfig) -> GRPOConfig:
    file = folder / "config.yaml"
    file.write_text(text)
    return load_expr_config(["--config", str(file), "actor.path=m", *overrides], cls)[0]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.split()[0])
def test_presets_are_those_of_the_papers(row: str) -> None:
    name, baseline, scale, norm, objective, aggregation, estimator, _, kl_in, *bounds = row.split()
    resolved = resolve_choices(actor(algorithm=name), GRPO_DEFAULTS)
    assert (resolved.baseline, resolved.reward_scale, str(resolved.adv_norm)) == (baseline, scale, norm)
    assert (resolved.objective, resolved.aggregation) == (objective, aggregation)
    assert (resolved.kl_estimator, resolved.kl_in) == (estimator, kl_in)
    assert [str(value) for key in BOUNDS if (value := getattr(resolved, key)) is not None] == bounds
    assert resolved.importance_sampling_level == ("sequence" if name == "gspo" else "token")
    assert resolved.dynamic_sampling == (name == "dapo")
    assert (resolved.proximal, resolved.correction.action, resolved.truncated) == ("rollout", "none", "keep")
    gae_lambda = 0.95 if name == "ppo" else 1.0
    assert (resolved.discount, resolved.gae_lambda) == (1.0, gae_lambda)
    assert resolved.returns_lambda == (gae_lambda if name == "ppo" else None)
    untouched = ("ppo_n_minibatches", "group_size", "kl_ctl", "optimizer", "entropy_ctl", "algorithm")
    assert all(getattr(resolved, key) == getattr(actor(algorithm=name), key) for key in untouched)


def test_every_preset_is_in_the_table() -> None:
    assert {row.split()[0] for row in TABLE} == PRESETS.keys()
    assert PRESETS["ppo"]["gae_lambda"] == 0.95


def test_what_is_given_wins_over_the_preset_and_the_preset_over_the_defaults() -> None:
    resolved = resolve_choices(actor(algorithm="dapo", eps_clip_higher=0.5, reward_scale="none"), GRPO_DEFAULTS)
    assert (resolved.eps_clip, resolved.eps_clip_higher, resolved.reward_scale) == (0.2, 0.5, "none")
    assert resolve_choices(actor(algorithm="grpo", eps_clip=0.4)).eps_clip_higher == 0.4
    assert resolve_choices(actor(), GRPO_DEFAULTS).adv_norm is False
    assert resolve_choices(actor(algorithm="reinforce_plus_plus"), GRPO_DEFAULTS).adv_norm is True
    assert resolve_choices(actor(algorithm="dr_grpo", loss_constant=9.0, max_new_tokens=None)).loss_constant == 9.0


def test_what_a_preset_says_about_its_baseline_goes_with_it() -> None:
    """Rewards over their deviation, and a lambda, mean nothing where nothing is subtracted."""
    assert resolve_choices(actor(baseline="none"), GRPO_DEFAULTS).reward_scale == "none"
    assert resolve_choices(actor(algorithm="lite_ppo", baseline="none")).reward_scale == "none"
    assert resolve_choices(actor(algorithm="ppo", baseline="group_mean")).gae_lambda == 1.0


@pytest.mark.parametrize(
    ("choices", "estimator"),
    [
        ({"kl_in": "loss"}, "k3"),
        ({"algorithm": "rloo", "kl_in": "loss"}, "k3"),
        ({"algorithm": "grpo", "kl_in": "reward"}, "k1"),
        ({"algorithm": "reinforce_plus_plus_baseline", "kl_in": "loss"}, "k2"),
    ],
)
def test_the_estimator_follows_where_the_penalty_acts(choices: dict[str, Any], estimator: str) -> None:
    assert resolve_choices(actor(**choices)).kl_estimator == estimator


def test_nothing_given_is_plain_ppo_without_a_group_statistic() -> None:
    resolved = resolve_choices(actor())
    for key, value in DEFAULTS.items():
        if "." not in key and key not in BELONGS_TO:
            assert getattr(resolved, key) == value
    assert (resolved.eps_clip, resolved.eps_clip_higher, resolved.cispo_max) == (0.2, 0.2, None)
    assert resolved.correction == CorrectionConfig(action="none")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"cispo_max": 5.0}, "actor.cispo_max must be null with actor.objective ppo: got 5.0"),
        ({"objective": "cispo", "eps_clip": 0.2}, "actor.eps_clip must be null with actor.objective cispo"),
        ({"_upper": 3.0}, "actor.correction.upper must be null with actor.correction.action none"),
        ({"algorithm": "gspo", "objective": "sapo"}, "actor.importance_sampling_level must be token with actor.objec"),
        ({"algorithm": "gspo", "aggregation": "token_mean"}, "actor.aggregation must be sequence_mean with"),
        ({"algorithm": "gmpo", "aggregation": "constant"}, "actor.aggregation must be sequence_mean with actor.object"),
        ({"algorithm": "gmpo", "kl_ctl": 0.1, "kl_in": "reward"}, "actor.kl_in must be loss with actor.objective gmpo"),
        ({"algorithm": "gspo", "discount": 0.95}, "actor.discount must be 1.0 with actor.importance_sampling_level"),
        ({"algorithm": "gspo", "gae_lambda": 0.95}, "actor.gae_lambda must be 1.0 with actor.baseline group"),
        ({"algorithm": "ppo", "baseline": "none", "gae_lambda": 0.9}, "actor.gae_lambda must be 1.0 with actor.base"),
        ({"reward_scale": "group_std"}, "actor.reward_scale must be none or group_mean with actor.baseline none"),
        ({"algorithm": "lite_ppo", "baseline": "none", "reward_scale": "batch_std"}, "must be none or group_mean with"),
        ({"algorithm": "gspo", "eps_clip": 0.2}, "actor.eps_clip_higher must be given with actor.eps_clip and actor"),
        ({"algorithm": "dapo", "eps_clip": 0.4}, "Remove actor.eps_clip for the bounds of the paper, 0.2 and 0.28, or"),
        ({"proximal": "recompute", "_action": "mask", "_upper": 0.0}, "actor.correction.upper must be above 0 with ac"),
        ({"algorithm": "dr_grpo", "max_new_tokens": None}, "actor.loss_constant must be given with actor.aggregation"),
        ({"kl_estimator": "k3"}, "actor.kl_estimator must be k1 with actor.kl_in reward: got k3. The expected gradi"),
        ({"kl_in": "loss", "kl_estimator": "k1"}, "actor.kl_estimator must be k2 or k3 with actor.kl_in loss: got k1"),
        ({"baseline": "critic", "reward_scale": "group_std"}, "actor.reward_scale must be none with actor.baseline"),
        ({"returns_lambda": 1.0}, "actor.returns_lambda must be null with actor.baseline none: got 1.0"),
        ({"algorithm": "max_rl", "reward_bias": -0.5}, "actor.reward_scale must not be group_mean with rewards that"),
        ({"algorithm": "max_rl", "overlong_buffer": 4}, "actor.reward_scale must not be group_mean with rewards that"),
        ({"overlong_buffer": 513}, "actor.overlong_buffer must be at most actor.max_new_tokens: got 513 and 512"),
        ({"overlong_buffer": 4, "max_new_tokens": None}, "actor.overlong_buffer must be at most actor.max_new_tokens"),
        ({"proximal": "current", "ppo_n_minibatches": 2}, "actor.ppo_n_minibatches must be 1 with actor.proximal"),
        ({"_action": "truncate", "_upper": 2.0}, "actor.correction.action must be none with actor.proximal rollout"),
        ({"sequence_mask_delta": 0.1}, "actor.sequence_mask_delta must be null with actor.proximal rollout"),
        (
            {"algorithm": "dppo", "proximal": "recompute", "_action": "mask", "_upper": 2.0},
            "actor.correction.action must be none with actor.objective dppo",
        ),
        ({"proximal": "recompute", "_action": "mask", "_lower": 5.0, "_upper": 0.5}, "actor.correction.lower must be"),
        ({"proximal": "recompute", "_action": "truncate"}, "actor.correction.upper must be above 0"),
        (
            {"proximal": "recompute", "_action": "truncate", "_upper": 2.0, "_level": "geometric"},
            "actor.correction.level must be token or sequence with actor.correction.action truncate: got geometric.",
        ),
        ({"proximal": "recompute", "_action": "mask", "_level": "geometric"}, "actor.correction must have a bound"),
        (
            {"algorithm": "gspo", "proximal": "recompute", "_action": "mask", "_level": "token", "_upper": 2.0},
            "actor.correction.level must be geometric or sequence with actor.importance_sampling_level sequence: got t",
        ),
        (
            {"objective": "gmpo", "aggregation": "sequence_mean", "proximal": "recompute", "_action": "mask"},
            "actor.correction.level must be geometric or sequence with actor.objective gmpo: got token",
        ),
        (
            {"algorithm": "gmpo", "proximal": "recompute", "_action": "truncate", "_upper": 2.0},
            "actor.correction.level must be token or sequence with actor.correction.action truncate: got geometric.",
        ),
        ({"algorithm": "opd", "kl_ctl": 0.1, "kl_in": "reward", "kl_estimator": "k1"}, "actor.kl_in must be loss with"),
        ({"algorithm": "opd", "objective": "gmpo", "aggregation": "sequence_mean"}, "Tokens of a completion must"),
    ],
)
def test_what_means_nothing_is_refused(choices: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_choices(actor(**choices))
    assert message in str(caught.value)
    assert str(caught.value).endswith(".") and ": got " in str(caught.value)


@pytest.mark.parametrize(
    "choices",
    [
        {"algorithm": "gspo", "kl_ctl": 0.1},
        {"algorithm": "gspo", "adv_norm": True, "proximal": "recompute", "_action": "mask", "_upper": 2.0},
        {"algorithm": "gspo", "proximal": "recompute", "_action": "truncate", "_level": "sequence", "_upper": 2.0},
        {"algorithm": "gmpo", "proximal": "recompute", "_action": "mask", "_upper": 5.0, "sequence_mask_delta": 0.1},
        {"algorithm": "grpo", "proximal": "current", "ppo_n_minibatches": 1, "sequence_mask_delta": 0.1},
        {"algorithm": "dppo", "proximal": "recompute", "sequence_mask_delta": 0.1},
        {"proximal": "recompute", "_action": "truncate", "_upper": 2.0, "_level": "sequence"},
        {"kl_in": "loss", "kl_estimator": "k2"},
        {"algorithm": "dapo", "eps_clip": 0.2},
        {"algorithm": "gspo", "eps_clip": 1e-3, "eps_clip_higher": 1e-3},
        {"proximal": "recompute", "_action": "mask", "_metric": "k1", "_upper": -0.1},
    ],
)
def test_what_means_something_is_accepted(choices: dict[str, Any]) -> None:
    resolve_choices(actor(**choices))


VALUES: dict[str, list[Any]] = {
    "algorithm": [*PRESETS],
    "truncated": ["keep", "zero", "mask"],
    "baseline": ["none", "group_mean", "leave_one_out", "length_weighted", "teacher"],
    "reward_scale": ["none", "group_std", "batch_std", "group_mean"],
    "objective": ["ppo", "reinforce", "cispo", "sapo", "gmpo", "dppo"],
    "importance_sampling_level": ["token", "sequence"],
    "proximal": ["recompute", "current", "rollout"],
    "aggregation": ["token_mean", "sequence_mean", "prompt_mean", "constant"],
    "kl_in": ["reward", "loss"],
    "kl_estimator": ["k1", "k2", "k3"],
    "_action": ["none", "truncate", "mask"],
    "_level": ["token", "sequence", "geometric"],
    "_metric": ["ratio", "k1", "k2", "k3"],
    **{key: [0.1, 0.5] for key in ("eps_clip", "eps_clip_higher", "cispo_max", "_lower", "_upper", "loss_constant")},
    **{key: [0.3] for key in ("sapo_tau_positive", "gmpo_eps_log", "dppo_delta", "discount", "gae_lambda", "kl_ctl")},
    **{key: [0.7] for key in ("sequence_mask_delta",)},
    **{key: [True, False] for key in ("adv_norm", "group_adv_norm", "dynamic_sampling")},
    **{key: [1] for key in ("ppo_n_minibatches", "overlong_buffer")},
}


@given(st.dictionaries(st.sampled_from(list(VALUES)), st.integers(0, 20), max_size=8), st.booleans())
def test_resolving_is_final_and_keeps_what_is_given(picks: dict[str, int], is_grpo: bool) -> None:
    choices = {key: VALUES[key][pick % len(VALUES[key])] for key, pick in picks.items()}
    defaults = GRPO_DEFAULTS if is_grpo else {}
    config = actor(**choices)
    before = config.model_copy(deep=True)
    try:
        resolved = resolve_choices(config, defaults)
    except ConfigError:
        return
    assert config == before, "the user's config is left as it is"
    assert resolve_choices(resolved, defaults) == resolved == resolve_choices(resolved)
    may_be_off = {*BELONGS_TO, "correction.lower", "correction.upper", "c_clip"}
    for key in DEFAULTS:
        block, _, leaf = key.rpartition(".")
        value = getattr(resolved.correction if block else resolved, leaf)
        assert value is not None or key in may_be_off
        asked = choices.get(f"_{leaf}" if block else leaf)
        assert asked is None or value == asked


@pytest.mark.parametrize("algorithm", [None, "ppo", "opd", "gmpo"])  # a critic, a teacher, keys of its own
def test_resolved_choices_survive_yaml(tmp_path: Path, algorithm: str | None) -> None:
    overrides = ("actor.proximal=recompute", *([f"actor.algorithm={algorithm}"] if algorithm else []))
    overrides += ("teacher.path=t",) if algorithm == "opd" else ()
    cls = PPOConfig if algorithm == "ppo" else GRPOConfig
    config = load(tmp_path, COMMON, *overrides, cls=cls)
    assert config.actor.baseline is not None and config.actor.max_new_tokens == config.gconfig.max_new_tokens
    again = load(tmp_path, to_yaml(config), cls=cls)
    assert again == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.algorithm=opd"], "actor.baseline must be teacher exactly with a teacher block: got teacher and no"),
        (["teacher.path=t"], "actor.baseline must be teacher exactly with a teacher block: got group_mean and a block"),
        (["actor.algorithm=opd", "teacher={path: t, temperature: 0.5}"], "teacher.temperature must equal gconfig.temp"),
        (["actor.algorithm=opd", "teacher={path: t, optimizer: {}}"], "teacher.optimizer must be null: got an"),
        (["actor.algorithm=opd", "teacher={}"], "teacher.path must be given"),
    ],
)
def test_a_teacher_and_its_preset_come_together(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, COMMON, *overrides)
    assert message in str(caught.value)


def test_a_grpo_config_without_a_preset_has_the_group_statistic(tmp_path: Path) -> None:
    plain = load(tmp_path, COMMON).actor
    assert (plain.baseline, plain.reward_scale, plain.adv_norm) == ("group_mean", "group_std", False)
    assert (plain.aggregation, plain.proximal, plain.eps_clip) == ("token_mean", "rollout", 0.2)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor.algorithm=rloo", "actor.baseline must be none if gconfig.n_samples is 1: got leave_one_out."),
        ("actor.algorithm=lite_ppo", "actor.baseline must be none if gconfig.n_samples is 1: got group_mean."),
        ("actor={baseline: none, group_adv_norm: true}", "actor.group_adv_norm must be false if gconfig"),
        ("actor={baseline: none, dynamic_sampling: true}", "actor.dynamic_sampling must be false if gconf"),
        ("actor={algorithm: dapo, max_new_tokens: 3}", "actor.max_new_tokens must equal gconfig.max_new_tokens: got 3"),
        ("actor.algorithm=grpo2", "actor.algorithm must be one of grpo, dr_grpo, "),
        ("actor.correction.action=clip", "actor.correction.action must be 'none', 'truncate' or 'mask': got 'clip'."),
    ],
)
def test_experiments_refuse_what_their_groups_cannot_give(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, COMMON, "gconfig.n_samples=1", override)
    assert message in str(caught.value)


def test_the_page_has_a_row_per_preset_and_names_tests_that_exist() -> None:
    page = (REPOSITORY / "docs/algorithms.md").read_text()
    (doc,) = (key.doc for key in config_keys(PPOActorConfig) if key.name == "algorithm")
    assert PRESETS.keys() <= set(re.findall(r"\w+", doc)), "what --help shows"
    _, _, presets = page.partition("\n## Presets\n")
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*)$", presets.partition("\n## Off-policy")[0], re.M))
    assert rows.keys() == PRESETS.keys()
    for name, choices in PRESETS.items():
        _, advantage, objective, weight, kl, *_ = rows[name].split(" | ")
        named = {choices["baseline"], choices["reward_scale"]} - {"none"}
        assert set(advantage.split(", ")) - {"whitened", "lambda 0.95"} == named
        assert ("whitened" in advantage) == choices["adv_norm"]
        assert objective.split(" ")[0] == choices["objective"] and weight.split(" ")[0] == choices["aggregation"]
        assert kl in ("none", f"{choices['kl_estimator']} in {choices['kl_in']}")
    tests = re.findall(r"`(tests/\S+\.py)::(\w+)`", page)
    assert len(tests) >= 8
    for file, test in tests:
        assert f"def {test}(" in (REPOSITORY / file).read_text()


def test_a_config_with_a_critic_is_ppo(tmp_path: Path) -> None:
    text = (
        COMMON + "actor: {dtype: float32, ppo_n_minibatches: 2, gradient_checkpointing: false, mb_spec: {n_mbs: 3}}\n"
    )
    overrides = ("critic.optimizer.lr=1e-5", "gconfig.n_samples=2", "gconfig.temperature=0.8")
    config = load(tmp_path, text, *overrides, cls=PPOConfig)
    choices = {key: value for key, value in PRESETS["ppo"].items() if getattr(config.actor, key) != value}
    assert choices == {} and (config.actor.returns_lambda, config.actor.aggregation) == (0.95, "token_mean")
    critic = config.critic
    assert (critic.path, critic.dtype, critic.ppo_n_minibatches, critic.group_size) == ("m", "float32", 2, 2)
    assert (critic.mb_spec.n_mbs, critic.gradient_checkpointing, critic.optimizer.lr) == (3, False, 1e-5)
    assert (critic.seed, critic.value_eps_clip, config.has_critic) == (1, 0.2, True)
    own = load(tmp_path, text, "critic.path=reward", "actor.returns_lambda=1.0", cls=PPOConfig)
    assert (own.critic.path, own.actor.returns_lambda, own.actor.gae_lambda) == ("reward", 1.0, 0.95)
    stored = tmp_path / "stored.yaml"
    stored.write_text(to_yaml(own))
    assert load_expr_config(["--config", str(stored)], PPOConfig)[0] == own


@pytest.mark.parametrize(
    ("cls", "overrides", "message"),
    [
        (GRPOConfig, ["actor.baseline=critic"], "actor.baseline must not be critic without a critic: got critic with"),
        (GRPOConfig, ["actor.algorithm=ppo"], "actor.baseline must not be critic without a critic: got critic with"),
        (PPOConfig, ["actor.algorithm=grpo"], "actor.baseline must be critic with a critic block: got group_mean with"),
        (PPOConfig, ["critic.optimizer=null"], "critic.optimizer must be a block: got null"),
        (PPOConfig, ["critic.group_size=3"], "critic.group_size must equal gconfig.n_samples: got 3 and 8"),
        (PPOConfig, ["actor.reward_scale=batch_std"], "actor.reward_scale must be none with actor.baseline critic"),
    ],
)
def test_a_critic_and_its_baseline_come_together(
    tmp_path: Path, cls: type[GRPOConfig], overrides: list[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, COMMON, *overrides, cls=cls)
    assert str(refused.value).startswith(message)


def test_where_the_critic_of_the_original_starts_is_where_ours_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(tmp_path, COMMON, "critic.init_critic_from_actor=true", cls=PPOConfig)
    assert config.critic.path == "m" and "critic.path follows actor.path" in caplog.text


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"ppo", "opd"}))
def test_every_preset_goes_on_top_of_the_shipped_config(name: str) -> None:
    path = REPOSITORY / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"
    overrides = ["actor.path=m", f"actor.algorithm={name}"]
    if name == "dppo":  # its ratio is to the policy that sampled: a correction would count twice
        overrides += ["actor.correction.action=none", "actor.correction.upper=null"]
    actor = load_expr_config(["--config", str(path), *overrides], GRPOConfig)[0].actor
    expected = {key: value for key, value in PRESETS[name].items() if "." not in key}
    assert {key: getattr(actor, key) for key in expected} == expected
    assert actor.proximal == "current"
    level = None if name == "dppo" else "geometric" if name in ("gspo", "gmpo") else "token"
    assert actor.correction.level == level


def test_a_plan_shows_what_else_is_set(tmp_path: Path) -> None:
    others = ["proximal=recompute", "sequence_mask_delta=0.1", "group_adv_norm=true"]
    others += ["kl_ctl=0.01", "entropy_ctl=0.001", "reward_bias=-0.5", "algorithm=grpo", "c_clip=3.0"]
    config = load(tmp_path, COMMON, "ref.path=m", *(f"actor.{one}" for one in others))
    shown = describe_choices(config.actor).split(" ")
    assert set(others) <= set(shown) and len(shown) == len({one.partition("=")[0] for one in shown})
    plain = describe_choices(load(tmp_path, COMMON).actor).split(" ")
    assert not [one for one in plain if one.startswith(("kl_ctl", "group_adv", "second", "reward_bias", "temper"))]


def test_a_frozen_model_has_no_adapters_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ref must have no keys of learning: got lora"):
        load(tmp_path, COMMON, "actor.kl_ctl=0.1", "ref={path: m, lora: {rank: 4}}")


def test_keys_of_an_algorithm_have_no_effect_in_frozen_models(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = ["ref={path: m, kl_ctl: 0.2, correction: {action: mask}}", "teacher={path: t, eps_clip: 0.3}"]
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(tmp_path, COMMON, "actor.algorithm=opd", "gconfig.temperature=0.5", *given)
    dropped = [message.split(" ")[0] for message in caplog.messages if "is never trained" in message]
    assert sorted(dropped) == ["ref.correction", "ref.kl_ctl", "teacher.eps_clip"]
    frozen = config.ref.as_actor()
    assert (frozen.path, frozen.temperature, frozen.kl_ctl, frozen.optimizer) == ("m", 0.5, 0.0, None)
