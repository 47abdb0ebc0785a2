"""Configs of other frameworks, rewritten: values, comments, what is left, and that the result loads."""

from __future__ import annotations

import ast
import importlib.util
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from arealite.api.cli_args import GRPOConfig, PPOConfig, SFTConfig, load_expr_config
from arealite.api.config.schema import config_keys
from arealite.cli.main import main
from arealite.migrate import areal, prime_rl, trl, verl
from arealite.migrate.page import notes_of, page
from arealite.migrate.rules import ABSENT, New, Old, Rule, translate

PAGE = (Path(__file__).parents[2] / "docs/migration-keys.md").read_text()
TABLES: dict[str, dict[str, Rule]] = {
    "TRL's GRPOConfig": trl.GRPO,
    "TRL's SFTConfig": trl.SFT,
    "verl": verl.RULES,
    "prime-rl's rl.toml": prime_rl.RL,
    "prime-rl's sft.toml": prime_rl.SFT,
}

TRL = """\
# Small model
model_name_or_path: Qwen/Qwen2.5-0.5B  # of the hub
dataset_name: org/sums
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
steps_per_generation: 8
num_generations: 16
max_completion_length: 700
learning_rate: 3e-6
lr_scheduler_type: cosine
warmup_ratio: 0.1
# keep it close
beta: 0.04
epsilon_high: 0.28
max_steps: 100
save_steps: 50
use_vllm: true
vllm_importance_sampling_mode: token_truncate
log_completions: true
sync_ref_model: true
"""

VERL = """\
data: {train_files: [a.parquet, b.parquet], val_files: t.parquet, train_batch_size: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  actor:
    optim: {lr: 1e-6, lr_warmup_steps: 10}
    ppo_mini_batch_size: 128
    ppo_micro_batch_size_per_gpu: 4
    use_kl_loss: true
    kl_loss_coef: 0.002
    clip_ratio_low: 0.2
    clip_ratio_high: 0.28
    loss_agg_mode: seq-mean-token-sum
  rollout: {name: vllm, n: 5, tensor_model_parallel_size: 2, gpu_memory_utilization: 0.6}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false}
custom_reward_function: {path: my.py, name: score}
trainer: {project_name: my sums, experiment_name: first, total_training_steps: 200, save_freq: 20, logger: [wandb],
          default_local_dir: "ckpt/${trainer.experiment_name}", balance_batch: true}
"""

PRIME = """\
max_steps = 20
[model]
name = "Qwen/Qwen3-0.6B"
[deployment]
num_infer_gpus = 6
num_train_gpus = 2
[inference.parallel]
tp = 2
[orchestrator]
batch_size = 128
rollouts_per_example = 16
[orchestrator.sampling]
max_tokens = 128
[[orchestrator.env]]
id = "reverse-text"
[trainer.optim]
lr = 3e-6
[trainer.model.ac]
[trainer.scheduler]
type = "linear"
warmup_steps = 5
"""


def migrated(
    folder: Path, text: str, *options: str, suffix: str = ".yaml", status: int = 0
) -> tuple[dict[str, Any], str]:
    """Rewrite a config; return its keys and its text."""
    old, new = folder / f"old{suffix}", folder / "new.yaml"
    new.unlink(missing_ok=True)
    old.write_text(text)
    assert main(["migrate", str(old), "--out", str(new), *options]) == status
    return yaml.safe_load(new.read_text()), new.read_text()


def loaded(folder: Path, cls: type[Any] = GRPOConfig, *overrides: str) -> Any:
    return load_expr_config(["--config", str(folder / "new.yaml"), *overrides], cls)[0]


