"""Configs of AReaL load, and errors give our names for keys of other frameworks."""

from __future__ import annotations

import importlib
import logging
import re
from pathlib import Path
from typing import Any

import pytest

from arealite.api.cli_args import GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.api.config.legacy import THEIR_WORDS
from arealite.api.config.types import config_keys
from arealite.api.errors import ConfigError

MIGRATION = Path(__file__).parents[3] / "docs/migration.md"
KEYS = [key.name for key in config_keys(PPOConfig)]

AREAL_2026 = (Path(__file__).parents[1] / "originals/2026.yaml").read_text()


def load(folder: Path, text: str, *overrides: str, cls: type[Any] = GRPOConfig) -> Any:
    file = folder / "config.yaml"
    file.write_text(text)
    return load_expr_config(["--config", str(file), *overrides], cls)[0]


def refusal(folder: Path, *overrides: str, text: str = "") -> str:
    common = ("experiment_name=e", "trial_name=t", "actor.path=m", "train_dataset.path=gsm8k")
    with pytest.raises(ConfigError) as caught:
        load(folder, text, *common, *overrides)
    return str(caught.value)


def test_the_yaml_of_todays_areal_loads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        config = load(tmp_path, AREAL_2026)
    assert config.allocation_mode == "sglang.d4p1t1+d4p1t1" and config.rollout.backend == "sglang"
    assert config.rollout.weight_update == "broadcast"
    actor = config.actor
    assert (actor.baseline, actor.reward_scale) == ("group_mean", "group_std")
    assert (actor.adv_norm, actor.group_adv_norm, actor.max_new_tokens) == (True, False, 1024)
    assert (actor.proximal, actor.correction.action, actor.correction.upper) == ("recompute", "mask", None)
    keys = {message.split(" ")[0] for message in caplog.messages}
    assert keys >= {
        "allocation_mode",
        "actor.reward_norm",
        "actor.adv_norm",
        "actor.weight_update_mode",
        "scheduler",
    }
    again = AREAL_2026.replace('backend: "sglang:d4p1t1"', "").replace('backend: "fsdp:d4p1t1"', "")
    again = again.replace("backend: ${actor.backend}", "")
    assert load(tmp_path, again, "allocation_mode=sglang:d4p1t1+fsdp:d4p1t1") == config


@pytest.mark.parametrize(
    ("norms", "fields"),
    [
        ("{reward_norm: null, adv_norm: null}", ("none", "none", False, False)),
        ("{adv_norm: {mean_level: group, std_level: group}}", ("group_mean", "group_std", False, True)),
        ("{adv_norm: false, group_reward_norm: false}", ("none", "none", False, False)),
        ("{adv_norm: false, group_reward_norm: true}", ("group_mean", "group_std", False, False)),
        ("{reward_norm: {mean_level: group, std_level: batch}}", ("group_mean", "batch_std", False, False)),
        ("{reward_norm: {mean_level: group, mean_leave1out: true}}", ("leave_one_out", "none", False, False)),
        (  # LitePPO in AReaL
            "{reward_norm: null, adv_norm: {mean_level: group, std_level: batch}}",
            ("group_mean", "batch_std", False, False),
        ),
        (  # Dr. GRPO in AReaL, with its key of two meanings beside ours
            "{adv_norm: {mean_level: group, std_level: null}, group_adv_norm: true}",
            ("group_mean", "none", False, True),
        ),
    ],
)
def test_normalisations_as_areal_writes_them(tmp_path: Path, norms: str, fields: tuple[object, ...]) -> None:
    overrides = ("experiment_name=e", "trial_name=t", "actor.path=m", "train_dataset.path=gsm8k")
    actor = load(tmp_path, f"actor: {norms}", *overrides, "train_dataset.batch_size=8").actor
    assert (actor.baseline, actor.reward_scale, actor.adv_norm, actor.group_adv_norm) == fields


@pytest.mark.parametrize(
    ("older", "fields"),
    [
        ("{mask_no_eos_with_zero: true, recompute_logprob: true}", ("zero", "recompute", "none", None)),
        ("{mask_no_eos_with_zero: null, recompute_logprob: false}", ("keep", "rollout", "none", None)),
        ("{use_decoupled_loss: false}", ("keep", "rollout", "none", None)),
        (
            "{use_decoupled_loss: true, recompute_logprob: true, behav_imp_weight_cap: 5.0}",
            ("keep", "recompute", "mask", 5.0),
        ),
        ("{use_decoupled_loss: false, behav_imp_weight_cap: 5.0}", ("keep", "rollout", "none", None)),
        ("{behav_imp_weight_cap: 5.0}", ("keep", "rollout", "none", None)),
    ],
)
def test_older_keys_choose_as_they_did(tmp_path: Path, older: str, fields: tuple[object, ...]) -> None:
    overrides = ("experiment_name=e", "trial_name=t", "actor.path=m", "train_dataset={path: p, batch_size: 8}")
    actor = load(tmp_path, f"actor: {older}", *overrides).actor
    assert (actor.truncated, actor.proximal, actor.correction.action, actor.correction.upper) == fields


def test_older_keys_of_the_block_of_core_choose_as_those_of_the_actor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    common = ("experiment_name=e", "trial_name=t", "actor.path=m", "train_dataset={path: p, batch_size: 8}")
    ppo = "ppo: {recompute_logprob: true, use_decoupled_loss: true, behav_imp_weight_cap: 5.0}"
    actor = load(tmp_path, ppo, *common).actor
    assert (actor.proximal, actor.correction.action, actor.correction.upper) == ("recompute", "mask", 5.0)
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        actor = load(tmp_path, ppo, *common, "actor.use_decoupled_loss=false").actor
    assert (actor.correction.action, actor.correction.upper) == ("none", None)
    assert "actor.behav_imp_weight_cap has no effect: actor.use_decoupled_loss is not true." in caplog.text


