"""Makes `tests/` importable, so that tests in all folders share its modules (`tiny_models`, ...)."""
