"""Experiments: the top level of a YAML file, its keys that follow others, and its checks."""

import functools
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, cast

from pydantic import PrivateAttr

from arealite.api.alloc_mode import AllocationMode, ParallelSizes
from arealite.api.config import checks
from arealite.api.config.algorithm import GRPO_DEFAULTS, PRESETS, resolve_choices
from arealite.api.config.data import DatasetConfig, EvaluatorConfig, RecoverConfig, SaverConfig, StatsLoggerConfig
from arealite.api.config.launcher import ClusterSpecConfig, LauncherConfig, WorkersConfig
from arealite.api.config.model import (
    FrozenActorConfig,
    OptimizerConfig,
    PPOActorConfig,
    PPOCriticConfig,
    TrainEngineConfig,
)
from arealite.api.config.rollout import (
    ALL_TOKENS,
    DEFAULT_KEPT_IDS,
    AgentConfig,
    ColocatedConfig,
    GenerationHyperparameters,
    InferenceEngineConfig,
    LiteConfig,
)
from arealite.api.config.types import (
    MISSING,
    Bool,
    ConfigBase,
    Finite,
    Name,
    NonNegative,
    NonNegativeInt,
    Positive,
    PositiveInt,
    RunBlock,
    config_keys,
)
from arealite.api.errors import ConfigError, require
from arealite.api.servers import KINDS, BackendName, ServerKind

OF_RUN = {
    "experiment_name": "experiment_name",
    "trial_name": "trial_name",
    "fileroot": "cluster.fileroot",
    "seed": "seed",
    "group_size": "gconfig.n_samples",
    "temperature": "gconfig.temperature",
}
"""What a block of the top level that names its run (`RunBlock`) follows, by the field that it has for it."""

GSM8K_REWARD = "arealite.reward:gsm8k_reward_fn"
GYM_REWARD = "arealite.reward.gym:reasoning_gym_reward_fn"

_OF_FROZEN = ("dtype", "mb_spec", "fsdp", "torch_compile", "cast_lm_head_to_fp32")
"""What a reference or teacher follows of the trained model."""
_OF_EVALUATION = tuple(name for name in GenerationHyperparameters.model_fields if name not in ("n_samples", "greedy"))
"""What the sampling of evaluations follows of that of training."""


def _same(block: str, other: str, *names: str) -> dict[str, str]:
    """Return entries by which fields of a block follow those of another block."""
    return {f"{block}.{name}": f"{other}.{name}" for name in names}


