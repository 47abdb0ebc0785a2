"""A model and how it is trained: optimizer, sharding, micro-batches, the policy's objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from arealite.api.config.types import (
    MISSING,
    AboveOne,
    Bool,
    ConfigBase,
    Dtype,
    Finite,
    Fraction,
    HalfOpenFraction,
    NonNegative,
    NonNegativeInt,
    OpenFraction,
    Positive,
    PositiveInt,
    RunBlock,
)


class OptimizerConfig(ConfigBase):
    """AdamW and its learning-rate schedule."""

    type: Literal["adam", "adam_bf16"] = "adam"
    """AdamW, whose moments are kept in float32 (`adam`) or rounded to bfloat16 (`adam_bf16`: a quarter less memory)."""
    lr: NonNegative = 2e-5
    """Peak learning rate."""
    weight_decay: NonNegative = 0.05
    """Decoupled weight decay."""
    beta1: HalfOpenFraction = 0.9
    """Decay of the mean of gradients."""
    beta2: HalfOpenFraction = 0.95
    """Decay of the mean of squared gradients."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    min_lr_ratio: Fraction = 0.0
    """Final learning rate of the linear and cosine schedules, as a share of `lr`."""
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the schedule after warmup."""
    warmup_steps_proportion: Fraction = 0.001
    """Share of the training steps in which the learning rate rises from 0."""
    gradient_clipping: Positive = 1.0
    """Largest norm of the gradient."""


class MicroBatchSpec(ConfigBase):
    """How a batch is split so that it fits into memory. Never changes the gradient."""

    n_mbs: PositiveInt = 1
    """Smallest number of micro-batches."""
    max_tokens_per_mb: PositiveInt | None = None
    """Largest number of tokens in a micro-batch; None is no limit."""


class FSDPWrapPolicy(ConfigBase):
    """Which modules FSDP shards one by one."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names; None is what the model declares."""


class FSDPEngineConfig(ConfigBase):
    """How FSDP2 shards the model."""

    wrap_policy: FSDPWrapPolicy | None = None
    """None is what the model declares."""
    offload_params: Bool = False
    """Keep parameters and optimizer state in CPU memory."""
    dp_replicate: PositiveInt = 1
    """Copies of the model, each sharded over ranks / dp_replicate (HSDP). With one per node only gradients cross nodes;
    state takes dp_replicate times the memory."""
    reduce_once: Bool = False
    """Sum gradients over ranks once per step instead of once per micro-batch: faster for small models on slow links;
    each rank then keeps the whole float32 gradient."""


class LoRAConfig(ConfigBase):
    """Low-rank adapters, arXiv:2106.09685, by PEFT (`pip install 'arealite[lora]'`): all else is frozen."""

    rank: PositiveInt = 16
    """Rank of an adapter."""
    alpha: PositiveInt = 32
    """An adapter is scaled by alpha / rank."""
    dropout: HalfOpenFraction = 0.0
    """Dropout of an adapter's input; must be 0 where `disable_dropout` is true."""
    target_modules: str | list[str] = "all-linear"
    """Linear layers with adapters: `all-linear` (all but the output layer), a regular expression, or ends of names."""
    merge_on_save: Bool = False
    """Save whole models, with merged adapters, instead of adapters in PEFT's format."""