def test_a_config_of_trl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, text = migrated(tmp_path, TRL, "--devices", "2", status=1)
    config = loaded(tmp_path, GRPOConfig, "reward=a:b")
    actor = config.actor
    assert config.train_dataset.batch_size == 8 * 2 * 8 // 16, "128 completions of 16"
    assert (actor.ppo_n_minibatches, actor.mb_spec.n_mbs) == (2, 4)
    assert (config.total_train_steps, config.saver.freq_steps) == (50, 25), "TRL counts optimizer steps"
    assert (actor.optimizer.lr, actor.optimizer.weight_decay, actor.optimizer.beta2) == (3e-6, 0.0, 0.999)
    assert (actor.optimizer.lr_scheduler_type, actor.optimizer.warmup_steps_proportion) == ("cosine", 0.1)
    assert (actor.kl_ctl, actor.kl_in, actor.kl_estimator, config.ref.path) == (0.04, "loss", "k3", "Qwen/Qwen2.5-0.5B")
    assert (actor.eps_clip, actor.eps_clip_higher, actor.aggregation) == (0.2, 0.28, "token_mean")
    assert (actor.proximal, actor.correction.action, actor.correction.level) == ("recompute", "truncate", "token")
    assert (actor.correction.upper, config.seed, config.gconfig.max_new_tokens) == (3.0, 42, 700)
    assert config.allocation_mode == "vllm.d1p1t1+d1p1t1"
    lines = text.splitlines()
    assert lines[1:3] == ["# To fill in: reward.", "# Small model"]
    assert "  # of the hub" in lines and "  # keep it close" in lines
    assert "    lr: 3.0e-06  # learning_rate" in lines
    assert "    weight_decay: 0.0  # TRL's default of weight_decay" in lines
    assert "# sync_ref_model: true -- the reference stays the model before training" in lines
    told = capsys.readouterr().err
    assert "read as a config of TRL (GRPO) (--from says otherwise)" in told and "to fill in: reward" in told


def test_a_config_of_verl(tmp_path: Path) -> None:
    _, text = migrated(tmp_path, VERL)
    config = loaded(tmp_path)
    actor = config.actor
    assert (config.experiment_name, config.trial_name) == ("my-sums", "first")
    assert (config.train_dataset.path, config.train_dataset.mixed_with[0].path) == ("a.parquet", "b.parquet")
    assert (config.train_dataset.batch_size, actor.ppo_n_minibatches, config.gconfig.n_samples) == (512, 4, 5)
    assert actor.mb_spec.max_tokens_per_mb == 4 * (512 + 1024)
    assert (actor.kl_ctl, actor.kl_in, actor.kl_estimator) == (0.002, "loss", "k3")
    assert (actor.eps_clip, actor.eps_clip_higher, actor.c_clip) == (0.2, 0.28, 3.0)
    assert (actor.baseline, actor.reward_scale, actor.aggregation, actor.loss_constant) == (
        *("group_mean", "none"),
        *("constant", 1.0),
    )
    assert actor.optimizer.warmup_steps_proportion == 10 / 200
    assert (config.allocation_mode, config.reward) == ("vllm.d2p1t2+d4p1t1", "my.py:score")
    assert (config.recover.mode, config.recover.freq_steps) == ("auto", 20)
    assert config.cluster.fileroot.endswith("/ckpt/first"), "references are resolved"
    assert (
        "# trainer.* (trainer.balance_batch) -- no choice here" in text
        and "gpu_memory_utilization: 0.6 -- servers have" in text
    )


def test_trl_evaluates_as_often_as_it_logs_unless_told_otherwise(tmp_path: Path) -> None:
    for more, freq_steps, told in (
        ("", 5, "as often as TRL logs by default, every 10 steps"),
        ("logging_steps: 4\n", 2, "logging_steps: 4"),
        ("logging_steps: 4\neval_steps: 60\n", 30, "eval_steps: 60"),
    ):
        _, text = migrated(tmp_path, f"{TRL}eval_strategy: steps\n{more}", status=1)  # the reward is to be filled in
        assert loaded(tmp_path, GRPOConfig, "reward=a:b").evaluator.freq_steps == freq_steps
        assert f"freq_steps: {freq_steps}  # eval_strategy: steps; {told}\n" in text


@pytest.mark.parametrize(("steps", "share", "told"), [(300, 1.0, "300 of 200 steps"), (0, 0.0, "no warmup")])
def test_steps_of_warmup_are_a_share_of_all(tmp_path: Path, steps: int, share: float, told: str) -> None:
    _, text = migrated(tmp_path, VERL.replace("lr_warmup_steps: 10", f"lr_warmup_steps: {steps}"))
    assert loaded(tmp_path).actor.optimizer.warmup_steps_proportion == share
    assert f"lr_warmup_steps: {steps}; {told}" in text