class BaseExperimentConfig(ConfigBase):
    """What every experiment has."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        "rollout.consumer_batch_size": "train_dataset.batch_size",
        "rollout.tokenizer_path": "tokenizer_path",
        **_same("valid_dataset", "train_dataset", "path", "config_name", "type", "max_length"),
        **_same("valid_dataset", "train_dataset", "prompt_key", "answer_key", "system_prompt", "prompt_suffix"),
        **_same("valid_dataset", "train_dataset", "image_key", "chosen_key", "rejected_key"),
    }
    """Keys that take another key's value unless they are given, besides those of `OF_RUN`."""
    SCRIPTS: ClassVar[Mapping[str, str]] = {}
    """Scripts in examples/arealite of `arealite train`, by `trainer.type`."""
    TITLE: ClassVar[str] = ""
    """Title of its report, where its data do not tell more."""
    LOSS: ClassVar[str] = ""
    """Metric that the line of a step shows as its loss."""
    DATA_TYPE: ClassVar[str] = ""
    """Value of `train_dataset.type`."""

    experiment_name: Name = MISSING
    """Name of the experiment."""
    trial_name: Name = MISSING
    """Name of this run of it."""
    seed: NonNegativeInt = 1
    """Seed of every random number generator of the run."""
    allocation_mode: str = ""
    """Servers and trainers, e.g. `sglang.d4p1t1+d4p1t1`, or both on one device, `lite.d1|d1`; empty if no launcher is
    used."""
    mode: Literal["local", "ray", "slurm"] = "local"
    """Launcher that starts a script which is run by hand, and the trainers of `arealite train`."""
    cluster: ClusterSpecConfig = ClusterSpecConfig()
    """Nodes and folders."""
    total_train_epochs: PositiveInt = 1
    """Passes over the training data."""
    total_train_steps: PositiveInt | None = None
    """Stop after this many steps; None trains all epochs."""
    tokenizer_path: str = ""
    """Hugging Face folder or hub id; filled in from the model's path."""
    train_dataset: DatasetConfig = DatasetConfig()
    """Training data."""
    valid_dataset: DatasetConfig | None = None
    """Held-out data; None is no evaluation. Path, columns and length follow `train_dataset` unless given; if there is
    no test split, the last 5% of the training rows are held out, at most 1,000.
    We take every row once, in order; its `batch_size`, `shuffle` and `drop_last` are for your own loops."""
    rollout: InferenceEngineConfig | None = None
    """Episodes and servers; None is an experiment without servers."""
    saver: SaverConfig = SaverConfig()
    """Saving."""
    evaluator: EvaluatorConfig = EvaluatorConfig()
    """Evaluation."""
    stats_logger: StatsLoggerConfig = StatsLoggerConfig()
    """Metrics."""
    workers: WorkersConfig | None = None
    """Groups of workers for a script of Core; None is a script of ranks."""
    recover: RecoverConfig = RecoverConfig()
    """Recovery."""
    perf_trace: Bool | PositiveInt = False
    """Write `trace.json.gz` for ui.perfetto.dev: what all processes did in so many steps after each start; true is 20.
    It takes a launcher that starts the processes."""
    launcher: LauncherConfig = LauncherConfig()
    """Processes."""
    lite: LiteConfig = LiteConfig()
    """Options of the embedded server."""
    sglang: dict[str, Any] = {}
    """Options of SGLang servers, passed through."""
    vllm: dict[str, Any] = {}
    """Options of vLLM servers, passed through."""
    _from_environment: list[str] = PrivateAttr([])  # keys whose values environment variables brought in

    @classmethod
    @functools.cache
    def sources(cls) -> dict[str, str]:
        """Return by key the one whose value it takes unless it is given."""
        keys = {key.name: key for key in config_keys(cls)}
        of_blocks = [key for key in keys.values() if issubclass(key.owner, RunBlock) and "." not in key.parent]
        return {key.name: OF_RUN[key.leaf] for key in of_blocks if OF_RUN.get(key.leaf) in keys} | cls.DEFAULTS_FROM

    @property
    def fileroot(self) -> str:
        return self.cluster.fileroot

    @property
    def allocation(self) -> AllocationMode | None:
        """The parsed `allocation_mode`; None if it is empty."""
        return AllocationMode.from_str(self.allocation_mode) if self.allocation_mode else None

    @property
    def num_traced_steps(self) -> int:
        """How many steps `perf_trace` asks for."""
        return 20 if self.perf_trace is True else int(self.perf_trace)

    @property
    def trained(self) -> tuple[str, TrainEngineConfig]:
        """Key and block of the model that is trained, `actor` or else `model`; it is also the one that is served."""
        for key in ("actor", "model"):
            if isinstance(block := getattr(self, key, None), TrainEngineConfig):
                return key, block
        raise ConfigError(
            "actor.path or model.path must be given: got neither. Set the one that the script trains; a config class "
            "with another block must name it in `trained`."
        )

    @property
    def sampling(self) -> GenerationHyperparameters | None:
        """How training episodes are sampled; None without servers."""
        return getattr(self, "gconfig", None)

    @property
    def server_kind(self) -> ServerKind:
        """The kind of the servers of an experiment that has some."""
        assert self.rollout is not None, type(self)
        return KINDS[self.rollout.backend]

    @property
    def lite_takes_turns(self) -> bool:
        """Whether embedded servers and the trainer, in processes of one node, never compute at the same time."""
        rollout = self.rollout
        if rollout is None or rollout.backend != "lite" or rollout.colocated is not None:
            return False
        return rollout.max_head_offpolicyness == 0 and self.cluster.n_nodes == 1

    @property
    def lite_threads(self) -> int:
        """CPU threads of an embedded server; one core is left to the trainer's requests."""
        num_servers = self.rollout.num_servers if self.rollout and self.lite_takes_turns else 0
        all_but_one = len(os.sched_getaffinity(0)) - 1
        return self.lite.threads or max(1, all_but_one // num_servers if num_servers else 1)

    @property
    def has_reference(self) -> bool:
        """Whether each rank also holds a frozen copy of the model."""
        ref = getattr(self, "ref", None)  # a mapping where the script's own class judges it
        return ref is not None and not (isinstance(ref, TrainEngineConfig) and ref.is_base_of(self.trained[1]))

    @property
    def has_critic(self) -> bool:
        """Whether each rank also trains a critic."""
        return isinstance(getattr(self, "critic", None), PPOCriticConfig)

    def derive(self) -> None:
        """Fill in what follows from several keys: the allocation names the servers. Experiments add their own."""
        rollout, mode = self.rollout, self.allocation
        if mode is not None and self.workers is None and mode.train != ParallelSizes(data=mode.train.data):
            for engine in vars(self).values():
                if isinstance(engine, TrainEngineConfig):
                    engine.parallel = engine.parallel or str(mode.train)
        if rollout is None:
            return
        rollout.parallel = self.trained[1].parallel
        rollout.servers_sleep = mode is not None and mode.takes_turns
        if mode is not None and mode.gen_backend is not None:
            checks.check_backend(mode, self.allocation_mode, rollout)
            rollout.backend = cast(BackendName, mode.gen_backend)
            rollout.num_servers = rollout.num_servers or mode.gen_dp_size
            rollout.weight_update = rollout.weight_update or ("disk" if mode.takes_turns else "broadcast")
            path = self.trained[1].path
            block: dict[str, Any] = vars(self.lite) | {"path": path, "threads": self.lite.threads or 1}
            rollout.colocated = ColocatedConfig(**block) if mode.is_colocated else None

    def check(self) -> None:
        """Refuse contradictions; experiments add their own."""
        rollout, mode = self.rollout, self.allocation
        checks.check_loggers(self.stats_logger)
        checks.check_schedule(self.recover, self.evaluator, self.valid_dataset)
        checks.check_mixture(self.train_dataset, self.valid_dataset)
        checks.check_allocation(mode, self.allocation_mode, self.cluster, rollout)
        checks.check_colocated(mode, rollout, self.workers)
        train = None if mode is None or self.workers is not None else mode.train
        checks.check_senders(rollout, None if train is None else train.world_size)
        for key, engine in vars(self).items():
            if not isinstance(engine, TrainEngineConfig):
                continue
            checks.check_engine(engine, key, self.cluster, train)
            if engine.parallel:
                sizes = ParallelSizes.from_str(engine.parallel)
                change = f"allocation_mode gives the trainer: got {sizes} and {train}. Remove it."
                require(train in (None, sizes), f"{key}.parallel must be what {change}")
                checks.check_parallel(engine, key, sizes, given_by="allocation_mode")


class SFTConfig(BaseExperimentConfig):
    """Supervised fine-tuning."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        **BaseExperimentConfig.DEFAULTS_FROM,
        "tokenizer_path": "model.path",
        "model.path": "tokenizer_path",
    }
    SCRIPTS: ClassVar[Mapping[str, str]] = {"sft": "gsm8k_sft"}
    TITLE: ClassVar[str] = "Supervised fine-tuning"
    LOSS: ClassVar[str] = "sft/loss"
    DATA_TYPE: ClassVar[str] = "sft"

    rollout: None = None
    """There are no servers."""
    train_dataset: DatasetConfig = DatasetConfig(type="sft")
    """Training data."""
    model: TrainEngineConfig = TrainEngineConfig(optimizer=OptimizerConfig())
    """The model."""

    def check(self) -> None:
        """Refuse contradictions."""
        super().check()
        checks.check_training(self.model, "model", self.train_dataset, self.DATA_TYPE)


class DPOEngineConfig(TrainEngineConfig):
    """A policy that learns from pairs of answers, or its frozen reference."""

    disable_dropout: Bool = True
    """Dropout would make the ratio to the reference noise."""
    loss_type: Literal["dpo", "ipo"] = "dpo"
    """`dpo` takes the sum of log ratios over an answer (arXiv:2305.18290), `ipo` their mean (arXiv:2310.12036)."""
    beta: Positive = 0.1
    """Strength of the pull to the reference: beta of dpo, tau of ipo."""


class DPOConfig(SFTConfig):
    """Direct preference optimisation on pairs of answers."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        **SFTConfig.DEFAULTS_FROM,
        **_same("ref", "model", "path", "attn_impl", *_OF_FROZEN),
    }
    SCRIPTS: ClassVar[Mapping[str, str]] = {"dpo": "dpo"}
    TITLE: ClassVar[str] = "Preference optimization"
    LOSS: ClassVar[str] = "dpo/loss"
    DATA_TYPE: ClassVar[str] = "dpo"

    train_dataset: DatasetConfig = DatasetConfig(type="dpo")
    """Training data."""
    model: DPOEngineConfig = DPOEngineConfig(optimizer=OptimizerConfig())
    """The policy."""
    ref: DPOEngineConfig = DPOEngineConfig()
    """The reference; path, dtype and memory settings follow `model`."""

    def check(self) -> None:
        """Refuse contradictions."""
        super().check()
        checks.check_frozen(self.ref, "ref")


