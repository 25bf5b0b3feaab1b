"""Run in an environment with the wheel and some extras: `import_all.py redis,rewards`, or without extras.

Every module of the packages that the extras are for is imported. It may lack what other extras bring, and
nothing else.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pkgutil import walk_packages

CONTROL = ("headway",)
WEIGHTS = (*CONTROL, "weight_sync")
PACKAGES = {
    "weights": WEIGHTS,
    "inference": (*WEIGHTS, "inference_server"),
    "trainer": (*WEIGHTS, "trainer"),
}
"""Extra -> the packages that it makes whole; the others belong to the control part."""
BROUGHT = {
    "redis": ("redis",),
    "rewards": ("math_verify", "sympy"),
    "export": ("pyarrow",),
    "plots": ("matplotlib",),
    "tracking": ("tensorboard", "wandb"),
    "lora": ("peft",),
    "testing": ("pytest",),
    "ray": ("ray",),
    "sglang": ("sglang",),
    "vllm": ("vllm",),
}
"""Extra -> what is imported of it."""


def main(extras: set[str]) -> int:
    """Import it all; the number of modules that lack what they must not lack."""
    for extra in extras & BROUGHT.keys():
        for name in BROUGHT[extra]:
            import_module(name)
    may_lack = {name for extra in BROUGHT.keys() - extras for name in BROUGHT[extra]}
    packages = {name for extra in extras for name in PACKAGES.get(extra, CONTROL)} or CONTROL
    problems = [problem for package in packages for problem in problems_of(package, may_lack)]
    sys.stderr.writelines(f"{problem}\n" for problem in problems)
    return len(problems)


def problems_of(package: str, may_lack: set[str]) -> list[str]:
    """What keeps its modules from being imported."""
    found = []
    folder = import_module(package).__path__
    for module in walk_packages(folder, f"{package}."):
        if module.name.endswith("__main__"):
            continue
        try:
            import_module(module.name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in may_lack:
                found.append(f"{module.name}: {error}")
    return found


if __name__ == "__main__":
    sys.exit(min(main(set(filter(None, "".join(sys.argv[1:]).split(",")))), 1))