class TrainEngineConfig(RunBlock):
    """A model and how it is trained. Parameters are float32."""

    IS_EXTENDED: ClassVar[bool] = True
    HAS_VALUE_HEAD: ClassVar[bool] = False
    """Whether the model ends in one value per token instead of logits."""

    path: str = MISSING
    """Hugging Face folder or hub id of the model; filled in from `tokenizer_path` if only that is given."""
    init_from_scratch: Bool = False
    """Start from random weights (only the architecture is read from `path`)."""
    attn_impl: str | None = None
    """Attention implementation of transformers, `packed_sdpa` or `packed_varlen` (torch's FlashAttention); None picks
    the fastest for the device; on GPUs the log says which."""
    dtype: Dtype = "bfloat16"
    """Compute dtype."""
    grad_reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks."""
    gradient_checkpointing: Bool = True
    """Recompute activations in the backward pass: less memory, more time."""
    activation_offloading: Bool = False
    """Move what `gradient_checkpointing` keeps, the input of each layer, to the host until the backward pass."""
    torch_compile: Bool = False
    """Compile the layers of the model: faster steps, after minutes in the first one; needs a C++ compiler."""
    cast_lm_head_to_fp32: Bool = False
    """Compute logits in float32: exact logprobs under bfloat16, for a slower output layer of twice the memory."""
    disable_dropout: Bool = False
    """Set every dropout of the model to 0."""
    router_aux_loss_coef: NonNegative = 0.0
    """Weight of the loss that balances the load of experts (arXiv:2101.03961), which RL usually leaves at 0. It is
    computed over the tokens of one micro-batch of all ranks, so it depends on their number a little."""
    mb_spec: MicroBatchSpec = MicroBatchSpec()
    """How batches are split."""
    optimizer: OptimizerConfig | None = None
    """None is a model that is never trained (a reference)."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters; None trains all weights."""
    fsdp: FSDPEngineConfig = FSDPEngineConfig()
    """Sharding."""
    parallel: str = ""
    """Sizes of the ranks, such as `d2t2` (docs/parallel.md); filled in from `allocation_mode`. Empty is d alone."""
    seed: NonNegativeInt = 1
    """Seed of random weights and dropout; filled in from the top level."""

    def is_base_of(self, policy: TrainEngineConfig) -> bool:
        """Tell whether a reference is what a policy with LoRA is without its adapters, and needs no weights."""
        names = ("path", "dtype", "cast_lm_head_to_fp32")
        is_same = all(getattr(self, name) == getattr(policy, name) for name in names)
        return is_same and self.optimizer is None and policy.lora is not None

    def learning_keys(self) -> list[str]:
        """Return the keys of the algorithm that differ from their defaults."""
        default, others = type(self)(), {*TrainEngineConfig.model_fields, "group_size", "temperature"}
        names = [name for name in type(self).model_fields if name not in others]
        return [name for name in names if getattr(self, name) != getattr(default, name)]


@dataclass(frozen=True)
class Choice:
    """Marks a key of the algorithm, which `resolve_choices` gives a value."""

    default: Any = None
    """Its value unless the user or a preset gives one."""
    when: str = ""
    """Where it means something, as `objective=ppo` or `correction.action=truncate|mask`; it is null elsewhere."""


class CorrectionConfig(ConfigBase):
    """Factor of the objective that corrects for sampling with other weights: w = proximal / rollout probability."""

    action: Annotated[Literal["none", "truncate", "mask"] | None, Choice("none")] = None
    """`truncate`: min(w, upper). `mask`: w, or 0 outside of the bounds. None is `none`: no factor."""
    level: Annotated[
        Literal["token", "sequence", "geometric"] | None, Choice("token", when="correction.action=truncate|mask")
    ] = None
    """What the bounds apply to: w of a token, its product over the completion, or its geometric mean over the
    completion, which masks completions and leaves token weights, at most 2, to the others. None is token; with one
    ratio per completion (gspo, gmpo) it must be another, and geometric is that of their presets."""
    metric: Annotated[Literal["ratio", "k1", "k2", "k3"] | None, Choice("ratio", when="correction.action=mask")] = None
    """What is compared with the bounds of `mask`: w itself, or an estimate of the divergence. None is ratio."""
    lower: Annotated[Finite | None, Choice(when="correction.action=mask")] = None
    """Lower bound of `mask`; None is no bound."""
    upper: Annotated[Finite | None, Choice(when="correction.action=truncate|mask")] = None
    """Upper bound; None is no bound."""


