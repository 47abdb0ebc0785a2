from testing_reference import model_path, one_thread, reference

__all__ = ["model_path", "one_thread", "reference"]
