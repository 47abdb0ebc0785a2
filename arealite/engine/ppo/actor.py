"""The policy of PPO and GRPO: logprobs, advantages and updates of one engine.

Tensors `[B, T]` are aligned with the token they are about (nothing is shifted). Invariant: statistics, advantages and
minibatches depend on `group_index`, a row's group in the global batch, and never on the rank that holds the row.
"""

# B rows of this rank, T padded tokens, N packed tokens

import dataclasses
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from tensordict import TensorDict

from arealite.algorithms.advantages import gae, scale_rewards, spread, token_rewards, whiten
from arealite.algorithms.kl import k3
from arealite.algorithms.logprobs import (
    LazyLogits,
    count_loss_tokens,
    packed_logprobs,
    packed_logprobs_entropy,
    trained_tokens,
)
from arealite.algorithms.ppo import ppo_actor_loss_fn
from arealite.api.cli_args import PPOActorConfig, resolve_choices
from arealite.api.workflow_api import own_metrics
from arealite.engine.fsdp_engine import FSDPEngine
from arealite.utils.distributed import all_reduce, all_reduce_numbers
from arealite.utils.stats import Reduction, reduction_of

# What scripts of the original call these; a key that nobody reads would change the objective silently.
RENAMED_KEYS = {"prox_logp": "proximal_logprobs", "ref_logp": "ref_logprobs"}
UNKNOWN_LOGPROB = -9999.0  # vLLM's, over HTTP, of a logprob that is not finite; such a token is not trained on
_Reduce = Callable[..., torch.Tensor]
_REDUCTIONS: dict[Reduction, tuple[_Reduce, float, _Reduce]] = {  # of values, the result of none, of two results
    "mean": (torch.sum, 0.0, torch.add),
    "max": (torch.max, -math.inf, torch.maximum),
    "min": (torch.min, math.inf, torch.minimum),
}


