"""Shared modules lie beside this file, which puts their folder on the path. No test depends on how long a call takes."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
