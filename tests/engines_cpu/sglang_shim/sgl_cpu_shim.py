"""Lets SGLang import torchvision and triton on a machine that has neither in a usable form, have memory
of a host without a GPU, also for adapters, and fork its processes.

Imported by `sgl_cpu_shim.pth` at the start of every interpreter, so it does nothing until one of these
is asked for.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import platform
import sys
import sysconfig
from contextlib import contextmanager
from pathlib import Path

TORCHVISION_OPERATORS = ("nms", "qnms")
HOST_MEMORY = "sglang.srt.mem_cache.pool_host.common"
"""Has a function for each type of device, and CUDA's for those that it does not know, a CPU among them.
"""

ADAPTERS = "sglang.srt.lora.layers"
"""Pins memory of the host, which PyTorch refuses where there is no accelerator."""


class _Ready(importlib.abc.Loader):
    """Loader of a module that exists already."""

    def __init__(self, module):
        self._module = module

    def create_module(self, spec):
        return self._module

    def exec_module(self, module):
        pass


class _HostMemory(importlib.machinery.SourceFileLoader):
    """Loader of `HOST_MEMORY`."""

    def exec_module(self, module):
        super().exec_module(module)
        module.ALLOC_MEMORY_FUNCS["cpu"] = _plain_memory


def _plain_memory(dims, dtype, device, **ignored):
    """Memory that needs no pinning: nothing is copied to another device."""
    import torch

    return torch.empty(dims, dtype=dtype, device=device)


def _fork_processes():
    """Each of SGLang's processes would import for seconds what the first one has imported."""
    import multiprocessing

    choose = multiprocessing.set_start_method

    def forked(method, force=False):
        choose("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = forked


def _pin_nothing():
    """Nothing is copied to another device."""
    import torch

    if torch.accelerator.is_available():
        return

    def unpinned(make):
        return lambda *args, pin_memory=False, **options: make(*args, **options)

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, device=None: self


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self):
        self._is_asking = False
        self._stubs = None
        self._library = None

    def find_spec(self, name, path=None, target=None):
        if self._is_asking:
            return None
        if name == "sglang":
            _fork_processes()
        elif name == "torchvision":
            self._declare_operators()
        elif name == "triton" and not self._has_triton():
            return self._spec(name, self._mock_triton())
        elif name.startswith("triton.") and self._stubs is not None:
            return self._spec(name, self._stubs._MockModule(name))
        elif name == HOST_MEMORY:
            return self._host_memory(name)
        elif name == ADAPTERS:
            _pin_nothing()
        return None

    def _declare_operators(self):
        """torchvision's wheel from PyPI holds CUDA code that a CPU torch cannot load."""
        import torch

        if self._library is None:
            self._library = torch.library.Library("torchvision", "DEF")
            for name in TORCHVISION_OPERATORS:
                signature = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                self._library.define(name + signature)

    def _has_triton(self):
        with self._standing_aside():
            return importlib.util.find_spec("triton") is not None

    def _mock_triton(self):
        """SGLang's own mock, which it installs on a Mac only: let it see one."""
        with self._standing_aside():
            import torch

            stubs = _load_stubs()
            with _seeming_a_mac(torch):
                stubs.install_platform_stubs()
            sys.meta_path[:] = [f for f in sys.meta_path if type(f).__name__ != "_TritonFinder"]
            self._stubs = stubs
            return sys.modules.pop("triton")

    def _host_memory(self, name):
        with self._standing_aside():
            spec = importlib.util.find_spec(name)
        spec.loader = _HostMemory(name, spec.origin)
        return spec

    def _spec(self, name, module):
        return importlib.machinery.ModuleSpec(name, _Ready(module), is_package=True)

    @contextmanager
    def _standing_aside(self):
        self._is_asking = True
        try:
            yield
        finally:
            self._is_asking = False


def _load_stubs():
    path = Path(sysconfig.get_paths()["purelib"]) / "sglang" / "_platform_stubs.py"
    spec = importlib.util.spec_from_file_location("_sglang_platform_stubs", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@contextmanager
def _seeming_a_mac(torch):
    """What the stubs look at, and what they change beside triton, is put back."""
    seen = sys.platform, platform.machine, torch.backends.mps.is_available
    changed = torch.Tensor.to, torch.Tensor.copy_, dict(vars(torch.mps))
    sys.platform, platform.machine = "darwin", lambda: "arm64"
    torch.backends.mps.is_available = lambda: True
    try:
        yield
    finally:
        sys.platform, platform.machine, torch.backends.mps.is_available = seen
        torch.Tensor.to, torch.Tensor.copy_, names = changed
        for name in set(vars(torch.mps)) - set(names):
            delattr(torch.mps, name)


sys.meta_path.insert(0, _Finder())
