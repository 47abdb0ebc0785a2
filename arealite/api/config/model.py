"""A model and how it is trained: optimizer, sharding, micro-batches, the policy's objective."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from arealite.api.config.schema import MISSING
from arealite.api.config.types import (
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


@dataclass
class OptimizerConfig(ConfigBase):
    """AdamW and its learning-rate schedule."""

    type: Literal["adam"] = "adam"
    """`adam` is AdamW."""
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


@dataclass
class MicroBatchSpec(ConfigBase):
    """How a batch is split so that it fits into memory. Never changes the gradient."""

    n_mbs: PositiveInt = 1
    """Smallest number of micro-batches."""
    max_tokens_per_mb: PositiveInt | None = None
    """Largest number of tokens in a micro-batch; None is no limit."""


@dataclass
class FSDPWrapPolicy(ConfigBase):
    """Which modules FSDP shards one by one."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names; None is what the model declares."""


@dataclass
class FSDPEngineConfig(ConfigBase):
    """How FSDP2 shards the model."""

    wrap_policy: FSDPWrapPolicy | None = None
    """None is what the model declares."""
    offload_params: Bool = False
    """Keep parameters and optimizer state in CPU memory."""


@dataclass
class TrainEngineConfig(RunBlock):
    """A model and how it is trained. Parameters and optimizer state are float32."""

    IS_EXTENDED: ClassVar[bool] = True

    path: str = MISSING
    """Hugging Face folder or hub id of the model; filled in from `tokenizer_path` if only that is given."""
    init_from_scratch: Bool = False
    """Start from random weights (only the architecture is read from `path`)."""
    attn_impl: str | None = None
    """Attention implementation of transformers; None picks one for the device."""
    dtype: Dtype = "bfloat16"
    """Compute dtype."""
    grad_reduce_dtype: Dtype = "float32"
    """Dtype in which gradients are summed over ranks."""
    gradient_checkpointing: Bool = True
    """Recompute activations in the backward pass: less memory, more time."""
    disable_dropout: Bool = False
    """Set every dropout of the model to 0."""
    mb_spec: MicroBatchSpec = field(default_factory=MicroBatchSpec)
    """How batches are split."""
    optimizer: OptimizerConfig | None = None
    """None is a model that is never trained (a reference)."""
    fsdp: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    """Sharding."""
    seed: NonNegativeInt = 1
    """Seed of random weights and dropout; filled in from the top level."""
    node_timeout: Positive = 30.0
    """Seconds without a heartbeat of another node after which a rank exits; follows `launcher.node_timeout`."""


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy and its objective (PPO and GRPO)."""

    disable_dropout: Bool = True
    """Always on: dropout would make the ratios of policies noise."""
    group_size: PositiveInt = 1
    """Samples per prompt; must equal `gconfig.n_samples`, from which it is filled in."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps per batch."""
    eps_clip: OpenFraction = 0.2
    """Ratio of the new to the proximal probability is clipped to [1 - eps_clip, 1 + eps_clip]."""
    c_clip: AboveOne | None = None
    """Dual clipping: bound of the loss for negative advantages, as a multiple of them; None is off."""
    temperature: Positive = 1.0
    """Temperature of the logprobs; must equal `gconfig.temperature`, from which it is filled in."""
    reward_scaling: Finite = 1.0
    """Rewards become (reward + reward_bias) * reward_scaling."""
    reward_bias: Finite = 0.0
    """Added to rewards before scaling."""
    reward_clip: Positive | None = None
    """Largest absolute value of a scaled reward; None is no limit."""
    group_reward_norm: Bool = False
    """Normalise rewards to mean 0 and deviation 1 within each group."""
    mask_no_eos_with_zero: Bool = False
    """Give reward 0 to completions truncated at the token limit."""
    discount: Fraction = 1.0
    """Gamma of the advantage estimate."""
    gae_lambda: Fraction = 1.0
    """Lambda of the advantage estimate."""
    adv_norm: Bool = True
    """Normalise advantages over all trained tokens of the batch."""
    group_adv_norm: Bool = False
    """Normalise advantages within each group instead."""
    kl_ctl: NonNegative = 0.0
    """Weight of the KL penalty to the reference; above 0 it needs a `ref` block."""
    recompute_logprob: Bool = False
    """Recompute logprobs with the trainer before each update (the proximal policy)."""
    use_decoupled_loss: Bool = False
    """Clip around the proximal policy and weigh by its ratio to the sampling policy; needs `recompute_logprob`."""
    behav_imp_weight_cap: Positive | None = None
    """Tokens whose weight (of the decoupled loss) is above this are left out; None keeps all."""
