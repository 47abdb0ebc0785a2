"""The example of GRPO with LoRA: servers get merged weights, checkpoints the adapter."""

from pathlib import Path

import example_program
import pytest
import testing_forks
import tiny_models
import torch
from peft import PeftModel
from testing_lite import LiteServer, weights_of
from testing_quickstart import WORD_PROBLEMS
from testing_runs import metrics
from testing_server import serve
from transformers import AutoModelForCausalLM

EXAMPLES = Path(__file__).parents[2] / "examples" / "arealite"
REWARD = "def variety(completion_ids, **others):\n    return len(set(completion_ids)) / 8\n"
pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_grpo_with_lora(tmp_path: Path) -> None:
    path = tiny_models.save_qwen3(tmp_path / "policy", seed=0)
    (tmp_path / "my_reward.py").write_text(REWARD)
    server = LiteServer(AutoModelForCausalLM.from_pretrained(path), slots=32)
    overrides = [
        *("trial_name=t", f"cluster.fileroot={tmp_path}", "recover.mode=disabled", "total_train_steps=6"),
        *(f"actor.path={path}", "actor.lora.rank=8", "actor.optimizer.lr=2e-2", "ref={}", "actor.kl_ctl=1e-3"),
        *("async_training=false", f"reward={tmp_path}/my_reward.py:variety"),
        *(f"train_dataset.path={WORD_PROBLEMS}?train=96&test=2&steps=1", "train_dataset.batch_size=16"),
        *("gconfig.max_new_tokens=8", "valid_dataset=null", "evaluator.freq_steps=null"),
    ]
    with serve(server):
        config = EXAMPLES / "configs" / "gsm8k_grpo_cpu.yaml"
        argv = ["--config", str(config), f"rollout.server_addrs={server.address}", *overrides]
        with testing_forks.connected(example_program.main, EXAMPLES / "gsm8k_grpo.py", argv) as fork:
            assert fork.end() == 0
        served = weights_of(server.model)
    folder = tmp_path / "gsm8k-grpo-cpu" / "t"
    rows = metrics(folder)
    assert rows[5]["reward/mean"] > rows[0]["reward/mean"] + 0.05
    assert rows[0]["policy/ref_kl"] < 1e-8 < 1e-3 < rows[5]["policy/ref_kl"], "the reference is the model at the start"
    assert all(row["policy/mismatch_kl"] < 1e-6 for row in rows[:6]), "servers sample from what is trained"
    saved = folder / "checkpoints" / "step_5"
    assert not list(saved.glob("model*")) and (saved / "tokenizer.json").is_file()
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    merged = dict(PeftModel.from_pretrained(base, saved).merge_and_unload().named_parameters())
    for name, tensor in served.items():
        torch.testing.assert_close(merged[name], tensor, atol=1e-6, rtol=0)
