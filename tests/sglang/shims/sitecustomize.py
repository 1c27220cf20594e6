"""Let PyPI's torchvision import beside a CPU build of torch, in every process that SGLang starts.

PyPI's torchvision wheel is linked against CUDA: beside a CPU torch its operators do not load, and
then its import fails, as it adds to the schemas of `nms` and `qnms`, which only the operators
define. SGLang and transformers import torchvision at their start, though no text model calls it.
Defining the two schemas first is the whole cure. Python imports a module of this name by itself,
which is how the cure reaches spawned processes.
"""

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

SCHEMAS = [
    f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor" for name in ("nms", "qnms")
]


class _BeforeTorchvision(MetaPathFinder):
    """Finds nothing; defines the schemas when torchvision is first asked for."""

    library: Any = None  # a torch.library.Library takes its schemas with it when it is freed

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname == "torchvision" and _BeforeTorchvision.library is None:
            import torch

            _BeforeTorchvision.library = torch.library.Library("torchvision", "DEF")
            for schema in SCHEMAS:
                _BeforeTorchvision.library.define(schema)
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
