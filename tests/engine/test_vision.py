"""Training of models that see images: as transformers computes them row by row, whatever is packed with what."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import testing_forks
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from testing_images import vision_batch, write_model
from testing_quickstart import make_tiny_model
from training_cases import SPEC, actor_config, train_config
from transformers import AutoModelForImageTextToText

from arealite.algorithms.logprobs import count_loss_tokens
from arealite.api.cli_args import LoRAConfig
from arealite.api.io_struct import SaveLoadMeta
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.actor import FSDPPPOActor
from arealite.engine.sft.lm_engine import FSDPLMEngine, sft_loss_fn
from arealite.utils.hf import load_hf_tokenizer, load_image_processor

SAMPLED_PLACEHOLDER = 3  # row of `vision_batch` that transformers can't run: it counts the id that was sampled
Start = Callable[..., Any]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_model(tmp_path_factory.mktemp("vision") / "model")


@pytest.fixture
def batch(path: str) -> TensorDict:
    return vision_batch(path)


def reference(path: str, row: TensorDict) -> tuple[torch.Tensor, torch.nn.Module]:
    """Return the logprobs `[L]` of one row by transformers' own forward pass, and the model."""
    model = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    ids = row["input_ids"][row["attention_mask"]][None]
    grids = row["image_grid_thw"][row["image_grid_thw"].prod(-1) > 0]
    images = {}
    if len(grids):
        patches = row["pixel_values"][: int(grids.prod(-1).sum())]
        types = (ids == model.config.image_token_id).int()
        images = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
    logprobs = model(input_ids=ids, **images).logits.log_softmax(-1)[0, :-1]
    return torch.cat([torch.zeros(1), logprobs.gather(-1, ids[0, 1:, None])[:, 0]]), model


def test_logprobs_are_those_of_transformers(start: Start, path: str, batch: TensorDict) -> None:
    actor = start(FSDPPPOActor(actor_config(path)))
    together = actor.compute_logprobs(batch)
    alone = torch.cat([actor.compute_logprobs(row[None]) for row in batch])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)
    assert len(together[SAMPLED_PLACEHOLDER].unique()) > 10
    for index, row in enumerate(batch):
        if index != SAMPLED_PLACEHOLDER:
            expected, _ = reference(path, row)
            torch.testing.assert_close(together[index, : len(expected)], expected, atol=1e-5, rtol=0)


def step(path: str, batch: TensorDict, **config: object) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and the gradients of one step, of plain gradient descent."""
    engine = FSDPEngine(train_config(path, **config))
    engine.initialize(None, SPEC)
    before = {name: one.full_tensor().detach().clone() for name, one in engine.model.named_parameters()}
    engine.optimizer = torch.optim.SGD(engine.model.parameters(), lr=1.0)
    loss = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"]
    gradients = {name: before[name] - one.full_tensor() for name, one in engine.model.named_parameters()}
    engine.destroy()
    return loss, gradients


def assert_equal(gradients: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() < 2e-6 + 1e-4 * expected[name].abs().max(), name


def test_gradients_are_those_of_transformers(path: str, batch: TensorDict) -> None:
    rows = [index for index in range(len(batch)) if index != SAMPLED_PLACEHOLDER]
    _, gradients = step(path, batch[rows], max_tokens=40, gradient_checkpointing=True)
    expected = dict.fromkeys(gradients, torch.tensor(0.0))
    num_tokens = int(batch[rows]["loss_mask"].sum())
    for row in batch[rows]:
        logprobs, model = reference(path, row)
        trained = row["loss_mask"][row["attention_mask"]].bool()
        (-logprobs[trained].sum() / num_tokens).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                expected[name] = expected[name] + parameter.grad
    assert_equal(gradients, expected)
    in_tower = {name: gradient.abs().sum() for name, gradient in gradients.items() if ".visual." in name}
    assert sum(in_tower.values()) > 0.1, "it learns too"


@pytest.mark.xdist_group("two_ranks")
def test_a_rank_without_images_takes_part(path: str, batch: TensorDict, tmp_path: Path) -> None:
    """Also in micro-batches without any token: both ranks gather the layers of the vision tower at the same time."""
    with testing_forks.two_ranks(step_of_rank, path, batch, tmp_path) as ranks:
        assert [rank.end() for rank in ranks] == [0, 0]
    loss, gradients = step(path, batch)
    for name in SHARES:
        other_loss, others = torch.load(tmp_path / f"{name}.pt")
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert_equal(others, gradients)


SHARES = {"texts": [[1], [0, 2, 3, 4]], "nothing": [[0, 1, 2, 3, 4], []]}
"""Rows of each rank."""


def step_of_rank(_: Connection, path: str, batch: TensorDict, out: Path) -> None:
    torch.set_num_threads(1)
    for name, shares in SHARES.items():
        rank = int(os.environ["RANK"])
        found = step(path, batch[shares[rank]], max_tokens=40)
        if rank == 0:
            torch.save(found, out / f"{name}.pt")


def test_a_model_is_fine_tuned_saved_and_read_again(start: Start, path: str, batch: TensorDict, tmp_path: Path) -> None:
    engine = start(FSDPLMEngine(train_config(path)))
    losses = [engine.train_lm(batch)["sft/loss"] for _ in range(3)]
    assert losses[2] < losses[0] - 0.1
    meta = SaveLoadMeta(str(tmp_path), tokenizer=load_hf_tokenizer(path), processor=load_image_processor(path))
    engine.save(meta)
    again = start(FSDPLMEngine(train_config(str(tmp_path))))
    assert again.evaluate_lm(batch) == pytest.approx(engine.evaluate_lm(batch), abs=1e-6)
    assert load_file(tmp_path / "model.safetensors").keys() == load_file(f"{path}/model.safetensors").keys()
    assert load_image_processor(tmp_path).size == load_image_processor(path).size


def test_prompts_whose_images_got_lost_are_refused(start: Start, path: str, batch: TensorDict) -> None:
    engine = start(FSDPLMEngine(train_config(path)))
    with pytest.raises(ValueError, match=r"^a batch of prompts with images must have pixel_values and image_grid_thw"):
        engine.evaluate_lm(batch.exclude("pixel_values", "image_grid_thw"))
    cut = batch[:1]
    cut["attention_mask"][:, :5] = False
    with pytest.raises(ValueError, match=r"^a sequence must have a placeholder for each of the 8 tokens of its images"):
        engine.evaluate_lm(cut)


def test_what_such_models_can_not_do_is_refused(start: Start, path: str) -> None:
    with pytest.raises(ValueError, match=r"must be matrices: got .*visual.patch_embed"):
        start(FSDPEngine(train_config(path, lora=LoRAConfig(rank=2))))
    with pytest.raises(ValueError, match=r"must have a sequence classifier .* qwen2_5_vl"):
        start(FSDPEngine(train_config(path), has_value_head=True))


def test_a_model_that_sees_no_images_takes_no_image_processor(tmp_path: Path) -> None:
    with pytest.raises((ValueError, OSError)):
        load_image_processor(make_tiny_model(tmp_path, layers=1))
