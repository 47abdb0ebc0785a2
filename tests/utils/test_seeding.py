import json
import random

import numpy as np
import torch

from arealite.utils.seeding import rng_state, seed_everything, set_rng_state


def draws() -> list[object]:
    """What the next steps would draw, odd numbers of values included."""
    return [
        random.random(),
        random.gauss(0, 1),
        np.random.rand(3).tolist(),
        np.random.standard_normal(1).tolist(),
        torch.rand(5).tolist(),
        torch.randn(1).tolist(),
    ]


def test_generators_go_on_from_a_stored_state() -> None:
    before = rng_state()
    try:
        seed_everything(7)
        draws()
        state = json.loads(json.dumps(rng_state()))
        expected = [draws(), draws()]
        seed_everything(8)
        assert draws() != expected[0]
        set_rng_state(state)
        assert [draws(), draws()] == expected
    finally:
        set_rng_state(before)
