"""Lets vLLM fork its processes, if $VLLM_WORKER_MULTIPROC_METHOD is `fork`.

Each would import for seconds what the first one has imported: on a CPU, vLLM overrides the variable. It
does so for the sake of OpenMP's threads, of which the tests have none. Imported by `vllm_cpu_shim.pth` at
the start of every interpreter, so it does nothing until vLLM is.
"""

import importlib.abc
import importlib.machinery
import os
import sys

PLATFORM = "vllm.platforms.cpu"
METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class _Loader(importlib.machinery.SourceFileLoader):
    """Loader of `PLATFORM`."""

    def exec_module(self, module):
        super().exec_module(module)
        update = module.CpuPlatform.check_and_update_config

        def update_and_fork(config):
            method = os.environ.get(METHOD)
            update(config)
            if method == "fork":
                os.environ[METHOD] = method

        module.CpuPlatform.check_and_update_config = staticmethod(update_and_fork)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != PLATFORM:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = _Loader(name, spec.origin)
        return spec


sys.meta_path.insert(0, _Finder())
