"""Runs an experiment on this machine: inference servers, the trainer's ranks, one console.

    python3 -m arealite.launcher.local ENTRY.py --config FILE.yaml [key=value ...]

Exit status: 0 the trainer is done; 2 the config can't run and nothing was started; 3 a server ended; 4 the run stood
still (see `stall`); 128 + n a signal (130 is Ctrl-C); otherwise the status of the first rank that failed. Nothing that
was started survives. With `recover.mode` auto or fault a run that failed or stood still is started again, so the status
is that of the last attempt.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.launcher.console import Console
from arealite.launcher.roles import (
    Roles,
    check_roles,
    server_jobs,
    trainer_job,
    untied_model,
)
from arealite.launcher.stall import StallPolicy
from arealite.launcher.supervisor import Ending, Supervisor
from arealite.utils.environment import SERVER_ADDRS_VARIABLE
from arealite.utils.file_lock import file_lock
from arealite.utils.network import hold_port, port_of

_CONFIG_FAILED = 2
_SETUP_TIMEOUT_S = 600.0
"""Of fine-tuning, whose start is the loading of its model."""
_LOCK_TIMEOUT_S = 5.0
"""So long may the end of another launcher of the same run take."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m arealite.launcher.local",
        description="Start inference servers and trainer on this machine, as allocation_mode says.",
        epilog="exit status: 0 done, 2 config error, 3 a server ended, 4 the run stood still, 128 + n a signal, else "
        "the failed rank's",
    )
    parser.add_argument("entry", help="script with the training loop, e.g. examples/arealite/gsm8k_grpo.py")
    parser.add_argument("--config", metavar="FILE.yaml", required=True, help="experiment")
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="keys of the experiment to change")
    args = parser.parse_intermixed_args(argv)
    return launch(args.entry, ["--config", args.config, *args.overrides])


def launch(entry: str | Path, argv: Sequence[str]) -> int:
    """Run `entry` with `--config FILE key=value ...`, wait for its end and return the launcher's exit status.

    Must be called from the main thread, which takes SIGINT and SIGTERM meanwhile: a caller that gets 128 or more
    should end as well. The caller's other child processes must not be started meanwhile.
    """
    with contextlib.ExitStack() as held:
        try:
            entry = entry_script(entry)
            config = read_config(entry, argv)
            roles = check_roles(config)
            _check_resume(config)
            held.enter_context(file_lock(_run_folder(config) / ".launcher.lock", timeout_s=_LOCK_TIMEOUT_S))
            _untie(config, roles)
        except (ConfigError, TimeoutError) as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            return _CONFIG_FAILED
        return asyncio.run(_run(config, roles, entry=entry, argv=argv))


def entry_script(entry: str | Path) -> Path:
    """Return the absolute path of the script, which must be a file."""
    path = Path(entry)
    if not path.is_file():
        raise ConfigError(f"the entry script must be a file: got {entry}, which does not exist. Correct its path.")
    return path.resolve()


def read_config(entry: Path, argv: Sequence[str]) -> GRPOConfig | SFTConfig:
    """Load the part of the config that the launcher needs.

    If the entry script calls `load_expr_config(..., GRPOConfig)` or `SFTConfig`, that is the class, and a key it does
    not know is an error here already. Otherwise the script has a class of its own: a `model` block without an `actor`
    block means SFTConfig, anything else GRPOConfig, and the script judges the keys that are unknown here.
    """
    common: dict[str, type[GRPOConfig] | type[SFTConfig]] = {"GRPOConfig": GRPOConfig, "SFTConfig": SFTConfig}
    names = _loaded_class_names(entry)
    if len(names) == 1 and names <= common.keys():
        return load_expr_config(argv, common[names.pop()])[0]
    blocks = _blocks(argv)
    has_model_only = "model" in blocks and "actor" not in blocks
    return load_expr_config(argv, common["SFTConfig" if has_model_only else "GRPOConfig"], ignore_unknown=True)[0]


async def _run(config: GRPOConfig | SFTConfig, roles: Roles, *, entry: Path, argv: Sequence[str]) -> int:
    """Run to the end, and start again what failed as often as `recover` allows."""
    folder = _run_folder(config)
    if not (folder / "recover").exists():
        for log in (folder / "logs").glob("*.log"):  # of a run that this one replaces
            log.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    record = {"entry": str(entry), "argv": list(argv)}
    (folder / "run.json").write_text(json.dumps(record) + "\n", encoding="utf-8")  # `arealite replay` reads it
    retries = config.recover.retries if config.recover.mode in ("auto", "fault") else 0
    cause = ""
    for attempt in range(retries + 1):
        restart = f"restart {attempt} of {retries}, because {cause}" if attempt else None
        ending = await _attempt(config, roles, entry=entry, argv=argv, restart=restart)
        cause = ending.reason
        if not ending.is_failure or ending.status == _CONFIG_FAILED or ending.is_refusal:
            break
    return ending.status


