"""What the commands of `arealite` take: a function per command, in the order of --help."""

import argparse
from typing import Any, TypeAlias

from arealite import __version__
from arealite.cli.init import TEMPLATES
from arealite.cli.trainers import TRAINERS
from arealite.utils.terminal import Parser

Commands: TypeAlias = "argparse._SubParsersAction[Parser]"


def make_parser() -> Parser:
    """Return the parser of all commands."""
    description = "Asynchronous reinforcement learning of language models."
    parser = Parser(prog="arealite", description=description)
    parser.add_argument("--version", action="version", version=f"arealite {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", dest="command")
    for add in _COMMANDS:
        add(commands)
    return parser


def _quickstart(commands: Commands) -> None:
    command = commands.add_parser(
        "quickstart",
        help="train a tiny model from scratch: SFT, then asynchronous GRPO, in minutes, on a CPU",
        description="Make a tiny model, fine-tune it on word problems, then improve it by asynchronous GRPO through "
        "the same launcher, server and scripts that a cluster uses. Ends with a report page.",
    )
    command.add_argument(
        "overrides",
        nargs="*",
        metavar="key=value",
        help="any key of the GRPO config, e.g. seed=2 gconfig.n_samples=16; "
        "fileroot= is short for cluster.fileroot=, and sft_steps= is the length of the fine-tuning",
    )


def _init(commands: Commands) -> None:
    command = commands.add_parser(
        "init",
        help="write an experiment to change: script, config, reward, data, and a test",
        description="Write a folder with a script, its config, a reward with a test, 20 rows of data and a README. It "
        "trains a tiny model on a CPU at once, and on a GPU by one changed line.",
    )
    command.add_argument("folder", metavar="NAME", help="new folder, whose name the experiment has")
    command.add_argument(
        "--template",
        choices=TEMPLATES,
        default="rlvr",
        help="what is trained: answers with a verifiable reward (default), answers that may be tried again, calls of "
        "tools, an agent on OpenAI's package, or supervised fine-tuning",
    )


def _train(commands: Commands) -> None:
    command = commands.add_parser(
        "train",
        allow_abbrev=False,  # --mode is no --model
        help="train a model on your data and reward, or start a ready-made trainer or one of your own",
        usage="arealite train --model M --data D (--reward FILE.py:FUNCTION | --sft) [key=value ...]\n"
        "       arealite train trainer.type=TYPE [mode=local|ray|slurm] [--config FILE.yaml] [key=value ...]",
        description=f"Start the example script of trainer.type ({', '.join(TRAINERS)}), or a class of your own "
        "(my_module:MyTrainer), by the launcher that mode names (default local). Keys are those of the script's "
        "config, with trainer.TYPE. before them or not; `python3 SCRIPT --help` lists them. --model, --data, --reward "
        "and --sft are such keys for GRPO and fine-tuning on your own data; the config that they make is printed.",
        epilog="exit status: that of `python3 -m arealite.launcher.MODE`, whose other options are taken too",
    )
    command.add_argument("--model", metavar="M", action=_Once, help="folder or hub id of the model to train")
    command.add_argument(
        "--data",
        metavar="D",
        action=_Once,
        help=".jsonl, .json, .parquet or .csv file, folder, data set of the hub, or FILE.py:FUNCTION; columns are "
        "question and answer, or messages, unless train_dataset.prompt_key and answer_key name others",
    )
    command.add_argument(
        "--reward",
        metavar="FILE.py:FUNCTION[=WEIGHT]",
        action="append",
        default=[],
        help="function that scores a completion; several, with weights, are added",
    )
    command.add_argument("--sft", action="store_true", help="learn the answers of the data (supervised fine-tuning)")
    command.add_argument("--save-config", metavar="FILE.yaml", help="also write the config, to use it with --config")
    command.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="default: the example's for GPUs; its _cpu.yaml with cluster.n_gpus_per_node=0, and with mode=local where "
        "there is no GPU; own_grpo.yaml or own_sft.yaml with --model and the like",
    )
    command.add_argument("--dry-run", action="store_true", help="print what would run where, and start nothing")
    command.add_argument("overrides", nargs="*", metavar="key=value", help="trainer.type, mode, and keys to change")


def _check(commands: Commands) -> None:
    command = commands.add_parser(
        "check",
        help="preflight: find what would make a run fail, before it starts",
        usage="arealite check ENTRY.py --config FILE.yaml [key=value ...]",
        description="Check config, server program and flags, model files, tokenizer, chat template, data and memory of "
        "the run that the launcher would start with the same arguments. Most findings name their fix.",
        epilog="exit status: 0 no problem (warnings don't count), 1 problems, 2 the config can't be read",
    )
    command.add_argument("entry", metavar="ENTRY.py", help="script with the training loop")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="what the launcher would get")


