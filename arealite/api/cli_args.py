"""Every knob of a run, as plain dataclasses; the YAML file has the same shape.

Types carry the allowed range; `load_expr_config` checks them, fills in what follows from other values (`FILLED_FROM`)
and refuses pairs that contradict each other (`settle`). Nothing here touches files, devices or the network.
"""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, cast

from pydantic import ConfigDict

from arealite.api.alloc_mode import AllocationMode
from arealite.api.config.loader import load_expr_config, to_yaml
from arealite.api.config.schema import MISSING, config_help
from arealite.api.config.types import (
    AboveOne,
    Addresses,
    Bool,
    Dtype,
    EnvVars,
    Finite,
    Folder,
    Fraction,
    HalfOpenFraction,
    Name,
    NonNegative,
    NonNegativeInt,
    OpenFraction,
    Positive,
    PositiveFraction,
    PositiveInt,
)
from arealite.api.errors import ConfigError

__all__ = [
    "BaseExperimentConfig",
    "ClusterSpecConfig",
    "DatasetConfig",
    "EvaluatorConfig",
    "FSDPEngineConfig",
    "FSDPWrapPolicy",
    "GRPOConfig",
    "GenerationHyperparameters",
    "InferenceEngineConfig",
    "LauncherConfig",
    "LiteConfig",
    "MicroBatchSpec",
    "NameResolveConfig",
    "OptimizerConfig",
    "PPOActorConfig",
    "RecoverConfig",
    "SFTConfig",
    "SaverConfig",
    "SlurmLauncherConfig",
    "StatsLoggerConfig",
    "SwanlabConfig",
    "TensorBoardConfig",
    "TrackioConfig",
    "TrainEngineConfig",
    "WandBConfig",
    "WeightCheckConfig",
    "config_help",
    "load_expr_config",
    "to_yaml",
]

logger = logging.getLogger("arealite.config")

_VLLM_MAX_TEMPERATURE = 2.0
ALL_TOKENS = 100_000_000
"""The `top_k` that cuts nothing off."""


@dataclass
class Block:
    """Base of all blocks: unknown keys are errors, and a number may stand for a string (`trial_name=0`)."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", coerce_numbers_to_str=True)


@dataclass
class MicroBatchSpec(Block):
    """How a batch is split so that it fits into memory. Never changes the gradient."""

    n_mbs: PositiveInt = 1
    """Smallest number of micro-batches."""
    max_tokens_per_mb: PositiveInt | None = None
    """Largest number of tokens in a micro-batch; None is no limit."""


@dataclass
class GenerationHyperparameters(Block):
    """How completions are sampled."""

    n_samples: PositiveInt = 1
    """Completions per prompt (the size of a group)."""
    max_new_tokens: PositiveInt = 16384
    """Longest completion, in tokens."""
    min_new_tokens: NonNegativeInt = 0
    """Shortest completion, in tokens; stop tokens are banned until then."""
    greedy: Bool = False
    """Always take the likeliest token."""
    top_p: PositiveFraction = 1.0
    """Sample from the likeliest tokens that hold this much probability; 1 is all."""
    top_k: PositiveInt = ALL_TOKENS
    """Sample from this many likeliest tokens; the default is all."""
    temperature: Positive = 1.0
    """Divides the logits. For temperature 0 set `greedy: true`."""
    stop_token_ids: list[NonNegativeInt] = field(default_factory=list)
    """Token ids that end a completion, besides the model's own end token."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a completion."""

    def new(self, **changes: Any) -> GenerationHyperparameters:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def check(self, key: str) -> None:
        """Refuse a lower limit above the upper one."""
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"{key}.min_new_tokens must be at most {key}.max_new_tokens: got {self.min_new_tokens} and "
                f"{self.max_new_tokens}. Lower the first or raise the second."
            )


@dataclass
class OptimizerConfig(Block):
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
    eps: Positive = 1e-5
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
class FSDPWrapPolicy(Block):
    """Which modules FSDP shards one by one."""

    transformer_layer_cls_to_wrap: list[str] | None = None
    """Class names; None is what the model declares."""


@dataclass
class FSDPEngineConfig(Block):
    """How FSDP2 shards the model."""

    wrap_policy: FSDPWrapPolicy | None = None
    """None is what the model declares."""
    offload_params: Bool = False
    """Keep parameters and optimizer state in CPU memory."""


