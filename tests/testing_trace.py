"""The spans of a trace, and what the trainer waited for according to them."""

import gzip
import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Span:
    """One span, in seconds."""

    process: str
    thread: int
    name: str
    began_s: float
    ended_s: float
    args: dict[str, Any] = field(default_factory=dict)
    id: int | None = None  # of an asynchronous one

    @property
    def length_s(self) -> float:
        return self.ended_s - self.began_s


def read_spans(path: Path) -> list[Span]:
    """Read a whole trace; asynchronous spans that did not end are left out."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    spans, begun = [], {}
    for event in events:
        if event["ph"] == "M":
            continue
        key, at_s = (event["pid"], json.dumps(event.get("id2"))), event["ts"] / 1e6
        if event["ph"] == "b":
            begun[key] = at_s
            continue
        began_s, ended_s = (begun.pop(key), at_s) if event["ph"] == "e" else (at_s, (event["ts"] + event["dur"]) / 1e6)
        local = int(event["id2"]["local"], 16) if "id2" in event else None
        spans.append(Span(names[event["pid"]], event["tid"], event["name"], began_s, ended_s, event["args"], local))
    return sorted(spans, key=lambda one: (one.began_s, -one.ended_s))


def assert_nested(spans: list[Span], slack_s: float = 2e-9) -> None:
    """Hold the spans of every thread to what Perfetto needs: they lie in each other or apart."""
    around: dict[tuple[str, int], list[Span]] = {}
    for span in spans:
        if span.id is None:
            stack = around.setdefault((span.process, span.thread), [])
            while stack and stack[-1].ended_s <= span.began_s + slack_s:
                stack.pop()
            assert not stack or span.ended_s <= stack[-1].ended_s + slack_s, (stack[-1], span)
            stack.append(span)


def waits_of(spans: list[Span], step: Span) -> Counter[str]:
    """Divide the waits for a batch in a step among what its process's episodes did, as `rollout/event_loop.py` does."""
    ours = [one for one in spans if one.process == step.process]
    parents = {one.id: one for one in ours if one.id is not None}

    def episode_of(one: Span) -> int | None:
        while one.name != "episode" and one.args.get("in") in parents:
            one = parents[one.args["in"]]
        return one.id if one.name == "episode" else None

    of_episodes = [(episode, one) for one in ours if one.id and (episode := episode_of(one)) is not None]
    found: Counter[str] = Counter()
    for wait in ours:
        if wait.name != "wait for a batch" or not step.began_s <= wait.began_s < step.ended_s:
            continue
        inside = [(episode, one) for episode, one in of_episodes if one.ended_s > wait.began_s]
        times = {min(max(at, wait.began_s), wait.ended_s) for _, one in inside for at in (one.began_s, one.ended_s)}
        edges = sorted(times | {wait.began_s, wait.ended_s})
        for start, end in itertools.pairwise(edges):
            middle = (start + end) / 2
            doing: dict[int, set[str]] = {}
            for episode, one in inside:
                if one.began_s <= middle < one.ended_s:
                    doing.setdefault(episode, set()).add(one.name)
            running = [names for names in doing.values() if "episode" in names]
            for names in running:
                kind = "servers" if "servers" in names else "reward" if "reward" in names else "workflow"
                found[kind] += (end - start) / len(running)
    return found