class PPOActorConfig(TrainEngineConfig):
    """The policy and its algorithm. Choices that are null are filled in by `resolve_choices`; docs/algorithms.md."""

    disable_dropout: Bool = True
    """Always on: dropout would make the ratios of policies noise."""
    group_size: PositiveInt = 1
    """Samples per prompt; must equal `gconfig.n_samples`, from which it is filled in."""
    max_new_tokens: PositiveInt | None = None
    """Longest completion; must equal `gconfig.max_new_tokens`, from which it is filled in."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps per batch."""
    temperature: Positive = 1.0
    """Temperature of the logprobs; must equal `gconfig.temperature`, from which it is filled in."""
    algorithm: str | None = None
    """Preset that fills in choices that are not given: grpo, dr_grpo, dapo, gspo, cispo, rloo, reinforce_plus_plus,
    reinforce_plus_plus_baseline, ppo, sapo, gmpo, lite_ppo, max_rl, dppo or opd. None is the default of each."""
    reward_bias: Finite = 0.0
    """Added to rewards before scaling."""
    reward_scaling: Finite = 1.0
    """Rewards become (reward + reward_bias) * reward_scaling."""
    reward_clip: Positive | None = None
    """Largest absolute value of a scaled reward; None is no limit."""
    truncated: Annotated[Literal["keep", "zero", "mask"] | None, Choice("keep")] = None
    """Completions truncated at the token limit: `keep` their reward, `zero` the raw reward, or `mask` them from the
    loss. None is keep."""
    overlong_buffer: PositiveInt | None = None
    """Tokens before `max_new_tokens` within which the reward falls linearly (DAPO); None is off."""
    overlong_penalty: NonNegative = 1.0
    """What the longest completion loses through `overlong_buffer`."""
    dynamic_sampling: Annotated[Bool | None, Choice(False)] = None
    """Reject groups whose raw rewards are all equal and sample others (DAPO); the script passes it to prepare_batch as
    should_accept. None is false."""
    baseline: Annotated[
        Literal["none", "group_mean", "leave_one_out", "length_weighted", "critic", "teacher"] | None, Choice("none")
    ] = None
    """What is subtracted from rewards; with `teacher` the advantage of a token is the teacher's logprob minus the
    student's, and rewards are only logged. None is group_mean in GRPOConfig, critic in PPOConfig, else none."""
    reward_scale: Annotated[Literal["none", "group_std", "batch_std", "group_mean"] | None, Choice("none")] = None
    """What rewards minus the baseline are divided by. None is group_std in GRPOConfig, else none."""
    adv_norm: Annotated[Bool | None, Choice(True)] = None
    """Normalise advantages over all trained tokens of the batch. None is false in GRPOConfig, else true."""
    group_adv_norm: Bool = False
    """Normalise advantages within each group instead."""
    discount: Annotated[Fraction | None, Choice(1.0)] = None
    """Gamma of the advantage estimate. None is 1."""
    gae_lambda: Annotated[Fraction | None, Choice(1.0)] = None
    """Lambda of the advantage estimate. None is 1, in PPOConfig 0.95."""
    returns_lambda: Annotated[Fraction | None, Choice(when="baseline=critic")] = None
    """Lambda of the returns that a critic learns (VAPO: 1). None is `gae_lambda`."""
    objective: Annotated[Literal["ppo", "reinforce", "cispo", "sapo", "gmpo", "dppo"] | None, Choice("ppo")] = None
    """Loss of a token. None is ppo."""
    importance_sampling_level: Annotated[Literal["token", "sequence"] | None, Choice("token")] = None
    """Whether ppo clips the ratio of a token or its geometric mean over the completion (GSPO). None is token."""
    eps_clip: Annotated[OpenFraction | None, Choice(0.2, when="objective=ppo")] = None
    """ppo: ratio of the new to the proximal probability is clipped to [1 - eps_clip, 1 + eps_clip_higher]. None is
    0.2."""
    eps_clip_higher: Annotated[Positive | None, Choice(when="objective=ppo")] = None
    """ppo: distance of the upper bound; None is `eps_clip`."""
    c_clip: Annotated[AboveOne | None, Choice(when="objective=ppo")] = None
    """Dual clipping (ppo): bound of the loss for negative advantages, as a multiple of them; None is off."""
    cispo_max: Annotated[Positive | None, Choice(5.0, when="objective=cispo")] = None
    """cispo: upper bound of the ratio; there is no lower one. None is 5."""
    sapo_tau_positive: Annotated[Positive | None, Choice(1.0, when="objective=sapo")] = None
    """sapo: temperature for positive advantages. None is 1."""
    sapo_tau_negative: Annotated[Positive | None, Choice(1.05, when="objective=sapo")] = None
    """sapo: temperature for other advantages. None is 1.05."""
    gmpo_eps_log: Annotated[Positive | None, Choice(0.4, when="objective=gmpo")] = None
    """gmpo: log ratios of tokens are clipped to [-gmpo_eps_log, gmpo_eps_log]. None is 0.4."""
    dppo_delta: Annotated[OpenFraction | None, Choice(0.2, when="objective=dppo")] = None
    """dppo: change of a token's probability above which it is left out. None is 0.2."""
    proximal: Annotated[Literal["recompute", "current", "rollout"] | None, Choice("rollout")] = None
    """Policy to clip around: logprobs recomputed before the update, those of the update itself (exact with one
    optimizer step per batch, and a forward pass cheaper), or the server's (no correction). None is rollout."""
    correction: CorrectionConfig = CorrectionConfig()
    """Off-policy correction of the objective."""
    sequence_mask_delta: Positive | None = None
    """Completions with a negative advantage and a mean log(rollout / proximal) above this are left out; None is off."""
    aggregation: Annotated[
        Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] | None, Choice("token_mean")
    ] = None
    """What weighs equally in the loss: tokens, completions, prompts; `constant` divides the sum of a completion by
    `loss_constant`. None is token_mean."""
    loss_constant: Annotated[Positive | None, Choice(when="aggregation=constant")] = None
    """Divisor of aggregation constant. None is `max_new_tokens`."""
    kl_ctl: NonNegative = 0.0
    """Weight of the KL penalty to the reference; above 0 it needs a `ref` block."""
    kl_in: Annotated[Literal["reward", "loss"] | None, Choice("reward")] = None
    """Where the KL penalty acts. None is reward."""
    kl_estimator: Annotated[Literal["k1", "k2", "k3"] | None, Choice("k1")] = None
    """Estimator of the KL divergence per token: k1 in the reward, k2 or k3 in the loss. None is k1 or k3."""
    entropy_ctl: NonNegative = 0.0
    """Weight of the entropy bonus."""

    def as_actor(self) -> Self:
        """Return a copy with what is always on, for an engine."""
        return self.new(disable_dropout=True)


