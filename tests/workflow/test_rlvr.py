import asyncio
from dataclasses import dataclass, field

import pytest
import torch
from rewards import columns_reward, failing_reward
from testing_quickstart import make_tiny_model

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import RewardError, ServerError
from arealite.api.io_struct import ModelRequest, ModelResponse, PromptId
from arealite.reward import gsm8k_reward_fn
from arealite.utils.hf import load_hf_tokenizer
from arealite.workflow.rlvr import RLVRWorkflow, trajectory_from_response

torch.set_num_threads(1)
QUESTION = "Tom has 3 apples and gets 7 more. How many?"
DATA = {
    "messages": [{"role": "user", "content": QUESTION}],
    "question": QUESTION,
    "answer": "3+7=10\n#### 10",
    "prompt_id": PromptId(2, 5),
}


@dataclass
class ScriptedSampler:
    """Samples the scripted texts one after the other; one in `...` is cut off, `!` is a server's failure."""

    texts: list[str]
    tokenizer: object
    requests: list[ModelRequest] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0
    cancelled: int = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        text = self.texts[len(self.requests)]
        self.requests.append(req)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(0.01 if text == "!" else 0.2)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if text == "!":
            raise ServerError("localhost:1 /generate answered 500")
        is_cut = text.endswith("...")
        tokens = self.tokenizer(text.removesuffix("..."), add_special_tokens=False)["input_ids"]
        tokens = tokens if is_cut else [*tokens, self.tokenizer.eos_token_id]
        return ModelResponse(
            input_tokens=list(req.input_ids),
            output_tokens=tokens,
            output_logprobs=[-0.5 - index for index in range(len(tokens))],
            output_versions=[4] * (len(tokens) - 1) + [5],
            stop_reason="length" if is_cut else "stop",
            server="localhost:1",
        )


InferenceEngine.register(ScriptedSampler)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_hf_tokenizer(make_tiny_model(tmp_path_factory.mktemp("tiny"), [QUESTION], layers=1))


async def test_a_group_is_sampled_at_once_scored_and_padded(tokenizer) -> None:
    engine = ScriptedSampler(["#### 10", "3+7=10\n#### 10", "#### 9", "3+7..."], tokenizer)
    gconfig = GenerationHyperparameters(n_samples=4, max_new_tokens=32, temperature=0.7)
    workflow = RLVRWorkflow(gsm8k_reward_fn, gconfig, tokenizer)
    batch = await workflow.arun_episode(engine, DATA)
    workflow.close()

    assert engine.most_at_once == 4
    assert len({request.rid for request in engine.requests}) == 1
    assert all(request.gconfig == gconfig.new(n_samples=1) for request in engine.requests)
    assert batch["rewards"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert batch["no_eos"].tolist() == [False, False, False, True]

    prompt = tokenizer(f"<|user|>{QUESTION}<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    answers = ["#### 10<|end|>", "3+7=10\n#### 10<|end|>", "#### 9<|end|>", "3+7"]
    for row, answer in zip(batch, answers, strict=True):
        real = row["attention_mask"]
        length = int(real.sum())
        assert real[:length].all()
        assert row["input_ids"][: len(prompt)].tolist() == prompt
        sampled = row["loss_mask"].bool()
        assert tokenizer.decode(row["input_ids"][sampled]) == answer
        assert not sampled[: len(prompt)].any() and sampled[len(prompt) : length].all() and not sampled[length:].any()
        num_sampled = length - len(prompt)
        assert row["logprobs"][sampled].tolist() == [-0.5 - index for index in range(num_sampled)]
        assert row["versions"][sampled].tolist() == [4] * (num_sampled - 1) + [5]
        assert (row["logprobs"][~sampled] == 0).all() and (row["versions"][~sampled] == -1).all()


async def test_the_reward_gets_texts_tokens_and_columns_by_name(tokenizer) -> None:
    engine = ScriptedSampler(["3+7=10\n#### 10"], tokenizer)
    workflow = RLVRWorkflow(columns_reward, GenerationHyperparameters(), tokenizer)
    batch = await workflow.arun_episode(engine, DATA)
    workflow.close()
    sampled = int(batch["loss_mask"].sum())
    prompt = int(batch["attention_mask"].sum()) - sampled
    assert batch["rewards"].item() == pytest.approx(len("3+7=10\n#### 10") + prompt / 100 + sampled / 10000)


async def test_a_failing_reward_fails_the_episode(tokenizer) -> None:
    workflow = RLVRWorkflow(failing_reward, GenerationHyperparameters(n_samples=2), tokenizer)
    with pytest.raises(RewardError, match="KeyError: 'oops'"):
        await workflow.arun_episode(ScriptedSampler(["a", "b"], tokenizer), DATA)
    workflow.close()


async def test_a_failing_sample_cancels_the_rest_of_the_group(tokenizer) -> None:
    engine = ScriptedSampler(["a", "!", "b"], tokenizer)
    workflow = RLVRWorkflow(gsm8k_reward_fn, GenerationHyperparameters(n_samples=3), tokenizer)
    with pytest.raises(ServerError, match="answered 500"):
        await workflow.arun_episode(engine, DATA)
    await asyncio.sleep(0)
    assert engine.cancelled == 2 and engine.running == 0
    workflow.close()


def test_dtypes_of_a_trajectory() -> None:
    response = ModelResponse([1, 2], [3], [-0.25], [7], "length", "localhost:1")
    trajectory = trajectory_from_response(response, 0.5)
    assert {key: value.dtype for key, value in trajectory.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.bool,
        "loss_mask": torch.int64,
        "logprobs": torch.float32,
        "versions": torch.int64,
        "rewards": torch.float32,
        "no_eos": torch.bool,
    }
    assert trajectory["versions"].tolist() == [[-1, -1, 7]] and trajectory["no_eos"].tolist() == [True]
