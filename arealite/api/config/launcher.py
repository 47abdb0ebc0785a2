"""The nodes of a run, how processes start on them, and the worker groups of Core."""

from typing import Literal

from arealite.api.config.types import ConfigBase, EnvVars, Folder, NonNegativeInt, Positive, PositiveInt

Strategy = Literal["STRICT_PACK", "PACK", "SPREAD", "STRICT_SPREAD"]


class ClusterSpecConfig(ConfigBase):
    """The nodes of a run."""

    n_nodes: PositiveInt = 1
    """Number of nodes."""
    n_gpus_per_node: NonNegativeInt = 8
    """GPUs per node; 0 is a CPU cluster."""
    fileroot: Folder = "runs"
    """Folder of all runs, visible to every node; a run's files are in `<fileroot>/<experiment_name>/<trial_name>/`."""


class SlurmLauncherConfig(ConfigBase):
    """Options of the Slurm launcher."""

    srun_additional_args: str = ""
    """More arguments of srun."""
    sbatch_additional_args: str = ""
    """More arguments of sbatch, on one line or several, e.g. `--partition=gpu --account=lab --time=1-0`."""
    container_type: Literal["none", "apptainer"] = "none"
    """What runs the images."""
    mount: str = ""
    """Folders to mount in containers, as `/from:/to,/from2:/to2`."""
    trainer_image: str = ""
    """Image of trainers; empty runs them without a container."""
    inference_server_image: str = ""
    """Image of servers; empty runs them without a container."""


class LauncherConfig(ConfigBase):
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
    """How often a server that exits after it was ready is restarted without a new checkpoint in between; then the run
    continues with the others, or ends."""
    node_timeout: Positive = 30.0
    """Seconds without a heartbeat after which a node counts as lost."""
    slurm: SlurmLauncherConfig = SlurmLauncherConfig()
    """Slurm."""
    inference_server_env_vars: EnvVars = ""
    """Environment of servers, as `A=1,B=2`."""
    trainer_env_vars: EnvVars = ""
    """Environment of trainers, as `A=1,B=2`."""
    trainer_threads: PositiveInt | None = None
    """CPU threads of one trainer process; None is OMP_NUM_THREADS of the launcher, else a share of the cores."""
    server_python: str | None = None
    """Python interpreter of the environment in which SGLang or vLLM is installed; None is that of the launcher."""
    stop_timeout: Positive = 60.0
    """Seconds that the trainer has for a last checkpoint and report after Ctrl-C or SIGTERM; a second one ends it."""
    stall_timeout: Positive = 1800.0
    """Seconds without progress of any process after which the run is stalled: exit status 4."""
    preflight: bool = True
    """Whether the launcher looks at model, tokenizer, data, reward and declared graph before it starts anything."""


class RoleConfig(ConfigBase):
    """The workers of one role. A role that says nothing lies with the first one, as in a script of ranks."""

    ranks: PositiveInt | None = None
    """Workers of a group of its own; None takes the trainer's part of `allocation_mode`, or shares the first group."""
    parallel: str = ""
    """Sizes of a group of its own, such as `d2t2` (see docs/parallel.md), instead of `ranks`. Empty is `ranks` of data
    alone, or without these the trainer's part of `allocation_mode`."""
    share: str | None = None
    """Role with whose workers this one takes turns; None is a group of its own if `ranks` or `parallel` is given."""
    strategy: Strategy = "PACK"
    """How Ray places the workers on nodes."""
    threads: PositiveInt | None = None
    """CPU threads of each worker; None shares the cores out, as the launcher does for ranks."""


class RolloutWorkersConfig(ConfigBase):
    """Processes that run the training episodes of a declared graph."""

    num: NonNegativeInt = 0
    """How many, on any nodes; 0 is the master itself, which always keeps the account and runs evaluations."""


class WorkersConfig(ConfigBase):
    """Groups of workers on Ray, which a master tells what to do."""

    actor: RoleConfig = RoleConfig()
    """The policy."""
    critic: RoleConfig = RoleConfig()
    """The critic."""
    ref: RoleConfig = RoleConfig()
    """The reference."""
    teacher: RoleConfig = RoleConfig()
    """The teacher of a distillation."""
    model: RoleConfig = RoleConfig()
    """The model of an experiment without reinforcement learning."""
    rollout: RolloutWorkersConfig = RolloutWorkersConfig()
    """Episodes."""
    call_timeout: Positive = 7200.0
    """Seconds that a call may take before its group counts as lost."""
    restarts: NonNegativeInt = 3
    """How often a group that is lost may be started again between two checkpoints."""
