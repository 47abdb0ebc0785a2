"""Variables by which a launcher tells the trainer's processes what they can't know."""

SERVER_ADDRS_VARIABLE = "AREAL_LLM_SERVER_ADDRS"
"""Addresses of the inference servers, host:port, separated by commas."""
RESTART_VARIABLE = "AREAL_RECOVER_RUN"
"""`1` in a run that is started again because it failed."""
