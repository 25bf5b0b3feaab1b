"""Who may import whom, and what the light packages never load."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("headway", "gateway", "weight_sync", "inference_server", "trainer")
HEAVY = ("torch", "transformers", "sglang", "vllm", "ray", "megatron")


def modules_below(folder: str) -> list[str]:
    """Dotted names of all modules of a folder, read from the tree, not imported."""
    return [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for file in sorted((ROOT / folder).rglob("*.py"))
    ]


LIGHT = [
    *modules_below("headway/contracts"),
    *modules_below("headway/runtime"),
    *modules_below("headway/text"),
    *modules_below("headway/dialects"),
    *modules_below("gateway"),
    "headway.launch.cli",
]

REPORT_HEAVY_IMPORTS = f"""
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]
    if loaded:
        sys.exit(f"importing {{name}} loads {{loaded}}")
"""


def test_imports_run_one_way():
    command = Path(sys.executable).with_name("lint-imports")
    done = subprocess.run(
        [command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert ", 0 broken" in done.stdout


def test_the_light_rooms_never_load_torch():
    assert len(LIGHT) > 30
    done = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY_IMPORTS, *LIGHT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "module",
    ["gateway.app.main", "headway.launch.cli", "headway.runtime.inference_client"],
)
def test_each_light_process_starts_without_torch(module):
    done = subprocess.run(
        [sys.executable, "-c", REPORT_HEAVY_IMPORTS, module],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", PACKAGES)
def test_a_generic_name_is_our_package(name):
    """Other distributions install packages of these names; ours must be the one that is imported."""
    file = Path(importlib.import_module(name).__file__)
    assert file == ROOT / name / "__init__.py"


@pytest.mark.parametrize("package", ["headway", "gateway"])
def test_no_facade_loads_the_world(package):
    files = [*(ROOT / package).rglob("__init__.py")]
    assert files
    for file in files:
        check_imports_lazily(file)


def check_imports_lazily(file: Path) -> None:
    lines = [
        line for line in file.read_text().splitlines() if line.startswith(("import ", "from "))
    ]
    assert not lines, f"{file} imports eagerly: {lines}"


UNTIED = (
    "headway.contracts",
    "headway.dialects",
    "headway.launch",
    "gateway",
    "headway.runtime",
    "headway.text",
    "inference_server",
    "trainer",
    "weight_sync",
)
"""Packages of whose folders no parts load one another in a circle."""


def imports_at_load(body: list[ast.stmt]) -> Iterator[str]:
    """Names that a module imports when it is loaded, `a.b` or `a.b.c` for `from a.b import c`."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from imports_at_load(node.orelse)
        else:
            for field in ("body", "orelse", "finalbody"):
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield from imports_at_load(getattr(node, field, []))


def imports_within(package: str) -> dict[str, set[str]]:
    """Module -> modules of the same package that it loads."""
    names = set(modules_below(package.replace(".", "/")))
    found: dict[str, set[str]] = {}
    for name in names:
        path = ROOT / name.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        loaded = imports_at_load(ast.parse(file.read_text()).body)
        found[name] = {
            known
            for target in loaded
            for known in (target, target.rpartition(".")[0])
            if known in names
        }
    return found


def knot(imports: Mapping[str, set[str]], folder: str) -> list[str] | None:
    """The children of a folder (subpackages whole, each file alone) that load one another in a circle."""
    depth = folder.count(".") + 1

    def child(module: str) -> str | None:
        parts = module.split(".")
        return parts[depth] if module.startswith(f"{folder}.") else None

    edges: dict[str, set[str]] = {}
    for module, targets in imports.items():
        source = child(module)
        if source is not None:
            below = {name for target in targets if (name := child(target)) is not None}
            edges.setdefault(source, set()).update(below - {source})
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle[::-1]
    return None


@pytest.mark.parametrize("package", UNTIED)
def test_no_parts_of_a_folder_load_one_another_in_a_circle(package):
    imports = imports_within(package)
    folders = {module.rpartition(".")[0] for module in imports if module != package}
    knots = {folder: knot(imports, folder) for folder in sorted(folders)}
    assert not {folder: circle for folder, circle in knots.items() if circle}


def test_a_circle_between_subpackages_is_found():
    imports = {"a.b.x": {"a.c.y"}, "a.c.z": {"a.d"}, "a.d": {"a.b.x"}, "a.e": {"a.b.x"}}
    assert set(knot(imports, "a") or ()) == {"b", "c", "d"}
    assert knot({**imports, "a.d": set()}, "a") is None


def test_what_only_type_checkers_import_is_no_load():
    source = "from a import b\nif TYPE_CHECKING:\n    import c\nelse:\n    import d\n"
    later = "try:\n    import e\nfinally:\n    import f\ndef late():\n    import g\n"
    loaded = imports_at_load(ast.parse(source + later).body)
    assert list(loaded) == ["a.b", "d", "e", "f"]
