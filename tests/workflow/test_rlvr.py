import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rewards import brevity, columns_reward, failing_reward
from testing_chat_templates import tokenizer_of
from testing_completions import CASES
from testing_quickstart import make_tiny_model

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig, load_expr_config
from arealite.api.engine_api import InferenceEngine
from arealite.api.errors import ConfigError, RewardError
from arealite.api.io_struct import ModelRequest, ModelResponse, PromptId
from arealite.api.workflow_api import own_metrics
from arealite.dataset import load_datasets
from arealite.reward import gsm8k_reward_fn, load_rewards
from arealite.utils.hf import load_hf_tokenizer
from arealite.workflow.rlvr import RLVRWorkflow

torch.set_num_threads(1)
SHIPPED = Path(__file__).parents[2] / "examples" / "arealite" / "configs" / "gsm8k_grpo.yaml"
QUESTION = "Tom has 3 apples and gets 7 more. How many?"
DATA = {
    "messages": [{"role": "user", "content": QUESTION}],
    "question": QUESTION,
    "answer": "3+7=10\n#### 10",
    "prompt_id": PromptId(2, 5),
}


@dataclass
class ScriptedSampler:
    """Samples the scripted texts one after the other; one in `...` is cut off."""

    texts: list[str]
    tokenizer: object
    requests: list[ModelRequest] = field(default_factory=list)
    most_at_once: int = 0
    running: int = 0

    async def agenerate(self, req: ModelRequest) -> ModelResponse:
        text = self.texts[len(self.requests)]
        self.requests.append(req)
        self.running += 1
        self.most_at_once = max(self.most_at_once, self.running)
        await asyncio.sleep(0.2)
        self.running -= 1
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


async def test_several_rewards_are_weighted_and_each_is_a_metric(tokenizer) -> None:
    engine = ScriptedSampler(["#### 10", "#### 9."], tokenizer)
    gconfig = GenerationHyperparameters(n_samples=2)
    workflow = RLVRWorkflow({gsm8k_reward_fn: 1.0, brevity: 0.5}, gconfig, tokenizer)
    batch = await workflow.arun_episode(engine, DATA)
    workflow.close()
    assert batch["rewards"].tolist() == [1 - 3.5, 0 - 3.5]
    metrics = {name: values.tolist() for name, values in own_metrics(batch).items()}
    assert metrics == {"rewards/gsm8k_reward_fn": [1.0, 0.0], "rewards/brevity": [-7.0, -7.0]}


def takes_a_completion(completion, answer) -> float: ...


def of_trl(prompts, completions, **kwargs): ...


def of_trl_by_its_type(completions, **kwargs) -> list[float]: ...


@pytest.mark.parametrize(
    ("rewards", "told"),
    [
        (takes_a_completion, r"takes_a_completion must take prompt, completions, .* got .*\(completion, answer\)"),
        ({gsm8k_reward_fn: 1, takes_a_completion: 1}, "takes_a_completion must take"),
        (of_trl, r"of_trl must score one completion: got .* lists as in TRL. Take prompt and completions, one text"),
        (of_trl_by_its_type, "of_trl_by_its_type must score one completion"),
        ({}, "reward_fn must have a function: got none"),
    ],
)
def test_rewards_that_can_not_be_called_are_refused_at_once(tokenizer, rewards, told) -> None:
    with pytest.raises(ConfigError, match=told):
        RLVRWorkflow(rewards, GenerationHyperparameters(), tokenizer)


@pytest.fixture(scope="module")
def styled(tmp_path_factory):
    return {style: tokenizer_of(style, tmp_path_factory.mktemp("style")) for style in {case[0] for case in CASES}}


@pytest.fixture(scope="module")
def shipped(tmp_path_factory):
    """The shipped config, on rows of our own, as there is no network."""
    rows = tmp_path_factory.mktemp("data") / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": text, "answer": answer}) + "\n" for _, answer, _, text in CASES))
    overrides = [f"train_dataset.path={rows}", "valid_dataset=null", "evaluator.freq_epochs=null"]
    return load_expr_config(["--config", str(SHIPPED), *overrides, "train_dataset.batch_size=8"], GRPOConfig)[0]


@pytest.mark.parametrize("style", ["qwen2.5", "llama", "gemma"])
async def test_the_shipped_config_asks_chat_models_for_what_it_rewards(styled, shipped, style: str) -> None:
    tokenizer = styled[style]
    cases = [case for case in CASES if case[0] == style]
    rows, _ = load_datasets(shipped, tokenizer)
    rows = [row for row, case in zip(rows, CASES, strict=True) if case[0] == style]
    engine = ScriptedSampler([completion.removesuffix("...") for *_, completion in cases], tokenizer)
    workflow = RLVRWorkflow(load_rewards(shipped.reward), shipped.gconfig.new(n_samples=1), tokenizer)
    batches = await asyncio.gather(*(workflow.arun_episode(engine, row) for row in rows))
    workflow.close()
    assert len(cases) == 20
    assert [batch["rewards"].item() for batch in batches] == [expected for _, _, expected, _ in cases]
    for request in engine.requests:
        prompt = tokenizer.decode(request.input_ids)
        assert "put your final answer within \\boxed{}." in prompt and prompt.rstrip().endswith(
            ("assistant", "model", ">")
        )


async def test_a_failing_reward_fails_the_episode(tokenizer) -> None:
    workflow = RLVRWorkflow(failing_reward, GenerationHyperparameters(n_samples=2), tokenizer)
    with pytest.raises(RewardError, match="KeyError: 'oops'"):
        await workflow.arun_episode(ScriptedSampler(["a", "b"], tokenizer), DATA)
    workflow.close()
