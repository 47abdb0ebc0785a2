"""AReaLite: asynchronous reinforcement learning of language models."""

import os
import sys

if sys.argv[:1] == ["-m"] and sys.path[0] == os.getcwd():  # a json.py of the user's is not the standard library's
    sys.path.append(sys.path.pop(0))

__version__ = "0.1.0"