def test_older_keys_that_contradict_are_refused(tmp_path: Path) -> None:
    with_ours = refusal(tmp_path, text="actor: {group_reward_norm: true, baseline: none}")
    assert with_ours.startswith("actor.baseline must be given once: got it as actor.group_reward_norm too.")
    both = refusal(tmp_path, text="actor: {use_decoupled_loss: true, recompute_logprob: false}")
    assert both.startswith("actor.proximal must be given once: got it as actor.")
    assert refusal(tmp_path, "actor.recompute_logprob=5").startswith("actor.recompute_logprob must be None: got 5.")


def test_normalisations_without_a_counterpart_are_refused(tmp_path: Path) -> None:
    mean_of_batch = refusal(tmp_path, text="actor: {reward_norm: {mean_level: batch, std_level: batch}}")
    assert "actor.reward_norm must be a key of GRPOConfig" in mean_of_batch
    twice = "{reward_norm: {mean_level: group}, adv_norm: {mean_level: group, std_level: batch}}"
    assert "actor.adv_norm must be true or false or null: got {'mean" in refusal(tmp_path, text=f"actor: {twice}")


def test_all_that_is_wrong_with_keys_comes_in_one_message(tmp_path: Path) -> None:
    text = (
        "actor: {use_lora: true, lora_rank: 8, eps_klip: 0.1, backend: 'megatron:d4'}\nmax_steps: 3\nzzz: {a: {b: 1}}\n"
    )
    message = refusal(tmp_path, "rollout=5", text=text).replace(str(tmp_path), "F").splitlines()
    assert message == [
        "actor.use_lora must be False: got True. Remove it: a lora block switches LoRA on, e.g. lora.rank=16.",
        "actor.backend must be 'fsdp': got 'megatron:d4'. Remove it: the training engine is the class that the script "
        "constructs.",
        "actor.lora_rank must be a key of GRPOConfig: got it in F/config.yaml. It is called actor.lora.rank here.",
        "actor.eps_klip must be a key of GRPOConfig: got it in F/config.yaml. Did you mean actor.eps_clip?",
        "max_steps must be a key of GRPOConfig: got it in F/config.yaml. It is called total_train_steps here.",
        "zzz must be a key of GRPOConfig: got it in F/config.yaml. Remove it; --help lists all keys.",
        "rollout must be a block: got 5 on the command line. Correct it there.",
    ]


@pytest.mark.parametrize(
    ("override", "advice"),
    [
        ("actor.optimizer.learning_rate=1", "It is called actor.optimizer.lr here."),
        ("learning_rate=1", "It is called actor.optimizer.lr here."),
        ("ref.model_name_or_path=x", "It is called ref.path here."),
        ("actor.beta=0.1", "It is called actor.kl_ctl here."),
        ("rollout.max_staleness=1", "It is called rollout.max_head_offpolicyness here."),
        ("actor.loss_type=dapo", "It is called actor.algorithm here."),
        ("actor_rollout_ref.rollout.n=5", "It is called gconfig.n_samples here."),
        ("algorithm.adv_estimator=grpo", "It is called actor.algorithm here."),
        ("reward_model=m", "It is called reward here."),  # a function that asks a reward model
        ("seqlen=5", "Remove it; --help lists all keys."),  # seed is the nearest, and another thing
        ("actor.zeed=5", "Did you mean actor.seed?"),
        (
            "max_new_tokens=5",
            "Did you mean gconfig.max_new_tokens or eval_gconfig.max_new_tokens or actor.max_new_tokens?",
        ),
    ],
)
def test_words_of_others_are_known_and_nothing_is_guessed(tmp_path: Path, override: str, advice: str) -> None:
    name = override.partition("=")[0]
    message = refusal(tmp_path, override)
    assert message == f"{name} must be a key of GRPOConfig: got it on the command line. {advice}"


@pytest.mark.parametrize("override", ["critic.path=m", "vf_coef=0.5", "cliprange_value=0.2"])
def test_words_of_a_critic_name_the_config_that_has_one(tmp_path: Path, override: str) -> None:
    assert refusal(tmp_path, override).endswith("A critic is part of PPOConfig: use examples/arealite/gsm8k_ppo.py.")


def test_fine_tuning_has_the_keys_of_its_model(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"It is called model\.optimizer\.lr here"):
        load(tmp_path, "experiment_name: e\ntrial_name: t\nmodel: {path: m}", "learning_rate=1", cls=SFTConfig)


@pytest.mark.parametrize("ours", THEIR_WORDS)
def test_what_their_words_are_called_exists(ours: str) -> None:
    assert [key for key in KEYS if f".{key}".endswith(f".{ours}")]


def test_no_word_has_two_meanings_or_is_a_key_of_ours() -> None:
    words = " ".join(THEIR_WORDS.values()).split()
    assert len(words) == len(set(words))
    assert not set(words) & {key.rpartition(".")[2] for key in KEYS}


def test_the_imports_that_the_page_names_exist() -> None:
    imports = re.findall(r"`from (\S+) import (\w+)`", MIGRATION.read_text())
    assert len(imports) == 8
    assert all(hasattr(importlib.import_module(module), name) for module, name in imports)


def test_the_page_on_migration_shows_the_same_words() -> None:
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", MIGRATION.read_text(), re.MULTILINE)
    shown = {left.strip("`"): " ".join(re.findall(r"`(\w+)`", right)) for left, right in rows}
    assert {key: shown.get(key) for key in THEIR_WORDS} == THEIR_WORDS