class RWEngineConfig(TrainEngineConfig):
    """A reward model: a sequence classifier of one label. A language model gets a head that starts at 0."""

    HAS_VALUE_HEAD: ClassVar[bool] = True

    center: NonNegative = 0.0
    """Weight of (chosen + rejected score)^2 in the loss, which keeps scores near 0 (0.01 in use)."""


class RWConfig(SFTConfig):
    """A reward model, trained on pairs of answers."""

    SCRIPTS: ClassVar[Mapping[str, str]] = {"rw": "reward_model"}
    TITLE: ClassVar[str] = "Reward modelling"
    LOSS: ClassVar[str] = "rw/loss"
    DATA_TYPE: ClassVar[str] = "rw"

    train_dataset: DatasetConfig = DatasetConfig(type="rw")
    """Training data."""
    model: RWEngineConfig = RWEngineConfig(optimizer=OptimizerConfig())
    """The reward model."""


class GRPOConfig(BaseExperimentConfig):
    """Reinforcement learning with verifiable rewards; by default GRPO, arXiv:2402.03300."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        **BaseExperimentConfig.DEFAULTS_FROM,
        "actor.max_new_tokens": "gconfig.max_new_tokens",
        "rollout.num_minibatches": "actor.ppo_n_minibatches",
        **_same("ref", "actor", "path", "attn_impl", *_OF_FROZEN),
        **_same("teacher", "actor", *_OF_FROZEN),
        **_same("eval_gconfig", "gconfig", *_OF_EVALUATION),
        "tokenizer_path": "actor.path",
        "actor.path": "tokenizer_path",
    }

    SCRIPTS: ClassVar[Mapping[str, str]] = {"grpo": "gsm8k_grpo", "distill": "distill"}
    LOSS: ClassVar[str] = "policy/loss"
    DATA_TYPE: ClassVar[str] = "rl"
    CHOICES: ClassVar[Mapping[str, Any]] = GRPO_DEFAULTS
    """Choices of the algorithm without a preset."""

    async_training: Bool = True
    """False trains synchronously: `rollout.max_head_offpolicyness` becomes 0."""
    reward: str | dict[str, Finite] = GSM8K_REWARD
    """Reward function, `FILE.py:FUNCTION` or `module:FUNCTION`; several with their weights as a mapping."""
    gconfig: GenerationHyperparameters = GenerationHyperparameters(n_samples=8)
    """Sampling of training episodes."""
    eval_gconfig: GenerationHyperparameters = GenerationHyperparameters(greedy=True)
    """Sampling of evaluations; what is not given follows `gconfig`, but greedy and with one sample."""
    rollout: InferenceEngineConfig = InferenceEngineConfig()
    """Episodes and servers."""
    agent: AgentConfig = AgentConfig()
    """Agents that speak HTTP, of scripts that make an AgentWorkflow of them."""
    actor: PPOActorConfig = PPOActorConfig(optimizer=OptimizerConfig())
    """The policy and its algorithm."""
    ref: FrozenActorConfig | None = None
    """The reference of the KL penalty; None is no reference. Path, dtype and memory settings follow `actor`."""
    teacher: FrozenActorConfig | None = None
    """The teacher of on-policy distillation; None is no teacher. Dtype and memory settings follow `actor`."""

    def derive(self) -> None:
        """Apply `async_training`, and fill in the choices of the algorithm and `top_k`."""
        super().derive()
        if not self.async_training:
            self.rollout.max_head_offpolicyness = 0
        self.actor = resolve_choices(self.actor, self.CHOICES)
        if self.gconfig.narrows and self.gconfig.top_k >= ALL_TOKENS:
            self.gconfig.top_k = DEFAULT_KEPT_IDS

    def check(self) -> None:
        """Refuse contradictions, also of the algorithm."""
        super().check()
        checks.check_training(self.actor, "actor", self.train_dataset, self.DATA_TYPE)
        checks.check_servers(self.rollout, self.lite, gconfig=self.gconfig, eval_gconfig=self.eval_gconfig)
        checks.check_sampling(self.gconfig, self.rollout, self.cluster)
        checks.check_objective(self.actor, self.gconfig, self.rollout)
        checks.check_reference(self.actor, self.ref, self.gconfig)
        checks.check_teacher(self.actor, self.teacher, self.gconfig)
        checks.check_critic(self.actor, has_critic=self.has_critic)


class PPOConfig(GRPOConfig):
    """Reinforcement learning with a critic; by default PPO, arXiv:1707.06347."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        **GRPOConfig.DEFAULTS_FROM,
        **_same("critic", "actor", "path", "dtype", "attn_impl", "mb_spec", "fsdp", "torch_compile"),
        **_same("critic", "actor", "gradient_checkpointing", "activation_offloading", "ppo_n_minibatches"),
    }
    SCRIPTS: ClassVar[Mapping[str, str]] = {"ppo": "gsm8k_ppo"}
    CHOICES: ClassVar[Mapping[str, Any]] = PRESETS["ppo"]

    critic: PPOCriticConfig = PPOCriticConfig(optimizer=OptimizerConfig())
    """The critic. Path (its backbone), minibatches, dtype and memory settings follow `actor`."""
    critic_warmup_steps: NonNegativeInt = 0
    """Steps at the start in which only the critic learns."""

    def check(self) -> None:
        """Refuse contradictions, and what the critic lacks."""
        super().check()
        checks.check_training(self.critic, "critic", self.train_dataset, self.DATA_TYPE)
        checks.check_equal("critic.group_size", self.critic.group_size, "gconfig.n_samples", self.gconfig.n_samples)


