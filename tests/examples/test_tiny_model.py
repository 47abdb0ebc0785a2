import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from testing_quickstart import make_tiny_model
from transformers import AutoModelForCausalLM

from arealite.utils.hf import load_hf_tokenizer

torch.set_num_threads(1)
CORPUS = ["Mia has 12 apples. She buys 7 more apples.", "12+7=19\n#### 19"] * 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), CORPUS, seed=3)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_hf_tokenizer(folder)


def test_a_quarter_million_tied_parameters_that_load_anywhere(folder, tokenizer) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert 0.2e6 < sum(parameter.numel() for parameter in model.parameters()) < 0.26e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id != tokenizer.eos_token_id
    assert model.dtype == torch.float32


def test_the_seed_decides_the_weights_and_leaves_the_global_generator_alone(folder, tmp_path) -> None:
    state = torch.get_rng_state()
    make_tiny_model(tmp_path / "same", CORPUS, seed=3)
    make_tiny_model(tmp_path / "other", CORPUS, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    weights = [
        AutoModelForCausalLM.from_pretrained(path).model.layers[0].mlp.up_proj.weight
        for path in (folder, tmp_path / "same", tmp_path / "other")
    ]
    assert torch.equal(weights[0], weights[1]) and not torch.equal(weights[0], weights[2])


@given(text=st.text() | st.text(alphabet=" \n\t019aÀ日½🙂#=<|>'"))
def test_any_text_survives_a_round_trip(tokenizer, text: str) -> None:
    tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(tokens) == text
    assert all(0 <= token < len(tokenizer) for token in tokens)


def test_words_are_merged_and_digits_are_not(tokenizer) -> None:
    pieces = [
        tokenizer.decode([token]) for token in tokenizer("Mia has 127 apples", add_special_tokens=False)["input_ids"]
    ]
    assert pieces == ["Mia", " has", " ", "1", "2", "7", " apples"]


@pytest.mark.parametrize("options", [{"hidden": 65}, {"heads": 3}, {"heads": 4, "kv_heads": 3}, {"vocab_size": 100}])
def test_impossible_shapes_are_refused(tmp_path, options) -> None:
    with pytest.raises(ValueError, match="must"):
        make_tiny_model(tmp_path, **options)


def test_a_tokenizer_without_a_pad_token_pads_with_eos(folder, tmp_path) -> None:
    tokenizer = load_hf_tokenizer(folder)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_hf_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id == tokenizer.eos_token_id
    with pytest.raises(ValueError, match="tokenizer_path"):
        load_hf_tokenizer("")
