"""`arealite migrate` on files of AReaLite v0.3 and AReaL."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.cli.main import main
from arealite.cli.migrate import _page

AREAL_BLOCK = "{experiment_name: '${experiment_name}', trial_name: '${trial_name}', fileroot: '${cluster.fileroot}'"
AREAL = """\
experiment_name: sums
trial_name: trial0
ALLOCATION
cluster: {n_nodes: 1, n_gpus_per_node: 8, fileroot: /tmp/runs, name_resolve: {type: nfs, nfs_record_root: /tmp/names}}
seed: 1
total_train_epochs: 10
tokenizer_path: ${actor.path}
rollout:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  max_concurrent_rollouts: 256
  queue_size: null
  consumer_batch_size: ${train_dataset.batch_size}
  max_head_offpolicyness: 2
  enable_rollout_tracing: false
  OF_ROLLOUT
gconfig: {n_samples: 4, min_new_tokens: 0, max_new_tokens: 1024, greedy: false, temperature: 1.0}
actor:
  experiment_name: ${experiment_name}
  trial_name: ${trial_name}
  path: Qwen/Qwen2-1.5B-Instruct
  init_from_scratch: false
  disable_dropout: true
  gradient_checkpointing: false
  dtype: bfloat16
  mb_spec: {max_tokens_per_mb: 10240}
  optimizer:
    type: adam
    lr: 1.70e-5
    weight_decay: 0.017
    beta1: 0.9
    beta2: 0.999
    eps: 1e-8
    lr_scheduler_type: constant
    gradient_clipping: 1.0
    warmup_steps_proportion: 0.001
  eps_clip: 0.4
  reward_scaling: 10.0
  reward_bias: -0.5
  kl_ctl: 0.0
  ppo_n_minibatches: 1
  recompute_logprob: true
  use_decoupled_loss: true
  behav_imp_weight_cap: 5.0
  OF_ACTOR
ref: {path: "${actor.path}", init_from_scratch: false, dtype: "${actor.dtype}", optimizer: null, OF_REF}
sglang:
  model_path: ${actor.path}
  random_seed: ${seed}
  skip_tokenizer_init: true
  dtype: ${actor.dtype}
  max_running_requests: null
  context_length: 32768
  mem_fraction_static: 0.8
