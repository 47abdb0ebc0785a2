"""The policy: logprobs, advantages and updates of one engine, for every choice of the algorithm.

Loss of an optimizer step: the sum over its trained tokens of c (f l + KL - entropy). An objective gives l, one number
per token; c (how tokens are averaged) and f (the off-policy correction) are constants, computed once over the global
batch. Nothing else is averaged, so no result depends on micro-batches, ranks or the order of rows.

Tensors `[B, T]` are aligned with the token they are about (nothing is shifted). `group_index` is a row's group in the
global batch.
"""

# B rows of this rank, R runs (samples of a group) of this rank, S of all ranks, T padded tokens, N packed tokens

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.advantages import (
    adaptive_lambda,
    distillation_advantages,
    gae,
    gae_returns,
    overlong_penalty,
    reward_advantages,
    scale_rewards,
    spread,
    token_rewards,
    whiten,
)
from arealite.algorithms.aggregation import token_weights
from arealite.algorithms.corrections import correction_factors, drifted_answers, second_moment_mask
from arealite.algorithms.kl import k3, kl_estimates, kl_losses
from arealite.algorithms.logprobs import LazyLogits, kept_sets, packed_logprobs, packed_logprobs_entropy, trained_tokens
from arealite.algorithms.ratios import masked_log_ratio
from arealite.api.cli_args import PPOActorConfig, resolve_choices
from arealite.api.errors import ConfigError
from arealite.api.workflow_api import Runs, runs_of
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.engine.ppo.batch import finite_rewards, groups_of, require_key, require_no_negative
from arealite.engine.ppo.metrics import OF_TOKENS, MaskedMetrics, note_losses, note_tokens, of_runs
from arealite.engine.ppo.objective import TokenLossFn, objective_of
from arealite.engine.ppo.own_functions import checked_advantages, checked_loss_fn
from arealite.utils.distributed import all_reduce, all_reduce_numbers, of_all_ranks
from arealite.utils.tensors import INPUTS

# What scripts of the original call these; a key that nobody reads would change the objective silently.
RENAMED_KEYS = {"prox_logp": "proximal_logprobs", "ref_logp": "ref_logprobs"}
TOKENS = (*INPUTS, "kept_ids", "kept_counts")  # and what they were sampled from, if narrowed
UNKNOWN_LOGPROB = -9999.0  # vLLM's, over HTTP, of a logprob that is not finite; such a token is not trained on