class PPOActor:
    """Runs the algorithm on an engine. Every method is collective."""

    def __init__(self, config: PPOActorConfig, engine: FSDPEngine) -> None:
        self.config = resolve_choices(config)
        self.engine = engine
        _require_built(self.config)

    def compute_logprobs(self, batch: TensorDict) -> torch.Tensor:
        """Return the logprob `[B, T]` of every token under the current weights, 0 for padding and first tokens.

        The softmax is over the whole vocabulary at `config.temperature`: rollouts sampled with top-p or top-k differ.
        """
        self.engine.eval()
        return self.engine.forward(
            batch.select("input_ids", "attention_mask"),
            lambda logits, micro_batch: packed_logprobs(
                logits, micro_batch["input_ids"], micro_batch["cu_seqlens"], self.config.temperature
            ),
        )

    compute_logp = compute_logprobs

    def compute_advantages(self, batch: TensorDict) -> None:
        """Add `advantages [B, T]` to the batch, 0 outside of the trained tokens.

        Needs `rewards [B]`, the masks and logprobs of a trajectory, `ref_logprobs` with a KL penalty; takes `values`.
        """
        config = self.config
        groups_B, num_groups = self._groups(batch)
        rewards_B = batch["rewards"]
        if config.truncated == "zero":
            _require(batch, "no_eos", "truncated: zero", "Let the workflow mark truncated completions")
            rewards_B = rewards_B.masked_fill(batch["no_eos"].bool(), 0.0)
        scores_B = scale_rewards(
            rewards_B, scaling=config.reward_scaling, bias=config.reward_bias, clip=config.reward_clip
        )
        if config.reward_scale == "group_std":
            scores_B = whiten(scores_B, groups_B, num_groups, reduce=self._sum_over_ranks)
        mask_BT = _trained_tokens(batch)
        kl_BT = None
        if config.kl_ctl > 0:
            _require(batch, "ref_logprobs", "kl_ctl > 0", "Set it to ref.compute_logprobs(batch)")
            kl_BT = self._old_logprobs(batch)[1] - batch["ref_logprobs"]
        rewards_BT = token_rewards(scores_B, mask_BT, kl_BT, kl_ctl=config.kl_ctl)
        values_BT = batch["values"] if "values" in batch else torch.zeros_like(rewards_BT)
        assert config.discount is not None and config.gae_lambda is not None
        advantages_BT = gae(rewards_BT, values_BT, mask_BT, discount=config.discount, gae_lambda=config.gae_lambda)
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
        equal on all ranks.
        """
        config = self.config
        groups_B, num_groups = self._groups(batch)
        if num_groups == 0:
            raise ValueError("a batch must have a row on some rank: got none. Train on what prepare_batch returns.")
        proximal_BT, rollout_BT = self._old_logprobs(batch)
        columns = batch.select("input_ids", "attention_mask", "advantages")
        columns["loss_mask"] = _trained_tokens(batch)
        columns["proximal_logprobs"], columns["rollout_logprobs"] = proximal_BT, rollout_BT
        metrics = MaskedMetrics()
        eps_clip = config.eps_clip
        assert eps_clip is not None

        def loss_fn(logits: LazyLogits, micro_batch: TensorDict) -> torch.Tensor:
            logprobs_N, entropy_N = packed_logprobs_entropy(
                logits, micro_batch["input_ids"], micro_batch["cu_seqlens"], config.temperature
            )
            loss, statistics = ppo_actor_loss_fn(
                logprobs_N,
                micro_batch["proximal_logprobs"],
                micro_batch["rollout_logprobs"],
                micro_batch["advantages"],
                eps_clip,
                micro_batch["loss_mask"],
                config.c_clip,
                config.correction.upper,
            )
            statistics["entropy"] = entropy_N
            mask_N = micro_batch["loss_mask"]
            kept_N = mask_N & ~statistics["rollout_importance_dropped_ratio"]
            weight_N = torch.where(kept_N, statistics.pop("rollout_importance_weight"), 0.0)
            metrics.add(kept_N, {"policy/rollout_importance_weight": weight_N})
            metrics.add(mask_N, {f"policy/{name}": value for name, value in statistics.items()})
            largest = {"policy/ratio_max": statistics["ratio"], "policy/rollout_importance_weight_max": weight_N}
            metrics.add(mask_N, largest)
            return loss

        self.engine.train()
        num_minibatches = min(config.ppo_n_minibatches, num_groups)
        steps = [
            self.engine.train_batch(columns[groups_B % num_minibatches == index], loss_fn, count_loss_tokens)
            for index in range(num_minibatches)
        ]
        self.engine.step_lr_scheduler()
        described = self._describe(batch, columns["loss_mask"], metrics)
        return {
            "policy/loss": sum(step["loss"] for step in steps) / len(steps),
            **metrics.reduce(self.engine.parallelism_group),
            "optim/grad_norm": sum(step["grad_norm"] for step in steps) / len(steps),
            "optim/lr": steps[0]["lr"],
            "optim/skipped_steps": sum(1.0 - step["update_successful"] for step in steps),
            **described,
        }

    def _old_logprobs(self, batch: TensorDict) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the proximal logprobs, to clip around, and those of the policy that sampled.

        With a correction: the recomputed ones and the server's. Without, both are the recomputed ones with `proximal:
        recompute` (which leaves out the numerical gap to the server), else the server's.
        """
        for old, new in RENAMED_KEYS.items():
            if old in batch:
                raise ValueError(f"the key {old!r} of a batch must be called {new!r}: got {old!r}. Rename it.")
        if self.config.proximal != "recompute":
            return batch["logprobs"], batch["logprobs"]
        _require(batch, "proximal_logprobs", "proximal: recompute", "Set it to actor.compute_logprobs(batch)")
        proximal_BT = batch["proximal_logprobs"]
        return proximal_BT, proximal_BT if self.config.correction.action == "none" else batch["logprobs"]

    def _describe(self, batch: TensorDict, mask_BT: torch.Tensor, metrics: "MaskedMetrics") -> dict[str, float]:
        """Describe the global batch: add what can be reduced value by value to `metrics`, and return the rest.

        `policy/mismatch_kl` is the k3 estimate, over trained tokens, of the divergence between the server's policy and
        the recomputed one: numerical differences, plus the drift of the weights since a stale token was sampled.
        `policy/ref_kl` is that between the sampling policy, or the recomputed one without the decoupled loss, and the
        reference. A dead group, whose rewards are all equal, teaches nothing with baseline group_mean.
        """
        version, lengths_B = self.engine.get_version(), batch["attention_mask"].sum(dim=1)
        staleness_B = version - batch["versions"].masked_fill(~mask_BT, version).amin(dim=1)
        sampled_B = batch["loss_mask"].sum(dim=1)
        rows = {"reward/mean": batch["rewards"], "rollout/prompt_tokens": lengths_B - sampled_B}
        rows |= dict.fromkeys(("staleness/mean", "staleness/max"), staleness_B)
        rows |= {f"rollout/completion_tokens{suffix}": sampled_B for suffix in ("", "_min", "_max")}
        if "no_eos" in batch:
            rows["rollout/truncated_ratio"] = batch["no_eos"]
        own = {name if "/" in name else f"workflow/{name}": values_B for name, values_B in own_metrics(batch).items()}
        metrics.add(torch.ones_like(lengths_B), own | rows)
        if "proximal_logprobs" in batch:
            log_ratio_BT = batch["logprobs"].double() - batch["proximal_logprobs"].double()
            metrics.add(mask_BT, {"policy/mismatch_kl": k3(log_ratio_BT)})
        if "ref_logprobs" in batch:
            log_ratio_BT = self._old_logprobs(batch)[1].double() - batch["ref_logprobs"].double()
            metrics.add(mask_BT, {"policy/ref_kl": k3(log_ratio_BT)})
        groups_B, num_groups = self._groups(batch)
        (deviation,) = spread(batch["rewards"], torch.zeros_like(groups_B), 1, reduce=self._sum_over_ranks)[1].tolist()
        deviations_G = spread(batch["rewards"], groups_B, num_groups, reduce=self._sum_over_ranks)[1]
        unknown_BT = trained_tokens(batch["attention_mask"], batch["loss_mask"]) & ~mask_BT
        counts = [one.sum().item() for one in (lengths_B, mask_BT, unknown_BT)]
        num_tokens, num_trained, num_unknown = all_reduce_numbers(counts, group=self.engine.parallelism_group)
        return {
            "reward/std": deviation,
            "reward/dead_group_ratio": (deviations_G == 0).sum().item() / (~deviations_G.isnan()).sum().item(),
            "rollout/unknown_logprobs": num_unknown,
            "perf/processed_tokens": num_tokens,
            "perf/trained_tokens": num_trained,
        }

    def _groups(self, batch: TensorDict) -> tuple[torch.Tensor, int]:
        """Return each row's group `[B]` in the global batch and the number of groups.

        Without `group_index`, rows are whole groups of `config.group_size`, rank after rank.
        """
        group = self.engine.parallelism_group
        if "group_index" in batch:
            groups_B = batch["group_index"]
        else:
            num_rows, size = batch.batch_size[0], self.config.group_size
            if num_rows % size:
                raise ValueError(
                    f"the rows of a rank must be a multiple of group_size {size}: got {num_rows}. "
                    "Give the batch a group_index, as prepare_batch does."
                )
            counts = torch.zeros(dist.get_world_size(group))
            rank = dist.get_rank(group)
            counts[rank] = num_rows // size
            first = int(all_reduce(counts, group=group)[:rank].sum())
            groups_B = first + torch.arange(num_rows, device=batch["attention_mask"].device) // size
        num_groups = groups_B.max().item() + 1 if len(groups_B) else 0
        (num_on_all,) = all_reduce_numbers([num_groups], dist.ReduceOp.MAX, group)
        return groups_B, int(num_on_all)

    def _sum_over_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        return all_reduce(tensor, group=self.engine.parallelism_group)


