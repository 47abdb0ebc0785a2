"""`python -m arealite.launcher.serve.sglang_server [--check] FLAGS`: SGLang's own server, after a check of its flags.

Runs in SGLang's environment, which lacks our dependencies. SGLang's own parser and rules judge the flags; we also
refuse what would fail later or corrupt training data.
"""

import argparse
import contextlib
import importlib
import importlib.util
import logging
import os
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from arealite.api.errors import ConfigError
from arealite.launcher.serve.wrapper import RequireSecret, strict, wrap
from arealite.utils.secret import secret_of_environment

_MEMORY_SAVER = "torch_memory_saver"
_VARIABLES = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # else logprobs are of temperature 1 whatever the temperature is
    "SGLANG_VLM_CACHE_SIZE_MB": "0",  # of what images became, which outlives the weights that it came from
}
"""What training needs, whatever the user's environment says."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    os.environ |= _VARIABLES
    return wrap(argv, check_flags, _serve)


def check_flags(flags: list[str]) -> tuple[list[str], dict[str, object]]:
    """Refuse flags that the installed SGLang or training can't use; return the others, and which program runs them."""
    with contextlib.redirect_stdout(sys.stderr):  # stdout is for our JSON
        try:
            version = str(importlib.import_module("sglang").__version__)
            server_args = importlib.import_module("sglang.srt.server_args")
        except (ImportError, RuntimeError) as error:
            raise ConfigError(
                f"the interpreter of the servers must have a working SGLang: got {sys.executable}, where importing it "
                f"fails with {_one_line(error)}. Set launcher.server_python to that of SGLang's environment."
            ) from error
        parser = strict(argparse.ArgumentParser, program=f"SGLang {version}", block="sglang")(
            prog="python -m arealite.launcher.serve.sglang_server", allow_abbrev=False
        )
        server_args.ServerArgs.add_cli_args(parser)
        check_options(parser.parse_args(flags))
        try:
            record = server_args.prepare_server_args(list(flags))
            if hasattr(record, "resolve_once"):  # older versions check flags in the constructor
                record.resolve_once()
        except Exception as error:
            raise ConfigError(
                f"SGLang {version} must accept its flags and the model's config: got {_one_line(error)}. "
                "Correct the sglang block."
            ) from error
    return flags, {"program": "sglang", "version": version}


def check_options(options: argparse.Namespace) -> None:
    """Refuse what would fail later or corrupt training data."""
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
    if getattr(options, "enable_memory_saver", False) and importlib.util.find_spec(_MEMORY_SAVER) is None:
        raise ConfigError(
            f"{_MEMORY_SAVER} must be installed beside SGLang for enable_memory_saver, by which a server gives a GPU's "
            f"memory back: got none in {sys.executable}. Run `pip install torch-memory-saver` there, which needs CUDA."
        )


def _serve(flags: list[str]) -> None:
    if secret := secret_of_environment():
        flags += ["--api-key", secret]  # in our memory alone; SGLang shows it when it warms itself up
        _hide_in_logs(secret)
        importlib.import_module("sglang.srt.entrypoints.http_server").app.add_middleware(RequireSecret)
    sys.argv[1:] = flags
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


def _hide_in_logs(secret: str) -> None:
    """Keep the secret out of SGLang's log, to which it writes its flags."""
    make_record = logging.getLogRecordFactory()

    def make_record_without(*args: Any, **kwargs: Any) -> logging.LogRecord:
        record = make_record(*args, **kwargs)
        if isinstance(record.msg, str):
            record.msg = record.msg.replace(secret, "***")
        return record

    logging.setLogRecordFactory(make_record_without)


def _one_line(error: BaseException) -> str:
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line.rstrip('.')}"


if __name__ == "__main__":
    sys.exit(main())
