"""`arealite init NAME`: writes an experiment to change, composed of files of the examples.

`examples/templates/templates.yaml` names the files of a template and the texts of its README.
"""

import argparse
import os
import re
import shlex
import textwrap
from pathlib import Path
from string import Template
from typing import Any

import yaml

from arealite.api.errors import ConfigError
from arealite.cli.examples import examples_folder

TEMPLATES = ("rlvr", "multi-turn", "tools", "openai-agent", "sft")
_MEANS = {
    "train.py": "the experiment, top to bottom",
    "loop.py": "the loop that runs the workflow of `train.py`",
    "config.yaml": "every key that is not a default",
    "data.jsonl": "20 rows, the last 4 of which are only evaluated",
    "reward.py": "what a completion earns",
    "test_reward.py": "its test: `python3 -m pytest`, after `pip install pytest`",
}
_SHOWN = re.compile(r"```sh\n(.*?)```", re.DOTALL)
_COMMAND = re.compile(r"(?:python3 -m arealite\.launcher\.local|torchrun [\w -]+) examples/\S+ \\\n +--config \S+")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a folder with a script, its config, a reward with a test, 20 rows of data and a README. It trains a "
        "tiny model on a CPU at once, and on a GPU by one changed line."
    )
    parser.add_argument("folder", metavar="NAME", help="new folder, whose name the experiment has")
    parser.add_argument(
        "--template",
        choices=TEMPLATES,
        default="rlvr",
        help="what is trained: answers with a verifiable reward (default), answers that may be tried again, calls of "
        "tools, an agent on OpenAI's package, or supervised fine-tuning",
    )


def run(args: argparse.Namespace) -> int:
    """Write an experiment into a new folder, and print the next commands."""
    path, examples = Path(args.folder).expanduser(), examples_folder()
    name = Path(os.path.abspath(path)).name
    if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
        raise ConfigError(
            f"NAME must be made of letters, digits, '_', '-' and '.', as it names the experiment: got {name!r}. "
            "Choose another one."
        )
    template = yaml.safe_load((examples / "templates" / "templates.yaml").read_text(encoding="utf-8"))[args.template]
    files = {file: _text(examples / source, name) for file, source in template["files"].items()}
    files["README.md"] = _readme(examples / "templates" / "README.md", name, args.template, template)
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise FileExistsError(f"{args.folder}, which holds files")
        for file, text in files.items():
            (path / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"NAME must be a new or an empty folder that can be written: got {error}. Choose another one."
        ) from error
    print(f"{args.folder}: {', '.join(sorted(files))}")
    print(f"next, as in README.md:\n    cd {shlex.quote(args.folder)}")
    print(textwrap.indent(_SHOWN.findall(files["README.md"])[0], "    "), end="")
    return 0


def _text(source: Path, name: str) -> str:
    """Return a file of the examples with the command and data set of the new folder."""
    text = source.read_text(encoding="utf-8").replace(" on GSM8K", "", 1).replace("EXPERIMENT", name)
    return _COMMAND.sub("python3 -m arealite.launcher.local train.py --config config.yaml", text)


def _readme(source: Path, name: str, kind: str, template: dict[str, Any]) -> str:
    package = Path(__file__).parents[1]
    return Template(source.read_text(encoding="utf-8")).substitute(
        name=name,
        template=kind,
        title=template["title"],
        needs=f"{template['needs']}\n" if "needs" in template else "",
        files="\n".join(f"| `{file}` | {meaning} |" for file, meaning in _MEANS.items() if file in template["files"]),
        learns=template["learns"],
        change=template["change"],
        block="model" if kind == "sft" else "actor",
        where=package if (package / "docs").is_dir() else package.parent,  # of docs/: the wheel has its own
    )
