"""`arealite check` on runs that would work, and on runs that have one thing wrong."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest
import torch
from testing_quickstart import CHAT_TEMPLATE, WORD_PROBLEMS, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.cli_args import GRPOConfig, load_expr_config
from arealite.cli.check.findings import Findings
from arealite.cli.main import main
from arealite.engine.hf_model import build_meta_model
from arealite.planner.needs import context_of, positions_of

torch.set_num_threads(1)
CONFIG = f"""
experiment_name: e
trial_name: t
allocation_mode: lite.d2+d2
cluster: {{n_gpus_per_node: 0, fileroot: unused}}
gconfig: {{n_samples: 4, max_new_tokens: 64}}
actor: {{dtype: float32, gradient_checkpointing: false, mb_spec: {{max_tokens_per_mb: 512}}}}
lite: {{context: 512}}
train_dataset: {{path: "{WORD_PROBLEMS}?train=16&test=4", batch_size: 8}}
"""
ENTRY = """
def train(argv):
    config, _ = load_expr_config(argv, GRPOConfig)
    rows, _ = load_datasets(config, tokenizer)
    workflow = RLVRWorkflow(reward, config.gconfig)
"""
TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>"
FORGETFUL = "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}" + TURN + "{% endif %}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A model whose tokenizer knows 261 tokens."""
    return make_tiny_model(tmp_path_factory.mktemp("check") / "tiny", layers=2)


@pytest.fixture
def model(tiny, tmp_path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


@pytest.fixture
def check(tmp_path, capsys, monkeypatch):
    """Return a function that checks a run and returns status and lines; `entry` is the script."""
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def run(
        model: Path, *overrides: str, entry: str = ENTRY, config: str = CONFIG, key: str = "actor.path"
    ) -> tuple[int, str]:
        (tmp_path / "entry.py").write_text(entry)
        (tmp_path / "config.yaml").write_text(config)
        arguments = ["--config", str(tmp_path / "config.yaml"), f"{key}={model}", *overrides]
        status = main(["check", str(tmp_path / "entry.py"), *arguments])
        shown = capsys.readouterr()
        return status, " ".join(shown.out.split()) + shown.err

    return run


def test_a_run_that_works(check, tiny) -> None:
    status, shown = check(tiny)
    assert status == 0 and shown.endswith("0 problems, 0 warnings")
    for line in (
        "ok: model: Qwen3ForCausalLM: 0.115 million parameters in 2 layers, tied embeddings",
        "ok: tokenizer: 261 tokens of 261 that the model has",
        "ok: template: it ends an answer with '<|end|>'.",
        "train_dataset: the first 16 prompts have",
        "ok: memory: the run needs about 0.",
    ):
        assert line in shown
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tiny).parameters()) == pytest.approx(
        0.115e6, 5e-3
    )


def test_adapters_are_planned_for_and_their_targets_checked(check, tiny) -> None:
    status, shown = check(tiny, "actor.lora.rank=4", "ref={}", "actor.kl_ctl=0.1")
    assert status == 0 and "parameters in 2 layers, 92.2% of them frozen, tied embeddings" in shown
    assert "reference" not in shown
    status, shown = check(tiny, "actor.lora.target_modules=[w_proj]")
    assert status == 1 and "lora.target_modules must match linear layers of Qwen3ForCausalLM" in shown


def test_ranks_that_divide_a_model(check, tiny) -> None:
    """The plan counts what a rank has; the model's own numbers refuse sizes before anything starts."""
    status, shown = check(tiny, "allocation_mode=lite.d1+d1")
    (whole,) = re.findall(r"parameters ([0-9.]+) [0-9.]+ gradients", shown)
    status, shown = check(tiny, "allocation_mode=lite.d1+c2")
    assert status == 0 and "trainer d1p1t1c2: 2 ranks divide c2 tokens, heads ranks 0-1" in shown
    (each,) = re.findall(r"parameters ([0-9.]+) [0-9.]+ gradients", shown)
    assert float(each) == pytest.approx(float(whole) / 2, abs=2e-3)
    status, shown = check(tiny, "allocation_mode=lite.d1+t8")
    assert (
        status == 1 and "problem: model: t of allocation_mode must divide the key heads of the model: got t8" in shown
    )
    assert "which has none. Write e1 in allocation_mode" in check(tiny, "allocation_mode=lite.d1+d2e2")[1]


