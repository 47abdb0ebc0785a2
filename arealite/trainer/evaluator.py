"""Evaluates the policy on held-out prompts at intervals, through the servers that sample for training."""

from collections.abc import Sequence
from typing import Any

from arealite.api.cli_args import EvaluatorConfig
from arealite.api.engine_api import InferenceEngine
from arealite.api.io_struct import FinetuneSpec, PromptId
from arealite.api.workflow_api import RolloutWorkflow
from arealite.utils.frequency import Frequency


class Evaluator(Frequency):
    """Evaluates at intervals. Every rank calls it once per step.

    With any trigger set the first call is due, which records the accuracy before training.
    """

    def __init__(
        self,
        config: EvaluatorConfig,
        ft_spec: FinetuneSpec,
        valid_dataset: Sequence[dict[str, Any]] | None,
        workflow: RolloutWorkflow,
    ) -> None:
        """Without a data set it never evaluates."""
        super().__init__(config, ft_spec.steps_per_epoch, is_first_due=True)
        self._valid_dataset = valid_dataset
        self._workflow = workflow

    def evaluate(self, rollout: InferenceEngine, step: int, *, force: bool = False) -> dict[str, float] | None:
        """Evaluate the weights after `step` updates if due or forced (collective).

        Returns the metrics of `evaluate_batch` as `eval/<name>`. Call it at the top of the loop, where row N gets the
        accuracy of the weights before step N, and with `force` after the loop.
        """
        if self._valid_dataset is None or not self.check(force=force):
            return None
        rows = [{**row, "prompt_id": PromptId(epoch=step, index=i)} for i, row in enumerate(self._valid_dataset)]
        metrics = rollout.evaluate_batch(rows, self._workflow)
        return {"eval/version": step} | {f"eval/{name}": value for name, value in metrics.items()}
