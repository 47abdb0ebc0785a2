"""Core: a master tells groups of remote workers what to compute. Workers run the engines of a script of ranks."""
