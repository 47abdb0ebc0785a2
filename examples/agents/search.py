"""A search agent: questions about a local corpus, which the model searches by BM25.

    pip install 'arealite[agents]'
    python3 -m arealite.launcher.local examples/agents/search.py \
        --config examples/agents/configs/search.yaml key=value ...

The corpus is generated: people, their cities and their friends. A question needs two searches. For texts of your
own, replace `corpus` and `rows`.
"""

import functools
import random
import sys
from typing import Any

import bm25s
import loop

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.workflow.tools import ToolWorkflow

SYLLABLES = ("ka", "lo", "mi", "ren", "sa", "tor", "vel", "zu", "ba", "dun", "fi", "gor")
CITIES = ("Arlen", "Bruma", "Calder", "Dorne", "Elsin", "Farrow", "Garth", "Hollow")
NUM_PEOPLE = 400


@functools.cache
def people() -> list[tuple[str, str, str]]:
    """Return names, cities and a friend of each."""
    draw = random.Random(0)
    names: list[str] = []
    while len(names) < NUM_PEOPLE:
        name = "".join(draw.choices(SYLLABLES, k=3)).title()
        names += [name] if name not in names else []
    return [(name, draw.choice(CITIES), draw.choice([one for one in names if one != name])) for name in names]


@functools.cache
def index() -> tuple[bm25s.BM25, list[str]]:
    corpus = [f"{name} lives in {city}. A good friend of {name} is {friend}." for name, city, friend in people()]
    found = bm25s.BM25()
    found.index(bm25s.tokenize(corpus, show_progress=False), show_progress=False)
    return found, corpus


def search(query: str) -> str:
    """Search the texts and return the three best matches.

    Args:
        query: A few words, such as a name.
    """
    found, corpus = index()
    (best,), _ = found.retrieve(bm25s.tokenize(query, show_progress=False), k=3, show_progress=False)
    return "\n".join(corpus[number] for number in best)


def rows(split: str, *, seed: int, train: int | str = 300, test: int | str = 100) -> list[dict[str, Any]]:
    """Ask for the city of a person's friend."""
    city_of = {name: city for name, city, _ in people()}
    asked = people()[:-100] if split == "train" else people()[-100:]
    return [
        {
            "messages": [
                {"role": "user", "content": f"In which city does the good friend of {name} live? Search first."}
            ],
            "city": city_of[friend],
        }
        for name, _, friend in asked[: int(train if split == "train" else test)]
    ]


async def score(completions: str, city: str, **columns: object) -> float:
    """Return 1 if the answer names the right city and no other."""
    return float([name for name in CITIES if name in completions] == [city])


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> ToolWorkflow:
    index()  # build the index before the first search
    return ToolWorkflow(score, gconfig, tokenizer, [search], max_turns=5, tool_timeout=10.0)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
