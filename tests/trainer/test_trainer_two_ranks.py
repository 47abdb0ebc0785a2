"""What every rank must agree on, with two real processes."""

import json
import time
from multiprocessing.connection import Connection
from pathlib import Path

import testing_forks
import torch.distributed as dist

from arealite.api.cli_args import SaverConfig, StatsLoggerConfig
from arealite.api.io_struct import FinetuneSpec, SaveLoadMeta
from arealite.trainer.saver import Saver
from arealite.trainer.stats_logger import StatsLogger

FT_SPEC = FinetuneSpec(total_train_epochs=1, dataset_size=40, train_batch_size=4)


class RankFileEngine:
    """Every rank writes a file, rank 1 late; as at every engine, no rank returns before all have written."""

    def save(self, meta: SaveLoadMeta) -> None:
        time.sleep(0.3 * dist.get_rank())
        (Path(meta.path) / f"shard_{dist.get_rank()}").touch()
        dist.barrier()


def work(test: Connection, folder: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    run = {"experiment_name": "exp", "trial_name": "t0", "fileroot": folder}
    result: dict[str, object] = {}

    stats = StatsLogger(StatsLoggerConfig(**run), FT_SPEC)
    for value in [1.0] * (1 + rank):  # a mean weighs values, not ranks
        stats.add({"a/mean": value + 2 * rank, "a/max": rank, "a/min": rank})
    stats.add({"a/sum": 1.0 + rank}, reduce="sum")
    if rank == 0:
        stats.add({"only/rank_0": 7.0})
    began = time.perf_counter()
    with stats.timer("update"):
        time.sleep(0.5 * rank)
    result["update_s"] = time.perf_counter() - began
    result["row"] = stats.commit(0)
    stats.close()

    early = Saver(SaverConfig(**run, freq_secs=1e9 if rank == 0 else 1e-9), FT_SPEC).save(RankFileEngine(), 0)
    saver = Saver(SaverConfig(**run, freq_secs=1e-9 if rank == 0 else 1e9), FT_SPEC)
    path = saver.save(RankFileEngine(), 1)
    result["saved"] = [early is None, sorted(file.name for file in path.iterdir()) if path else None]

    if rank == 0:
        (path.parent / ".step_2.old").touch()
        (path.parent / "step_2").mkdir()
    try:
        saver.save(RankFileEngine(), 2, force=True)
    except (OSError, RuntimeError) as error:
        result["error"] = str(error)
    test.send(result)
    dist.destroy_process_group()


def test_two_ranks(tmp_path: Path) -> None:
    with testing_forks.two_ranks(work, str(tmp_path)) as ranks:
        results = [rank.receive() for rank in ranks]
        assert [rank.end() for rank in ranks] == [0, 0]
    row = results[0]["row"]
    assert row == results[1]["row"]
    assert json.loads((tmp_path / "exp/t0/metrics.jsonl").read_text()) == {"step": 0} | row
    assert {key: row[key] for key in row if not key.startswith("time/")} == {
        "a/mean": (1 + 3 + 3) / 3, "a/max": 1.0, "a/min": 0.0, "a/sum": 3.0, "only/rank_0": 7.0,
    }  # fmt: skip
    assert row["time/update_s"] <= results[0]["update_s"], "rank 0's own"
    assert [result["saved"] for result in results] == [[True, ["shard_0", "shard_1"]]] * 2
    assert all("step_2.old" in result["error"] for result in results), "an error of rank 0 reaches all"
