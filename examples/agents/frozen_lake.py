"""A gymnasium environment: the model crosses a frozen lake of 4 x 4 fields, one move a turn.

    pip install 'arealite[agents]'
    python3 -m arealite.launcher.local examples/agents/frozen_lake.py \
        --config examples/agents/configs/frozen_lake.yaml key=value ...
"""

import re
import sys
from typing import Any

import gymnasium
import loop
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from arealite.api.cli_args import GenerationHyperparameters, GRPOConfig
from arealite.api.env_api import Agent
from arealite.api.errors import ParseError
from arealite.workflow.env import EnvWorkflow

MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
RULES = (
    "You (P) cross a frozen lake to the goal (G) over ice (.), and must not enter a hole (O). "
    "Answer with one move: left, right, up or down."
)


class Drawn(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Shows the lake as text."""

    def observation(self, field: int) -> str:
        fields = [["SFHG".index(letter.decode()) for letter in line] for line in self.get_wrapper_attr("desc")]
        drawn = [[".", ".", "O", "G"][kind] for line in fields for kind in line]
        drawn[field] = "P"
        width = len(fields[0])
        return "\n".join("".join(drawn[start : start + width]) for start in range(0, len(drawn), width))


class Walker(Agent):
    def observe(self, observation: str, info: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{RULES}\n\n{observation}"}]

    def act(self, message: dict[str, Any]) -> int:
        moves = re.findall(r"\b(left|right|up|down)\b", message["content"].lower())
        if not moves:
            raise ParseError("There is no move in your answer. Say left, right, up or down.")
        return MOVES[moves[-1]]


def make_env(data: dict[str, Any]) -> Drawn:
    lake = generate_random_map(size=4, seed=data["map"])
    return Drawn(gymnasium.make("FrozenLake-v1", desc=lake, is_slippery=False))


def rows(split: str, *, seed: int, train: int | str = 2000, test: int | str = 100) -> list[dict[str, Any]]:
    """Return the rows, one per lake; test lakes are not among the training lakes."""
    first, count = (0, int(train)) if split == "train" else (10**6, int(test))
    asked = [{"role": "user", "content": RULES}]  # required in rows; the model sees the agent's observations
    return [{"messages": asked, "map": first + number, "seed": seed} for number in range(count)]


def make_workflow(config: GRPOConfig, gconfig: GenerationHyperparameters, tokenizer: Any) -> EnvWorkflow:
    return EnvWorkflow(Walker(), make_env, gconfig, tokenizer, max_turns=12)


if __name__ == "__main__":
    loop.main(sys.argv[1:], make_workflow)