def _check_loss(commands: Commands) -> None:
    command = commands.add_parser(
        "check-loss",
        help="try the properties that a loss or an advantage function of your own must have",
        usage="arealite check-loss FILE.py[:FUNCTION] [--kind loss|advantage] [--strict]",
        description="Call a loss (logprobs, micro_batch) or an advantage function (rewards, group_index, num_tokens) "
        "on small inputs, on a CPU, and show by how much a property fails, and on which input.",
        epilog="exit status: 0 all properties hold (warnings don't count), 1 one fails, 2 the file can't be used",
    )
    command.add_argument("function", metavar="FILE.py[:FUNCTION]", help="default: every function of these arguments")
    command.add_argument("--kind", choices=["loss", "advantage"], help="where the arguments don't tell")
    command.add_argument("--strict", action="store_true", help="let warnings count as failures")


def _serve(commands: Commands) -> None:
    command = commands.add_parser(
        "serve",
        help="add an inference server to a running experiment, or serve a model on its own",
        description="Start an inference server on this node with the run's own config. It receives the run's current "
        "weights before requests; Ctrl-C or SIGTERM hands unfinished requests back. Without --join, serve a model on "
        "its own: that of --config FILE, or allocation_mode=lite.d1 actor.path=MODEL (lite, sglang or vllm).",
        epilog="exit status: 0 after a signal, 2 refused, 3 not ready in time, else that of the server",
    )
    command.add_argument("--join", metavar="EXPERIMENT/TRIAL", help="the run")
    fileroot = "cluster.fileroot of the run, as this node sees it (default runs)"
    command.add_argument("--fileroot", metavar="FOLDER", default="runs", help=fileroot)
    command.add_argument("--config", metavar="FILE.yaml", help="config to use where the run folder is not visible")
    host = "address by which trainers reach this node (default: detected with --join, else loopback)"
    command.add_argument("--host", metavar="ADDRESS", help=host)
    command.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")
    command.add_argument("--dry-run", action="store_true", help="print the command of the server")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change, e.g. lite.slots=8")


def _evaluate(commands: Commands) -> None:
    command = commands.add_parser(
        "eval",
        help="evaluate a model on a data set through servers that run already",
        usage="arealite eval --server HOST:PORT [--server ...] [--config FILE.yaml] rollout.backend=KIND key=value ...",
        description="Run examples/arealite/evaluate.py without a launcher: model.path, whose tokenizer is used, is "
        "what the servers have loaded, rollout.backend sglang (default), vllm or lite, valid_dataset.path the data.",
        epilog="AREALITE_SECRET must be the secret of servers that have one.",
    )
    command.add_argument("--server", metavar="HOST:PORT", action="append", required=True, help="a server that runs")
    command.add_argument("--config", metavar="FILE.yaml", help="default: examples/arealite/configs/evaluate.yaml")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change, e.g. gconfig.n_samples=32")


def _tiny_model(commands: Commands) -> None:
    command = commands.add_parser("tiny-model", help="make a tiny model and tokenizer for tests and smoke runs")
    command.add_argument("--out", required=True, help="folder to write (Hugging Face format)")
    command.add_argument("--corpus", help="text or jsonl file for the tokenizer; default: generated word problems")
    command.add_argument("--seed", type=int, default=1, help="seed of the random weights (default 1)")
    command.add_argument("--vision", action="store_true", help="let it see images, of the Qwen2.5-VL type")
    command.add_argument("--untied", action="store_true", help="give the output layer weights of its own")


def _replay(commands: Commands) -> None:
    command = commands.add_parser(
        "replay",
        help="repeat a training step of a run and compare the weights",
        description="Repeat a training step, also of an asynchronous run, from the newest checkpoint before it and the "
        "stored rollouts, without servers. On a CPU the weights must be bit-identical.",
        epilog="exit status: 0 the weights are bit-identical, 1 they differ, 2 the folder lacks what a replay needs",
    )
    command.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")
    command.add_argument("--step", type=int, required=True, help="the step, counted from 0")


def _report(commands: Commands) -> None:
    command = commands.add_parser("report", help="write report.html for a run folder")
    command.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")


