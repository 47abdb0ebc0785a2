"""`python -m arealite.launcher.serve.sglang_server [--check] FLAGS`: SGLang's own server, after a check of its flags.

Runs in SGLang's environment, which lacks our dependencies. SGLang's own parser and rules judge the flags; we also
refuse what would hang later or corrupt training data. A refusal is the last line on stderr and exit status 2, before a
model is loaded. `--check` starts nothing and prints one line of JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import logging
import os
import runpy
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from arealite.api.errors import ConfigError
from arealite.launcher.serve.auth import RequireSecret
from arealite.utils.secret import secret_of_environment

_VERSION_FLAG = "--weight-version"
RAW_LOGPROBS_VARIABLE = "SGLANG_RETURN_ORIGINAL_LOGPROB"


def main(argv: Sequence[str] | None = None) -> int:
    """Check the flags, then print what was found or become the server."""
    flags = list(sys.argv[1:] if argv is None else argv)
    if is_check := "--check" in flags:
        flags.remove("--check")
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is for our JSON
            version = check_flags(flags)
    except ConfigError as error:
        print(f"{ConfigError.__module__}.ConfigError: {error}", file=sys.stderr)
        return 2
    if is_check:
        print(json.dumps({"program": "sglang", "version": version}))
        return 0
    if secret := secret_of_environment():
        flags += ["--api-key", secret]  # in our memory alone; SGLang shows it when it warms itself up
        _hide_in_logs(secret)
        importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(RequireSecret)
    sys.argv[1:] = flags
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
    return 0


def check_flags(flags: list[str]) -> str:
    """Refuse flags that the installed SGLang or training can't use; return SGLang's version."""
    try:
        version = str(importlib.import_module("sglang").__version__)
        server_args = importlib.import_module("sglang.srt.server_args")
    except (ImportError, RuntimeError) as error:
        raise ConfigError(
            f"the interpreter of the servers must have a working SGLang: got {sys.executable}, where importing it "
            f"fails with {_one_line(error)}. Set launcher.server_python to that of SGLang's environment."
        ) from error
    parser = _Parser(prog="python -m arealite.launcher.serve.sglang_server", allow_abbrev=False)
    server_args.ServerArgs.add_cli_args(parser)
    drop_unknown_version(flags, parser.flags)  # SGLang before 0.5 does not report versions
    options, unknown = parser.parse_known_args(flags)
    if unknown:
        raise ConfigError(unknown_flag_message(unknown[0], parser.flags, version))
    check_nodes(
        nnodes=options.nnodes,
        node_rank=options.node_rank,
        dist_init_addr=options.dist_init_addr,
        num_devices=options.tp_size * options.pp_size,
    )
    if getattr(options, "tokenizer_worker_num", 1) > 1 and secret_of_environment():
        raise ConfigError(
            f"tokenizer_worker_num must be 1 for a server with a secret: got {options.tokenizer_worker_num}, whose "
            "processes SGLang can't guard. Remove it from the sglang block."
        )
    if getattr(options, "allow_auto_truncate", False):
        raise ConfigError(
            "allow_auto_truncate must be off: got on, which cuts prompts without saying so. Remove it from the sglang "
            "block."
        )
    if os.environ.get(RAW_LOGPROBS_VARIABLE, "0").lower() not in ("", "0", "false", "no", "n", "f", "off"):
        raise ConfigError(
            f"{RAW_LOGPROBS_VARIABLE} must be off: got {os.environ[RAW_LOGPROBS_VARIABLE]}, which returns logprobs of "
            "temperature 1 whatever the temperature is. Remove it from launcher.inference_server_env_vars."
        )
    try:
        record = server_args.prepare_server_args(list(flags))
        if hasattr(record, "resolve_once"):  # older versions check flags in the constructor
            record.resolve_once()
    except Exception as error:
        raise ConfigError(
            f"SGLang {version} must accept its flags and the model's config: got {_one_line(error)}. "
            "Correct the sglang block."
        ) from error
    return version


def drop_unknown_version(flags: list[str], known: Collection[str]) -> None:
    """Remove `--weight-version` and its value from `flags` if SGLang does not know it."""
    if _VERSION_FLAG in flags and _VERSION_FLAG not in known:
        at = flags.index(_VERSION_FLAG)
        del flags[at : at + 2]


def unknown_flag_message(word: str, known: Collection[str], version: str) -> str:
    """Explain an unknown flag, with the flags that resemble it."""
    flag = word.partition("=")[0]
    matches = difflib.get_close_matches(flag, known, n=2, cutoff=0.7)
    advice = f"Did you mean {' or '.join(matches)}?" if matches else "Remove it from the sglang block."
    return f"every flag must be one of SGLang {version}: got {flag}. {advice}"


def check_nodes(*, nnodes: int, node_rank: int, dist_init_addr: str | None, num_devices: int) -> None:
    """Refuse a server on several nodes that can't meet, or whose `num_devices` can't be divided evenly."""
    if nnodes < 1 or not 0 <= node_rank < nnodes:
        raise ConfigError(
            f"node_rank must be from 0 to nnodes - 1: got node_rank {node_rank} and nnodes {nnodes}. "
            "Number the nodes of a server from 0."
        )
    if nnodes > 1 and not dist_init_addr:
        raise ConfigError(
            f"dist_init_addr must be given if nnodes is above 1: got nnodes {nnodes} and no address. "
            "Add dist_init_addr=HOST:PORT of node 0, the same on every node."
        )
    if num_devices % nnodes:
        raise ConfigError(f"nnodes must divide tp_size * pp_size: got {nnodes} and {num_devices}. Change one of them.")


def _hide_in_logs(secret: str) -> None:
    """Keep the secret out of SGLang's log, to which it writes its flags."""
    make_record = logging.getLogRecordFactory()

    def make_record_without(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if isinstance(record.msg, str):
            record.msg = record.msg.replace(secret, "***")
        return record

    logging.setLogRecordFactory(make_record_without)


class _Parser(argparse.ArgumentParser):
    """SGLang's parser with our errors."""

    @property
    def flags(self) -> Collection[str]:
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise ConfigError(f"SGLang's flags must be valid: got {message}. Correct the sglang block.")


def _one_line(error: BaseException) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


if __name__ == "__main__":
    sys.exit(main())
