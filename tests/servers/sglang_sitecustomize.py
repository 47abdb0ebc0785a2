"""Lets SGLang start on a CPU: declares the operators that torchvision registers fake kernels for.

The torchvision of PyPI is compiled against a CUDA torch, so beside a CPU torch its library of operators does not load,
and `import torchvision` fails at the first operator that no one declared. No operator gets an implementation here:
language models call none. `install_sglang.sh` has every interpreter of the test environment import this module at its
start, the processes that SGLang spawns included; torch is imported only when torchvision is looked for.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

OPERATORS = {
    "torchvision::nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "torchvision::qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


class DeclareBeforeTorchvision(MetaPathFinder):
    """Finds no module; declares the operators when torchvision is first looked for."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        """Leave every module to the finders after this one."""
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for name, schema in OPERATORS.items():
                torch.library.define(name, schema)


sys.meta_path.insert(0, DeclareBeforeTorchvision())
