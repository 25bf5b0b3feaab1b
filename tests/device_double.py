"""A device that is not there: tensors say `gpu:0`, compute on the CPU, and log what a GPU would feel.

It shows, without a GPU, the kernels launched (`launches`), host reads and copies that would wait
(`syncs`: `.item()`, nonzero, boolean indexing, copies between host and device, with the line),
copies that nobody waits for (`queued`: non-blocking ones), and operations on tensors of both
devices (`mixed`: an error on a GPU). It covers eager operations of models, losses and samplers. It
does not cover time, memory, streams, NCCL, fused and compiled kernels, or recomputed activations
(they crash in the device's stub); scaled_dot_product_attention decomposes, so counts of attention
are too high.

    double = DeviceDouble()
    with double:
        model = double.move(model)
        out = model(double.tensor(ids))
    print(double.launches.total(), double.syncs, double.mixed)
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

_setup_privateuseone_for_python_backend("gpu")
torch._C._set_only_lift_cpu_tensors(True)

ROOT = str(Path(__file__).resolve().parents[1])
DEVICE = torch.device("gpu:0")
VIEWS = frozenset(
    (
        *("view", "t", "transpose", "slice", "select", "unsqueeze", "squeeze", "expand", "permute"),
        *("split", "unbind", "detach", "alias", "as_strided", "_unsafe_view", "split_with_sizes"),
        *(
            "unflatten",
            "_reshape_alias",
            "reshape",
            "device",
            "lift_fresh",
            "chunk",
            "unsafe_split",
        ),
    )
)
HOST_READS = frozenset(
    (
        *("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select"),
        *("unique_dim", "_unique2"),
    )
)
INDEXING = frozenset(("index", "index_put", "index_put_", "_index_put_impl_"))
KERNELS = {"aten.mm.dtype": lambda left, right, dtype: left.to(dtype) @ right.to(dtype)}
"""In place of what a CPU has not."""
COPIES = frozenset(("copy_", "_to_copy"))


class DoubleTensor(torch.Tensor):
    """Looks like a tensor of the device; `inner` holds the values."""

    inner: torch.Tensor
    owner: DeviceDouble
    is_cuda = property(lambda self: True)

    @staticmethod
    def __new__(cls, inner: torch.Tensor, double: DeviceDouble) -> DoubleTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=DEVICE,
        )
        made.inner, made.owner = inner, double
        return made

    def tolist(self) -> Any:  # torch refuses it for subclasses
        """One read by the host."""
        return self.cpu().tolist()

    def __repr__(self) -> str:
        return f"DoubleTensor({tuple(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = tree_flatten((args, kwargs or {}))[0]
        double = next(leaf.owner for leaf in leaves if isinstance(leaf, DoubleTensor))
        return double.run(func, args, kwargs or {})


class DeviceDouble(TorchDispatchMode):
    """The log, and the mode in which `device="gpu"` makes tensors of the double."""

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()
        self.syncs: list[tuple[Any, ...]] = []
        self.queued: list[tuple[Any, ...]] = []
        self.mixed: list[tuple[str, str]] = []
        self.transfers: list[tuple[str, str, int]] = []
        """Copies between host and device: way, type, bytes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def clear(self) -> None:
        """Forget what was logged."""
        self.launches.clear()
        self.syncs.clear()
        self.queued.clear()
        self.mixed.clear()
        self.transfers.clear()

    def tensor(self, value: torch.Tensor) -> torch.Tensor:
        """Put a tensor of the CPU on the device."""
        return DoubleTensor(value, self)

    def move(self, model: torch.nn.Module) -> torch.nn.Module:
        """Put the parameters and buffers of a model on the device, tied ones once."""
        memo: dict[int, torch.nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = memo.setdefault(
                        id(parameter),
                        torch.nn.Parameter(self.tensor(parameter.data), parameter.requires_grad),
                    )
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = self.tensor(buffer)
        return model

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute on the CPU what was asked of the device, and log it."""
        name = func.__name__.split(".")[0]
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_device = any(isinstance(tensor, DoubleTensor) for tensor in tensors)
        is_out = on_device
        inner_kwargs = dict(kwargs)
        if kwargs.get("device") is not None:
            is_out = torch.device(kwargs["device"]).type == DEVICE.type
            if is_out:
                inner_kwargs["device"] = torch.device("cpu")
        is_queued = bool(kwargs.get("non_blocking")) or (name == "copy_" and True in args[2:])
        self._log(name, str(func), tensors, on_device, is_out, is_queued)

        wrapped: dict[int, torch.Tensor] = {}

        def unwrap(leaf: Any) -> Any:
            if isinstance(leaf, DoubleTensor):
                wrapped[id(leaf.inner)] = leaf
                return leaf.inner
            return leaf

        def wrap(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            if id(leaf) in wrapped:  # an operation in place
                return wrapped[id(leaf)]
            return DoubleTensor(leaf, self) if is_out else leaf

        kernel = KERNELS.get(str(func), func)
        result = kernel(*tree_map(unwrap, args), **tree_map(unwrap, inner_kwargs))
        return tree_map(wrap, result)

    def _log(
        self,
        name: str,
        full: str,
        tensors: list[torch.Tensor],
        on_device: bool,
        is_out: bool,
        is_queued: bool,
    ) -> None:
        of_host = any(not isinstance(each, DoubleTensor) and each.ndim > 0 for each in tensors)
        if on_device and of_host and name not in COPIES:
            (self.syncs if name in INDEXING else self.mixed).append((full, self._where()))
        if name in COPIES and tensors:
            target = is_out if name == "_to_copy" else isinstance(tensors[0], DoubleTensor)
            source = tensors[-1 if name == "copy_" else 0]
            if isinstance(source, DoubleTensor) != target:
                way = "host to device" if target else "device to host"
                log = self.queued if is_queued else self.syncs
                log.append((way, tuple(source.shape), self._where()))
                self.transfers.append((way, str(source.dtype), source.nbytes))
        if on_device and name in HOST_READS:
            self.syncs.append((name, self._where()))
        if (on_device or is_out) and name not in VIEWS:
            self.launches[name] += 1

    def _where(self) -> str:
        """The innermost line of the project."""
        for frame in reversed(traceback.extract_stack()):
            name = frame.filename
            if name.startswith(ROOT) and "site-packages" not in name and name != __file__:
                return f"{name.removeprefix(ROOT + '/')}:{frame.lineno}"
        return "?"
