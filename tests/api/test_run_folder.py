"""A run's folder is the same from its config, from any block that knows its run, and from its path."""

from pathlib import Path

from arealite.api.cli_args import ClusterSpecConfig, SaverConfig, SFTConfig
from arealite.api.run_folder import RunFolder


def test_configs_and_blocks_name_the_same_folder() -> None:
    names = {"experiment_name": "e", "trial_name": "t"}
    runs = [
        RunFolder(SFTConfig(**names, cluster=ClusterSpecConfig(fileroot="/runs"))),
        RunFolder(SaverConfig(**names, fileroot="/runs")),
        RunFolder("/runs/e/t"),
    ]
    assert {run.path for run in runs} == {Path("/runs/e/t")}
    assert runs[0].metrics == Path("/runs/e/t/metrics.jsonl")