@dataclass
class TrainEngineConfig(Block):
    """A model and how it is trained. Parameters and optimizer state are float32."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""
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
    """Of random weights and dropout; filled in from the top level."""
    node_timeout: Positive = 30.0
    """Seconds without a word from another machine after which a rank ends; filled in from `launcher.node_timeout`."""


@dataclass
class PPOActorConfig(TrainEngineConfig):
    """The policy and its objective (PPO and GRPO)."""

    group_size: PositiveInt = 1
    """Samples per prompt; must equal `gconfig.n_samples`, from which it is filled in."""
    ppo_n_minibatches: PositiveInt = 4
    """Optimizer steps per batch."""
    eps_clip: OpenFraction = 0.2
    """Ratio of the new to the proximal probability is clipped to [1 - eps_clip, 1 + eps_clip]."""
    c_clip: AboveOne | None = None
    """Dual clipping: bound of the loss for negative advantages, as a multiple of them; None is off."""
    temperature: Positive = 1.0
    """Of the logprobs; must equal `gconfig.temperature`, from which it is filled in."""
    reward_scaling: Finite = 1.0
    """Rewards become (reward + reward_bias) * reward_scaling."""
    reward_bias: Finite = 0.0
    """Added to rewards before scaling."""
    reward_clip: Positive = 20.0
    """Largest absolute value of a scaled reward."""
    group_reward_norm: Bool = False
    """Normalise rewards to mean 0 and deviation 1 within each group."""
    mask_no_eos_with_zero: Bool = False
    """Give reward 0 to answers cut off at the token limit."""
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


@dataclass
class NameResolveConfig(Block):
    """Where the processes of a run find each other."""

    type: Literal["nfs", "redis", "etcd3", "ray"] = "nfs"
    """Files in a folder that every machine sees, a Redis or etcd server, or the Ray cluster of the run."""
    nfs_record_root: Folder = ""
    """Folder of `nfs`, whose `.names` has the entries; filled in from `cluster.fileroot`."""
    redis_addr: str = "127.0.0.1:6379"
    """host:port of Redis."""
    etcd3_addr: str = "127.0.0.1:2379"
    """host:port of etcd."""
    ray_actor_name: str = "arealite_names"
    """Of the detached actor that keeps the names in Ray."""


@dataclass
class WeightCheckConfig(Block):
    """How every publication of weights is verified."""

    fingerprint: Bool = True
    """Compare a fingerprint of every tensor, on servers that can (`lite`)."""
    canary_tokens: NonNegativeInt = 16
    """Tokens that every server samples after a publication, whose logprobs the trainer must agree with; 0 is off."""
    canary_bound: Positive | None = None
    """Largest mean absolute difference of those logprobs; None is 0.001 in float32 and 0.1 in shorter dtypes."""
    on_mismatch: Literal["stop", "warn"] = "stop"
    """What a difference does to the run."""


@dataclass
class InferenceEngineConfig(Block):
    """How episodes are scheduled and how servers are talked to."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""
    fileroot: Folder = ""
    """Filled in from `cluster.fileroot`."""
    seed: NonNegativeInt = 1
    """Of the sampling seeds; filled in from the top level."""
    backend: Literal["lite", "sglang", "vllm"] = "sglang"
    """Protocol of the servers; filled in from `allocation_mode`."""
    server_addrs: Addresses = field(default_factory=list)
    """host:port of servers that someone else started and stops; empty is those that register for this run."""
    num_servers: NonNegativeInt = 0
    """Registered servers to wait for before the first episode; filled in from `allocation_mode`. More may join."""
    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    """Where servers register; filled in from `cluster.name_resolve`."""
    consumer_batch_size: PositiveInt = 1
    """Episodes (prompts) per training step over all ranks; filled in from `train_dataset.batch_size`."""
    max_concurrent_rollouts: PositiveInt | None = None
    """Most episodes running at once over all ranks, fewer while servers are missing; None is `consumer_batch_size`,
    times live servers by `num_servers` if more have joined."""
    max_head_offpolicyness: NonNegativeInt = 0
    """Largest staleness, in weight versions, of a trajectory we train on. 0 is synchronous training."""
    queue_size: PositiveInt | None = None
    """Most episodes submitted and not yet started; None is 16 times the concurrency."""
    weight_update: Literal["broadcast", "disk"] = "broadcast"
    """How new weights reach the servers."""
    pause_mode: Literal["abort", "retract", "in_place", "wait"] = "abort"
    """What new weights do to completions in flight. `abort`: they come back and are continued later, by any server.
    `retract`: they stay and their keys and values are computed again. `in_place`: they stay and go on with those of the
    old weights; such tokens are counted as `rollout/stale_kv_tokens`. `wait` (only vllm): the weights wait for them,
    so `weight_update_timeout` must be longer than a completion takes."""
    untie_embeddings: Bool = False
    """Serve a model whose tied output layer is a tensor of its own, for servers that can't reload a tied one (vLLM on a
    CPU): the launcher starts them from such a copy, and each publication sends the embeddings twice."""
    tokenizer_path: str = ""
    """Filled in from the top level; finds stop strings that an interruption has cut in two."""
    weight_update_timeout: Positive = 120.0
    """Seconds after which an update of the weights has failed."""
    setup_timeout: Positive = 600.0
    """Seconds in which every server must become ready."""
    request_timeout: Positive = 3600.0
    """Seconds after which one request to a server has failed."""
    request_retries: NonNegativeInt = 3
    """How often a failed request is sent again."""
    reward_timeout: Positive = 15.0
    """Seconds after which a reward function has failed."""
    reward_workers: PositiveInt = 2
    """Processes that run a plain reward function."""
    episode_timeout: Positive = 3600.0
    """Seconds after which an episode has failed."""
    episode_retries: NonNegativeInt = 1
    """Fresh attempts after an episode has failed; then its whole group is dropped and counted."""
    failure_window: PositiveInt = 100
    """Episodes that `max_failed_share` looks back on."""
    max_failed_share: Fraction = 0.1
    """Share of the last `failure_window` episodes that may be dropped as failed; more of them stop the run."""
    max_rejected_in_a_row: PositiveInt | None = None
    """Episodes rejected with none accepted in between, after which the run stops; None is 20 batches."""
    overdue: Literal["wait", "drop", "train"] = "wait"
    """What happens to a running episode that the bound leaves no time for: wait for it before others are trained on,
    drop and count it, or train on it late, which gives up the bound."""
    blocking_call_s: Positive = 1.0
    """Seconds that a workflow may block the event loop before its line is reported."""
    weight_check: WeightCheckConfig = field(default_factory=WeightCheckConfig)
    """Proof that the servers hold the trainer's weights."""
    replay_from: str = ""
    """Run folder whose stored batches are played again instead of sampling; `arealite replay` sets it."""
    replay_step: NonNegativeInt = 0
    """The step after which a replay ends."""