AdvantageFn = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""`(rewards [S], group_index [S], num_tokens [S]) -> advantages [S]` over all answers of the global batch."""


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
        self.choices: Any = self.config  # in which no choice is None any more
        self.engine = engine
        self.loss_fn = objective_of(self.choices) if loss_fn is None else checked_loss_fn(loss_fn)
        self.needs_every_row = loss_fn is not None or self.choices.entropy_ctl > 0  # also those with advantage 0
        if advantage_fn is not None and self.config.baseline == "teacher":
            raise ConfigError(
                "advantage_fn must not be given with actor.baseline teacher: got one. It would never be called; remove "
                "it or actor.algorithm=opd."
            )
        self.advantage_fn = advantage_fn
        self.per_token: dict[str, torch.Tensor] = {}  # of the last batch that was trained on

    def compute_logprobs(self, batch: TensorDict, *, whole: bool = False) -> torch.Tensor:
        """Return the logprob `[B, T]` of every token under the current weights, 0 for padding and first tokens.

        The softmax at `config.temperature` is over what each token was sampled from, where the batch has `kept_ids`
        (top-p, top-k); with `whole`, and always for a reference (no optimizer), over the whole vocabulary.
        """
        keys = INPUTS if whole or self.config.optimizer is None else TOKENS
        self.engine.eval()
        return self.engine.forward(
            batch.select(*keys, strict=False),
            lambda logits, micro_batch: packed_logprobs(
                logits, *self._tokens(micro_batch), kept=kept_sets(micro_batch)
            ),
        )

    compute_logp = compute_logprobs

    def compute_advantages(self, batch: TensorDict) -> None:
        """Add `advantages [B, T]` to the batch, 0 outside of the trained tokens; for a critic also its targets `returns
        [B, T]` and the mask `returns_mask [B, T]` of tokens that have one.

        Needs `rewards [B]`, the masks and logprobs of a trajectory, `ref_logprobs` with a KL penalty in the reward,
        `values [B, T]` with `baseline: critic`, and `no_eos [B]` where cut-off answers are treated apart. With
        `baseline: teacher` it needs `teacher_logprobs [B, T]` and no rewards.

        Groups compare runs: rows of one `sample_index` are one answer, and share its advantage. With `baseline: critic`
        and `none`, `turn_rewards [B, T]` take the place of `rewards`; other baselines leave them out.
        """
        self.per_token = {}  # of an earlier batch
        if self.config.baseline == "teacher":
            batch["advantages"] = self._teacher_advantages(batch)
            return
        config, (groups_B, num_groups) = self.choices, self._groups(batch)
        runs = runs_of(batch, groups_B)
        groups_R = groups_B[runs.first_rows]
        mask_BT = self._trained_tokens(batch)
        scores_R = self._shaped_rewards(batch, runs)
        kl_BT = torch.zeros_like(mask_BT, dtype=scores_R.dtype)
        if config.kl_ctl > 0 and config.kl_in == "reward":
            require_key(batch, "ref_logprobs", "kl_ctl > 0", "Set it to ref.compute_logprobs(batch)")
            log_ratio_BT = masked_log_ratio(self._whole_logprobs(batch), batch["ref_logprobs"], mask_BT)
            kl_BT = kl_estimates(log_ratio_BT, config.kl_estimator)
        if config.baseline == "leave_one_out":  # the KL of an answer is part of its reward, also for the others
            scores_R = scores_R - config.kl_ctl * runs.sum(kl_BT.sum(dim=1))
            kl_BT = torch.zeros_like(kl_BT)
        scores_R = self._relative_rewards(scores_R, groups_R, num_groups, runs.sum(mask_BT.sum(dim=1)))
        turn_rewards_BT = self._turn_rewards(batch)
        if turn_rewards_BT is not None:  # of the scores remains what bias, penalties and clipping have changed
            scores_R = scores_R - batch["rewards"][runs.first_rows] * config.reward_scaling
        scores_B = scores_R[runs.of_rows]
        rewards_BT = token_rewards(scores_B, mask_BT, kl_BT, kl_ctl=config.kl_ctl, turn_rewards=turn_rewards_BT)
        values_BT = torch.zeros_like(rewards_BT)
        if config.baseline == "critic":
            require_key(batch, "values", "baseline: critic", "Set it to critic.compute_values(batch)")
            values_BT = torch.where(mask_BT, batch["values"], 0.0)
            settings = {"discount": config.discount, "gae_lambda": config.returns_lambda}
            batch["returns"], batch["returns_mask"] = gae_returns(rewards_BT, values_BT, mask_BT, **settings), mask_BT
        gae_lambda = config.gae_lambda
        if config.lambda_alpha is not None:
            gae_lambda = adaptive_lambda(mask_BT.sum(dim=1), alpha=config.lambda_alpha)
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, discount=config.discount, gae_lambda=gae_lambda)
        if config.group_adv_norm or config.adv_norm:
            groups_BT = groups_B[:, None].expand_as(mask_BT)
            if not config.group_adv_norm:  # the whole batch is one group
                groups_BT, num_groups = torch.zeros_like(groups_BT), 1
            advantages_BT[mask_BT] = whiten(
                advantages_BT[mask_BT], groups_BT[mask_BT], num_groups, reduce=self._sum_over_ranks
            )
        batch["advantages"] = advantages_BT

    def ppo_update(self, batch: TensorDict) -> dict[str, float]:
        """Take `ppo_n_minibatches` optimizer steps (at most one per group) and one of the schedule; return metrics.

        Needs `advantages` and what they need. A group is in minibatch `group_index % ppo_n_minibatches`. Metrics are
        equal on all ranks. `per_token` then has what `note_tokens` says, of all real tokens of the batch in turn, and
        nan for those that the update left out.
        """
        groups_B, num_groups = self._groups(batch)
        columns, metrics = self._columns(batch), MaskedMetrics()
        mask_BT = batch["attention_mask"].bool()
        columns["token_place"] = mask_BT.flatten().cumsum(0).view_as(mask_BT) - 1
        num_tokens = int(mask_BT.sum())
        self.per_token = {key: torch.full((num_tokens,), torch.nan, device=self.engine.device) for key in OF_TOKENS}
        self.engine.train()
        num_minibatches = min(self.config.ppo_n_minibatches, num_groups)
        minibatch_B = groups_B % num_minibatches
        rows = [(minibatch_B == index).nonzero()[:, 0] for index in range(num_minibatches)]
        steps = [self._step(columns[of_step], groups_B[of_step], num_groups, metrics) for of_step in rows]
        self.engine.step_lr_scheduler()
        return {
            "policy/loss": sum(step["loss"] for step in steps) / len(steps),
            **self.engine.costs.take(self.engine.parallelism_group),
            **metrics.reduce(self.engine.parallelism_group),
            "optim/grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
            "optim/lr": steps[0]["lr"],
            "optim/skipped_steps": sum(1.0 - step["update_successful"] for step in steps),
            "perf/skipped_tokens": sum(step["skipped_tokens"] for step in steps),
            **self.describe(batch),
        }

    # Rewards

    def _teacher_advantages(self, batch: TensorDict) -> torch.Tensor:
        """Return log teacher - log student `[B, T]`, of the student as it is before the update where that is known."""
        require_key(batch, "teacher_logprobs", "baseline: teacher", "Set it to teacher.compute_logprobs(batch)")
        student_BT = self._whole_logprobs(batch)
        if "kept_ids" not in batch and "proximal_logprobs" in batch:
            student_BT = batch["proximal_logprobs"]
        return distillation_advantages(batch["teacher_logprobs"], student_BT, self._trained_tokens(batch))

    def _shaped_rewards(self, batch: TensorDict, runs: Runs) -> torch.Tensor:
        """Return the rewards `[R]`: cut-off answers treated, long ones penalised, then scaled."""
        config, rewards_R = self.choices, finite_rewards(batch)[runs.first_rows]
        if config.truncated == "zero":
            require_key(batch, "no_eos", "truncated: zero", "Let the workflow mark truncated completions")
            rewards_R = rewards_R.masked_fill(runs.max(batch["no_eos"].byte()).bool(), 0.0)
        if config.overlong_buffer is not None:
            lengths_R = runs.sum(batch["loss_mask"].sum(dim=1))
            rewards_R = rewards_R + config.overlong_penalty * overlong_penalty(
                lengths_R, longest=config.max_new_tokens, buffer=config.overlong_buffer
            )
        return scale_rewards(rewards_R, scaling=config.reward_scaling, bias=config.reward_bias, clip=config.reward_clip)

    def _turn_rewards(self, batch: TensorDict) -> torch.Tensor | None:
        """Return what turns earned `[B, T]`; None if advantages are of runs as a whole."""
        choices = (self.choices.baseline, self.choices.reward_scale)
        is_of_turns = choices in (("critic", "none"), ("none", "none")) and self.advantage_fn is None
        return batch["turn_rewards"] * self.choices.reward_scaling if "turn_rewards" in batch and is_of_turns else None

    def _relative_rewards(
        self, scores_R: torch.Tensor, groups_R: torch.Tensor, num_groups: int, num_tokens_R: torch.Tensor
    ) -> torch.Tensor:
        """Return the rewards `[R]` minus the baseline and over the scale, or what the user's function makes of them."""
        if self.advantage_fn is not None:
            of_ranks = [self._gather(values) for values in (scores_R, groups_R, num_tokens_R)]
            columns_S = [torch.cat(of_rank) for of_rank in of_ranks]
            advantages_S = checked_advantages(self.advantage_fn(*columns_S), columns_S[0])
            return advantages_S.split([len(one) for one in of_ranks[0]])[dist.get_rank(self.engine.parallelism_group)]
        baseline, scale = self.choices.baseline, self.choices.reward_scale
        if scale == "group_mean":
            require_no_negative(scores_R)
        return reward_advantages(
            scores_R,
            groups_R,
            num_groups,
            baseline="none" if baseline == "critic" else baseline,  # whose values enter token by token
            scale=scale,
            lengths=num_tokens_R,
            reduce=self._sum_over_ranks,
        )

    # Steps

    def _columns(self, batch: TensorDict) -> TensorDict:
        """Return what the loss reads; all of it is constant during the update."""
        config, proximal_BT = self.choices, self._proximal_logprobs(batch)
        columns = batch.select(*TOKENS, "advantages", strict=False)
        mask_BT = columns["loss_mask"] = self._trained_tokens(batch)
        columns["rollout_logprobs"] = batch["logprobs"]
        if config.kl_ctl > 0 and config.kl_in == "loss":
            require_key(batch, "ref_logprobs", "kl_ctl > 0", "Set it to ref.compute_logprobs(batch)")
            columns["ref_logprobs"] = batch["ref_logprobs"]
        columns["corrections"] = torch.ones_like(batch["logprobs"])
        if proximal_BT is not None:
            columns["proximal_logprobs"] = proximal_BT
            columns["corrections"] = self._corrections(proximal_BT, columns)
        if config.second_moment_limit is not None:
            assert proximal_BT is not None, "resolve_choices refuses it"
            columns["corrections"] *= second_moment_mask(
                proximal_BT,
                batch["logprobs"],
                mask_BT,
                max_moment=config.second_moment_limit,
                reduce=self._sum_over_ranks,
            )
        return columns

    def _corrections(self, proximal_BT: torch.Tensor, columns: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the factor `[B, T]` of each token's objective: off-policy correction and mask of drifted answers."""
        config, mask_BT, rollout_BT = self.choices, columns["loss_mask"], columns["rollout_logprobs"]
        factors_BT = torch.ones_like(rollout_BT)
        if config.correction.action != "none":
            settings = {key: value for key, value in vars(config.correction).items() if value is not None}
            factors_BT = correction_factors(proximal_BT, rollout_BT, mask_BT, **settings)
        if config.sequence_mask_delta is not None:
            drifted_B = drifted_answers(
                proximal_BT, rollout_BT, columns["advantages"], mask_BT, delta=config.sequence_mask_delta
            )
            factors_BT = factors_BT.masked_fill(drifted_B[:, None], 0.0)
        return factors_BT

    def _step(
        self, columns: TensorDict, groups_B: torch.Tensor, num_groups: int, metrics: MaskedMetrics
    ) -> dict[str, float]:
        """Take one optimizer step on the sum of c (f l + KL - entropy)."""
        mask_BT = columns["loss_mask"]
        columns["token_weights"] = token_weights(
            mask_BT,
            groups_B,
            num_groups,
            aggregation=self.choices.aggregation,
            loss_constant=self.choices.loss_constant,
            reduce=self._sum_over_ranks,
        ).to(columns["advantages"])
        rows = self._rows_to_train(columns)
        lengths_B = columns["attention_mask"].sum(dim=1)
        counts = [lengths_B[rows].sum().item(), lengths_B.sum().item(), mask_BT.sum().item()]
        num_tokens, num_in_all, num_trained = all_reduce_numbers(counts, group=self.engine.parallelism_group)
        if num_tokens == 0:  # no gradient but 0, with which the optimizer steps all the same
            rows, num_tokens = lengths_B.nonzero()[:, 0], num_in_all
        longest = int(lengths_B.max()) if len(lengths_B) else 0

        def weight(micro_batch: TensorDict) -> float:
            return float(len(micro_batch["input_ids"])) if num_trained else 0.0

        # The engine takes a mean over all tokens, and c already contains every denominator.
        def loss_fn(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
            return self._loss(logits, micro_batch, metrics, longest) * (num_tokens / weight(micro_batch))

        return self.engine.train_batch(columns[rows], loss_fn, weight) | {"skipped_tokens": num_in_all - num_tokens}

    def _rows_to_train(self, columns: TensorDict) -> torch.Tensor:
        """Return the indices of rows whose loss may have a gradient: not those of a group without spread, unless a KL
        penalty, an entropy bonus or a loss of the user acts on them. They still count as the aggregation says."""
        if self.needs_every_row or "ref_logprobs" in columns:
            return columns["attention_mask"].any(dim=1).nonzero()[:, 0]
        return ((columns["advantages"] != 0) & columns["loss_mask"]).any(dim=1).nonzero()[:, 0]

    def _loss(self, logits: LazyLogits, micro_batch: TensorDict, metrics: MaskedMetrics, longest: int) -> torch.Tensor:
        config, mask_N = self.choices, micro_batch["loss_mask"]
        tokens, kept = self._tokens(micro_batch), kept_sets(micro_batch)
        logprobs_N, entropy_N = packed_logprobs_entropy(logits, *tokens, kept=kept, entropy_grad=config.entropy_ctl > 0)
        if config.proximal == "current":
            micro_batch["proximal_logprobs"] = logprobs_N.detach()
            keys = ("proximal_logprobs", "rollout_logprobs", "advantages", "loss_mask")
            places = micro_batch["segment_ids"], micro_batch["position_ids"]  # in rows: `[B, longest]`, without a sync
            shape = len(micro_batch["cu_seqlens"]) - 1, longest
            rows = {key: micro_batch[key].new_zeros(shape).index_put(places, micro_batch[key]) for key in keys}
            micro_batch["corrections"] = self._corrections(rows["proximal_logprobs"], rows)[places]
        note_tokens(self.per_token, micro_batch, logprobs_N.detach())
        losses_N, statistics = self.loss_fn(logprobs_N, micro_batch)
        losses_N = micro_batch["corrections"] * torch.where(mask_N, losses_N, 0.0)
        if "ref_logprobs" in micro_batch:
            whole_N = logprobs_N if kept is None else packed_logprobs(logits, *tokens)
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
        """Return the logprobs `[B, T]` to clip around; None is those of the forward pass of the update itself."""
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
        """Return what a KL compares with the reference, over the whole vocabulary: for narrowed samples recomputed."""
        if "kept_ids" not in batch:
            return self._sampling_logprobs(batch)
        if "whole_logprobs" not in batch:
            batch["whole_logprobs"] = self.compute_logprobs(batch, whole=True)
        return batch["whole_logprobs"]

    def _sampling_logprobs(self, batch: TensorDict) -> torch.Tensor:
        """Return the logprobs `[B, T]` of the policy that sampled: the server's, or recomputed ones where those count
        as its (without a correction), which leaves out the numerical gap to the server."""
        is_recomputed = self.config.proximal == "recompute" and self.config.correction.action == "none"
        return batch["proximal_logprobs" if is_recomputed and "proximal_logprobs" in batch else "logprobs"]

    def _trained_tokens(self, batch: TensorDict) -> torch.Tensor:
        """Return the bool mask `[B, T]` of tokens to train on: those that were sampled, with a known logprob."""
        mask_BT = trained_tokens(batch["attention_mask"], batch["loss_mask"]) & (batch["logprobs"] > UNKNOWN_LOGPROB)
        if self.config.truncated == "mask":
            require_key(batch, "no_eos", "truncated: mask", "Let the workflow mark truncated completions")
            mask_BT &= ~batch["no_eos"].bool()[:, None]
        return mask_BT

    def describe(self, batch: TensorDict) -> dict[str, float]:
        """Return the metrics of the global batch itself, equal on all ranks; those of an update contain them.

        `policy/mismatch_kl` is the k3 estimate, over trained tokens, of the divergence between the server's policy and
        the recomputed one: numerical differences, plus the drift of the weights since a stale token was sampled.
        `policy/ref_kl` is that between the sampling policy, or the recomputed one without a correction, and the
        reference. A dead group, whose rewards are all equal, teaches nothing with a baseline of groups.
        """
        metrics, mask_BT = MaskedMetrics(), self._trained_tokens(batch)
        version, lengths_B = self.engine.get_version(), batch["attention_mask"].sum(dim=1)
        staleness_B = version - batch["versions"].masked_fill(~mask_BT, version).amin(dim=1)
        groups_B, num_groups = self._groups(batch)
        runs = runs_of(batch, groups_B)
        metrics.add(torch.ones_like(runs.first_rows), of_runs(batch, runs, staleness_B))
        metrics.add(torch.ones_like(lengths_B), {"rollout/prompt_tokens": lengths_B - batch["loss_mask"].sum(dim=1)})
        if "proximal_logprobs" in batch:
            log_ratio_BT = batch["logprobs"].double() - batch["proximal_logprobs"].double()
            metrics.add(mask_BT, {"policy/mismatch_kl": k3(log_ratio_BT)})
        if "ref_logprobs" in batch and ("kept_ids" not in batch or "whole_logprobs" in batch):
            log_ratio_BT = self._whole_logprobs(batch).double() - batch["ref_logprobs"].double()
            metrics.add(mask_BT, {"policy/ref_kl": k3(log_ratio_BT)})
        if self.config.baseline == "teacher":
            metrics.add(mask_BT, {"policy/teacher_kl": -batch["advantages"]})
        groups_R, rewards_R = groups_B[runs.first_rows], batch["rewards"].float()[runs.first_rows]
        (deviation,) = spread(rewards_R, torch.zeros_like(groups_R), 1, reduce=self._sum_over_ranks)[1].tolist()
        deviations_G = spread(rewards_R, groups_R, num_groups, reduce=self._sum_over_ranks)[1]
        unknown_BT = trained_tokens(batch["attention_mask"], batch["loss_mask"]) & ~mask_BT
        counts = [one.sum().item() for one in (lengths_B, mask_BT, unknown_BT)]
        num_tokens, num_trained, num_unknown = all_reduce_numbers(counts, group=self.engine.parallelism_group)
        return metrics.reduce(self.engine.parallelism_group) | {
            "reward/std": deviation,
            "reward/dead_group_ratio": (deviations_G == 0).sum().item() / num_groups,
            "rollout/unknown_logprobs": num_unknown,
            "perf/processed_tokens": num_tokens,
            "perf/trained_tokens": num_trained,
        }

    def _groups(self, batch: TensorDict) -> tuple[torch.Tensor, int]:
        return groups_of(batch, self.config.group_size, self.engine.parallelism_group)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(tensor, group=self.engine.parallelism_group)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, which may differ in length."""
        return [one.to(tensor.device) for one in of_all_ranks(tensor.cpu(), self.engine.parallelism_group)]


class FSDPPPOActor(FSDPEngine, PPOActor):
    """The policy on FSDP2; with `optimizer: null` a frozen reference. Dropout is off: ratios would be noise."""

    config: PPOActorConfig

    def __init__(
        self, config: PPOActorConfig, loss_fn: TokenLossFn | None = None, advantage_fn: AdvantageFn | None = None
    ) -> None:
        config = dataclasses.replace(config, disable_dropout=True)
        FSDPEngine.__init__(self, config)
        PPOActor.__init__(self, config, engine=self, loss_fn=loss_fn, advantage_fn=advantage_fn)
