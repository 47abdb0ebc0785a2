"""A server of OpenEnv: guess a number of the seed. `guess.py PORT SESSIONS [PING_S]` serves it on loopback."""

import os
import random
import sys
import time
from typing import Any

import uvicorn
from openenv.core.env_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    message: str


class Told(Observation):
    text: str = ""
    guesses: tuple[int, ...] = ()


class GuessEnvironment(Environment[Guess, Told, State]):
    """Each guess earns `1 - distance / limit`, or 2 and the end. Other words make trouble."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, limit: int = 100, **kwargs: Any) -> Told:
        self.limit, self.number = limit, random.Random(seed).randrange(limit)
        self.guesses: list[int] = []
        if kwargs.get("hangs"):
            time.sleep(600)
        return Told(text=f"Guess my number below {limit}.")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Told:
        word = action.message.strip()
        if word == "silence":
            return Told(text="Nothing is earned.", reward=None)
        if word == "exit":
            os._exit(3)
        if word == "hang":
            time.sleep(600)
        guess = int(word)
        self.guesses.append(guess)
        if guess == self.number:
            return Told(text="Right.", reward=2.0, done=True, guesses=tuple(self.guesses))
        told = "higher" if guess < self.number else "lower"
        reward, guesses = 1 - abs(guess - self.number) / self.limit, tuple(self.guesses)
        return Told(text=f"It is {told} than {guess}.", reward=reward, guesses=guesses, metadata={"secret": "no"})

    @property
    def state(self) -> State:
        return State(step_count=len(self.guesses))


if __name__ == "__main__":
    port, sessions, ping_s = int(sys.argv[1]), int(sys.argv[2]), float([*sys.argv, "20"][3])
    app = create_app(GuessEnvironment, Guess, Told, env_name="guess", max_concurrent_envs=sessions)
    uvicorn.run(app, port=port, log_level="warning", ws_ping_interval=ping_s, ws_ping_timeout=ping_s)
