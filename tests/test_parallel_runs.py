"""Whole runs whose trainers divide a model: their metrics are those of one rank."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.processes import REPOSITORY
from test_end_to_end import CONFIGS, run_rl
from test_recovered_runs import STEPS, Run
from testing_quickstart import WORD_PROBLEMS
from testing_runs import launch, metrics
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3MoeConfig

from arealite.utils.processes import kill_tree

LEARNING = ("policy/", "optim/", "reward/", "value/", "eval/", "staleness/", "sft/")
"""Prefixes of the metrics that neither time nor the number of ranks may change."""
NUM_STEPS = 3
SCORE = """
def score(prompt, completions, prompt_ids, completion_ids, **row):
    return float(sum(completion_ids) % 7) / 7
"""
LORA = ("actor.lora.rank=4",)
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("parallel_runs")]  # runs on one rank are shared


@pytest.fixture(scope="module")
def models(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models with the tokenizer of the quickstart, whose layers two ranks can divide."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), AutoTokenizer.from_pretrained(model)
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "initializer_range": 0.2,
    }
    of_experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
    configs = {
        "tied": Qwen3Config(**common, tie_word_embeddings=True),
        "untied": Qwen3Config(**common, tie_word_embeddings=False),
        "experts": Qwen3MoeConfig(**common, **of_experts, tie_word_embeddings=False),
    }
    for name, config in configs.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in configs}


@pytest.fixture(scope="module")
def rows_of(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    found: dict[Any, list[dict[str, Any]]] = {}

    (reward := tmp_path_factory.mktemp("reward") / "score.py").write_text(SCORE)

    def run_once(
        layout: str, *more: str, kind: str = "tied", example: str = "gsm8k_grpo", script: Path | None = None
    ) -> list[dict[str, Any]]:
        key = layout, more, kind, example, script
        if key not in found:
            overrides = (
                *(f"allocation_mode=lite.d1+{layout}", "rollout.max_head_offpolicyness=0", "actor.dtype=float32"),
                f"reward={reward}:score",
            )
            folder, overrides = tmp_path_factory.mktemp(layout), (*overrides, *more)
            folder = run_rl(models[kind], folder, NUM_STEPS, *overrides, example=example, script=script)
            found[key] = metrics(folder)
        return found[key]

    return run_once


def assert_equal(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) and expected[0]["optim/grad_norm"] > 0.01
    for ours, one in zip(found, expected, strict=True):
        of_learning = {key: value for key, value in one.items() if key.startswith(LEARNING)}
        assert {key: ours[key] for key in of_learning} == pytest.approx(of_learning, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("layout", "kind"), [("d1t2", "tied"), ("d1c2", "tied"), ("d2e2", "experts"), ("d1p2", "untied")]
)
def test_a_run_of_grpo_learns_as_on_one_rank(rows_of: Any, layout: str, kind: str) -> None:
    assert_equal(rows_of(layout, kind=kind), rows_of("d1", kind=kind))


@pytest.mark.parametrize(("layout", "kind"), [("t2", "tied"), ("p2", "untied")])
def test_a_critic_learns_as_on_one_rank(rows_of: Any, layout: str, kind: str) -> None:
    assert_equal(rows_of(layout, example="gsm8k_ppo", kind=kind), rows_of("d1", example="gsm8k_ppo", kind=kind))


def test_adapters_learn_as_on_one_rank(rows_of: Any) -> None:
    assert_equal(rows_of("c2", *LORA), rows_of("d1", *LORA))


@pytest.mark.parametrize(("layout", "kind"), [("d1t2", "tied"), ("d1p2", "untied")])
def test_a_graph_whose_workers_divide_a_model_learns_as_on_one_rank(rows_of: Any, layout: str, kind: str) -> None:
    graph = REPOSITORY / "training" / "main_grpo.py"
    assert_equal(rows_of(layout, "workers={}", kind=kind, script=graph), rows_of("d1", kind=kind))


def test_a_graph_whose_groups_have_other_sizes_learns_as_on_one_rank(rows_of: Any) -> None:
    """The one block of the policy gets both parts of a batch, of which each rank of the critic has one."""
    graph, apart = REPOSITORY / "training" / "main_sync_ppo.py", "workers={actor: {parallel: t2}, critic: {ranks: 2}}"
    expected = rows_of("d1", example="gsm8k_ppo")
    assert_equal(rows_of("d1", apart, example="gsm8k_ppo", script=graph), expected)
    assert 0 < expected[0]["reward/mean"] < 1


def test_demonstrations_are_learned_as_on_one_rank(models: dict[str, Path], tmp_path: Path) -> None:
    for layout in ("d1", "c2"):
        launch(
            *(REPOSITORY / "examples" / "arealite" / "gsm8k_sft.py", CONFIGS / "gsm8k_sft_cpu.yaml"),
            *(f"model.path={models['tied']}", f"cluster.fileroot={tmp_path}", f"allocation_mode={layout}"),
            *("experiment_name=sft", f"trial_name={layout}", f"total_train_steps={NUM_STEPS}", "model.dtype=float32"),
            *(f"train_dataset.path={WORD_PROBLEMS}?train=40&test=8", "launcher.preflight=false"),
        )
    assert_equal(metrics(tmp_path / "sft" / "c2"), metrics(tmp_path / "sft" / "d1"))


@pytest.fixture
def runs(models: dict[str, Path], tmp_path: Path) -> Iterator[dict[str, Run]]:
    layouts = {"whole": "lite.d1+d1", "cut": "lite.d1+d1t2"}
    made = {name: Run(models["tied"], tmp_path / name, layout) for name, layout in layouts.items()}
    yield made
    for run in made.values():
        for launcher in run.launchers:
            kill_tree(launcher.process.pid)


def test_a_killed_run_goes_on_in_another_layout(runs: dict[str, Run], tmp_path: Path) -> None:
    whole, cut = runs["whole"], runs["cut"]
    whole.finish(whole.start())
    cut.kill_in_update(tmp_path)
    cut.finish(cut.start("allocation_mode=lite.d1+c2"))
    assert "resuming after step 1 from " in cut.output
    assert [cut.prompts(step) for step in range(STEPS)] == [whole.prompts(step) for step in range(STEPS)]
    assert_equal(cut.rows, whole.rows)