def test_a_config_that_cannot_be_used(check, tiny, capsys) -> None:
    status, shown = check(tiny, "sed=1")
    assert status == 2 and "ConfigError: sed must be a key of GRPOConfig" in shown
    own_class = ENTRY.replace("GRPOConfig", "MyConfig")
    assert check(tiny, "my_knob=1", entry=own_class)[0] == 0, "the script judges its own keys"
    status, shown = check(tiny, entry="def train(:")
    assert status == 2 and "the entry script must be Python: got" in shown
    status, shown = check(tiny, "allocation_mode=lite.d2t2+d2")
    assert status == 2 and "ConfigError: servers of lite must have p1t1" in shown
    assert main(["check", "missing.py", "--config", "missing.yaml"]) == 2
    assert "the entry script must be a file: got missing.py" in capsys.readouterr().err


def test_a_tokenizer_with_more_tokens_than_the_model(check, model) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<more>"])
    tokenizer.save_pretrained(model)
    status, shown = check(model)
    assert status == 1
    assert "problem: tokenizer: the tokenizer has 262 tokens and the model embeddings for 261" in shown


def write_template(model: Path, template: str | None) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template
    (model / "chat_template.jinja").unlink()
    tokenizer.save_pretrained(model)


def test_the_end_of_an_answer_is_the_templates(check, model) -> None:
    write_template(model, CHAT_TEMPLATE.replace("<|end|>", "<|system|>"))
    status, shown = check(model)
    assert status == 0 and "ok: template: it ends an answer with '<|system|>'" in shown
    write_template(model, "{% for message in messages %}{{ message['content'] }}{% endfor %}")
    status, shown = check(model)
    assert status == 0 and "warning: template: it ends an answer with no token: completions may run on." in shown


def test_no_template(check, model) -> None:
    write_template(model, CHAT_TEMPLATE)
    (model / "chat_template.jinja").unlink()
    status, shown = check(model)
    assert status == 0 and "warning: template: the tokenizer has none: prompts are plain texts" in shown


@pytest.mark.parametrize(
    ("flags", "context"), [("max-model-len: 100", 100), ("max_model_len: 32k", 512), ("max_model_len: auto", 512)]
)
def test_the_context_of_servers_counts_where_it_is_a_number(tiny, tmp_path, monkeypatch, flags, context) -> None:
    monkeypatch.delenv("AREAL_LLM_SERVER_ADDRS", raising=False)
    (tmp_path / "config.yaml").write_text(CONFIG.replace("lite.d2+d2", "vllm.d2+d2"))
    argv = ["--config", str(tmp_path / "config.yaml"), f"actor.path={tiny}", f"vllm={{{flags}}}"]
    config = load_expr_config(argv, GRPOConfig)[0]
    model = build_meta_model(tiny, "sdpa")
    model.config.max_position_embeddings = 512
    assert context_of(config, positions_of(model)) == context


def test_data_that_does_not_fit(check, tiny, tmp_path) -> None:
    rows = [{"question": "x" * length, "answer": "1"} for length in (5, 210)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"train_dataset.path={tmp_path / 'rows.jsonl'}"
    batch = ("train_dataset.batch_size=2", "actor.ppo_n_minibatches=1")
    status, shown = check(tiny, data, *batch, "lite.context=256")
    tokens = 210 + len(["<|user|>", "<|end|>", "<|assistant|>"])
    assert f"the first 2 prompts have 8 to {tokens} tokens" in shown
    assert status == 0 and "completions are cut before gconfig.max_new_tokens" in shown, "213 + 64 > 256"
    status, shown = check(tiny, data, *batch, "lite.context=100")
    assert status == 1 and f"problem: data: the longest prompt seen has {tokens} tokens, the context 100" in shown
    status, shown = check(tiny, f"train_dataset.path={tmp_path / 'none.jsonl'}")
    assert status == 1 and "problem: data: dataset file must exist" in shown
    status, shown = check(
        tiny, f"train_dataset.path={tmp_path / 'none.jsonl'}", entry=ENTRY.replace("load_datasets", "mine")
    )
    assert status == 0 and "ok: data: not checked: the script has data of its own" in shown


def test_a_teacher_is_part_of_the_plan(check, tiny, tmp_path) -> None:
    """With the parameters of its own folder."""
    large = make_tiny_model(tmp_path / "large", layers=27)
    for name in ("GRPOConfig", "MyConfig"):  # ours, and one that launchers don't know
        entry = ENTRY.replace("GRPOConfig", name)
        status, shown = check(tiny, "actor.algorithm=opd", f"teacher.path={large}", entry=entry)
        num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(large).parameters())
        each, together = (f"{num_parameters * 4 / ranks / 2**20:.3f}" for ranks in (2, 1))
        assert status == 0 and f"teacher {each} {together}" in shown, shown


