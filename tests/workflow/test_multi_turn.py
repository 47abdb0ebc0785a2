import pytest
from rewards import has_seven
from testing_conversations import SayingEngine, sampled_texts

from arealite.api.cli_args import GenerationHyperparameters
from arealite.api.errors import ContextOverflowError
from arealite.rollout.trajectory import check_trajectory
from arealite.workflow.multi_turn import FEEDBACK, MultiTurnWorkflow

DATA = {"messages": [{"role": "user", "content": "How much is 3 + 4?"}]}
END = "<|im_end|>"


def tries(text: str) -> str:
    """Answer 5, 6, 7 in turn."""
    return str(5 + text.count("assistant\n") - 1)


@pytest.mark.parametrize(
    ("max_turns", "reward", "said"), [(1, 0.0, ["5"]), (2, 0.0, ["5", "6"]), (5, 0.25, ["5", "6", "7"])]
)
async def test_a_wrong_answer_may_be_tried_again_for_less(
    tokenizer, max_turns: int, reward: float, said: list[str]
) -> None:
    engine = SayingEngine(tokenizer, tries)
    workflow = MultiTurnWorkflow(
        has_seven, GenerationHyperparameters(n_samples=2), tokenizer, max_turns, turn_discount=0.5
    )
    group = check_trajectory(await workflow.arun_episode(engine, DATA), head_version=0)
    workflow.close()
    assert group["rewards"].tolist() == [reward] * 2 and group["sample_index"].tolist() == [0, 1]
    assert group["num_turns"].tolist() == [len(said)] * 2
    for row in group:
        assert sampled_texts(tokenizer, row) == [answer + END for answer in said]
    text = tokenizer.decode(group[0]["input_ids"][group[0]["attention_mask"]])
    again = f"{END}\n<|im_start|>user\n{FEEDBACK}{END}\n<|im_start|>assistant\n"
    assert text.endswith(f"How much is 3 + 4?{END}\n<|im_start|>assistant\n" + again.join(said) + END)
    assert {request.seed_key for request in engine.requests} == {"0", "1"}
    assert len({request.rid for request in engine.requests}) == 2, "turns of a run stay on one server"


async def test_feedback_may_depend_on_row_and_reward(tokenizer) -> None:
    engine = SayingEngine(tokenizer, tries)
    workflow = MultiTurnWorkflow(
        *(has_seven, GenerationHyperparameters(), tokenizer), feedback=lambda data, reward: f"{data['hint']}: {reward}"
    )
    await workflow.arun_episode(engine, {**DATA, "hint": "add them"})
    workflow.close()
    assert "add them: 0.0" in tokenizer.decode(engine.requests[1].input_ids)


async def test_a_context_that_is_full_ends_the_run(tokenizer) -> None:
    first = len(
        tokenizer(tokenizer.apply_chat_template(DATA["messages"], tokenize=False, add_generation_prompt=True))[
            "input_ids"
        ]
    )
    workflow = MultiTurnWorkflow(has_seven, GenerationHyperparameters(), tokenizer, max_turns=9)
    group = await workflow.arun_episode(SayingEngine(tokenizer, tries, context=first + 5), DATA)
    assert group["num_turns"].tolist() == [1] and group["rewards"].tolist() == [0]
    with pytest.raises(ContextOverflowError):
        await workflow.arun_episode(SayingEngine(tokenizer, tries, context=first - 1), DATA)
    workflow.close()
