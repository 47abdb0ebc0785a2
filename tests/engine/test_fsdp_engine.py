import json
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from testing_ports import held_port
from torch.distributed.checkpoint import state_dict_saver
from training_cases import (
    OPTIMIZER,
    full_params,
    gradient_norm,
    gradients,
    plain_logprobs,
    token_batch,
    train_config,
    write_model,
)
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from arealite.algorithms.logprobs import LazyLogits, align_with_tokens, count_loss_tokens
from arealite.api.cli_args import FSDPEngineConfig, FSDPWrapPolicy, MicroBatchSpec, OptimizerConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import SaveLoadMeta, WeightTransfer, WeightUpdateMeta
from arealite.engine import fsdp_weights
from arealite.engine.fsdp_engine import COLLECTIVE_TIMEOUT_S, FSDPEngine
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.generation.model_runner import ModelRunner
from arealite.server.app import end_of_sequence_ids
from arealite.utils.background import start_thread
from arealite.utils.weight_transfer import close_group, join_group, receive_bucket

Make = Callable[..., FSDPEngine]


@pytest.fixture
def make(start: Callable[..., Any], lm_path: str) -> Make:
    return lambda path=lm_path, **changes: start(FSDPEngine(train_config(path, **changes)))


def mean_nll(model: torch.nn.Module, batch: TensorDict) -> torch.Tensor:
    return -plain_logprobs(model, batch)[batch["loss_mask"].bool()].mean()


@pytest.mark.parametrize(
    ("tie", "recomputes", "offloads"), [(True, False, False), (False, True, False), (True, True, True)]
)
def test_loss_and_gradient_equal_those_of_plain_transformers(
    make: Make, tmp_path: Path, tie: bool, recomputes: bool, offloads: bool
) -> None:
    path, fsdp = write_model(tmp_path, tie=tie), FSDPEngineConfig(offload_params=offloads)
    engine = make(path, max_tokens=20, gradient_checkpointing=recomputes, fsdp=fsdp)
    engine.train()
    batch = token_batch([9, 4, 12, 3, 7])
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    expected = mean_nll(reference, batch)
    expected.backward()
    assert engine.eval_batch(batch, sft_loss_fn, count_loss_tokens) == pytest.approx(expected.item(), abs=1e-5)
    result = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    assert result["loss"] == pytest.approx(expected.item(), abs=1e-5)
    assert result["grad_norm"] == pytest.approx(gradient_norm(reference), rel=1e-4)
    assert result["update_successful"] == 1.0 and result["lr"] == OPTIMIZER["lr"]
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_gradients_are_as_near_as_those_of_plain_transformers(make: Make, lm_path: str) -> None:
    """The parameters themselves are float32; servers get bfloat16."""
    engine, batch = make(max_tokens=20, dtype="bfloat16"), token_batch([9, 4, 12, 3, 7])
    exact, rounded = (AutoModelForCausalLM.from_pretrained(lm_path, dtype=d) for d in (torch.float32, torch.bfloat16))
    for model in (exact, rounded):
        loss = mean_nll(model, batch)
        loss.backward()
    assert engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] == pytest.approx(loss.item(), rel=2e-2)
    assert {one.dtype for one in engine.model.parameters()} == {torch.float32}
    assert {spec.dtype for bucket in engine.get_param_specs() for spec in bucket} == {"bfloat16"}
    for name, gradient in gradients(engine).items():
        expected, theirs = (model.get_parameter(name).grad.float() for model in (exact, rounded))
        distances = [(one - expected).norm().item() / expected.norm().item() for one in (gradient, theirs)]
        assert distances[0] < 1.2 * distances[1] + 0.01, name


@pytest.fixture(scope="module")
def standing_engine(lm_path: str) -> Iterator[FSDPEngine]:
    """An engine that computes in float64 and whose steps leave the parameters as they are."""
    dtypes = {"dtype": "float64", "grad_reduce_dtype": "float64"}
    config = train_config(lm_path, optimizer=OptimizerConfig(**(OPTIMIZER | {"lr": 0.0})))
    engine = FSDPEngine(config.new(**dtypes))  # no value of the config
    engine.initialize(None, None)
    engine.train()
    yield engine
    engine.destroy()


