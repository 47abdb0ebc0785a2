"""Environments that work, and that fail in every way."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import Any

from arealite.api.env_api import Agent
from arealite.api.errors import ParseError


class Countdown:
    """Counts down from the seed's last digit by what the action says; each step earns what was counted."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.left, self.fault = 0, data.get("fault", "")
        self.limit = data.get("limit", 100)
        self.log = data.get("log")

    def reset(self, *, seed: int) -> tuple[int, dict[str, Any]]:
        self.left = seed % 10
        if self.fault == "reset":
            return self.left  # type: ignore[return-value]
        return self.left, {"seed": seed, "pid": os.getpid()}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        if self.fault == "crash":
            os.kill(os.getpid(), 9)
        if self.fault == "raise":
            raise KeyError("left")
        if self.fault == "hang":
            time.sleep(600)
        self.left, self.limit = self.left - action, self.limit - 1
        info = {"pid": os.getpid()}
        if self.fault == "tuple":
            return self.left, 1.0, True, info  # type: ignore[return-value]
        return self.left, float("nan") if self.fault == "nan" else action, self.left <= 0, self.limit <= 0, info

    def close(self) -> None:
        if self.log is not None:
            self.log.append("closed")


class AsyncCountdown(Countdown):
    async def areset(self, *, seed: int) -> Any:
        await asyncio.sleep(0)
        return super().reset(seed=seed)

    async def astep(self, action: int) -> Any:
        assert threading.current_thread() is threading.main_thread(), "awaited"
        return super().step(action)

    async def aclose(self) -> None:
        super().close()

    reset = step = close = None  # type: ignore[assignment]


class Counter(Agent):
    def observe(self, observation: int, info: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"{observation} left in {info['pid']}"}]

    def act(self, message: dict[str, Any]) -> int:
        if not message["content"].isdigit():
            raise ParseError("Say a number.")
        return int(message["content"])