@dataclass
class LiteConfig(Block):
    """The embedded inference server."""

    threads: PositiveInt = 1
    """CPU threads of one server."""
    slots: PositiveInt = 64
    """Sequences decoded together."""
    context: PositiveInt = 2048
    """Longest sequence, prompt and completion, in tokens."""
    dtype: Dtype = "float32"
    """Of weights and cache."""
    deterministic: Bool = False
    """Decode so that a sequence's bits do not depend on its neighbours (slower)."""


@dataclass
class DatasetConfig(Block):
    """Prompts or demonstrations."""

    path: str = MISSING
    """Hub id, local file or folder, `hf-dataset://org/name/file`, or `story` (generated)."""
    type: Literal["sft", "rl"] = "rl"
    """Demonstrations or prompts."""
    batch_size: PositiveInt = 1
    """Rows per step over all ranks."""
    shuffle: Bool = True
    """A new order in every epoch."""
    drop_last: Bool = True
    """Leave out the last rows of an epoch that do not fill a batch."""
    max_length: PositiveInt | None = None
    """Rows with more tokens are left out; None keeps all."""
    max_rows: PositiveInt | None = None
    """Only the first so many rows are used; None is all."""


@dataclass
class _Frequency(Block):
    """When something happens again: each trigger counts from the last time, and any of them suffices."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""
    fileroot: Folder = ""
    """Filled in from `cluster.fileroot`."""
    freq_epochs: PositiveInt | None = None
    """Every so many epochs; None is never."""
    freq_steps: PositiveInt | None = None
    """Every so many steps; None is never."""
    freq_secs: Positive | None = None
    """Every so many seconds; None is never."""


@dataclass
class SaverConfig(_Frequency):
    """When the model is saved."""


@dataclass
class EvaluatorConfig(_Frequency):
    """When the model is evaluated."""


@dataclass
class RecoverConfig(_Frequency):
    """Checkpoints from which an interrupted run goes on; the triggers say when they are written."""

    mode: Literal["disabled", "auto", "fault", "resume"] = "disabled"
    """`auto` goes on from the last checkpoint if there is one, `resume` requires one, `fault` only does so when the
    launcher restarts a run that failed, `disabled` never, and writes none."""
    retries: NonNegativeInt = 3
    """How often the launcher restarts a run that failed (`auto` and `fault`), unless it refused to run as it is."""
    keep_last: PositiveInt = 2
    """Newest checkpoints to keep, besides that of the best evaluation."""


@dataclass
class WandBConfig(Block):
    """Weights & Biases; fields go to `wandb.init`."""

    mode: Literal["disabled", "online", "offline"] = "disabled"
    """`disabled` is off."""
    entity: str | None = None
    """User or team."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    job_type: str | None = None
    """Kind of run."""
    group: str | None = None
    """Group of runs."""
    notes: str | None = None
    """Free text."""
    tags: list[str] | None = None
    """Labels."""
    config: dict[str, Any] | None = None
    """Extra values stored with the run."""


