from testing_client import stack

__all__ = ["stack"]
