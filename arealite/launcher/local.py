"""Runs an experiment on this machine: inference servers, the trainer's ranks, one console.

    python3 -m arealite.launcher.local ENTRY.py --config FILE.yaml [key=value ...]

Exit status: 0 the trainer is done; 2 the config can't run and nothing was started; 3 a server ended; 128 + n a signal
(130 is Ctrl-C); otherwise the status of the first rank that failed. Nothing that was started survives.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from arealite.api.cli_args import GRPOConfig, SFTConfig, load_expr_config
from arealite.api.errors import ConfigError
from arealite.launcher.console import Console
from arealite.launcher.roles import SERVER_ADDRS_VARIABLE, Roles, check_roles, server_jobs, trainer_job
from arealite.launcher.supervisor import Supervisor
from arealite.utils.network import hold_port, port_of

_CONFIG_FAILED = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m arealite.launcher.local",
        description="Start inference servers and trainer on this machine, as allocation_mode says.",
        epilog="exit status: 0 done, 2 config error, 3 a server ended, 128 + n a signal, else the failed rank's",
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
    try:
        entry = _entry(entry)
        config = read_config(entry, argv)
        roles = check_roles(config)
    except ConfigError as error:
        print(f"ConfigError: {error}", file=sys.stderr)
        return _CONFIG_FAILED
    return asyncio.run(_run(config, roles, entry=entry, argv=argv))


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
    """Start everything at once and supervise it to its end."""
    log_folder = Path(config.cluster.fileroot) / config.experiment_name / config.trial_name / "logs"
    log_folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        ports = [port_of(held.enter_context(hold_port())) for _ in range(roles.num_servers + 1)]
        servers = server_jobs(config, roles, ports[1:])
        server_addrs = ",".join(server.address for server in servers) or roles.foreign_servers
        async with Supervisor(log_folder=log_folder, console=Console()) as supervisor:
            supervisor.say(f"{config.allocation_mode}; logs in {log_folder}")
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
                        streams=streams,
                        report=report,
                    ),
                )
            else:
                supervisor.say(f"servers only, until Ctrl-C: export {SERVER_ADDRS_VARIABLE}={server_addrs}")
            return await supervisor.wait()


def _entry(entry: str | Path) -> Path:
    path = Path(entry)
    if not path.is_file():
        raise ConfigError(f"the entry script must be a file: got {entry}, which does not exist. Correct its path.")
    return path.resolve()


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
