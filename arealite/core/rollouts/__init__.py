"""Episodes on workers of their own, when the process that keeps the account has no time left for them.

A rollout worker is a Ray actor with an event loop, a client and a workflow with its reward processes. The account stays
in the master: it says which prompt starts when, and gets what came of it: the trajectory as arrays, and its rows of
the rollout file. Invariants: workers follow the master's view of the servers, and none sends a request between a hold
and its release, so versions mean what they mean in one process; an episode whose worker died is issued again.
"""