def float64_nll(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
    """The loss of fine-tuning, made of logits that are there as a whole."""
    labels_N = micro_batch["input_ids"].roll(-1)
    logprobs_N = logits.dense().log_softmax(-1).gather(-1, labels_N[:, None])[:, 0]
    assert logprobs_N.dtype == torch.float64
    return -align_with_tokens(logprobs_N, micro_batch["cu_seqlens"])[micro_batch["loss_mask"].bool()].mean()


@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7).filter(lambda lengths: max(lengths) > 2),
    n_mbs=st.integers(1, 5),
    max_tokens=st.none() | st.integers(3, 30),
)
@settings(max_examples=settings.default.max_examples // 5)
def test_the_gradient_does_not_depend_on_micro_batches(
    standing_engine: FSDPEngine, lengths: list[int], n_mbs: int, max_tokens: int | None
) -> None:
    found = []
    for spec in (MicroBatchSpec(), MicroBatchSpec(n_mbs=n_mbs, max_tokens_per_mb=max_tokens)):
        standing_engine.optimizer.state.clear()
        standing_engine.config.mb_spec = spec
        standing_engine.train_batch(token_batch(lengths), float64_nll, count_loss_tokens)
        found.append(gradients(standing_engine))
    largest = max(gradient.abs().max().item() for gradient in found[0].values())
    eps = torch.finfo(torch.float32).eps  # what is left of rounding: norms and the stored gradient are float32
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, atol=eps * largest, rtol=eps)


def test_a_loss_or_gradient_that_is_not_finite_skips_the_step(make: Make) -> None:
    engine, batch = make(), token_batch([5, 6])
    before = full_params(engine)

    def poisoned(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
        return sft_loss_fn(logits, micro_batch) * torch.inf

    def hidden(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
        return sft_loss_fn(logits, micro_batch) + torch.nan

    result = engine.train_batch(batch, poisoned, count_loss_tokens)
    assert result["update_successful"] == 0.0 and not math.isfinite(result["grad_norm"])
    result = engine.train_batch(batch, hidden, count_loss_tokens)
    assert result["update_successful"] == 0.0 and math.isfinite(result["grad_norm"]) and math.isnan(result["loss"])
    for name, parameter in full_params(engine).items():
        assert torch.equal(parameter, before[name])
    assert engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["update_successful"] == 1.0
    assert all(torch.isfinite(parameter).all() for parameter in full_params(engine).values())


def test_the_gradient_is_clipped(make: Make) -> None:
    engine = make(optimizer=OptimizerConfig(**(OPTIMIZER | {"gradient_clipping": 0.01})))
    norm = engine.train_batch(token_batch([5, 6]), sft_loss_fn, count_loss_tokens)["grad_norm"]
    clipped = torch.stack([gradient.norm() for gradient in gradients(engine).values()]).norm().item()
    assert norm > 0.1 and clipped == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
def test_save_and_load_are_exact_and_readable_by_transformers(make: Make, tmp_path: Path, tie: bool) -> None:
    engine, batch = make(write_model(tmp_path / "before", tie=tie)), token_batch([9, 4, 12])
    for _ in range(2):
        engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
        engine.step_lr_scheduler()
    engine.save(SaveLoadMeta(str(tmp_path), with_optim=True))
    saved = full_params(engine)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert plain.dtype == torch.float32 and plain.config.architectures == ["Qwen3ForCausalLM"]
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, saved[name])
    after = [engine.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] for _ in range(2)]

    engine.load(SaveLoadMeta(str(tmp_path), with_optim=True))
    assert engine.lr_schedule.num_steps == 2
    for name, parameter in full_params(engine).items():
        assert torch.equal(parameter, saved[name])
    fresh = make(path=str(tmp_path))
    fresh.load(SaveLoadMeta(str(tmp_path), with_optim=True))
    for resumed in (engine, fresh):
        assert [resumed.train_batch(batch, sft_loss_fn, count_loss_tokens)["loss"] for _ in range(2)] == after


