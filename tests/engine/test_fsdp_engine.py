import json
import math
import shutil
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import tiny_models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tensordict import TensorDict
from testing_ports import held_port
from training_cases import OPTIMIZER, token_batch, train_config, write_model
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedConfig, Qwen3MoeConfig

from arealite.algorithms.logprobs import LazyLogits, align_with_tokens, count_loss_tokens, packed_logprobs
from arealite.api.cli_args import FSDPEngineConfig, FSDPWrapPolicy, MicroBatchSpec, OptimizerConfig
from arealite.api.errors import CheckpointError
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta, WeightTransfer, WeightUpdateMeta
from arealite.engine.fsdp_engine import COLLECTIVE_TIMEOUT_S, FSDPEngine
from arealite.engine.sft.lm_engine import sft_loss_fn
from arealite.generation.model_runner import ModelRunner
from arealite.server.app import end_of_sequence_ids
from arealite.utils.weight_transfer import close_group, join_group, receive_bucket

Make = Callable[..., FSDPEngine]


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    torch.set_num_threads(1)
    return write_model(tmp_path_factory.mktemp("model"), tie=request.param)


@pytest.fixture
def make(model_path: str) -> Iterator[Make]:
    engines: list[FSDPEngine] = []

    def make_engine(**changes: object) -> FSDPEngine:
        engine = FSDPEngine(train_config(changes.pop("path", model_path), **changes))
        engine.initialize(None, FinetuneSpec(1, 100, 10))
        engines.append(engine)
        return engine

    yield make_engine
    for engine in engines:
        engine.destroy()


def full_params(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: parameter.full_tensor().detach().clone() for name, parameter in engine.model.named_parameters()}


def gradients(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """Read the last gradient off the first moments that one step left."""
    moments = {name: engine.optimizer.state[p]["exp_avg"] for name, p in engine.model.named_parameters()}
    return {name: moment.full_tensor() / 0.1 for name, moment in moments.items()}


def mean_nll(model: torch.nn.Module, batch: TensorDict) -> torch.Tensor:
    """Compute the SFT loss the slow way, row by row without padding."""
    total, count = torch.zeros(()), 0
    for input_ids, attention_mask, loss_mask in zip(batch["input_ids"], batch["attention_mask"], batch["loss_mask"]):
        row = input_ids[attention_mask][None]
        logprobs = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None])[:, 0]
        mask = loss_mask[attention_mask][1:].bool()
        total, count = total - logprobs[mask].sum(), count + int(mask.sum())
    return total / count


@pytest.mark.parametrize("offload", [False, True], ids=["", "offloaded"])
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_loss_and_gradient_equal_those_of_plain_transformers(
    make: Make, model_path: str, recomputes: bool, offload: bool
) -> None:
    fsdp = FSDPEngineConfig(offload_params=offload)
    engine = make(max_tokens=20, gradient_checkpointing=recomputes, fsdp=fsdp)
    engine.train()
    batch = token_batch([9, 4, 12, 3, 7])
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    expected = mean_nll(reference, batch)
    expected.backward()
    assert engine.eval_batch(batch, sft_loss_fn, count_loss_tokens) == pytest.approx(expected.item(), abs=1e-5)
    result = engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    assert result["loss"] == pytest.approx(expected.item(), abs=1e-5)
    norms = torch.stack([parameter.grad.norm() for parameter in reference.parameters()])
    assert result["grad_norm"] == pytest.approx(norms.norm().item(), rel=1e-4)
    assert result["update_successful"] == 1.0 and result["lr"] == OPTIMIZER["lr"]
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, atol=1e-5, rtol=1e-4)


def test_bfloat16_gradients_are_as_near_as_those_of_plain_transformers(make: Make, model_path: str) -> None:
    engine, batch = make(max_tokens=20, dtype="bfloat16"), token_batch([9, 4, 12, 3, 7])
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(model_path, dtype=d) for d in (torch.float32, torch.bfloat16)
    )
    for model in (exact, rounded):
        mean_nll(model, batch).backward()
    engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    for name, gradient in gradients(engine).items():
        expected, theirs = (model.get_parameter(name).grad.float() for model in (exact, rounded))
        distances = [(one - expected).norm().item() / expected.norm().item() for one in (gradient, theirs)]
        assert distances[0] < 1.2 * distances[1] + 0.01, name


