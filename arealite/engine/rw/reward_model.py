"""A trained reward model as the reward of an RL run, in the process of the trainer that runs the episodes (rank 0)."""

# B rows, T padded tokens

import asyncio
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from arealite.engine.hf_model import is_classifier, load_whole_model, model_config, values_of
from arealite.utils import cores
from arealite.utils.background import in_thread
from arealite.utils.hf import require_same_vocabulary


class RewardModel:
    """Scores token ids. An instance is a reward function of workflows, for `reward: FILE.py:NAME`.

    `path` is a sequence classifier with one label and the vocabulary of the policy's `tokenizer`: it reads the token
    ids of prompt and completion. `max_tokens` bounds a padded batch. Ranks other than 0 load the model when they score.
    """

    def __init__(self, path: str, tokenizer: Any, *, dtype: str = "bfloat16", max_tokens: int = 16384) -> None:
        if not is_classifier(model_config(path)):
            raise ValueError(
                f"a reward model must be a sequence classifier: got {path}, which has no head of scores. Train one "
                "with examples/arealite/reward_model.py."
            )
        require_same_vocabulary(tokenizer, path)
        self.path = path
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.max_tokens = max_tokens
        self._num_threads = torch.get_num_threads()  # of the trainer; else a thread computes alone
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        self._waiting: dict[asyncio.Future[float], list[int]] = {}
        self._scoring = asyncio.Lock()
        if os.environ.get("RANK", "0") == "0":
            _ = self._model

    async def __call__(self, prompt_ids: list[int], completion_ids: list[int], **columns: Any) -> float:
        """Return the score of a completion; completions that arrive during a forward pass form the next batch."""
        mine: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting[mine] = [*prompt_ids, *completion_ids]
        try:
            async with self._scoring:
                if not mine.done():
                    waiting = dict(self._waiting)
                    scores = await in_thread(self.score, list(waiting.values()))
                    for future, score in zip(waiting, scores, strict=True):
                        if not future.done():
                            future.set_result(score)
            return mine.result()
        finally:
            del self._waiting[mine]

    @torch.no_grad()
    def score(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Return the score of each row of token ids: the value of its last token."""
        if torch.get_num_threads() != self._num_threads:
            cores.compute_with(self._num_threads)
        scores = [0.0] * len(rows)
        left = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        while left:
            size = max(1, self.max_tokens // max(len(rows[left[-1]]), 1))
            batch, left = left[-size:], left[:-size]
            for row, score in zip(batch, self._score_padded([rows[row] for row in batch]), strict=True):
                scores[row] = score
        return scores

    def _score_padded(self, rows: Sequence[Sequence[int]]) -> list[float]:
        lengths_B = torch.tensor([len(row) for row in rows], device=self.device)
        ids_BT = pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True).to(self.device)
        mask_BT = torch.arange(ids_BT.shape[1], device=self.device) < lengths_B[:, None]
        hidden_BTH = self._model.base_model(input_ids=ids_BT, attention_mask=mask_BT.long()).last_hidden_state
        last_BH = hidden_BTH[torch.arange(len(rows), device=self.device), lengths_B - 1]
        return values_of(self._model)(last_BH, len(rows)).tolist()

    @functools.cached_property
    def _model(self) -> Any:
        return load_whole_model(self.path, has_value_head=True).to(self.device, self.dtype).eval()