class FSDPPPOActor(FSDPEngine, PPOActor):
    """The policy on FSDP2; with `optimizer: null` a frozen reference. Dropout is off: ratios would be noise."""

    config: PPOActorConfig

    def __init__(self, config: PPOActorConfig) -> None:
        config = dataclasses.replace(config, disable_dropout=True)
        FSDPEngine.__init__(self, config)
        PPOActor.__init__(self, config, engine=self)


class MaskedMetrics:
    """Means (maxima, minima where a name ends so) of values under masks, over all that was added and all ranks."""

    def __init__(self) -> None:
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, mask: torch.Tensor, values: Mapping[str, torch.Tensor]) -> None:
        """Add values under a mask of their shape."""
        for name, value in values.items() if mask.numel() else ():
            total, of_none, _ = _REDUCTIONS[reduction_of(name)]
            count = mask.double().sum() if total is torch.sum else torch.ones((), device=mask.device)
            kept = torch.where(mask.bool(), value.double(), of_none)
            _merge(self._totals, {name: torch.stack([total(kept), count])})

    def reduce(self, group: dist.ProcessGroup) -> dict[str, float]:
        """Return the results, also of names that only other ranks added (collective)."""
        of_ranks: list[dict[str, torch.Tensor]] = [{}] * dist.get_world_size(group)
        dist.all_gather_object(of_ranks, {name: entry.cpu() for name, entry in self._totals.items()}, group=group)
        totals: dict[str, torch.Tensor] = {}
        for of_rank in of_ranks:
            _merge(totals, of_rank)
        return {name: total.item() / max(count.item(), 1.0) for name, (total, count) in totals.items()}


