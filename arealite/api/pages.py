"""Which page of docs/ says more about an error.

A message that the page on troubleshooting quotes belongs to that symptom, any other to the page of its class or of the
file that raised it. This file must import where only the standard library is.
"""

from arealite.api import errors
from arealite.api.source_lines import lines_of_error
from arealite.utils.doc_pages import TROUBLESHOOTING, page_of_file, page_of_message

CLASSES: dict[type[BaseException], str] = {
    errors.CheckpointError: f"{TROUBLESHOOTING}#a-checkpoint-is-refused",
    errors.WeightUpdateError: f"{TROUBLESHOOTING}#the-servers-have-other-weights",
    errors.EpisodeError: f"{TROUBLESHOOTING}#all-episodes-fail",
    errors.ContextOverflowError: f"{TROUBLESHOOTING}#a-prompt-does-not-fit",
    errors.ServerError: f"{TROUBLESHOOTING}#a-server-answers-with-an-error",
    errors.EpisodeTimeoutError: "staleness.md#episodes-that-take-too-long",
    errors.LedgerError: "reliability.md#one-account-of-every-prompt",
    errors.RewardError: "data-and-rewards.md#data-and-a-reward",
    errors.TrajectoryError: "workflows.md#what-to-keep-to",
    errors.ParseError: "workflows.md#environments",
    errors.EnvError: "workflows.md#environments",
    errors.AgentError: "agents.md#what-it-may-ask",
    errors.AbandonedError: "agents.md#online-others-bring-the-work",
    errors.GroupLostError: "core.md#when-workers-die",
    errors.WorkerLostError: "core.md#when-workers-die",
}


def page_of(error: BaseException) -> str:
    """Return the page of an error, with the anchor of its section."""
    if page := page_of_message(str(error)):
        return page
    for kind in type(error).__mro__:
        if kind in CLASSES:
            return CLASSES[kind]
    files: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        files = [line.file for line in lines_of_error(cause)] + files
        cause = cause.__cause__
    return next(filter(None, map(page_of_file, files)), TROUBLESHOOTING)