def test_what_a_script_declares_must_fit(check, tiny) -> None:
    """It says so itself, to the launcher and here: e.g. the graph of a master."""
    entry = (
        ENTRY
        + """
from arealite.api.errors import ConfigError
def fits(argv):
    if "seed=7" in argv:
        raise ConfigError("the graph must fit")
if __name__ == "__main__":
    launched(__file__, train, check=fits)
"""
    )
    status, shown = check(tiny, "seed=7", entry=entry)
    assert status == 1 and "problem: graph: the graph must fit" in shown
    status, shown = check(tiny, entry=entry)
    assert status == 0 and "ok: graph: what the script declares fits the config" in shown
    of_a_class = entry.replace("check=fits", "check=Own.fits").replace(
        "def fits", "class Own:\n  @staticmethod\n  def fits"
    )
    status, shown = check(tiny, "seed=7", entry=of_a_class)
    assert status == 1 and "problem: graph: the graph must fit" in shown
    status, shown = check(tiny, entry=entry.replace("check=fits", "check=lambda argv: fits(argv)"))
    assert (
        status == 1 and "problem: graph: check of launched must be a function of the script: got lambda argv" in shown
    )


def test_memory_that_is_not_there(check, tiny) -> None:
    """Each rank gets 2 x 2**20 x 4 / 2 answers in one micro-batch, of which a layer keeps kilobytes per token."""
    too_many = (
        "train_dataset.batch_size=2097152",
        "train_dataset.drop_last=true",
        "actor.mb_spec.max_tokens_per_mb=null",
    )
    status, shown = check(tiny, *too_many)
    assert status == 1 and "problem: memory: the run needs about" in shown and "most of it activations" in shown
    assert f"of {psutil.virtual_memory().total / 2**30:.1f} GiB" in shown
    assert (
        "Set actor.gradient_checkpointing=true, lower actor.mb_spec.max_tokens_per_mb, or raise c or t of the" in shown
    )
    status, shown = check(tiny, "rollout.server_addrs=[127.0.0.1:1]")
    assert status == 0 and "AdamW moments" in shown and "next weights" not in shown, "the plan has no foreign servers"
    status, shown = check(tiny, "allocation_mode=lite.d1")
    assert status == 0 and "memory" not in shown, "servers alone have no plan"


def test_supervised_fine_tuning(check, model) -> None:
    """Demonstrations end as the template says, whatever the tokenizer's eos token is."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.eos_token = "<|pad|>"
    tokenizer.save_pretrained(model)
    config = CONFIG.replace("actor:", "model:").replace("lite.d2+d2", "d2")
    config = "".join(line for line in config.splitlines(True) if not line.startswith(("gconfig", "lite")))
    entry = ENTRY.replace("GRPOConfig", "SFTConfig").replace("RLVRWorkflow", "train")
    status, shown = check(model, entry=entry, config=config, key="model.path")
    assert status == 0, shown
    assert "eos token" not in shown
    assert "the first 16 demonstrations have" in shown


def test_a_script_that_exits_where_it_is_imported_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    found = Findings(is_brief=True)
    assert found.look("reward", lambda _: sys.exit(0)) is None and found.summarize()
    assert "problem: reward: SystemExit: 0, at " in capsys.readouterr().err
