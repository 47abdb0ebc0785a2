"""The critic: values of tokens, and updates towards the returns that the actor computes from them.

`values[t]` is aligned with token t, like a logprob: the expected reward to come before token t is sampled. It is read
at token t - 1. The head starts at 0 unless the checkpoint is a sequence classifier, such as a reward model.
"""

# B rows of this rank, T padded tokens, N packed tokens

import functools

import torch
from tensordict import TensorDict

from arealite.algorithms.advantages import spread
from arealite.algorithms.logprobs import align_with_tokens, count_loss_tokens
from arealite.algorithms.objectives import critic_loss
from arealite.api.cli_args import PPOCriticConfig
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.metrics import MaskedMetrics, of_steps
from arealite.engine.ppo.batch import groups_of, require_key
from arealite.utils.distributed import all_reduce


class PPOCritic:
    """Runs a critic on an engine that has a value head. Every method is collective."""

    def __init__(self, config: PPOCriticConfig, engine: FSDPEngine) -> None:
        assert engine.has_value_head, "a critic's engine is FSDPEngine(config, has_value_head=True)"
        self.config = config
        self.engine = engine

    def compute_values(self, batch: TensorDict) -> torch.Tensor:
        """Return the value `[B, T]` of every token under the current weights, 0 for padding and first tokens."""
        return self.engine.forward(
            batch.select("input_ids", "attention_mask"),
            lambda values_N, micro_batch: align_with_tokens(values_N, micro_batch["cu_seqlens"]),
        )

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """Take one optimizer step per minibatch of the actor and one of the schedule; return metrics.

        Needs `values`, and `returns` and `returns_mask` of the actor's `compute_advantages`. The loss is a mean over
        the trained tokens of a minibatch on all ranks. Metrics are equal on all ranks.
        """
        require_key(batch, "returns", "a critic", "Call actor.compute_advantages(batch) with baseline: critic")
        groups_B, num_groups = groups_of(batch, self.config.group_size, self.engine.parallelism_group)
        columns = batch.select("input_ids", "attention_mask", "values", "returns")
        columns["loss_mask"] = batch["returns_mask"]
        metrics = MaskedMetrics()
        metrics.add(columns["loss_mask"], {"value/mean": batch["values"], "value/return": batch["returns"]})
        num_minibatches = min(self.config.ppo_n_minibatches, num_groups)
        loss_fn = functools.partial(self._loss, metrics=metrics)
        steps = [
            self.engine.train_batch(columns[groups_B % num_minibatches == index], loss_fn, count_loss_tokens)
            for index in range(num_minibatches)
        ]
        self.engine.step_lr_scheduler()
        return {
            "value/loss": sum(step["loss"] for step in steps) / len(steps),
            **metrics.reduce(),
            "value/explained_variance": self._explained_variance(columns),
            **of_steps(steps, "value"),
        }

    def _loss(self, values_N: torch.Tensor, micro_batch: TensorDict, *, metrics: MaskedMetrics) -> torch.Tensor:
        values_N = align_with_tokens(values_N, micro_batch["cu_seqlens"])
        losses_N, statistics = critic_loss(values_N, micro_batch, eps_clip=self.config.value_eps_clip)
        metrics.add(micro_batch["loss_mask"], {"value/clip_ratio": statistics["clip_ratio"]})
        return losses_N.sum() / micro_batch["loss_mask"].sum()

    def _explained_variance(self, columns: TensorDict) -> float:
        """Return 1 - Var(returns - values) / Var(returns) over all trained tokens before the update, 0 for constant
        returns."""
        mask_BT = columns["loss_mask"]
        returns_N, values_N = columns["returns"][mask_BT], columns["values"][mask_BT]
        reduce = functools.partial(all_reduce, group=self.engine.parallelism_group)
        of_errors, of_returns = (
            spread(numbers_N, torch.zeros_like(numbers_N, dtype=torch.long), 1, reduce=reduce)[1].item()
            for numbers_N in (returns_N - values_N, returns_N)
        )
        return 1.0 - (of_errors / of_returns) ** 2 if of_returns > 0 else 0.0


class FSDPPPOCritic(FSDPEngine, PPOCritic):
    """The critic on FSDP2. Dropout is off: values must not be random."""

    config: PPOCriticConfig

    def __init__(self, config: PPOCriticConfig) -> None:
        config = config.new(disable_dropout=True)
        FSDPEngine.__init__(self, config, has_value_head=True)
        PPOCritic.__init__(self, config, engine=self)
