"""Versioned weights, both ends; knows neither trainer nor server.

A trainer of your own publishes with the names below. Each is loaded when it is first used, and torch with
it. `docs/python.md` lists them; `__init__.pyi` shows them to type checkers. Headway's own modules do not
import them from here.
"""

_MODULES = {
    "CheckpointSync": "headway.contracts.config.weight_sync",
    "CollectiveSync": "headway.contracts.config.weight_sync",
    "DiskSync": "headway.contracts.config.weight_sync",
    "HttpSync": "headway.contracts.config.weight_sync",
    "SharedMemorySync": "headway.contracts.config.weight_sync",
    "WeightPublisher": "weight_sync.channel",
    "Base": "weight_sync.manifest",
    "make_adapter": "weight_sync.adapter",
    "make_publisher": "weight_sync.transports.base",
    "next_version": "weight_sync.publication",
    "publish_next": "weight_sync.publication",
}

__all__ = sorted(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'weight_sync' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
