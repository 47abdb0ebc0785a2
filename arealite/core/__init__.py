"""Core: a master sends calls to groups of remote workers, which run the engines of a script of ranks."""
