"""`python -m arealite.server --model-path DIR --port P`: serve one model with the embedded engine until SIGTERM.

On SIGTERM, requests in flight return the tokens so far. With a secret in the environment (`utils.secret`) every request
must have it; without one the server listens on loopback only.

Exit status: 0 after SIGTERM or SIGINT, 1 when generation failed, 2 for arguments or a model that can't be served.
"""

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from arealite.generation.engine import GenerationEngine
from arealite.server.app import Server, load_server
from arealite.utils import heartbeat
from arealite.utils.http_server import HttpServer
from arealite.utils.processes import raise_file_limit
from arealite.utils.secret import check_exposed, secret_of_environment
from arealite.utils.terminal import Parser, setup_logging

logger = logging.getLogger("arealite.server")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, load the model, serve."""
    args = parse_args(argv)
    setup_logging()
    disable_progress_bar()
    raise_file_limit()
    torch.set_num_threads(1)  # the engine's thread has --threads; more threads than cores would sleep in OpenMP
    try:
        check_exposed(args.host, secret_of_environment())
        family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
        try:
            socket.create_server((args.host, args.port), family=family).close()  # fails before the model is loaded
        except OSError as error:
            raise ValueError(
                f"--host and --port must be an address that is free here: got {args.host}:{args.port} "
                f"({str(error.strerror).partition(' (while')[0]}). Take another, or --port 0 for any."
            ) from error
        if args.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("--device cuda must find a CUDA device: got none. Take --device cpu.")
        options = {name: value for name, value in vars(args).items() if name not in ("model_path", "host", "port")}
        engine, server = load_server(args.model_path, **options, secret=secret_of_environment())
    except (ValueError, OSError, ImportError) as error:
        logger.error("can't serve %s: %s", args.model_path, error)
        return 2
    return asyncio.run(serve(engine, server, args))


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="python -m arealite.server", description=__doc__)
    parser.add_argument("--model-path", required=True, help="Hugging Face folder with safetensors, or hub id")
    parser.add_argument("--port", type=int, required=True, help="0 picks a free port, which the log names")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch")
    parser.add_argument("--slots", type=int, default=64, help="sequences that run at once; more wait")
    parser.add_argument("--context", type=int, default=2048, help="tokens of prompt and output together")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: not tried on a GPU yet")
    parser.add_argument(
        "--deterministic",
        action="store_true",
        help="one sequence per forward pass: a sequence's bits don't depend on its neighbours; several times slower",
    )
    parser.add_argument(
        "--allow-stale-kv",
        action="store_true",
        help="sequences in flight keep their cache when weights change; /server_info counts tokens sampled on it",
    )
    parser.add_argument("--weight-version", default="0", help="version of the weights in the folder")
    parser.add_argument("--seed", type=int, default=0, help="for requests without a sampling_seed")
    args = parser.parse_args(argv)
    for name in ("threads", "slots", "context"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1: got {getattr(args, name)}")
    if not 0 <= args.port < 65536:
        parser.error(f"--port must be from 0 to 65535: got {args.port}")
    return args


async def serve(engine: GenerationEngine, server: Server, args: argparse.Namespace) -> int:
    """Serve until a signal or until the engine fails; return the exit status."""
    http = HttpServer(server.app, secret_of_environment())
    heartbeat.tick()
    signalled = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, signalled.set)
    port = await http.start(args.host, args.port)
    logger.info("serving %s at http://%s:%d", args.model_path, args.host, port)
    stop = asyncio.create_task(signalled.wait())
    failed: asyncio.Future[None] = asyncio.wrap_future(engine.stopped)
    waits: list[asyncio.Future[Any]] = [stop, failed]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    status = 0
    if failed.done():
        logger.error("exiting: %s", failed.exception())
        status = 1
    await asyncio.to_thread(engine.close)
    await http.close()
    stop.cancel()
    return status


if __name__ == "__main__":
    sys.exit(main())
