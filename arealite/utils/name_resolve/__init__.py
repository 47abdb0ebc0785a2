"""Where the processes of a run find each other: names with values, kept by files, Redis, etcd or Ray."""

from arealite.utils.name_resolve.repository import (
    NameBackendError,
    NameEntryExistsError,
    NameEntryNotFoundError,
    NameRepository,
    NameResolveError,
    make_repository,
)

__all__ = [
    "NameBackendError",
    "NameEntryExistsError",
    "NameEntryNotFoundError",
    "NameRepository",
    "NameResolveError",
    "make_repository",
]