train_dataset: {path: openai/gsm8k, type: rl, batch_size: 256, shuffle: true, pin_memory: true, num_workers: 4}
valid_dataset: {path: openai/gsm8k, type: rl, batch_size: 256, pin_memory: true, num_workers: 4}
saver: BLOCK, freq_epochs: 1, freq_steps: null, freq_secs: null}
evaluator: BLOCK, freq_epochs: 1, freq_steps: null, freq_secs: null}
stats_logger: BLOCK, wandb: {mode: disabled}}
"""
AREAL_V03 = (
    AREAL.replace("ALLOCATION", "allocation_mode: sglang.d4p1t1+d4p1t1\nasync_training: true\nserver_only: false")
    .replace("OF_ROLLOUT", "schedule_policy: round_robin")
    .replace("OF_ACTOR", "group_size: ${gconfig.n_samples}\n  group_adv_norm: false\n  backend: fsdp")
    .replace("OF_REF", "backend: fsdp")
    .replace("BLOCK", AREAL_BLOCK)
    + "checkpointer: {freq_epochs: 1, freq_secs: 3600}\n"
)
AREAL_2026 = (
    AREAL.replace("ALLOCATION", "allocation_mode: sglang:d4p1t1+d4p1t1\nenable_offload: false\nscheduler: {type: null}")
    .replace("OF_ROLLOUT", "scheduling_spec: ${actor.scheduling_spec}\n  dump_to_file: true")
    .replace(
        "OF_ACTOR",
        "reward_norm: {mean_level: group, std_level: group, group_size: '${gconfig.n_samples}'}\n"
        "  adv_norm: {mean_level: batch, std_level: batch}\n"
        "  weight_update_mode: xccl\n"
        "  scheduling_spec: [{task_type: worker, gpu: 1, cmd: python3 -m areal.scheduler.rpc.rpc_server}]",
    )
    .replace("OF_REF", "scheduling_strategy: {type: colocation, target: actor}")
    .replace("BLOCK", AREAL_BLOCK)
    + f"recover: {AREAL_BLOCK}, mode: disabled, freq_epochs: 1, freq_secs: 3600}}\n"
    + f"perf_tracer: {AREAL_BLOCK}, enabled: false}}\n"
)


def migrated(folder: Path, text: str, *, status: int = 0) -> tuple[dict[str, Any], str]:
    """Rewrite a config; return its keys and its text."""
    old, new = folder / "old.yaml", folder / "new.yaml"
    old.write_text(text)
    with new.open("w") as file, contextlib.redirect_stdout(file):
        assert main(["migrate", str(old)]) == status
    return yaml.safe_load(new.read_text()), new.read_text()


def loaded(folder: Path) -> GRPOConfig:
    return load_expr_config(["--config", str(folder / "new.yaml")], GRPOConfig)[0]


@pytest.mark.parametrize(("text", "baseline"), [(AREAL_V03, "none"), (AREAL_2026, "group_mean")], ids=["v0.3", "2026"])
def test_published_files_keep_their_run(tmp_path: Path, text: str, baseline: str) -> None:
    _, written = migrated(tmp_path, text)
    config = loaded(tmp_path)
    assert (config.allocation_mode, config.train_dataset.path) == ("sglang.d4p1t1+d4p1t1", "openai/gsm8k")
    assert (config.actor.proximal, config.actor.correction.upper, config.actor.adv_norm) == ("recompute", 5.0, True)
    assert config.actor.baseline == baseline
    for key in ("pin_memory", "num_workers", "enable_rollout_tracing", "name_resolve"):
        assert f"{key} has no effect: " in written, key


def test_moved_dropped_and_unknown_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = """\
experiment_name: e
trial_name: t
n_nodes: 2
cluster: {fileroot: /tmp/runs, name_resolve: {type: nfs, token: hidden}}
actor: {path: m, lr: 1e-5, eps_clip: 0.4, ppo_n_minibatches: 1}
train_dataset: {path: "${oc.env:DATA,gsm8k}", batch_size: 8}
rollout: {enable_rollout_tracing: true}
"""
    keys, text = migrated(tmp_path, old)
    assert capsys.readouterr().err == "changes: 9, listed at the end of the file\n"
    lines = text.splitlines()
    assert keys["cluster"] == {"fileroot": "/tmp/runs", "n_nodes": 2}
    assert "# - n_nodes is now cluster.n_nodes=2. Rename it." in lines
    assert keys["actor"]["optimizer"] == {"lr": 1e-5, "eps": 1e-5}
    assert "# - actor.optimizer.eps=1e-05 is written out: it was the default." in lines
    assert keys["train_dataset"]["path"] == "${oc.env:DATA,gsm8k}"
    assert (keys["actor"]["group_reward_norm"], keys["actor"]["adv_norm"]) == (False, True)
    assert any(line.startswith("# - rollout.enable_rollout_tracing has no effect: ") for line in lines)
    assert "hidden" not in text
    assert loaded(tmp_path).actor.baseline == "none"
    keys, text = migrated(tmp_path, f"{old}mine: {{a: 1}}\n", status=1)
    assert keys["mine"] == {"a": 1}, "a config class of the user's may have it"
    assert "# - mine must be a key of GRPOConfig: got it. Remove it; --help lists all keys" in text


def test_one_of_ours_stays_as_it_is(tmp_path: Path) -> None:
    folder = Path(__file__).parents[2] / "examples/arealite/configs"
    for name in ("gsm8k_grpo_cpu.yaml", "gsm8k_sft_cpu.yaml", "gsm8k_ppo_cpu.yaml"):
        text = (folder / name).read_text().replace("???", "m")
        keys, _ = migrated(tmp_path, text)
        assert keys == yaml.safe_load(text), name


def test_values_that_do_not_load_are_left_to_decide(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "experiment_name: e\ntrial_name: t\nactor: {path: m, optimizer: {lr: fast}}\ntrain_dataset: {path: d}"
    _, new = migrated(tmp_path, text, status=1)
    assert "to decide: actor.optimizer.lr must be" in capsys.readouterr().err
    assert "# - actor.optimizer.lr must be" in new


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("orchestrator: {}", "the config must be of AReaLite v0.3 or AReaL, with a block actor or model: got orchestr"),
        ("a: [", "F must"),
        ("[1]", "F must"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    old = tmp_path / "old.yaml"
    old.write_text(text)
    assert main(["migrate", str(old)]) == 2
    assert f"ConfigError: {error}" in capsys.readouterr().err.replace(str(old), "F")


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12).filter(lambda text: text.isprintable() and "$" not in text),
    st.lists(st.integers(), max_size=3),
    st.dictionaries(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(), max_size=2),
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), VALUES, max_size=5), st.text(max_size=40))
def test_comments_never_change_the_config(tree: dict[str, Any], comment: str) -> None:
    text = _page(OmegaConf.to_yaml(OmegaConf.create(tree)), "old.yaml", [comment], [comment])
    assert (OmegaConf.to_container(OmegaConf.create(text)) or {}) == tree
