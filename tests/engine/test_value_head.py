"""A one-label sequence classifier in the engine gives the values, gradients and folders of transformers' own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tensordict import TensorDict
from test_models import WORKS, config_of
from tiny_models import build, config
from training_cases import token_batch, train_config, write_classifier
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.hf_model import build_meta_model, load_whole_model, return_hidden_states, values_of
from arealite.engine.packed_attention import PACKED_SDPA

Make = Callable[..., FSDPEngine]
NO_CLASSIFIER = "Granite"
LENGTHS = [9, 4, 12, 3]


@pytest.fixture
def make(start: Callable[..., Any]) -> Make:
    return lambda path, **changes: start(FSDPEngine(train_config(path, **changes), has_value_head=True))


def hf_score(path: str) -> PreTrainedModel:
    return AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32)


def squared(values: torch.Tensor, micro_batch: TensorDict) -> torch.Tensor:
    """A loss that is a mean over trained tokens."""
    mask = micro_batch["loss_mask"].bool()
    return ((values - micro_batch["input_ids"] / 10) ** 2)[mask].mean()


def values_at_all_tokens(engine: FSDPEngine, batch: TensorDict) -> torch.Tensor:
    engine.eval()
    return engine.forward(batch, lambda values, _: values)


@pytest.mark.parametrize("family", [family for family in WORKS if family != NO_CLASSIFIER])
def test_values_of_a_family_are_transformers_own(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config_of(family, num_labels=1, **WORKS[family])).eval()
    torch.nn.init.normal_(model.score.weight)
    input_ids = torch.arange(2, 10)[None]
    with torch.no_grad():
        expected = torch.cat([model(input_ids=input_ids[:, : t + 1]).logits[0] for t in range(8)])
        values = values_of(model)
        return_hidden_states(model)
        found = values(hidden := model(input_ids=input_ids, use_cache=False)[0], len(hidden))
    assert expected.std() > 0.01
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_it_starts_from_a_language_model_with_values_0(
    make: Make, lm_path: str, capfd: pytest.CaptureFixture[str]
) -> None:
    engine = make(lm_path)
    assert "MISSING" not in capfd.readouterr().err
    assert (values_at_all_tokens(engine, token_batch(LENGTHS)) == 0).all()
    backbone = AutoModelForCausalLM.from_pretrained(lm_path, dtype=torch.float32)
    for name, parameter in engine.model.named_parameters():
        if name != "score.weight":
            assert torch.equal(parameter.full_tensor(), backbone.get_parameter(name))


@pytest.mark.parametrize("with_optim", [False, True])
def test_a_saved_one_is_a_classifier_of_transformers_and_starts_another(
    make: Make, lm_path: str, tmp_path: Path, with_optim: bool
) -> None:
    batch = token_batch(LENGTHS)
    first = make(lm_path)
    for _ in range(2):
        first.train_batch(batch, squared, count_loss_tokens)
    values = values_at_all_tokens(first, batch)
    assert values.abs().max() > 0.1
    saved = str(tmp_path / "saved")
    first.save(SaveLoadMeta(saved, with_optim=with_optim))
    model = hf_score(saved)
    assert (type(model).__name__, model.config.num_labels) == ("Qwen3ForSequenceClassification", 1)
    last = model(input_ids=batch["input_ids"][2:3]).logits
    torch.testing.assert_close(last[0, 0], values[2, 11], atol=1e-5, rtol=1e-5)
    assert torch.equal(values_at_all_tokens(make(saved), batch), values)
    if with_optim:
        second = make(lm_path)
        second.load(SaveLoadMeta(saved, with_optim=True))
        results = [engine.train_batch(batch, squared, count_loss_tokens) for engine in (first, second)]
        assert results[0] == results[1] and first.fingerprint() == second.fingerprint()


def test_values_are_float32_when_the_model_computes_in_bfloat16(make: Make, tmp_path: Path) -> None:
    path, batch = write_classifier(tmp_path), token_batch(LENGTHS)
    exact, coarse = (values_at_all_tokens(make(path, dtype=dtype), batch) for dtype in ("float32", "bfloat16"))
    assert coarse.dtype == torch.float32 and not torch.equal(coarse, coarse.bfloat16().float())
    torch.testing.assert_close(coarse, exact, atol=0.3, rtol=0.05)


def test_random_weights_have_a_head_of_0(tmp_path: Path) -> None:
    model = load_whole_model(write_classifier(tmp_path), has_value_head=True, init_from_scratch=True)
    assert (model.score.weight == 0).all()


def test_other_checkpoints_are_refused(tmp_path: Path) -> None:
    two_labels = write_classifier(tmp_path / "two", num_labels=2)
    with pytest.raises(ValueError, match=r"^a critic or reward model must have one label: got 2 in "):
        build_meta_model(two_labels, PACKED_SDPA, has_value_head=True)
    build(config(transformers.GraniteConfig), seed=1).save_pretrained(tmp_path / "granite")
    with pytest.raises(ValueError, match=r"^a critic or reward model must have a sequence classifier .*: got granite"):
        build_meta_model(str(tmp_path / "granite"), PACKED_SDPA, has_value_head=True)
    model = hf_score(write_classifier(tmp_path / "one"))
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "score.weight"}
    model.save_pretrained(tmp_path / "one", state_dict=state)
    with pytest.raises(ValueError, match=r"must have every tensor of Qwen3For.*: got 1 missing, score\.weight"):
        load_whole_model(str(tmp_path / "one"), has_value_head=True)
