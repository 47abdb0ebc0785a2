"""An untied copy computes what the original does, with one tensor more, and what can't be copied is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    GPT2Config,
    GPTNeoXConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from arealite.cli.main import main
from arealite.utils.tiny_model import make_tiny_model
from arealite.utils.untied_copy import write_untied_copy

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", layers=2)


def logits(folder: Path) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder).eval()(TOKENS).logits
    return output


def halves(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    return model.get_input_embeddings().weight, model.get_output_embeddings().weight


def check_copy(source: Path, out: Path) -> None:
    """The copy gives the same logits bit for bit, has its own output layer and leaves nothing else behind."""
    assert torch.equal(logits(out), logits(source))
    embeddings, output = halves(AutoModelForCausalLM.from_pretrained(out))
    assert embeddings is not output and torch.equal(embeddings, output)
    assert not Path(f"{out}.partial").exists()


def test_one_file_is_linked_and_one_tensor_is_added(source: Path, tmp_path: Path) -> None:
    write_untied_copy(source, tmp_path / "copy")
    check_copy(source, tmp_path / "copy")
    copy = tmp_path / "copy"
    written = {file.name: file.stat().st_size for file in copy.iterdir() if not file.is_symlink()}
    assert written.keys() == {"config.json", "model.safetensors.index.json", "model-output.safetensors"}
    added = load_file(copy / "model-output.safetensors")
    assert {name: tensor.shape for name, tensor in added.items()} == {"lm_head.weight": (len(tokens(source)), 64)}
    assert (copy / "generation_config.json").samefile(source / "generation_config.json")
    conversation = [{"role": "user", "content": "2+2?"}]
    assert tokens(copy).apply_chat_template(conversation) == tokens(source).apply_chat_template(conversation)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, copy))
    assert before["tie_word_embeddings"] is True and after == before | {"tie_word_embeddings": False}


def tokens(folder: Path) -> AutoTokenizer:
    return AutoTokenizer.from_pretrained(folder)


def test_shards_are_linked_and_keep_their_dtype(source: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "sharded"
    AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).save_pretrained(sharded, max_shard_size="60KB")
    shards = sorted(file.name for file in sharded.glob("*.safetensors"))
    assert len(shards) > 2
    write_untied_copy(sharded, tmp_path / "copy")
    check_copy(sharded, tmp_path / "copy")
    links = {file.name: file for file in (tmp_path / "copy").glob("*.safetensors") if file.is_symlink()}
    assert sorted(links) == shards and all(links[name].samefile(sharded / name) for name in shards)
    assert {one.dtype for one in load_file(tmp_path / "copy" / "model-output.safetensors").values()} == {torch.bfloat16}


SIZES = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.mark.parametrize(
    ("config", "output"),
    [
        (GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=2), "lm_head.weight"),
        (GPTNeoXConfig(**SIZES, tie_word_embeddings=True), "embed_out.weight"),
        (
            Gemma3Config(
                text_config=SIZES | {"num_key_value_heads": 1, "head_dim": 16},
                vision_config=VISION | {"image_size": 28, "patch_size": 14},
                mm_tokens_per_image=4,
            ),
            "language_model.lm_head.weight",
        ),
    ],
    ids=["gpt2", "gpt_neox", "gemma3"],
)
def test_names_are_those_of_the_architecture(config: PreTrainedConfig, output: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    write_untied_copy(tmp_path / "model", tmp_path / "copy")
    check_copy(tmp_path / "model", tmp_path / "copy")
    assert list(load_file(tmp_path / "copy" / "model-output.safetensors")) == [output]
    text = json.loads((tmp_path / "copy" / "config.json").read_text()).get("text_config", {})
    assert not text.get("tie_word_embeddings", False)


def test_a_copy_replaces_an_older_one_and_the_rest_of_an_attempt(source: Path, tmp_path: Path) -> None:
    for folder in ("copy", "copy.partial"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "model.safetensors").write_text("left by someone else")
    write_untied_copy(source, tmp_path / "copy")
    check_copy(source, tmp_path / "copy")


def test_an_output_layer_that_is_stored_already_is_used(source: Path, tmp_path: Path) -> None:
    weights = load_file(source / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    write_untied_copy(source, tmp_path / "copy")
    check_copy(source, tmp_path / "copy")
    assert [file.name for file in (tmp_path / "copy").glob("*.safetensors")] == ["model-tied.safetensors"]
    weights["lm_head.weight"][2, 3] += 1
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lm_head.weight must equal model.embed_tokens.weight .*: got different"):
        write_untied_copy(source, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_what_can_not_be_copied_is_refused(source: Path, tmp_path: Path) -> None:
    untied = make_tiny_model(tmp_path / "untied", tie=False)
    with pytest.raises(ValueError, match=r"tied embeddings .*: got Qwen3ForCausalLM, .* Remove rollout.untie_emb"):
        write_untied_copy(untied, tmp_path / "copy")
    weights = load_file(source / "model.safetensors")
    save_file({"lm_head.weight": weights["model.embed_tokens.weight"]}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"must hold the tensor model.embed_tokens.weight: got none"):
        write_untied_copy(source, tmp_path / "copy")
    (source / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="must be stored as safetensors"):
        write_untied_copy(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


def test_the_program_copies_or_says_in_one_line_why_not(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "arealite.utils.untied_copy"]
    done = subprocess.run([*command, source, tmp_path / "copy"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    check_copy(source, tmp_path / "copy")
    done = subprocess.run([*command, tmp_path / "copy", tmp_path / "next"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert "a model must have tied embeddings" in done.stderr.splitlines()[-1] and "Traceback" not in done.stderr


def test_the_command_line_makes_tiny_models_of_both_kinds(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("two and two\n")
    options = ["tiny-model", "--corpus", str(tmp_path / "corpus.txt"), "--out"]
    assert main([*options, str(tmp_path / "tied")]) == main([*options, str(tmp_path / "untied"), "--untied"]) == 0
    tied, untied = (halves(AutoModelForCausalLM.from_pretrained(tmp_path / kind)) for kind in ("tied", "untied"))
    assert tied[0] is tied[1] and (untied[0] - untied[1]).abs().max() > 0.1