@dataclass
class SwanlabConfig(Block):
    """SwanLab; fields go to `swanlab.init`."""

    mode: Literal["disabled", "local", "cloud", "offline"] = "disabled"
    """`disabled` is off."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    config: dict[str, Any] | None = None
    """Extra values stored with the run."""
    logdir: str | None = None
    """None is SwanLab's default."""


@dataclass
class TensorBoardConfig(Block):
    """TensorBoard."""

    path: str | None = None
    """Folder of the event files; None is off."""


@dataclass
class TrackioConfig(Block):
    """Trackio; fields go to `trackio.init`."""

    mode: Literal["disabled", "online"] = "disabled"
    """`disabled` is off."""
    project: str | None = None
    """None is the experiment's name."""
    name: str | None = None
    """None is the trial's name."""
    space_id: str | None = None
    """Hugging Face space to show the run in; None is local."""


@dataclass
class StatsLoggerConfig(Block):
    """Where metrics go besides `metrics.jsonl`."""

    experiment_name: Name = ""
    """Filled in from the top level."""
    trial_name: Name = ""
    """Filled in from the top level."""
    fileroot: Folder = ""
    """Filled in from `cluster.fileroot`."""
    line_freq_steps: PositiveInt = 1
    """Steps per line on the console, for very short steps; `metrics.jsonl` has every step."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    swanlab: SwanlabConfig = field(default_factory=SwanlabConfig)
    """SwanLab."""
    tensorboard: TensorBoardConfig = field(default_factory=TensorBoardConfig)
    """TensorBoard."""
    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Trackio."""


@dataclass
class ClusterSpecConfig(Block):
    """The machines of a run."""

    name_resolve: NameResolveConfig = field(default_factory=NameResolveConfig)
    """Where the processes of a run find each other."""
    n_nodes: PositiveInt = 1
    """Machines."""
    n_gpus_per_node: NonNegativeInt = 8
    """GPUs of each machine; 0 is a CPU cluster."""
    fileroot: Folder = "runs"
    """Folder of all runs, seen by every machine; a run's files are in `<fileroot>/<experiment_name>/<trial_name>/`."""


@dataclass
class SlurmLauncherConfig(Block):
    """What only Slurm is told."""

    srun_additional_args: str = ""
    """More arguments of srun."""
    sbatch_additional_args: str = ""
    """More arguments of sbatch, e.g. `--partition=gpu --account=lab --time=1-0`."""
    container_type: Literal["none", "apptainer"] = "none"
    """What runs the images."""
    mount: str = ""
    """Folders to mount in containers, as `/from:/to,/from2:/to2`."""
    trainer_image: str = ""
    """Image of trainers; empty runs them without a container."""
    inference_server_image: str = ""
    """Image of servers; empty runs them without a container."""


