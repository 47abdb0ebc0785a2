"""The chaos suite itself: its promises notice what is broken, its faults are drawn as recorded, its proxy does harm.

The runs under fire are `make chaos`, outside of `make test`.
"""
