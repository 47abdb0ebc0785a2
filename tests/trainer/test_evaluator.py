from typing import Any

from arealite.api.cli_args import EvaluatorConfig
from arealite.api.io_struct import FinetuneSpec, PromptId
from arealite.trainer.evaluator import Evaluator

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=12, train_batch_size=4)
ROWS = [{"question": "1+1", "answer": "2"}, {"question": "2+2", "answer": "4"}]


class ScriptedRollout:
    """Answers evaluations with what it is told and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, Any]]] = []

    def evaluate_batch(self, data: list[dict[str, Any]], workflow: object) -> dict[str, float]:
        self.asked.append(data)
        return {"accuracy": 0.25 * len(self.asked), "num_samples": 2.0}


def evaluator_of(rows: list[dict[str, Any]] | None, **triggers: int) -> Evaluator:
    return Evaluator(EvaluatorConfig(**triggers), FT_SPEC, rows, workflow=None)


def test_first_then_every_nth_then_forced() -> None:
    evaluator, rollout = evaluator_of(ROWS, freq_steps=3), ScriptedRollout()
    for step in range(8):
        evaluator.evaluate(rollout, step)
    metrics = evaluator.evaluate(rollout, 8, force=True)
    assert metrics == {"eval/version": 8, "eval/accuracy": 1.0, "eval/num_samples": 2.0}
    assert [rows[0]["prompt_id"].epoch for rows in rollout.asked] == [0, 3, 6, 8]


def test_prompt_ids_are_unique_and_the_rows_are_left_alone() -> None:
    evaluator, rollout = evaluator_of(ROWS, freq_epochs=1), ScriptedRollout()
    for step in range(4):
        evaluator.evaluate(rollout, step)
    ids = [row["prompt_id"] for rows in rollout.asked for row in rows]
    assert ids == [PromptId(0, 0), PromptId(0, 1), PromptId(3, 0), PromptId(3, 1)]
    assert rollout.asked[0][1] == {"question": "2+2", "answer": "4", "prompt_id": PromptId(0, 1)}
    assert "prompt_id" not in ROWS[0]


def test_never_without_rows_or_a_trigger() -> None:
    rollout = ScriptedRollout()
    assert evaluator_of(None, freq_steps=1).evaluate(rollout, 0, force=True) is None
    assert evaluator_of(ROWS).evaluate(rollout, 0) is None
    assert rollout.asked == []
