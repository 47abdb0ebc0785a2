"""Variables by which a launcher tells the processes of a run what they can't know."""

SERVER_ADDRS_VARIABLE = "AREAL_LLM_SERVER_ADDRS"  # addresses of the inference servers, host:port, separated by commas
RESTART_VARIABLE = "AREAL_RECOVER_RUN"  # `1` in a run that is started again because it failed
SECRET_VARIABLE = "AREALITE_SECRET"  # secret of the run, which its servers want to be told with every request
REGISTRY_VARIABLE = "AREALITE_REGISTRY"  # where the registry of the run is: host:port, or the path of its registry.json