def test_a_saved_model_ends_its_answers_as_before(make: Make, lm_path: str, tmp_path: Path) -> None:
    """Its generation config names a second end, and a temperature that transformers refuses to save once changed."""
    shutil.copytree(lm_path, tmp_path / "before")
    (tmp_path / "before" / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [3, 5], "do_sample": False, "temperature": 0.5})
    )
    make(path=str(tmp_path / "before")).save(SaveLoadMeta(str(tmp_path / "after")))
    saved = json.loads((tmp_path / "after" / "generation_config.json").read_text())
    assert (saved["eos_token_id"], saved["temperature"]) == ([3, 5], 0.5)
    assert end_of_sequence_ids(str(tmp_path / "after"), None) == end_of_sequence_ids(str(tmp_path / "before"), None)


@pytest.mark.parametrize(
    "config",
    [
        tiny_models.config(Qwen3MoeConfig, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2),
        tiny_models.config(MixtralConfig, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False),
    ],
    ids=["Qwen3-MoE", "Mixtral"],
)
def test_fused_experts_are_trained_and_saved_and_sent_one_by_one(
    make: Make, tmp_path: Path, config: PreTrainedConfig
) -> None:
    tiny_models.build(config, seed=1).save_pretrained(tmp_path / "before")
    engine, batch = make(path=str(tmp_path / "before")), token_batch([9, 4, 12])
    batch["input_ids"] %= config.vocab_size
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    engine.save(SaveLoadMeta(str(tmp_path / "after")))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "after")
    trained, start = full_params(engine), AutoModelForCausalLM.from_pretrained(tmp_path / "before")
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, trained[name]) and not torch.equal(parameter, start.get_parameter(name))
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert {name: tensor.shape for name, tensor in after.items()} == {n: tensor.shape for n, tensor in before.items()}
    sent = [spec for bucket in engine.get_param_specs() for spec in bucket]
    assert {spec.name: spec.shape for spec in sent} == {name: tuple(tensor.shape) for name, tensor in after.items()}
    tokens, runner = torch.arange(2, 14)[None], ModelRunner(start, slots=1, context=32)
    with torch.inference_mode():
        runner.load_weights(after)
        logits = runner.prefill([tokens[0].tolist()], [0])[0]
        assert torch.allclose(logits, plain.eval()(tokens).logits[0, -1], atol=1e-5)


def test_an_optimizer_of_other_parameters_is_refused_in_words(make: Make, tmp_path: Path) -> None:
    engine = make()
    engine.save(SaveLoadMeta(str(tmp_path), with_optim=True))
    folder = tmp_path / fsdp_weights.OPTIMIZER_FOLDER
    shutil.rmtree(folder)
    state_dict_saver.save({"optimizer": {"model.norm.weight": torch.zeros(2)}}, checkpoint_id=folder)
    with pytest.raises(CheckpointError, match=r"must hold the moments of every parameter: got .*with_optim"):
        engine.load(SaveLoadMeta(str(tmp_path), with_optim=True))
    engine.load(SaveLoadMeta(str(tmp_path)))


def test_scratch_weights_depend_on_the_seed_alone(make: Make, lm_path: str) -> None:
    first, again, other = (full_params(make(init_from_scratch=True, seed=seed)) for seed in (3, 3, 4))
    from_disk = AutoModelForCausalLM.from_pretrained(lm_path).get_parameter("model.embed_tokens.weight")
    assert torch.equal(first["model.embed_tokens.weight"], again["model.embed_tokens.weight"])
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(first["model.embed_tokens.weight"], from_disk)


def test_what_can_not_work_is_refused(lm_path: str, make: Make) -> None:
    with pytest.raises(ValueError, match="float16"):
        FSDPEngine(train_config(lm_path, dtype="float16"))
    with pytest.raises(ValueError, match="addr must be None"):
        FSDPEngine(train_config(lm_path)).initialize("host:1", None)
    with pytest.raises(ValueError, match=r"got \['Nope'\]"):
        make(fsdp=FSDPEngineConfig(wrap_policy=FSDPWrapPolicy(transformer_layer_cls_to_wrap=["Nope"])))