@pytest.fixture(scope="module", params=[False, True], ids=["kept activations", "recomputed activations"])
def standing_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FSDPEngine]:
    """An engine that computes in float64 and whose steps leave the parameters as they are."""
    path, optimizer = write_model(tmp_path_factory.mktemp("model")), OptimizerConfig(**(OPTIMIZER | {"lr": 0.0}))
    dtypes = {"dtype": "float64", "grad_reduce_dtype": "float64"}
    config = train_config(path, gradient_checkpointing=request.param, optimizer=optimizer)
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


def test_forward_is_padded_and_aligned(make: Make, model_path: str) -> None:
    engine, batch = make(max_tokens=14), token_batch([3, 9, 5, 14])

    def post_hook(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
        return packed_logprobs(logits, micro_batch["input_ids"], micro_batch["cu_seqlens"])

    logprobs = engine.forward(batch, post_hook)
    reference = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = reference(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    expected = torch.cat([torch.zeros(4, 1), expected], dim=1) * batch["attention_mask"]
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=1e-5)


def test_an_empty_share_has_an_empty_result(make: Make) -> None:
    engine = make()
    empty = token_batch([3, 9])[:0]
    assert engine.forward(empty, lambda logits, micro_batch: logits.dense()[:, 0]).shape == (0, 9)
    before = full_params(engine)
    result = engine.train_batch(empty, sft_loss_fn, count_loss_tokens)
    assert result["update_successful"] == 0.0 and result["loss"] == 0.0
    for name, parameter in full_params(engine).items():
        assert torch.equal(parameter, before[name])


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


def test_save_and_load_are_exact_and_readable_by_transformers(make: Make, tmp_path: Path) -> None:
    engine, batch = make(), token_batch([9, 4, 12])
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


def test_a_saved_model_ends_its_answers_as_before(make: Make, model_path: str, tmp_path: Path) -> None:
    """Its generation config names a second end, and a temperature that transformers refuses to save once changed."""
    shutil.copytree(model_path, tmp_path / "before")
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
    losses = [
        one.eval_batch(batch, sft_loss_fn, count_loss_tokens) for one in (engine, make(path=str(tmp_path / "after")))
    ]
    assert losses[0] == losses[1]

    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "after"))
    assert {name: tensor.shape for name, tensor in after.items()} == {n: tensor.shape for n, tensor in before.items()}
    sent = [spec for bucket in engine.get_param_specs() for spec in bucket]
    assert {spec.name: spec.shape for spec in sent} == {name: tuple(tensor.shape) for name, tensor in after.items()}
    tokens, runner = torch.arange(2, 14)[None], ModelRunner(start, slots=1, context=32)
    with torch.inference_mode():
        runner.load_weights(after)
        logits = runner.prefill([tokens[0].tolist()], [0])[0]
        assert torch.allclose(logits, plain.eval()(tokens).logits[0, -1], atol=1e-5)


def test_an_optimizer_of_one_parameter_group_is_refused_in_words(make: Make, tmp_path: Path) -> None:
    engine = make()
    groups = engine.optimizer
    engine.optimizer = torch.optim.AdamW(engine.model.parameters())
    engine.save(SaveLoadMeta(str(tmp_path), with_optim=True))
    engine.optimizer = groups
    with pytest.raises(CheckpointError, match=r"must hold an optimizer of 2 parameter groups .*: got 1, .*with_optim"):
        engine.load(SaveLoadMeta(str(tmp_path), with_optim=True))
    engine.load(SaveLoadMeta(str(tmp_path)))


def test_buffers_outside_of_checkpoints_are_right(make: Make, model_path: str) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model_path)
    buffers = dict(make().model.named_buffers())
    assert buffers and set(buffers) == {name for name, _ in reference.named_buffers()}
    for name, buffer in reference.named_buffers():
        assert torch.equal(buffers[name], buffer)


