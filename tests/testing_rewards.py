"""Rewards that worker processes import in no time: nothing here needs torch."""


def checksum(completion_ids: list[int], **_: object) -> float:
    """Differ between most completions."""
    return float(sum(completion_ids) % 7)