def test_a_checkpoint_that_lacks_tensors_is_refused(make: Make, lm_path: str, tmp_path: Path) -> None:
    shutil.copytree(lm_path, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    weights = load_file(file)
    del weights["model.layers.1.mlp.down_proj.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 missing, model\.layers\.1\.mlp\.down_proj\.weight\. "):
        make(path=str(tmp_path / "model"))


def test_ranks_wait_for_each_other_as_long_in_every_group(make: Make) -> None:
    """The first rank reads, and may download, the model while the others wait."""
    backend = make().parallelism_group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == timedelta(seconds=COLLECTIVE_TIMEOUT_S)


# Weights to servers


def test_buckets_hold_every_parameter_once_and_stay_small(make: Make) -> None:
    engine = make()
    specs = [spec for bucket in engine.get_param_specs() for spec in bucket]
    assert {spec.name: spec.shape for spec in specs} == {n: tuple(p.shape) for n, p in full_params(engine).items()}
    buckets = engine.get_param_specs(0)
    assert [len(bucket) for bucket in buckets] == [1] * len(specs)


def test_an_upload_through_the_disk_replaces_the_folder(make: Make, tmp_path: Path) -> None:
    engine, path = make(), tmp_path / "weight_update"
    path.mkdir()
    (path / "old").touch()
    meta = WeightUpdateMeta(type="disk", path=str(path), version=1)
    engine.upload_weights(meta)
    assert meta.transfer.uploaded.result(0) is None
    assert not (path / "old").exists() and [entry.name for entry in tmp_path.iterdir()] == ["weight_update"]
    stored = load_file(path / "model.safetensors")
    for name, parameter in full_params(engine).items():
        assert torch.equal(stored[name], parameter)


def test_a_failed_upload_fails_the_receiver(make: Make, tmp_path: Path) -> None:
    engine = make()
    (tmp_path / "file").touch()
    meta = WeightUpdateMeta(type="disk", path=str(tmp_path / "file" / "below"))
    with pytest.raises(OSError):
        engine.upload_weights(meta)
    assert isinstance(meta.transfer.uploaded.exception(0), OSError)


def broadcast_meta(engine: FSDPEngine, name: str, timeout_s: float = 30.0) -> WeightUpdateMeta:
    meta = WeightUpdateMeta("nccl", nccl_param_specs=engine.get_param_specs(0), timeout_s=timeout_s)
    meta.transfer = WeightTransfer(group_name=name, meeting_point=("127.0.0.1", held_port()), world_size=2)
    return meta


def receiving(meta: WeightUpdateMeta, num_updates: int) -> Future[list[dict[str, torch.Tensor]]]:
    """Receive updates over one group in a thread."""

    def receive() -> list[dict[str, torch.Tensor]]:
        group = join_group("127.0.0.1", meta.transfer.meeting_point[1], 1, 2, meta.transfer.group_name, timeout_s=30)
        received: list[dict[str, torch.Tensor]] = [{} for _ in range(num_updates)]
        for weights in received:
            for bucket in meta.nccl_param_specs:
                weights |= receive_bucket([(group, spec) for spec in bucket])
        close_group(group)
        return received

    return start_thread(receive)


def test_a_broadcast_reaches_a_receiver_twice_over_one_group(make: Make) -> None:
    engine = make()
    meta = broadcast_meta(engine, "weights-1")
    received = receiving(meta, 2)
    engine.upload_weights(meta)
    first = full_params(engine)
    engine.train_batch(token_batch([5, 6]), sft_loss_fn, count_loss_tokens)
    engine.upload_weights(broadcast_meta(engine, "weights-1"))
    for weights, expected in zip(received.result(120), (first, full_params(engine)), strict=True):
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_broadcast_that_nobody_receives_fails_in_time_and_the_next_one_works(make: Make) -> None:
    engine = make()
    meta = broadcast_meta(engine, "weights-1", timeout_s=1.0)
    with pytest.raises(ConnectionError, match="weights-1"):
        engine.upload_weights(meta)
    assert isinstance(meta.transfer.uploaded.exception(0), ConnectionError)
    meta = broadcast_meta(engine, "weights-2")
    received = receiving(meta, 1)
    engine.upload_weights(meta)
    assert [list(weights) for weights in received.result(120)] == [list(full_params(engine))]
