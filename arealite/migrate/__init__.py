"""Configs of other frameworks as ours."""

FRAMEWORKS = ("areal", "trl", "verl", "prime-rl")