async def _attempt(
    config: GRPOConfig | SFTConfig, roles: Roles, *, entry: Path, argv: Sequence[str], restart: str | None
) -> Ending:
    """Start everything at once and supervise it to its end; `restart` tells why it is not the first time."""
    log_folder, scratch = _run_folder(config) / "logs", _run_folder(config) / ".torchrun"
    log_folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        held.callback(shutil.rmtree, scratch, ignore_errors=True)
        ports = [port_of(held.enter_context(hold_port())) for _ in range(roles.num_servers + 1)]
        servers = server_jobs(config, roles, ports[1:])
        server_addrs = ",".join(server.address for server in servers) or roles.foreign_servers
        async with Supervisor(
            log_folder=log_folder, console=Console(), stall=_stall_policy(config, roles)
        ) as supervisor:
            supervisor.say(restart or f"{config.allocation_mode}; logs in {log_folder}")
            if servers and isinstance(config, GRPOConfig):
                await supervisor.start_servers(servers, setup_timeout_s=config.rollout.setup_timeout)
            if roles.num_ranks > 0:
                await supervisor.start_trainer(
                    roles.num_ranks,
                    lambda streams, report: trainer_job(
                        config,
                        roles,
                        entry=entry,
                        argv=argv,
                        server_addrs=server_addrs,
                        master_port=ports[0],
                        scratch=scratch,
                        is_restart=restart is not None,
                        streams=streams,
                        report=report,
                    ),
                )
            else:
                supervisor.say(f"servers only, until Ctrl-C: export {SERVER_ADDRS_VARIABLE}={server_addrs}")
            await supervisor.wait()
        return supervisor.ending


def _run_folder(config: GRPOConfig | SFTConfig) -> Path:
    return Path(config.cluster.fileroot) / config.experiment_name / config.trial_name


def _untie(config: GRPOConfig | SFTConfig, roles: Roles) -> None:
    """Write the model that servers start with, in a process of its own, as a launcher does without torch."""
    if roles.num_servers == 0 or not isinstance(config, GRPOConfig) or not config.rollout.untie_embeddings:
        return
    command = [sys.executable, "-m", "arealite.utils.untied_copy", config.actor.path, str(untied_model(config))]
    outcome = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if outcome.returncode != 0:
        last_line = outcome.stderr.strip().rpartition("\n")[2]
        raise ConfigError(f"rollout.untie_embeddings must be false for {config.actor.path}: got true. {last_line}")


def _check_resume(config: GRPOConfig | SFTConfig) -> None:
    """Refuse to resume what has no checkpoint, before anything starts; whether one is whole is the trainer's to say."""
    folder = _run_folder(config) / "recover"
    if config.recover.mode == "resume" and not any(folder.glob("step_*")):
        raise ConfigError(
            f"{folder} must hold a checkpoint for recover.mode=resume: got none. Set recover.mode=auto to start afresh."
        )


def _stall_policy(config: GRPOConfig | SFTConfig, roles: Roles) -> StallPolicy:
    """Servers must become ready in `setup_timeout` anyhow; that is then also what the start of ranks may take."""
    return StallPolicy(
        timeout_s=config.launcher.stall_timeout,
        setup_timeout_s=config.rollout.setup_timeout if isinstance(config, GRPOConfig) else _SETUP_TIMEOUT_S,
        on_stall=config.launcher.on_stall,
        foreign_servers={address: address for address in roles.foreign_servers.split(",") if address},
    )


def _loaded_class_names(entry: Path) -> set[str]:
    """Return the config classes that the script passes to `load_expr_config`."""
    try:
        tree = ast.parse(entry.read_bytes())
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"the entry script must be Python: got {entry}, {error}. Correct it there.") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) == 2]
    return {_last_name(call.args[1]) for call in calls if _last_name(call.func) == "load_expr_config"}


def _last_name(node: ast.expr) -> str:
    """Return `b` of `b` and of `a.b`."""
    return ast.unparse(node).rpartition(".")[2]


def _blocks(argv: Sequence[str]) -> set[str]:
    """Return the top-level keys of the file and the overrides; an unreadable file is told by `load_expr_config`."""
    blocks = {argument.partition("=")[0].partition(".")[0] for argument in argv}
    with contextlib.suppress(OSError, yaml.YAMLError, ValueError):
        loaded = yaml.safe_load(Path(argv[argv.index("--config") + 1]).read_text(encoding="utf-8"))
        blocks |= set(loaded) if isinstance(loaded, dict) else set()
    return blocks


if __name__ == "__main__":
    sys.exit(main())