class EvalConfig(BaseExperimentConfig):
    """A model is asked the prompts of `valid_dataset`; nothing is trained."""

    DEFAULTS_FROM: ClassVar[dict[str, str]] = {
        **{key: source for key, source in BaseExperimentConfig.DEFAULTS_FROM.items() if "_dataset." not in key},
        **{key: source for key, source in GRPOConfig.DEFAULTS_FROM.items() if key.startswith("eval_gconfig.")},
        "tokenizer_path": "model.path",
        "model.path": "tokenizer_path",
        "rollout.consumer_batch_size": "valid_dataset.batch_size",
    }
    SCRIPTS: ClassVar[Mapping[str, str]] = {"eval": "evaluate", "null": "evaluate"}

    train_dataset: DatasetConfig = DatasetConfig(path="")
    """Must not be given: nothing is trained."""
    valid_dataset: DatasetConfig = DatasetConfig()
    """Prompts and what rewards need; `split` is by default `test`, or all rows of a source without one."""
    model: TrainEngineConfig = TrainEngineConfig()
    """The model that servers load, in its dtype."""
    rollout: InferenceEngineConfig = InferenceEngineConfig(max_concurrent_rollouts=128)
    """Episodes (one per prompt) and servers."""
    reward: str | dict[str, Finite] = GSM8K_REWARD
    """Reward function, `FILE.py:FUNCTION` or `module:FUNCTION`; several with their weights as a mapping."""
    gconfig: GenerationHyperparameters = GenerationHyperparameters(n_samples=8)
    """How each prompt is sampled `n_samples` times."""
    eval_gconfig: GenerationHyperparameters | None = GenerationHyperparameters(greedy=True)
    """How it is answered once more, greedily; what is not given follows `gconfig`. Null leaves this out."""
    pass_at_k: list[PositiveInt] | None = None
    """Numbers k of samples for which pass@k is estimated; None is 1, 2, 4, .. and `gconfig.n_samples`."""

    @property
    def sampling(self) -> GenerationHyperparameters:
        return self.gconfig.new(top_p=1.0, top_k=ALL_TOKENS, min_p=0.0)  # servers need not return what these kept

    def derive(self) -> None:
        """Fill in the numbers k."""
        super().derive()
        size = self.gconfig.n_samples
        powers = {2**i for i in range(size.bit_length())}
        self.pass_at_k = sorted(powers | {size} if self.pass_at_k is None else {*self.pass_at_k})

    def check(self) -> None:
        """Refuse contradictions."""
        super().check()
        mode, train_path = self.allocation, self.train_dataset.path
        require(
            not train_path,
            f"train_dataset.path must not be given in an evaluation: got {train_path}. Set valid_dataset.path.",
        )
        require(
            mode is None or mode.is_evaluation,
            f"allocation_mode must be servers and eval in an evaluation: got {mode}. Write e.g. lite.d1+eval.",
        )
        largest = max(self.pass_at_k or [1])
        require(
            largest <= self.gconfig.n_samples,
            f"pass_at_k must be at most gconfig.n_samples: got {largest} and {self.gconfig.n_samples}. Lower it.",
        )
        require(
            not self.gconfig.greedy,
            "gconfig.greedy must be false in an evaluation: got true. Samples would be equal; eval_gconfig is greedy.",
        )
        samplers = {"gconfig": self.gconfig, "eval_gconfig": self.eval_gconfig or self.gconfig}
        checks.check_servers(self.rollout, self.lite, **samplers)


EXPERIMENTS = (GRPOConfig, PPOConfig, SFTConfig, DPOConfig, RWConfig, EvalConfig)
"""The experiments that come along. Another one is a class here, an engine and a script in examples/arealite."""
