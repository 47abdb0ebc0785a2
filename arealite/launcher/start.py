"""Starts a script by the launcher that `mode` names, for a script that is run by hand and for `arealite train`.

if __name__ == "__main__":
    sys.exit(launched(__file__, main))  # python3 SCRIPT.py [--config FILE.yaml] [--dry-run] key=value ...
"""

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from arealite.api.config.loader import given_value
from arealite.api.errors import REFUSED, ConfigError
from arealite.api.script import show_refusal
from arealite.launcher import local, ray, slurm
from arealite.utils.terminal import Parser

LAUNCHERS = {"local": local.main, "ray": ray.main, "slurm": slurm.main}


def start(script: Path, config: str, words: Sequence[str]) -> int:
    """Start a script by the launcher that `mode` names in the config or in the words, and return its exit status."""
    mode = given_value("mode", config, [word for word in words if not word.startswith("-")]) or "local"
    if mode not in LAUNCHERS:
        raise ConfigError(f"mode must be local, ray or slurm: got {mode}. Correct it.")
    return LAUNCHERS[mode]([str(script), "--config", config, *words])


def launched(
    file: str,
    main: Callable[[list[str]], object],
    argv: Sequence[str] | None = None,
    *,
    check: Callable[[list[str]], object] | None = None,
) -> int:
    """Run `main` in a process of a launcher or of torchrun, else start the script `file` by a launcher.

    `check`, a function of the script, gets the same arguments and raises ConfigError if the run would fail. Every
    launcher finds it by its name and calls it before anything starts, also for --dry-run; so does `arealite check`.
    Returns the exit status. Without --config the config is `configs/<script>.yaml` beside the script; that of
    main_sync_ppo.py may be called sync-ppo.yaml.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "RANK" in os.environ or not {"-h", "--help"}.isdisjoint(words):
        main(words)
        return 0
    parser = Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config")
    args, others = parser.parse_known_args(words)
    script = Path(file).resolve()
    try:
        config = args.config or _config_beside(script)
        return start(script, config, others)
    except ConfigError as error:
        show_refusal(error)
        return REFUSED


def _config_beside(script: Path) -> str:
    names = dict.fromkeys([script.stem, script.stem.removeprefix("main_").replace("_", "-")])
    files = [script.parent / "configs" / f"{name}.yaml" for name in names]
    config = next((file for file in files if file.is_file()), None)
    if config is None:
        raise ConfigError(
            f"--config must be given without {' or '.join(map(str, files))}: got no file. Add --config FILE.yaml."
        )
    return str(config)