def _view(commands: Commands) -> None:
    command = commands.add_parser(
        "view",
        help="show runs in a browser, also while they train: charts, and every trajectory token by token",
        description="Serve a page about the runs at or below a folder on 127.0.0.1 until Ctrl-C, and print its address "
        "with a token, without which nobody else on this node can read it. Nothing of a run is changed.",
        epilog="From elsewhere: ssh -L PORT:127.0.0.1:PORT NODE, then open the address that was printed.",
    )
    command.add_argument("folder", help="<fileroot>/<experiment>/<trial>, or up to three folders above")
    command.add_argument("--port", type=int, default=0, help="port to listen on (default: any free one)")


def _plan_core(commands: Commands) -> None:
    command = commands.add_parser(
        "plan-core",
        help="predict which layout of worker groups makes the steps of a run with a graph shorter",
        usage="arealite plan-core CONFIG.yaml --costs RUN_FOLDER [--costs ...] [--devices N] [key=value ...]",
        description="Simulate a step of training/ scripts in every layout: which roles share workers, and how many "
        "ranks each group has. Seconds of calls are those that runs of the same work measured (calls.jsonl); runs on "
        "different numbers of ranks tell how much of a call more ranks don't shorten, which is assumed otherwise.",
        epilog="Memory is not judged: `arealite check` plans it.",
    )
    command.add_argument("config", metavar="CONFIG.yaml", help="config whose workers to lay out")
    command.add_argument("--costs", metavar="RUN_FOLDER", action="append", required=True, help="a run to learn from")
    command.add_argument("--devices", metavar="N", type=_positive, help="of all groups (default: the config's)")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change")


def _migrate(commands: Commands) -> None:
    command = commands.add_parser(
        "migrate",
        help="rewrite a config of AReaLite v0.3 or AReaL as one of ours",
        description="Write a YAML config of AReaLite v0.3 or AReaL as one of ours: values and order stay, a comment "
        "names the old key of each changed one, and old defaults that differ are written out.",
        epilog="exit status: 0 the result loads, 1 something is left to decide, 2 the file can't be read",
    )
    command.add_argument("config", metavar="OLD.yaml")
    command.add_argument("--out", metavar="NEW.yaml", help="a new file; printed unless given")


def _devices(commands: Commands) -> None:
    command = commands.add_parser(
        "devices",
        help="show what nodes have, and what a config would put where",
        usage="arealite devices [--ray] [--config FILE.yaml] [key=value ...]",
        description="List GPUs, CPU cores and memory of this node, or of the nodes of a Ray cluster, and what is free. "
        "With a config: which process gets which device, and whether the memory it needs is free, before any model is "
        "loaded. `arealite check` looks at everything else, too.",
        epilog="exit status: 0 it fits (warnings don't count), 1 it does not, 2 the config can't be read",
    )
    command.add_argument("--ray", action="store_true", help="the nodes of RAY_ADDRESS, or of this node's cluster")
    command.add_argument("--config", metavar="FILE.yaml", help="the run to place")
    command.add_argument("overrides", metavar="key=value", nargs="*", help="keys to change")


def _schema(commands: Commands) -> None:
    command = commands.add_parser(
        "schema",
        help="write the JSON schema of a config, by which editors complete and check YAML files",
        description="Write types, ranges, defaults and descriptions of every key. An editor with a YAML language "
        "server finds it by the first line of a config: # yaml-language-server: $schema=schema.json",
    )
    told = f"{', '.join(TRAINERS)} (grpo unless given), or FILE.py:CLASS, a config class of your own"
    command.add_argument("kind", nargs="?", default="grpo", help=told)
    command.add_argument("--out", metavar="FILE.json", help="printed unless given")


def _ledger(commands: Commands) -> None:
    command = commands.add_parser(
        "ledger",
        help="account for every prompt of a run: lost, repeated, dropped and why",
        description="Compare the dataloader's cursor, the stored rollouts and the ledger of a run, also while it runs. "
        "Exit status 1: a prompt is lost, repeated or in no state.",
    )
    command.add_argument("run_folder", help="<fileroot>/<experiment>/<trial>")
    command.add_argument("--json", action="store_true", help="print one JSON object")


_COMMANDS = (
    *(_quickstart, _init, _train, _check, _check_loss, _serve, _evaluate, _tiny_model),
    *(_replay, _report, _view, _plan_core, _migrate, _devices, _schema, _ledger),
)


class _Once(argparse.Action):
    """Stores a value, and refuses a second one."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, option: Any = None
    ) -> None:
        if getattr(args, self.dest) is not None:
            first = getattr(args, self.dest)
            message = f"{option} must be given once: got {first} and {value}."
            parser.error(f"{message} Remove one; train_dataset.mixed_with adds data sets.")
        setattr(args, self.dest, value)


def _positive(text: str) -> int:
    """Read a whole number above 0."""
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"must be a whole number above 0: got {text}")
    return int(text)