def test_a_critic_of_verl_makes_a_config_of_ppo(tmp_path: Path) -> None:
    text = VERL.replace("adv_estimator: grpo, norm_adv_by_std_in_grpo: false", "lam: 0.9, gamma: 0.99")
    migrated(tmp_path, f"{text}critic: {{optim: {{lr: 3e-5}}, cliprange_value: 0.4}}\n")
    config = loaded(tmp_path, PPOConfig)
    assert (config.actor.gae_lambda, config.actor.discount, config.actor.adv_norm) == (0.9, 0.99, True)
    assert (config.critic.optimizer.lr, config.critic.value_eps_clip) == (3e-5, 0.4)


def test_a_config_of_prime_rl(tmp_path: Path) -> None:
    keys, text = migrated(tmp_path, PRIME, suffix=".toml", status=1)
    config = loaded(tmp_path, GRPOConfig, "reward=a:b", "train_dataset.path=gsm8k")
    actor = config.actor
    assert (config.train_dataset.batch_size, config.gconfig.n_samples) == (8, 16)
    assert (config.gconfig.max_new_tokens, config.total_train_steps) == (128, 20)
    assert (actor.objective, actor.dppo_delta, actor.reward_scale, actor.ppo_n_minibatches) == ("dppo", 0.2, "none", 1)
    assert (config.rollout.max_head_offpolicyness, config.rollout.overdue) == (8, "drop")
    assert (config.allocation_mode, config.cluster.n_gpus_per_node) == ("vllm.d3p1t2+d2p1t1", 8)
    assert (actor.gradient_checkpointing, actor.optimizer.warmup_steps_proportion) == (True, 0.25)
    assert keys["reward"] == "???" and "of reverse-text; environments of verifiers are a workflow" in text


def test_fine_tuning_by_trl_and_prime_rl(tmp_path: Path) -> None:
    migrated(tmp_path, "{model_name_or_path: m, dataset_name: d, packing: true, per_device_train_batch_size: 4}")
    config = loaded(tmp_path, SFTConfig)
    assert (config.train_dataset.max_length, config.train_dataset.batch_size) == (1024, 4)
    assert (config.model.optimizer.lr, config.allocation_mode, config.cluster.n_gpus_per_node) == (2e-5, "d1", 1)
    migrated(tmp_path, '[model]\nname = "m"\n[data]\nname = "d"\nseq_len = 4096\n[optim]\nlr = 1e-5', suffix=".toml")
    config = loaded(tmp_path, SFTConfig)
    assert (config.train_dataset.max_length, config.train_dataset.batch_size) == (4096, 128)
    assert (config.model.optimizer.lr, config.model.optimizer.weight_decay) == (1e-5, 0.01)


