"""Shared modules lie beside this file, which puts their folder on the path; no test depends on how long calls take."""

from hypothesis import settings

settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
