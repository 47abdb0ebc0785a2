"""Rows of an OpenEnv server: a task is a seed. Nothing is asked of the server; `workflow.openenv` runs its episodes."""

from arealite.api.config.openenv import openenv_server
from arealite.dataset.rows import Row


def openenv_rows(path: str) -> list[Row]:
    """Return a row for each seed. Raises ConfigError."""
    server = openenv_server(path)
    seeds = range(server.seed, server.seed + server.tasks)
    return [{"question": f"task {n} of {server.address}", "answer": "", "environment": path, "seed": n} for n in seeds]
