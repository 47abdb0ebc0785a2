"""Agents that run in processes of their own: plain functions, and a command (this file)."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx2


def ask(base_url: str, api_key: str, text: str) -> dict:
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"messages": [{"role": "user", "content": text}]}
    return httpx2.post(f"{base_url}/chat/completions", json=body, headers=headers, timeout=60).json()


def polite(data: dict, base_url: str, api_key: str) -> float:
    return float(ask(base_url, api_key, data["question"])["choices"][0]["message"]["content"] == "Hello!")


def by_environment(data: dict) -> dict[str, float]:
    """Reward each of two answers."""
    answers = [ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"], data["question"]) for _ in range(2)]
    return {answer["id"]: 1.0 + number for number, answer in enumerate(answers)}


def failing(data: dict, base_url: str, api_key: str) -> float:
    ask(base_url, api_key, "Hi")
    raise ZeroDivisionError("no luck")


def without_a_number(data: dict, base_url: str, api_key: str) -> float:
    ask(base_url, api_key, "Hi")
    return float("nan")


def dying(data: dict) -> float:
    os._exit(3)


def hanging(data: dict) -> float:
    """Start a process, and hang with it."""
    child = subprocess.Popen(["sleep", "1000"])
    path = Path(data["pids"])
    path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
    path.with_suffix(".new").rename(path)
    time.sleep(1000)
    return 0.0


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    print("a line that is no reward")
    print(json.dumps(polite(row, os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
