"""The policy: logprobs, advantages and updates, for every algorithm of the config.

Loss of an optimizer step: the sum over its trained tokens of c (f l + KL - entropy). l is the objective's loss of a
token; c (the weight of a token in the mean) and f (the off-policy correction) are constants, computed once over the
global batch. Nothing else is averaged, so no result depends on micro-batches, ranks or the order of rows.

Tensors `[B, T]` are aligned with their token (nothing is shifted). `group_index` is a row's group in the global batch.
"""

# B rows of this rank, A samples of this rank, S of all ranks, T padded tokens, N packed tokens

import functools
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.advantages import AdvantageFn, advantages_of, reward_spread
from arealite.algorithms.corrections import corrections_of
from arealite.algorithms.logprobs import LazyLogits, kept_sets, packed_logprobs, packed_logprobs_entropy, trained_tokens
from arealite.algorithms.objectives import TokenLossFn, token_losses, token_weights
from arealite.algorithms.ratios import k3, kl_estimates, kl_losses, masked_log_ratio
from arealite.api.cli_args import AnyActorConfig, PPOActorConfig, resolve_choices
from arealite.api.errors import ConfigError
from arealite.api.workflow_api import runs_of
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.metrics import (
    OF_TOKENS,
    MaskedMetrics,
    add_batch,
    count_tokens,
    note_losses,
    note_tokens,
    of_steps,
)
from arealite.engine.ppo.batch import checked_advantages, checked_loss_fn, groups_of, require_key, samples_of
from arealite.utils.distributed import all_reduce, all_reduce_numbers, of_all_ranks
from arealite.utils.tensors import INPUTS, TOKENS

# Keys of the original's scripts are refused: ignoring them would change the objective silently.
RENAMED_KEYS = {"prox_logp": "proximal_logprobs", "ref_logp": "ref_logprobs"}
UNKNOWN_LOGPROB = -9999.0  # vLLM sends it for a logprob that is not finite; the token is not trained on
_SET_REF = "Set it to ref.compute_logprobs(batch)"