def _merge(totals: dict[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> None:
    for name, other in others.items():
        merged = _REDUCTIONS[reduction_of(name)][2]
        totals[name] = merged(totals[name], other) if name in totals else other


def _trained_tokens(batch: TensorDict) -> torch.Tensor:
    """Return the bool mask `[B, T]` of tokens to train on: those that were sampled, with a known logprob."""
    return trained_tokens(batch["attention_mask"], batch["loss_mask"]) & (batch["logprobs"] > UNKNOWN_LOGPROB)


def _require_built(config: PPOActorConfig) -> None:
    """Refuse choices that this actor does not train with yet."""
    correction = config.correction
    built = {
        "baseline and reward_scale": (config.baseline, config.reward_scale)
        in (("none", "none"), ("group_mean", "group_std")),
        "objective": config.objective == "ppo" and config.importance_sampling_level == "token",
        "eps_clip_higher": config.eps_clip_higher == config.eps_clip,
        "aggregation": config.aggregation == "token_mean",
        "proximal": config.proximal != "current",
        "correction": correction.action == "none"
        or (correction.action, correction.level, correction.metric, correction.lower)
        == ("mask", "token", "ratio", None),
        "kl_in": config.kl_ctl == 0 or (config.kl_in, config.kl_estimator) == ("reward", "k1"),
        "truncated": config.truncated != "mask",
        "overlong_buffer, sequence_mask_delta, second_moment_limit and entropy_ctl": config.entropy_ctl == 0
        and (config.overlong_buffer, config.sequence_mask_delta, config.second_moment_limit) == (None, None, None),
    }
    for name, is_built in built.items():
        if not is_built:
            raise ValueError(f"actor.{name} must be the default: got another choice, not built yet. Remove it.")


def _require(batch: TensorDict, key: str, because: str, remedy: str) -> None:
    if key not in batch:
        raise ValueError(f"a batch must have {key!r} with {because}: got {sorted(batch.keys())}. {remedy}.")
