"""The objectives token by token in plain Python, written from the papers' formulas and not from our code.

`logprob` is the variable; `held` is its value inside of what carries no gradient, so that differences of these
functions by `logprob` alone are the gradients that autograd should find.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass
class Token:
    logprob: float
    held: float
    proximal: float
    rollout: float
    advantage: float


Answer = list[Token]
"""The trained tokens of one answer."""


def bounded(log_ratio: float) -> float:
    return min(max(log_ratio, -20.0), 20.0)


def ppo(
    token: Token,
    answer: Answer,
    *,
    eps_clip: float,
    eps_clip_higher: float,
    c_clip: float | None = None,
    level: str = "token",
) -> float:
    compared = [token] if level == "token" else answer
    ratio = math.exp(sum(bounded(one.logprob - one.proximal) for one in compared) / len(compared))
    clipped = min(max(ratio, 1 - eps_clip), 1 + eps_clip_higher)
    objective = min(ratio * token.advantage, clipped * token.advantage)
    if c_clip is not None and token.advantage < 0:
        objective = max(objective, c_clip * token.advantage)
    return -objective


def reinforce(token: Token, _answer: Answer) -> float:
    return -token.advantage * token.logprob


def cispo(token: Token, _answer: Answer, *, cispo_max: float) -> float:
    return -min(math.exp(bounded(token.held - token.proximal)), cispo_max) * token.advantage * token.logprob


def sapo(token: Token, _answer: Answer, *, tau_positive: float, tau_negative: float) -> float:
    tau = tau_positive if token.advantage > 0 else tau_negative
    x = tau * (math.exp(bounded(token.logprob - token.proximal)) - 1)
    sigmoid = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    return -token.advantage * 4 / tau * sigmoid


def gmpo(token: Token, answer: Answer, *, eps_log: float) -> float:
    product = 1.0
    for one in answer:
        log_ratio = bounded(one.logprob - one.proximal)
        if one.advantage > 0:
            log_ratio = min(log_ratio, eps_log)
        elif one.advantage < 0:
            log_ratio = max(log_ratio, -eps_log)
        product *= math.exp(log_ratio / len(answer))
    return -token.advantage * product


def dppo(token: Token, _answer: Answer, *, delta: float) -> float:
    moved = math.exp(token.held) - math.exp(token.rollout)
    if moved > delta if token.advantage > 0 else moved < -delta:
        return 0.0
    return -min(math.exp(bounded(token.held - token.rollout)), 20.0) * token.advantage * token.logprob


Objective = Callable[..., float]


def losses_and_gradients(
    objective: Objective, answers: list[Answer], settings: dict[str, Any]
) -> tuple[list[float], list[float]]:
    """Return the losses of all tokens, and by central differences the gradient of their sum, weighted 1, 2, 3, ..."""
    tokens = [(token, answer) for answer in answers for token in answer]

    def losses() -> list[float]:
        return [objective(token, answer, **settings) for token, answer in tokens]

    def moved(token: Token, step: float) -> float:
        before, token.logprob = token.logprob, token.logprob + step
        total = sum(weight * loss for weight, loss in enumerate(losses(), start=1))
        token.logprob = before
        return total

    step = 1e-5
    return losses(), [(moved(token, step) - moved(token, -step)) / (2 * step) for token, _ in tokens]


def packed(answers: list[Answer]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the logprobs and the batch, in float64, that an objective takes; every token is trained on."""
    tokens = [token for answer in answers for token in answer]
    rows = [row for row, answer in enumerate(answers) for _ in answer]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=torch.float64)

    batch = {f"{name}_logprobs": column(name) for name in ("proximal", "rollout")}
    batch |= {"advantages": column("advantage"), "loss_mask": torch.ones(len(tokens), dtype=torch.bool)}
    return column("logprob").requires_grad_(), batch | {"segment_ids": torch.tensor(rows, dtype=torch.long)}