@dataclass
class LauncherConfig(Block):
    """How processes start."""

    inference_server_cpus_per_gpu: PositiveInt = 4
    """CPU cores that Ray and Slurm reserve for each GPU of a server; without GPUs, for each server."""
    inference_server_mem_per_gpu: NonNegativeInt = 0
    """MiB of memory that Ray and Slurm reserve for each GPU of a server; 0 reserves none."""
    trainer_cpus_per_gpu: PositiveInt = 4
    """CPU cores that Ray and Slurm reserve for each rank of the trainer."""
    trainer_mem_per_gpu: NonNegativeInt = 0
    """MiB of memory that Ray and Slurm reserve for each rank of the trainer; 0 reserves none."""
    server_restarts: NonNegativeInt = 3
    """How often each server that ended after it was ready is started again while the run goes on; then the run ends."""
    node_timeout: Positive = 30.0
    """Seconds without a word from a machine after which it is lost."""
    slurm: SlurmLauncherConfig = field(default_factory=SlurmLauncherConfig)
    """Slurm."""
    inference_server_env_vars: EnvVars = ""
    """Environment of servers, as `A=1,B=2`."""
    trainer_env_vars: EnvVars = ""
    """Environment of trainers, as `A=1,B=2`."""
    trainer_threads: PositiveInt | None = None
    """CPU threads of one trainer process; None lets the launcher share out the cores."""
    server_python: str | None = None
    """Python interpreter of the environment in which SGLang or vLLM is installed; None is that of the launcher."""
    stall_timeout: Positive = 1800.0
    """Seconds without progress of any process after which a run is called stalled."""
    on_stall: Literal["stop", "continue"] = "stop"
    """What the launcher does after its verdict on a stalled run."""


def _named(block: str, **sources: str) -> dict[str, str]:
    """Let a block follow the run's names, and further sources given by field."""
    sources = {"experiment_name": "experiment_name", "trial_name": "trial_name", **sources}
    return {f"{block}.{name}": source for name, source in sources.items()}


def _same(block: str, other: str, *names: str) -> dict[str, str]:
    """Let fields of a block follow those of another block."""
    return {f"{block}.{name}": f"{other}.{name}" for name in names}


