"""docs/models.md: a family that it names is sampled from, trained by one step, saved and served again, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tiny_models import VOCAB_SIZE, build, config
from training_cases import actor_config, trajectory_batch
from transformers import PreTrainedConfig

from arealite.api.cli_args import LoRAConfig
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.hf_model import build_meta_model
from arealite.engine.packed_attention import PACKED_SDPA
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.generation.model_runner import ModelRunner
from arealite.utils.hf import load_causal_lm

PAGE = Path(__file__).parents[2] / "docs/models.md"
SLIDING = {"sliding_window": 32}
NO_GROUPS = {"num_key_value_heads": 4}  # each head has keys and values of its own
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_local_experts": 4}
WORKS: dict[str, dict[str, object]] = {
    "Qwen2": {},
    "Qwen3": {},
    "Qwen3Moe": EXPERTS,
    "Llama": {},
    "Mistral": SLIDING,
    "Mixtral": EXPERTS,
    "Gemma": {},
    "Gemma3": SLIDING,
    "Phi3": {},
    "SmolLM3": {},
    "Olmo2": {},
    "Granite": {},
    "GPTNeoX": NO_GROUPS,
    "GPT2": NO_GROUPS,
    "OPT": NO_GROUPS | {"ffn_dim": 64, "word_embed_proj_dim": 32},
}
REFUSED = ("Gemma2", "Mamba")
LENGTHS = [9, 4, 12, 3]


def config_of(family: str, **changes: object) -> PreTrainedConfig:
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return config(getattr(transformers, name), **changes)


def write(folder: Path, family: str, **changes: object) -> str:
    build(config_of(family, **changes), seed=1).save_pretrained(folder)
    return str(folder)


def served(path: str, rows: list[list[int]]) -> list[torch.Tensor]:
    """Return the logprobs of all tokens but the first two of each row, as the embedded server computes them."""
    model = load_causal_lm(path, dtype=torch.float32, attn_implementation="sdpa")
    runner = ModelRunner(model, slots=1, context=32)
    found = []
    for row in rows:
        logits = [runner.prefill([row[:2]], [0])]
        logits += [runner.decode([row[i]], np.array([i])) for i in range(2, len(row) - 1)]
        found.append(torch.cat(logits).log_softmax(-1)[torch.arange(len(row) - 2), torch.tensor(row[2:])])
    return found


@pytest.mark.parametrize("family", WORKS)
def test_a_family_is_sampled_from_trained_saved_and_served_again(
    start: Callable[..., Any], tmp_path: Path, family: str
) -> None:
    path = write(tmp_path / "model", family, **WORKS[family])
    batch = trajectory_batch(LENGTHS, 2)
    batch["input_ids"].clamp_(max=47)
    rows = [row[:length] for row, length in zip(batch["input_ids"].tolist(), LENGTHS)]
    actor = start(FSDPPPOActor(actor_config(path, group_size=2, ppo_n_minibatches=1)))
    for folder in (path, str(tmp_path / "trained")):
        logprobs = actor.compute_logprobs(batch)
        for row, (length, expected) in enumerate(zip(LENGTHS, served(folder, rows))):
            torch.testing.assert_close(logprobs[row, 2:length], expected, atol=1e-5, rtol=1e-5)
        if folder == path:
            batch["logprobs"] = logprobs * batch["loss_mask"]
            actor.compute_advantages(batch)
            assert actor.ppo_update(batch)["optim/grad_norm"] > 0
            actor.save(SaveLoadMeta(path=str(tmp_path / "trained")))
            before = logprobs
    assert not torch.allclose(before, logprobs, atol=1e-3), "the step changed the model"


@pytest.mark.parametrize("family", REFUSED)
def test_a_family_that_is_refused_is_named_in_one_sentence(tmp_path: Path, family: str) -> None:
    if getattr(getattr(transformers, f"{family}PreTrainedModel"), "_supports_sdpa", False):
        pytest.skip("transformers before 5.21 builds it, and our attention refuses its soft cap at the first row")
    path = write(tmp_path, family)
    told = rf"^a model must have SDPA attention: got {family}ForCausalLM, which has none\. docs/models\.md names those"
    with pytest.raises(ValueError, match=told):
        load_causal_lm(path, dtype=torch.float32, attn_implementation="sdpa")
    with pytest.raises(ValueError, match=told):
        build_meta_model(path, PACKED_SDPA)


def test_the_page_names_these_families() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| .* \| (works|refused)", PAGE.read_text(), re.MULTILINE)
    assert dict(rows) == dict.fromkeys(WORKS, "works") | dict.fromkeys(REFUSED, "refused")


@pytest.mark.parametrize("family", ["Gemma3", "GPTNeoX"])
def test_adapters_of_other_families_are_merged_rightly(start: Callable[..., Any], tmp_path: Path, family: str) -> None:
    lora = LoRAConfig(rank=4, merge_on_save=True)
    path = write(tmp_path / "base", family, **WORKS[family])
    actor = start(FSDPPPOActor(actor_config(path, lora=lora, group_size=2)))
    batch = trajectory_batch(LENGTHS, group_size=2)
    batch["input_ids"] %= VOCAB_SIZE
    before = actor.compute_logprobs(batch)
    for _ in range(3):
        actor.compute_advantages(batch)
        actor.ppo_update(batch)
    after = actor.compute_logprobs(batch)
    actor.save(SaveLoadMeta(str(tmp_path / "merged")))
    rows = [row[:length].tolist() for row, length in zip(batch["input_ids"], LENGTHS)]
    for row, found in enumerate(served(str(tmp_path / "merged"), rows)):
        torch.testing.assert_close(found, after[row, 2 : LENGTHS[row]], atol=1e-5, rtol=0)
    assert (after - before).abs().max() > 1
