"""Writes a ledger until it is killed, and says after each flush what the ledger holds: run by `test_ledger.py`."""

import json
import random
import sys

from arealite.api.io_struct import PromptId
from arealite.rollout.account.ledger import Ledger
from arealite.rollout.prompts import Prompt, SampleRecord
from arealite.rollout.staleness import StalenessAccount

BATCH = 8


def main(path: str, seed: int) -> None:
    rng = random.Random(seed)
    ledger = Ledger(path, StalenessAccount(batch_size=BATCH, max_head_offpolicyness=10**9, max_concurrent=10**9))
    ledger.rollback(0)
    issued, version, ready = 0, 0, []
    while True:
        prompts = [Prompt(PromptId(0, issued + offset)) for offset in range(BATCH)]
        issued += BATCH
        ledger.issue(prompts, cursor={"position": issued})
        for prompt in prompts:
            if rng.random() < 0.9:
                ledger.start(prompt, head_version=version)
                ready += finish(ledger, rng, prompt)
        if len(ready) >= BATCH:
            ledger.train(ready[:BATCH], version)
            ready, version = ready[BATCH:], version + 1
        if rng.random() < 0.05:
            position = ledger.flush()
            print(json.dumps({"position": position, "issued": issued, "counts": ledger.counts}), flush=True)


def finish(ledger: Ledger, rng: random.Random, prompt: Prompt) -> list[Prompt]:
    """End some of the episodes, and return what may be trained on."""
    samples = [SampleRecord(sample, 10 + sample, 0.5, 0, "127.0.0.1:1") for sample in range(3)]
    outcome = rng.random()
    if outcome < 0.1:
        ledger.drop(prompt, "failed", "timeout", samples, 0.5)
    elif outcome < 0.2:
        ledger.retry(prompt, "server_error")
    elif outcome < 0.9:
        ledger.accept(prompt, samples, 0.5)
        return [prompt]
    return []


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