def test_a_config_of_areal(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = """\
experiment_name: e
trial_name: t
n_nodes: 2
cluster: {fileroot: /tmp/runs, name_resolve: {type: nfs}}
actor:
  path: m  # the policy
  lr: 1e-5
  eps_clip: 0.4
  ppo_n_minibatches: 1
train_dataset: {path: "${oc.env:DATA,gsm8k}", batch_size: 8}
rollout: {enable_rollout_tracing: true}
mine: {a: 1}
service: {user: me, keys: [{WANDB_API_KEY: hidden}], hf_token: hidden}
"""
    with caplog.at_level(logging.WARNING, logger="arealite.config"):
        keys, text = migrated(tmp_path, old, status=1)
    assert caplog.messages == [], "the file says it"
    lines = text.splitlines()
    assert keys["cluster"] == {"fileroot": "/tmp/runs", "n_nodes": 2} and "  n_nodes: 2  # n_nodes" in lines
    assert (
        keys["actor"]["optimizer"] == {"lr": 1e-5, "eps": 1e-5}
        and "    eps: 1.0e-05  # AReaLite v0.3's default" in lines
    )
    assert keys["train_dataset"]["path"] == "${oc.env:DATA,gsm8k}" and "  # the policy" in lines
    assert (keys["actor"]["group_reward_norm"], keys["actor"]["adv_norm"]) == (False, True)
    assert (
        "# rollout.enable_rollout_tracing: true -- every trained sample is stored in the run folder's rollouts/"
        in lines
    )
    assert any(line.startswith('# mine must be a key of ours: got {"a": 1}.') for line in lines)
    assert '"keys": [{"WANDB_API_KEY": "***"}], "hf_token": "***"' in " ".join(text.split()) and "hidden" not in text
    assert loaded(tmp_path).actor.baseline == "none"


def test_overrides_of_a_shell_script(tmp_path: Path) -> None:
    text = """#!/bin/bash
# it's GRPO
set -x
n=${SAMPLES:-4}
batch=64
lr=${LR:-}
lr=2e-6
files="['$HOME/a.parquet']"
EXTRA=()
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files="$files" \\
    data.train_batch_size=${batch} +actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.optim.lr=${lr} \\
    actor_rollout_ref.actor.ppo_mini_batch_size=$((batch / 2)) actor_rollout_ref.model.path="$MODEL" \\
    trainer.logger=['console','wandb'] trainer.project_name='sums' \\
    trainer.experiment_name=${NAME:-x_${N}_$(date +%Y)} $@
"""
    keys, new = migrated(tmp_path, text, suffix=".sh", status=1)
    assert (keys["train_dataset"]["batch_size"], keys["gconfig"]["n_samples"]) == (64, 4)
    assert (keys["train_dataset"]["path"], keys["experiment_name"]) == (f"{Path.home()}/a.parquet", "sums")
    assert (keys["actor"]["optimizer"]["lr"], keys["actor"]["path"]) == (2e-6, "$MODEL")
    assert keys["stats_logger"]["wandb"]["mode"] == "online"
    assert "# Of a shell script: variables and keys have the first values" in new
    assert keys["actor"]["ppo_n_minibatches"] == 2, "64 / $((batch / 2))"
    text = "accelerate launch --num_processes 4 grpo.py --model_name_or_path m --num_generations=8 --bf16 --beta 0.1\n"
    keys, _ = migrated(tmp_path, text, suffix=".sh", status=1)
    assert (keys["actor"]["kl_ctl"], keys["gconfig"]["n_samples"], keys["train_dataset"]["batch_size"]) == (0.1, 8, 4)


def test_one_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples/arealite/configs"
    for name in ("gsm8k_grpo.yaml", "gsm8k_sft.yaml", "gsm8k_ppo_cpu.yaml", "geometry3k_grpo.yaml"):
        text = (folder / name).read_text()
        keys, new = migrated(tmp_path, text, status="???" in text)
        assert keys == yaml.safe_load(text), name
        assert "recover:\n" in new and (name != "gsm8k_grpo.yaml" or "# Not of the paper:" in new)


@pytest.mark.parametrize(
    ("old", "key", "told"),
    [
        ("loss_type: luspo\nnum_generations: 8", "loss_type", "luspo, but losses are those of"),
        ("num_generations: 8\noptim: muon", "optim", "muon, but optimizers are AdamW"),
        (
            "algorithm: {adv_estimator: remax}\nactor_rollout_ref: {rollout: {n: 2}}",
            "algorithm.adv_estimator",
            "remax, but",
        ),
        ("learning_rate: 1.0\noptim: adafactor", "optim", "adafactor, but"),
    ],
)
def test_another_algorithm_is_never_chosen_silently(
    tmp_path: Path, old: str, key: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    migrated(tmp_path, old, status=1)
    assert f"to decide: {key} must have a counterpart here: got {told}" in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["dapo", "bnpo", "grpo", "dr_grpo", "cispo", "sapo"])
def test_every_loss_of_trl_that_has_a_counterpart_loads(tmp_path: Path, loss: str) -> None:
    common = (
        f"model_name_or_path: m\nnum_generations: 8\nloss_type: {loss}\ndelta: 4.0\nepsilon_high: 0.3\nuse_vllm: true\n"
    )
    migrated(tmp_path, common, status=1)
    actor = loaded(tmp_path, GRPOConfig, "reward=a:b", "train_dataset.path=d").actor
    assert (actor.objective, actor.c_clip) == ((loss, None) if loss in ("cispo", "sapo") else ("ppo", 4.0))
    assert actor.cispo_max == (0.3 if loss == "cispo" else None)


def test_blocks_that_are_none(tmp_path: Path) -> None:
    text = "experiment_name: e\nactor: {path: m, optimizer: null}\nrollout: 5\ngconfig: {n_samples: null}\n"
    keys, _ = migrated(tmp_path, text, status=1)
    assert keys["actor"]["optimizer"] is None and keys["rollout"] == 5
    migrated(tmp_path, "algorithm: grpo\nactor_rollout_ref: 5\ndata: [1]\n", status=1)


@pytest.mark.parametrize(
    ("text", "suffix", "options", "told"),
    [
        ("a: 1", ".yaml", (), "--from must name the framework of F: got a. Add --from areal|trl|verl|prime-rl."),
        ("[", ".yaml", (), "F must be a YAML file: got"),
        ("- 1", ".yaml", (), "F must hold `key: value` lines: got a list."),
        ("[1]", ".json", (), "F must hold an object of keys: got list."),
        ("a = ", ".toml", (), "F must be a file of TOML: got"),
        ("a = " + "[" * 5000, ".toml", (), "F must be a file of TOML: got"),
        (
            "learning_rate: 1\nf_divergence_type: x",
            ".yaml",
            ("--from", "trl"),
            "a config of TRL must be GRPO's or SFT's",
        ),
        ("echo 'a", ".sh", (), "F must be a shell script: got No closing quotation."),
    ],
    ids=["whose", "brackets", "list", "json", "toml", "depth", "dpo", "sh"],
)
def test_files_that_are_refused(
    tmp_path: Path, text: str, suffix: str, options: tuple[str, ...], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = tmp_path / f"old{suffix}"
    old.write_text(text)
    assert main(["migrate", str(old), *options]) == 2
    assert f"ConfigError: {told}" in capsys.readouterr().err.replace(str(old), "F")


def test_nothing_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(TRL)
    assert main(["migrate", str(old), "--out", str(old)]) == 2
    assert "--out must be a new file" in capsys.readouterr().err and old.read_text() == TRL


def test_what_does_not_load_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = TRL.replace("learning_rate: 3e-6", "learning_rate: fast")
    _, new = migrated(tmp_path, text, status=1)
    told = capsys.readouterr().err
    assert "new.yaml does not load yet" in told and "next:" not in told
    assert "to decide: actor.optimizer.lr must be a valid number" in told and "actor.optimizer.lr must be" in new


def test_secrets_and_strange_texts_stay_out_of_comments(tmp_path: Path) -> None:
    text = TRL + 'hub_token: s3cr3t\nmystery: "a\\nb: 1\\x85c: 2"\n'
    keys, new = migrated(tmp_path, text, status=1)
    assert "s3cr3t" not in new and not {"b", "c"} & keys.keys() and "mystery must be a key of TRL" in new


@given(
    st.dictionaries(
        st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
        st.one_of(
            st.none(),
            st.booleans(),
            st.integers(),
            st.floats(allow_nan=False, allow_infinity=False),
            st.text(max_size=12).filter(lambda text: text.isprintable() and "$" not in text),
            st.lists(st.integers(), max_size=3),
            st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(), max_size=2),
        ),
        max_size=5,
    ),
    st.text(max_size=40),
)
def test_comments_never_change_what_is_read(tree: dict[str, Any], comment: str) -> None:
    from omegaconf import OmegaConf

    text = page(New(tree, dict.fromkeys(tree, comment), gone={"x": comment}, problems=[comment]), [comment], {})
    assert OmegaConf.to_container(OmegaConf.create(text)) == tree


@pytest.mark.parametrize("table", TABLES)
def test_values_of_other_types_are_told_and_never_raise(table: str) -> None:
    rules = TABLES[table]
    for key in (key for key in rules if not key.endswith(")")):
        for value in (None, 0, "x", {"a": 1}):
            tree: Any = value
            for part in reversed([key] if "TRL" in table else key.split(".")):
                tree = {part: tree}
            new = translate(Old(tree, rules, framework="X", devices=2, stem="x"), {}, {})
            assert new.tree or new.problems


def test_comments_of_a_file() -> None:
    text = "# top\na: 1  # one\n\n# block\nb:  # head\n  # inner\n  c: {d: 2} # flow\n  e: '# no'\n"
    text += "# end\nf: |\n  x\ng: 3\n"
    assert notes_of(text) == {
        "": ["# top"],
        "a": ["# one"],
        "b": ["# block", "# head"],
        "b.c": ["# inner", "# flow"],
        "f": ["# end"],
    }


DEFAULTS = {
    "output_dir",
    "run_name",
    "project",
    "torch_dtype",
    "prompt (column)",
    "warmup_ratio",
    "reward_funcs",
    "num_processes",
    "overwrite_output_dir",
}
"""Keys of the tables whose defaults are none of TRL's."""


def test_defaults_of_trl_are_those_of_its_classes() -> None:
    given: dict[str, dict[str, Any]] = {}
    for module in ("transformers.training_args", "trl.trainer.base_config", "trl.trainer.grpo_config"):
        given.setdefault("GRPO", {}).update(_defaults(module))
    for module in ("transformers.training_args", "trl.trainer.base_config", "trl.trainer.sft_config"):
        given.setdefault("SFT", {}).update(_defaults(module))
    for values in given.values():
        values |= _defaults("trl.trainer.model_config") | _defaults("trl.scripts.utils")
    for name, table in (("GRPO", trl.GRPO), ("SFT", trl.SFT)):
        theirs = given[name]
        ours = {key: rule.default for key, rule in table.items() if rule.default is not ABSENT and key not in DEFAULTS}
        assert {key: theirs.get(key, "none of TRL's") for key in ours} == ours, name
        unknown = table.keys() - theirs.keys() - DEFAULTS - {"max_prompt_length", "dataset_configs"}
        assert not unknown, "keys that TRL has"


def _defaults(module: str) -> dict[str, Any]:
    """Read the defaults of a module's dataclasses without importing it."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    assert spec is not None and spec.submodule_search_locations
    path = Path(spec.submodule_search_locations[0], *module.split(".")[1:]).with_suffix(".py")
    found: dict[str, Any] = {}
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    for field in (node for cls in classes for node in cls.body):
        match field:
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.Call(keywords=keywords)):
                words = {word.arg: word.value for word in keywords}
                try:
                    found[name] = ast.literal_eval(words["default"])
                except (KeyError, ValueError):
                    found[name] = None
    return found


@pytest.mark.parametrize("table", TABLES)
def test_keys_here_exist(table: str) -> None:
    names = {key.name for cls in (PPOConfig, SFTConfig) for key in config_keys(cls)}
    for theirs, rule in TABLES[table].items():
        for key in filter(None, rule.ours.split(", ")):
            assert key in names or key.partition(".")[0] in ("vllm", "stats_logger"), f"{theirs}: {key}"
    assert all(key in names for key in areal.V03 | areal.TODAY)


@pytest.mark.parametrize("table", TABLES)
def test_the_page_shows_every_key(table: str) -> None:
    assert "\n".join(rows(TABLES[table])) in PAGE, f"print rows() of {table} into docs/migration-keys.md"


@pytest.mark.parametrize("module", [trl, verl, prime_rl], ids=lambda module: module.__name__)
def test_the_page_shows_what_has_no_place_here(module: Any) -> None:
    lines = [f"| `{pattern}` | {why} |" for pattern, why in module.IGNORED.items()]
    assert "\n".join(lines) in PAGE, "print these lines into docs/migration-keys.md"


def rows(table: dict[str, Rule]) -> list[str]:
    """Return a table as the page shows it."""
    lines = []
    for theirs, rule in table.items():
        is_told = rule.default is not ABSENT and not theirs.endswith(")")
        default = f"`{json.dumps(rule.default)}`" if is_told else ""
        here = ", ".join(f"`{key}`" for key in rule.ours.split(", ")) if rule.ours else "-"
        lines.append(f"| `{theirs}` | {default} | {here} | {rule.why} |".replace("  ", " "))
    return lines