class PPOActor:
    """Runs the algorithm on an engine. Every method is collective.

    `loss_fn` replaces the objective of the config, `advantage_fn` its baseline and scale.
    """

    def __init__(
        self,
        config: PPOActorConfig,
        engine: FSDPEngine,
        loss_fn: TokenLossFn | None = None,
        advantage_fn: AdvantageFn | None = None,
    ) -> None:
        self.config = resolve_choices(config)
        self.engine = engine
        self.loss_fn = None if loss_fn is None else checked_loss_fn(loss_fn)
        if advantage_fn is not None and self.config.baseline == "teacher":
            raise ConfigError(
                "advantage_fn must not be given with actor.baseline teacher: got one. It would never be called; remove "
                "it or actor.algorithm=opd."
            )
        self.advantage_fn = advantage_fn
        self.per_token: dict[str, torch.Tensor] = {}  # of the last update

    def compute_logprobs(self, batch: TensorDict, *, whole: bool = False) -> torch.Tensor:
        """Return the logprob `[B, T]` of every token under the current weights, 0 for padding and first tokens.

        The softmax at `config.temperature` is over the kept set of each token if the batch has `kept_ids` (top-p,
        top-k). It is over the whole vocabulary with `whole` and for a reference (no optimizer).
        """
        keys = INPUTS if whole or self.config.optimizer is None else TOKENS
        return self.engine.forward(
            batch.select(*keys, strict=False),
            lambda logits, micro_batch: packed_logprobs(
                logits, *self._tokens(micro_batch), kept=kept_sets(micro_batch)
            ),
        )

    compute_logp = compute_logprobs

    def compute_advantages(self, batch: TensorDict) -> None:
        """Add `advantages [B, T]` to the batch, 0 outside of the trained tokens.

        For a critic, also add its targets `returns [B, T]` and their mask `returns_mask [B, T]`.

        Needs `rewards [B]`, the masks and logprobs of a trajectory, `ref_logprobs` with a KL penalty in the reward,
        `values [B, T]` with `baseline: critic`, and `no_eos [B]` with `truncated: zero` or `mask`. With
        `baseline: teacher` it needs `teacher_logprobs [B, T]` and no rewards.

        Groups compare samples: rows with the same `sample_index` belong to one sample and share its advantage. With
        `baseline: critic` or `none`, `turn_rewards [B, T]` replace `rewards`; other baselines ignore them.
        """
        self.per_token = {}
        if self.config.baseline == "teacher":
            batch["advantages"] = self._teacher_advantages(batch)
            return
        groups_B, num_groups = self._groups(batch)
        inputs = self._advantage_inputs(batch)
        samples = samples_of(batch, inputs["loss_mask"], groups_B, num_groups)
        advantage_fn = None if self.advantage_fn is None else self._own_advantages
        batch.update(advantages_of(inputs, samples, self.config, self._sum_over_ranks, advantage_fn=advantage_fn))

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """Take `ppo_n_minibatches` optimizer steps (at most one per group) and one of the schedule; return metrics.

        Needs `advantages` and their inputs. A group is in minibatch `group_index % ppo_n_minibatches`. Metrics are
        equal on all ranks. Afterwards `per_token` has the columns of `note_tokens` for all real tokens of the batch in
        order, nan for tokens that were not trained on.
        """
        groups_B, num_groups = self._groups(batch)
        columns, metrics = self._columns(batch), MaskedMetrics()
        mask_BT = batch["attention_mask"].bool()
        columns["token_place"] = mask_BT.flatten().cumsum(0).view_as(mask_BT) - 1
        num_tokens = int(mask_BT.sum())
        self.per_token = {key: torch.full((num_tokens,), torch.nan, device=self.engine.device) for key in OF_TOKENS}
        num_minibatches = min(self.config.ppo_n_minibatches, num_groups)
        minibatch_B = groups_B % num_minibatches
        loss_fn = self.loss_fn or functools.partial(token_losses, choices=self.config)
        steps = []
        for index in range(num_minibatches):
            rows = (minibatch_B == index).nonzero()[:, 0]
            steps.append(self._step(columns[rows], groups_B[rows], num_groups, loss_fn, metrics))
        self.engine.step_lr_scheduler()
        return {
            "policy/loss": sum(step["loss"] for step in steps) / len(steps),
            **self.engine.costs.take(),
            **metrics.reduce(),
            **of_steps(steps, "optim"),
            "perf/skipped_tokens": sum(step["skipped_tokens"] for step in steps),
            **self.describe(batch),
        }

    def describe(self, batch: TensorDict) -> dict[str, float]:
        """Return the metrics of the global batch, equal on all ranks; `ppo_update` includes them.

        `policy/mismatch_kl` is the k3 estimate, over trained tokens, of the divergence between the server's policy and
        the recomputed policy: numerical differences, plus the drift of the weights since a stale token was sampled.
        `policy/ref_kl` is the divergence between the sampling policy (without a correction the recomputed one) and the
        reference.
        """
        metrics, mask_BT = MaskedMetrics(), self._trained_tokens(batch)
        groups_B, num_groups = self._groups(batch)
        add_batch(metrics, batch, mask_BT, groups_B, self.engine.get_version())
        if "ref_logprobs" in batch and ("kept_ids" not in batch or "whole_logprobs" in batch):
            log_ratio_BT = self._whole_logprobs(batch).double() - batch["ref_logprobs"].double()
            metrics.add(mask_BT, {"policy/ref_kl": k3(log_ratio_BT)})
        if self.config.baseline == "teacher":
            metrics.add(mask_BT, {"policy/teacher_kl": -batch["advantages"]})
        first_rows = runs_of(batch, groups_B).first_rows
        rewards_R, groups_R = batch["rewards"].float()[first_rows], groups_B[first_rows]
        return {
            **metrics.reduce(),
            **reward_spread(rewards_R, groups_R, num_groups, reduce=self._sum_over_ranks),
            **count_tokens(batch, mask_BT, self.engine.parallelism_group),
        }

    # Advantages

    def _teacher_advantages(self, batch: TensorDict) -> torch.Tensor:
        """Return log teacher - log student `[B, T]`, using the student's proximal logprobs if the batch has them."""
        teacher_BT = require_key(
            batch, "teacher_logprobs", "baseline: teacher", "Set it to teacher.compute_logprobs(batch)"
        )
        student_BT = self._whole_logprobs(batch)
        if "kept_ids" not in batch and "proximal_logprobs" in batch:
            student_BT = batch["proximal_logprobs"]
        return masked_log_ratio(teacher_BT, student_BT, self._trained_tokens(batch))

    def _advantage_inputs(self, batch: TensorDict) -> dict[str, torch.Tensor]:
        """Return the columns of `advantages_of`: the mask of trained tokens and the inputs that the config needs."""
        config, inputs = self.config, {"loss_mask": self._trained_tokens(batch)}
        if config.truncated == "zero":
            require_key(batch, "no_eos", "truncated: zero", "Let the workflow mark truncated completions")
        if config.kl_ctl > 0 and config.kl_in == "reward":
            ref_BT = require_key(batch, "ref_logprobs", "kl_ctl > 0", _SET_REF)
            log_ratio_BT = masked_log_ratio(self._whole_logprobs(batch), ref_BT, inputs["loss_mask"])
            inputs["kl"] = kl_estimates(log_ratio_BT, str(config.kl_estimator))
        if config.baseline == "critic":
            inputs["values"] = require_key(
                batch, "values", "baseline: critic", "Set it to critic.compute_values(batch)"
            )
        compares_samples = (config.baseline, config.reward_scale) not in (("critic", "none"), ("none", "none"))
        if "turn_rewards" in batch and not compares_samples and self.advantage_fn is None:
            inputs["turn_rewards"] = batch["turn_rewards"]
        return inputs

    def _own_advantages(
        self, rewards_R: torch.Tensor, groups_R: torch.Tensor, num_tokens_R: torch.Tensor
    ) -> torch.Tensor:
        """Return the advantages `[R]` of the user's function, computed on the samples of all ranks (collective)."""
        assert self.advantage_fn is not None
        group, columns = self.engine.parallelism_group, []
        for values_R in (rewards_R, groups_R, num_tokens_R):
            columns.append([values.to(values_R.device) for values in of_all_ranks(values_R.cpu(), group)])
        rewards_S, groups_S, num_tokens_S = map(torch.cat, columns)
        advantages_S = checked_advantages(self.advantage_fn(rewards_S, groups_S, num_tokens_S), rewards_S)
        return advantages_S.split([len(rewards) for rewards in columns[0]])[dist.get_rank(group)]

    # Steps

    def _columns(self, batch: TensorDict) -> TensorDict:
        """Return the columns that the loss reads; all are constant during the update."""
        config, proximal_BT = self.config, self._proximal_logprobs(batch)
        columns = batch.select(*TOKENS, "advantages", strict=False)
        columns["loss_mask"] = self._trained_tokens(batch)
        columns["rollout_logprobs"] = batch["logprobs"]
        if config.kl_ctl > 0 and config.kl_in == "loss":
            columns["ref_logprobs"] = require_key(batch, "ref_logprobs", "kl_ctl > 0", _SET_REF)
        columns["corrections"] = torch.ones_like(batch["logprobs"])
        if proximal_BT is not None:
            columns["proximal_logprobs"] = proximal_BT
            columns["corrections"] = corrections_of(columns, config)
        return columns

    def _step(
        self,
        columns: TensorDict,
        groups_B: torch.Tensor,
        num_groups: int,
        token_loss_fn: TokenLossFn,
        metrics: MaskedMetrics,
    ) -> dict[str, float]:
        """Take one optimizer step on the sum of c (f l + KL - entropy)."""
        config: Any = self.config  # in which no choice is None
        mask_BT = columns["loss_mask"]
        columns["token_weights"] = token_weights(
            mask_BT,
            groups_B,
            num_groups,
            aggregation=config.aggregation,
            loss_constant=config.loss_constant,
            reduce=self._sum_over_ranks,
        ).to(columns["advantages"])
        rows = self._rows_to_train(columns)
        lengths_B = columns["attention_mask"].sum(dim=1)
        counts = [lengths_B[rows].sum().item(), lengths_B.sum().item(), mask_BT.sum().item()]
        num_tokens, num_in_all, num_trained = all_reduce_numbers(counts, group=self.engine.parallelism_group)
        if num_tokens == 0:  # the gradient is 0, and the optimizer still steps
            rows, num_tokens = lengths_B.nonzero()[:, 0], num_in_all
        longest = int(lengths_B.max()) if len(lengths_B) else 0

        def weight(micro_batch: TensorDict) -> float:
            return float(len(micro_batch["input_ids"])) if num_trained else 0.0

        # The engine takes a mean over all tokens, and c already contains every denominator.
        def loss_fn(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
            loss = self._loss(logits, micro_batch, token_loss_fn, metrics, longest)
            return loss * (num_tokens / weight(micro_batch))

        return self.engine.train_batch(columns[rows], loss_fn, weight) | {"skipped_tokens": num_in_all - num_tokens}

    def _rows_to_train(self, columns: TensorDict) -> torch.Tensor:
        """Return the indices of rows whose loss may have a gradient.

        Rows of a dead group have none, unless a KL penalty, an entropy bonus or a user's loss acts on them. They still
        count in the aggregation.
        """
        if self.loss_fn is not None or self.config.entropy_ctl > 0 or "ref_logprobs" in columns:
            return columns["attention_mask"].any(dim=1).nonzero()[:, 0]
        return ((columns["advantages"] != 0) & columns["loss_mask"]).any(dim=1).nonzero()[:, 0]

    def _loss(
        self,
        logits: LazyLogits,
        micro_batch: TensorDict,
        token_loss_fn: TokenLossFn,
        metrics: MaskedMetrics,
        longest: int,
    ) -> torch.Tensor:
        config: Any = self.config  # in which no choice is None
        mask_N = micro_batch["loss_mask"]
        tokens, kept = self._tokens(micro_batch), kept_sets(micro_batch)
        logprobs_N, entropy_N = packed_logprobs_entropy(
            logits, *tokens, kept=kept, mask=mask_N, entropy_grad=config.entropy_ctl > 0
        )
        if config.proximal == "current":
            micro_batch["proximal_logprobs"] = logprobs_N.detach()
            keys = ("proximal_logprobs", "rollout_logprobs", "advantages", "loss_mask")
            places = micro_batch["segment_ids"], micro_batch["position_ids"]  # unpack to `[B, longest]` without a sync
            shape = len(micro_batch["cu_seqlens"]) - 1, longest
            rows = {key: micro_batch[key].new_zeros(shape).index_put(places, micro_batch[key]) for key in keys}
            micro_batch["corrections"] = corrections_of(rows, config)[places]
        note_tokens(self.per_token, micro_batch, logprobs_N.detach())
        losses_N, statistics = token_loss_fn(logprobs_N, micro_batch)
        losses_N = micro_batch["corrections"] * torch.where(mask_N, losses_N, 0.0)
        if "ref_logprobs" in micro_batch:
            whole_N = logprobs_N if kept is None else packed_logprobs(logits, *tokens, mask=mask_N)
            kl_N = kl_losses(logprobs_N, micro_batch, estimator=config.kl_estimator, whole=whole_N)
            if kept is not None:
                statistics["ref_kl"] = k3((whole_N.detach() - micro_batch["ref_logprobs"]).double())
            losses_N = losses_N + config.kl_ctl * kl_N
        if config.entropy_ctl > 0:
            losses_N = losses_N - config.entropy_ctl * torch.where(mask_N, entropy_N, 0.0)
        statistics["entropy"] = entropy_N.detach()
        if config.proximal == "current":
            statistics["mismatch_kl"] = k3((micro_batch["rollout_logprobs"] - logprobs_N.detach()).double())
        note_losses(metrics, micro_batch, statistics)
        return (micro_batch["token_weights"] * losses_N).sum()

    def _proximal_logprobs(self, batch: TensorDict) -> torch.Tensor | None:
        """Return the logprobs `[B, T]` to clip around, or None for those of the update's own forward pass."""
        for old, new in RENAMED_KEYS.items():
            if old in batch:
                raise ValueError(f"the key {old!r} of a batch must be called {new!r}: got {old!r}. Rename it.")
        if self.config.proximal == "recompute":
            require_key(batch, "proximal_logprobs", "proximal: recompute", "Set it to actor.compute_logprobs(batch)")
            return batch["proximal_logprobs"]
        return batch["logprobs"] if self.config.proximal == "rollout" else None

    def _tokens(self, micro_batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor, float]:
        return micro_batch["input_ids"], micro_batch["cu_seqlens"], self.config.temperature

    def _whole_logprobs(self, batch: TensorDict) -> torch.Tensor:
        """Return the logprobs `[B, T]` that a KL compares with the reference, over the whole vocabulary.

        They are recomputed if tokens were sampled from kept sets.
        """
        if "kept_ids" not in batch:
            return self._sampling_logprobs(batch)
        if "whole_logprobs" not in batch:
            batch["whole_logprobs"] = self.compute_logprobs(batch, whole=True)
        return batch["whole_logprobs"]

    def _sampling_logprobs(self, batch: TensorDict) -> torch.Tensor:
        """Return the logprobs `[B, T]` of the sampling policy: the server's, or recomputed without a correction.

        Recomputed logprobs exclude the numerical gap to the server.
        """
        is_recomputed = self.config.proximal == "recompute" and self.config.correction.action == "none"
        return batch["proximal_logprobs" if is_recomputed and "proximal_logprobs" in batch else "logprobs"]

    def _trained_tokens(self, batch: TensorDict) -> torch.Tensor:
        """Return the bool mask `[B, T]` of tokens to train on: sampled tokens with a known logprob."""
        mask_BT = trained_tokens(batch["attention_mask"], batch["loss_mask"]) & (batch["logprobs"] > UNKNOWN_LOGPROB)
        if self.config.truncated == "mask":
            require_key(batch, "no_eos", "truncated: mask", "Let the workflow mark truncated completions")
            mask_BT &= ~batch["no_eos"].bool()[:, None]
        return mask_BT

    def _groups(self, batch: TensorDict) -> tuple[torch.Tensor, int]:
        return groups_of(batch, self.config.group_size, self.engine.parallelism_group)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(tensor, group=self.engine.parallelism_group)


class FSDPPPOActor(FSDPEngine, PPOActor):
    """The policy on FSDP2; with `optimizer: null` a frozen reference. Dropout is off: it would make ratios noise."""

    config: PPOActorConfig

    def __init__(
        self, config: AnyActorConfig, loss_fn: TokenLossFn | None = None, advantage_fn: AdvantageFn | None = None
    ) -> None:
        actor = config.as_actor()
        FSDPEngine.__init__(self, actor)
        PPOActor.__init__(self, actor, engine=self, loss_fn=loss_fn, advantage_fn=advantage_fn)
