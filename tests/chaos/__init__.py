"""Faults injected into real runs, and what such a run promises: `python -m chaos --help`, with `tests` on the path."""
