import itertools

import pytest

from arealite.api.io_struct import FinetuneSpec
from arealite.dataset.loader import PromptLoader


@pytest.mark.parametrize(("drop_last", "steps"), [(True, 20), (False, 30)])
def test_the_steps_of_all_epochs_meet_their_batches(drop_last: bool, steps: int) -> None:
    spec = FinetuneSpec(total_train_epochs=10, dataset_size=5, train_batch_size=2, drop_last=drop_last)
    batches = PromptLoader([{}] * 5, 2, drop_last=drop_last)
    assert spec.total_train_steps == steps and spec.steps_per_epoch == len(batches)
    epochs = {row["prompt_id"].epoch for batch in itertools.islice(batches, steps) for row in batch}
    assert epochs == set(range(10))