class FrozenActorConfig(TrainEngineConfig):
    """A reference or a teacher: a policy that only computes logprobs."""

    disable_dropout: Bool = True
    """Always on: dropout would make the ratios of policies noise."""
    temperature: Positive = 1.0
    """Temperature of the logprobs; must equal `gconfig.temperature`, from which it is filled in."""

    def as_actor(self) -> PPOActorConfig:
        """Return the same model as the config of an actor, whose algorithm is never used."""
        fields = {name: getattr(self, name) for name in FrozenActorConfig.model_fields}
        return PPOActorConfig(**fields | {"disable_dropout": True})


AnyActorConfig = PPOActorConfig | FrozenActorConfig
"""What a policy's engine is made of."""


class PPOCriticConfig(TrainEngineConfig):
    """The critic: a sequence classifier of one label. A language model gets a head that starts at 0."""

    HAS_VALUE_HEAD: ClassVar[bool] = True

    disable_dropout: Bool = True
    """Always on: values would depend on chance."""
    group_size: PositiveInt = 1
    """Samples per prompt; must equal `gconfig.n_samples`, from which it is filled in."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps per batch; follows `actor.ppo_n_minibatches`."""
    value_eps_clip: Positive | None = 0.2
    """Values are clipped to this distance from those before the update; None is off."""