def test_scratch_weights_depend_on_the_seed_alone(make: Make, model_path: str) -> None:
    first, again, other = (full_params(make(init_from_scratch=True, seed=seed)) for seed in (3, 3, 4))
    from_disk = AutoModelForCausalLM.from_pretrained(model_path).get_parameter("model.embed_tokens.weight")
    assert torch.equal(first["model.embed_tokens.weight"], again["model.embed_tokens.weight"])
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(first["model.embed_tokens.weight"], from_disk)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(make: Make) -> None:
    batch = token_batch([9, 4, 12])
    exact, rounded = make(), make(dtype="bfloat16")
    assert next(rounded.model.parameters()).dtype == torch.float32
    losses = [engine.eval_batch(batch, sft_loss_fn, count_loss_tokens) for engine in (exact, rounded)]
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=2e-2)
    assert rounded.train_batch(batch, sft_loss_fn, count_loss_tokens)["update_successful"] == 1.0
    assert {spec.dtype for bucket in rounded.get_param_specs() for spec in bucket} == {"bfloat16"}


def test_offloaded_parameters_train_alike(make: Make) -> None:
    batch = token_batch([9, 4, 12])
    engines = [make(), make(fsdp=FSDPEngineConfig(offload_params=True))]
    for engine in engines:
        engine.train_batch(batch, sft_loss_fn, count_loss_tokens)
    first, second = (full_params(engine) for engine in engines)
    for name, parameter in first.items():
        torch.testing.assert_close(second[name], parameter)


def test_what_can_not_work_is_refused(model_path: str, make: Make) -> None:
    with pytest.raises(ValueError, match="float16"):
        FSDPEngine(train_config(model_path, dtype="float16"))
    with pytest.raises(ValueError, match="addr must be None"):
        FSDPEngine(train_config(model_path)).initialize("host:1", None)
    with pytest.raises(ValueError, match=r"got \['Nope'\]"):
        make(fsdp=FSDPEngineConfig(wrap_policy=FSDPWrapPolicy(transformer_layer_cls_to_wrap=["Nope"])))


def test_a_checkpoint_that_lacks_tensors_is_refused(make: Make, model_path: str, tmp_path: Path) -> None:
    shutil.copytree(model_path, tmp_path / "model")
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


def test_a_broadcast_reaches_a_receiver_twice_over_one_group(make: Make) -> None:
    engine = make()
    meta, received = broadcast_meta(engine, "weights-1"), []

    def receive() -> None:
        group = join_group("127.0.0.1", meta.transfer.meeting_point[1], 1, 2, meta.transfer.group_name, timeout_s=30)
        for _ in range(2):
            weights: dict[str, torch.Tensor] = {}
            for bucket in meta.nccl_param_specs:
                weights |= receive_bucket([group] * len(bucket), bucket)
            received.append(weights)
        close_group(group)

    receiver = threading.Thread(target=receive)
    receiver.start()
    engine.upload_weights(meta)
    first = full_params(engine)
    engine.train_batch(token_batch([5, 6]), sft_loss_fn, count_loss_tokens)
    engine.upload_weights(broadcast_meta(engine, "weights-1"))
    receiver.join(120)
    for weights, expected in zip(received, (first, full_params(engine)), strict=True):
        assert set(weights) == set(expected)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_a_broadcast_that_nobody_receives_fails_in_time_and_the_next_one_works(make: Make) -> None:
    engine = make()
    meta = broadcast_meta(engine, "weights-1", timeout_s=1.0)
    with pytest.raises(ConnectionError, match="weights-1"):
        engine.upload_weights(meta)
    assert isinstance(meta.transfer.uploaded.exception(0), ConnectionError)

    meta, names = broadcast_meta(engine, "weights-2"), []

    def receive() -> None:
        group = join_group("127.0.0.1", meta.transfer.meeting_point[1], 1, 2, meta.transfer.group_name, timeout_s=30)
        for bucket in meta.nccl_param_specs:
            names.extend(receive_bucket([group] * len(bucket), bucket))
        close_group(group)

    receiver = threading.Thread(target=receive)
    receiver.start()
    engine.upload_weights(meta)
    receiver.join(120)
    assert names == list(full_params(engine))