@dataclass
class BaseExperimentConfig(Block):
    """What every experiment has."""

    FILLED_FROM: ClassVar[dict[str, str]] = {
        **_named("saver", fileroot="cluster.fileroot"),
        **_named("evaluator", fileroot="cluster.fileroot"),
        **_named("recover", fileroot="cluster.fileroot"),
        **_named("stats_logger", fileroot="cluster.fileroot"),
        "cluster.name_resolve.nfs_record_root": "cluster.fileroot",
        **_same("valid_dataset", "train_dataset", "path", "type", "batch_size", "max_length"),
    }
    """Keys that take another key's value unless they are given."""

    experiment_name: Name = MISSING
    """Name of the experiment."""
    trial_name: Name = MISSING
    """Name of this run of it."""
    seed: NonNegativeInt = 1
    """Of everything random."""
    allocation_mode: str = ""
    """Servers and trainers, e.g. `sglang.d4p1t1+d4p1t1`; empty if no launcher is used."""
    cluster: ClusterSpecConfig = field(default_factory=ClusterSpecConfig)
    """Machines."""
    total_train_epochs: PositiveInt = 1
    """Passes over the training data."""
    total_train_steps: PositiveInt | None = None
    """Stop after so many steps; None trains all epochs."""
    tokenizer_path: str = ""
    """Hugging Face folder or hub id; filled in from the model's path."""
    train_dataset: DatasetConfig = field(default_factory=DatasetConfig)
    """Training data."""
    valid_dataset: DatasetConfig | None = None
    """Held-out data; None is no evaluation. Path, type, batch size and length follow `train_dataset` unless given."""
    saver: SaverConfig = field(default_factory=SaverConfig)
    """Saving."""
    evaluator: EvaluatorConfig = field(default_factory=EvaluatorConfig)
    """Evaluation."""
    stats_logger: StatsLoggerConfig = field(default_factory=StatsLoggerConfig)
    """Metrics."""
    recover: RecoverConfig = field(default_factory=RecoverConfig)
    """Recovery."""
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    """Processes."""
    lite: LiteConfig = field(default_factory=LiteConfig)
    """Options of the embedded server."""
    sglang: dict[str, Any] = field(default_factory=dict)
    """Options of SGLang servers, passed through."""
    vllm: dict[str, Any] = field(default_factory=dict)
    """Options of vLLM servers, passed through."""

    @property
    def allocation(self) -> AllocationMode | None:
        """The parsed `allocation_mode`; None if it is empty."""
        return AllocationMode.from_str(self.allocation_mode) if self.allocation_mode else None

    def settle(self) -> None:
        """Refuse contradictions; experiments add their own."""
        if self.valid_dataset and self.valid_dataset.path == self.train_dataset.path and _is_file(self.train_dataset):
            logger.warning(
                "valid_dataset.path is the training file %s: evaluations measure training data. "
                "Set valid_dataset.path to another file.",
                self.train_dataset.path,
            )
        recover = self.recover
        if recover.mode != "disabled" and not any((recover.freq_epochs, recover.freq_steps, recover.freq_secs)):
            raise ConfigError(
                f"recover must have a trigger if its mode is {recover.mode}: got none. "
                "Set recover.freq_steps, freq_epochs or freq_secs (e.g. recover.freq_secs=600)."
            )
        frequencies = (self.evaluator.freq_epochs, self.evaluator.freq_steps, self.evaluator.freq_secs)
        if self.valid_dataset is None and any(frequencies):
            raise ConfigError(
                "valid_dataset must be given if evaluator has a frequency: got null. "
                "Add a valid_dataset block, or set evaluator.freq_steps=null (and freq_epochs, freq_secs)."
            )

    def _check_devices(self, *, servers_are_ours: bool) -> None:
        """Refuse an allocation that needs more GPUs than the cluster has."""
        mode, cluster = self.allocation, self.cluster
        if mode is None or cluster.n_gpus_per_node == 0:
            return
        needed = mode.train_world_size + (mode.gen_world_size if servers_are_ours else 0)
        available = cluster.n_nodes * cluster.n_gpus_per_node
        if needed > available:
            raise ConfigError(
                f"allocation_mode must fit the cluster: got {self.allocation_mode}, which needs {needed} GPUs, and "
                f"{cluster.n_nodes} x {cluster.n_gpus_per_node} GPUs. Change it, or cluster.n_nodes or "
                "cluster.n_gpus_per_node (0 is a CPU cluster)."
            )


@dataclass
class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    FILLED_FROM: ClassVar[dict[str, str]] = {
        **BaseExperimentConfig.FILLED_FROM,
        **_named("model", seed="seed", node_timeout="launcher.node_timeout"),
        "tokenizer_path": "model.path",
        "model.path": "tokenizer_path",
    }

    train_dataset: DatasetConfig = field(default_factory=lambda: DatasetConfig(type="sft"))
    """Training data."""
    model: TrainEngineConfig = field(default_factory=lambda: TrainEngineConfig(optimizer=OptimizerConfig()))
    """The model."""

    def settle(self) -> None:
        """Refuse contradictions."""
        super().settle()
        _check_trained(self.model, "model")
        _check_dataset_type(self.train_dataset, "sft")
        self._check_devices(servers_are_ours=True)


