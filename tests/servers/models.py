"""The models of the suite, as random folders with traps in them, and what Hugging Face says about their tokens.

Distributions are sharp and depend on all earlier tokens, so wrong weights, a stale cache or a wrong temperature show in
every logprob. End tokens have a logit of exactly 0: greedy decoding never ends by itself, hot sampling does. The
generation config holds sampling defaults that nobody asked for and a second end token, which must hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from testing_quickstart import END, ROLES, make_tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from arealite.api.io_struct import ModelResponse

# T sampled tokens, V vocabulary

_SCALE = 0.25
"""Standard deviation of the weights."""


def write_model(folder: Path, *, seed: int, tie: bool = False, max_position: int = 2048) -> Path:
    """Write a model of two layers with its tokenizer."""
    make_tiny_model(folder, seed=seed, layers=2, tie=tie, max_position=max_position)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = end_ids(folder)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, _SCALE, generator=generator)
        model.lm_head.weight[ends] = 0
    model.save_pretrained(folder)
    config = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.3}
    (folder / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": ends}))
    return folder


def end_ids(folder: Path) -> list[int]:
    """Return the two ids that end a completion: the tokenizer's own, and one that only the generation config names."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return list(map(tokenizer.convert_tokens_to_ids, (END, ROLES[1])))


@dataclass(frozen=True)
class Scored:
    """A response and what the reference says of each of its tokens."""

    response: ModelResponse
    logits_TV: torch.Tensor

    def logprobs_TV(self, temperature: float = 1.0) -> torch.Tensor:
        return (self.logits_TV / temperature).log_softmax(-1)

    def gap(self, logprobs_TV: torch.Tensor | None = None) -> float:
        """Return the largest difference between the server's logprobs and the reference's."""
        expected_T = self.of_tokens(self.logprobs_TV() if logprobs_TV is None else logprobs_TV)
        return (torch.tensor(self.response.output_logprobs, dtype=torch.float64) - expected_T).abs().max().item()

    def of_tokens(self, values_TV: torch.Tensor) -> torch.Tensor:
        """Pick the values of the sampled tokens."""
        return values_TV.gather(-1, torch.tensor(self.response.output_tokens)[:, None])[:, 0]

    def regret(self) -> float:
        """Return how far a token was from being the likeliest one, in logits; greedy decoding has none."""
        return (self.logits_TV.max(-1).values - self.of_tokens(self.logits_TV)).max().item()


class Reference:
    """A model in plain transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.no_grad()
    def score(self, response: ModelResponse) -> Scored:
        """Compute the logits of every sampled token."""
        ids = torch.tensor([[*response.input_tokens, *response.output_tokens]])
        logits_TV = self._model(ids).logits[0, response.input_len - 1 : -1].double()
        return Scored(response, logits_TV)
