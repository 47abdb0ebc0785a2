"""Episodes on separate workers, for runs whose episodes exceed the capacity of one process.

A rollout worker is a Ray actor with an event loop, a client and a workflow with its reward processes. The account stays
in the master: it starts prompts, and receives trajectories as arrays and their rows of the rollout file. Invariants:
workers follow the master's view of the servers, and send no request between a hold and its release, so versions mean
the same as in one process; an episode whose worker died is issued again.
"""