@dataclass
class GRPOConfig(BaseExperimentConfig):
    """Reinforcement learning with verifiable rewards."""

    FILLED_FROM: ClassVar[dict[str, str]] = {
        **BaseExperimentConfig.FILLED_FROM,
        **_named("rollout", fileroot="cluster.fileroot", seed="seed", consumer_batch_size="train_dataset.batch_size"),
        "rollout.tokenizer_path": "tokenizer_path",
        "rollout.name_resolve": "cluster.name_resolve",
        **_named("actor", seed="seed", group_size="gconfig.n_samples", temperature="gconfig.temperature"),
        "actor.node_timeout": "launcher.node_timeout",
        **_named("ref", seed="seed", group_size="gconfig.n_samples", temperature="gconfig.temperature"),
        "ref.node_timeout": "launcher.node_timeout",
        **_same("ref", "actor", "path", "dtype", "attn_impl", "mb_spec", "fsdp"),
        **_same("eval_gconfig", "gconfig", "max_new_tokens", "min_new_tokens", "top_p", "top_k", "temperature"),
        **_same("eval_gconfig", "gconfig", "stop_token_ids", "stop"),
        "tokenizer_path": "actor.path",
        "actor.path": "tokenizer_path",
    }

    async_training: Bool = True
    """False trains synchronously: `rollout.max_head_offpolicyness` becomes 0."""
    gconfig: GenerationHyperparameters = field(default_factory=GenerationHyperparameters)
    """Sampling of training episodes."""
    eval_gconfig: GenerationHyperparameters = field(default_factory=lambda: GenerationHyperparameters(greedy=True))
    """Sampling of evaluations; what is not given follows `gconfig`, but greedy and with one sample."""
    rollout: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    """Episodes and servers."""
    actor: PPOActorConfig = field(default_factory=lambda: PPOActorConfig(optimizer=OptimizerConfig()))
    """The policy."""
    ref: PPOActorConfig | None = None
    """The reference of the KL penalty; None is no reference. Path, dtype and memory settings follow `actor`."""

    def settle(self) -> None:
        """Apply `async_training` and the servers' backend, and refuse contradictions."""
        super().settle()
        if not self.async_training:
            self.rollout.max_head_offpolicyness = 0
        self._settle_backend()
        self._check_devices(servers_are_ours=not self.rollout.server_addrs)
        _check_trained(self.actor, "actor")
        _check_dataset_type(self.train_dataset, "rl")
        self._check_sampling()
        self._check_objective()
        self._check_ref()

    def _settle_backend(self) -> None:
        """Let the allocation name the protocol of the servers."""
        mode = self.allocation
        if mode is None or mode.gen_backend is None:
            return
        if self.rollout.backend not in ("sglang", mode.gen_backend):
            raise ConfigError(
                f"rollout.backend must agree with allocation_mode: got {self.rollout.backend} and "
                f"{self.allocation_mode}. Remove rollout.backend."
            )
        self.rollout.backend = cast(Literal["lite", "sglang", "vllm"], mode.gen_backend)
        self.rollout.num_servers = self.rollout.num_servers or mode.gen_dp_size
        if self.rollout.weight_update == "broadcast" and mode.gen_pp_size > 1:
            raise ConfigError(
                f"rollout.weight_update must be disk if servers have p > 1: got broadcast and {self.allocation_mode}. "
                "Set rollout.weight_update=disk or p1."
            )

    def _check_server(self) -> None:
        """Refuse what the chosen server would do differently from others."""
        backend, gconfig = self.rollout.backend, self.gconfig
        if self.rollout.pause_mode == "wait" and backend != "vllm":
            raise ConfigError(
                f"rollout.pause_mode must be abort, retract or in_place for {backend}: got wait. "
                "Remove it for the default, abort."
            )
        if backend == "sglang" and (gconfig.top_p < 1 or gconfig.top_k < ALL_TOKENS):
            raise ConfigError(
                f"gconfig.top_p must be 1 and gconfig.top_k at least {ALL_TOKENS} for sglang: got {gconfig.top_p} and "
                f"{gconfig.top_k}. SGLang's logprobs are those of the whole distribution, not of what it sampled from, "
                "so that importance weights would be wrong. Remove both, or use vllm or lite."
            )
        for key, one in (("gconfig", gconfig), ("eval_gconfig", self.eval_gconfig)):
            if backend == "vllm" and one.temperature > _VLLM_MAX_TEMPERATURE:
                raise ConfigError(
                    f"{key}.temperature must be at most {_VLLM_MAX_TEMPERATURE:g} for vllm: got {one.temperature:g}. "
                    "Lower it, or use sglang or lite."
                )
            if backend == "sglang" and one.stop and one.min_new_tokens > 0:
                raise ConfigError(
                    f"{key}.min_new_tokens must be 0 with {key}.stop for sglang: got {one.min_new_tokens} and "
                    f"{one.stop}. SGLang looks for stop strings from the first token on. Remove one, or use vllm or "
                    "lite."
                )

    def _check_sampling(self) -> None:
        """Refuse sampling that can't be trained on."""
        self.gconfig.check("gconfig")
        self.eval_gconfig.check("eval_gconfig")
        self._check_server()
        if self.gconfig.greedy and self.gconfig.n_samples > 1:
            raise ConfigError(
                f"gconfig.greedy must be false if gconfig.n_samples > 1: got true and {self.gconfig.n_samples}, so "
                "that all samples of a group would be equal. Set gconfig.greedy=false."
            )
        gconfig = self.gconfig
        if gconfig.top_p < 1 or gconfig.top_k < ALL_TOKENS or gconfig.min_new_tokens > 0:
            logger.warning(
                "gconfig.top_p, top_k and min_new_tokens narrow the distribution that servers sample from, and their "
                "logprobs are of the narrowed one, while the trainer's are of the whole: importance weights are off. "
                "Set top_p to 1, top_k to %d and min_new_tokens to 0 unless you mean it.",
                ALL_TOKENS,
            )
        is_embedded = self.rollout.backend == "lite" and not self.rollout.server_addrs
        longest = max(self.gconfig.max_new_tokens, self.eval_gconfig.max_new_tokens)
        if is_embedded and longest >= self.lite.context:
            raise ConfigError(
                f"lite.context must be greater than max_new_tokens: got {self.lite.context} and {longest}. "
                "Raise lite.context or lower gconfig.max_new_tokens."
            )

    def _check_objective(self) -> None:
        """Refuse objectives that miss a part or contradict the sampling."""
        actor, n_samples = self.actor, self.gconfig.n_samples
        _check_equal("actor.group_size", actor.group_size, "gconfig.n_samples", n_samples)
        _check_equal("actor.temperature", actor.temperature, "gconfig.temperature", self.gconfig.temperature)
        if actor.use_decoupled_loss and not actor.recompute_logprob:
            raise ConfigError(
                "actor.recompute_logprob must be true if actor.use_decoupled_loss is: got false. "
                "The decoupled loss needs the recomputed logprobs; set actor.recompute_logprob=true."
            )
        if actor.behav_imp_weight_cap is not None and not actor.use_decoupled_loss:
            logger.warning("actor.behav_imp_weight_cap has no effect: actor.use_decoupled_loss is false.")
        for name in ("group_reward_norm", "group_adv_norm"):
            if getattr(actor, name) and n_samples == 1:
                raise ConfigError(
                    f"actor.{name} must be false if gconfig.n_samples is 1: got true. A group of one has no spread; "
                    f"raise gconfig.n_samples or set actor.{name}=false."
                )
        if actor.ppo_n_minibatches > self.rollout.consumer_batch_size:
            raise ConfigError(
                f"actor.ppo_n_minibatches must be at most rollout.consumer_batch_size: got {actor.ppo_n_minibatches} "
                f"and {self.rollout.consumer_batch_size}. Lower the first or raise train_dataset.batch_size."
            )

    def _check_ref(self) -> None:
        """Refuse a penalty without reference and a reference that trains."""
        if self.ref is None:
            if self.actor.kl_ctl > 0:
                raise ConfigError(
                    f"actor.kl_ctl must be 0 without a ref block: got {self.actor.kl_ctl}. "
                    "Add e.g. `ref: {path: ${actor.path}}` or set actor.kl_ctl=0."
                )
            return
        if self.actor.kl_ctl == 0:
            logger.warning("ref has no effect: actor.kl_ctl is 0. Set actor.kl_ctl above 0 or remove the ref block.")
        _check_equal("ref.temperature", self.ref.temperature, "gconfig.temperature", self.gconfig.temperature)
        if self.ref.optimizer is not None:
            raise ConfigError("ref.optimizer must be null: got an optimizer. A reference is never trained; remove it.")


def _is_file(dataset: DatasetConfig) -> bool:
    """Whether the path names one file, which has no splits."""
    return dataset.path.endswith((".jsonl", ".json", ".parquet"))


def _check_equal(name: str, value: float, other: str, expected: float) -> None:
    """Refuse a key that must repeat another one and does not."""
    if value != expected:
        raise ConfigError(f"{name} must equal {other}: got {value} and {expected}. Remove {name}; it follows {other}.")


def _check_trained(engine: TrainEngineConfig, key: str) -> None:
    """Refuse a trained model without optimizer."""
    if engine.optimizer is None:
        raise ConfigError(f"{key}.optimizer must be a block: got null. Remove it for the default, or set its lr.")


def _check_dataset_type(dataset: DatasetConfig, expected: str) -> None:
    """Refuse prompts for fine-tuning and demonstrations for reinforcement learning."""
    if dataset.type != expected:
        raise ConfigError(
            f"train_dataset.type must be {expected} in this experiment: got {dataset.type}. Remove it or correct it."
        )
