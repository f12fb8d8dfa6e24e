"""The layers hold: a module imports from its own package or from those below it, and no private name of another one."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent

# from below; the first line are single modules that everything may use
LAYERS = """
    _version errors dtypes units settings machine child kernel_cache
    quant ops backends graph weights text experts models parallel engine analysis convert api server cli demo
""".split()

# Where an upper layer is still reached from below, each with what has to come first.
KNOWN = {
    ("quant", "penstock.backends.cpu.quant"): "the kernel of quantize, found through the registry of kernels",
    ("engine.ahead", "penstock.api"): "a process that loads the model again",
    ("engine.scheduler", "penstock.api"): "the scheduler by requests alone",
    ("convert.run", "penstock.api"): "calibration by an engine",
}

# Private modules that another package still reaches.
PRIVATE = {
    ("engine.ahead", "penstock.backends.cpu._claims"),
    ("engine.ahead", "penstock.backends.cpu._compile"),
    ("cli.doctor", "penstock.backends.cpu._compile"),
}


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Every module's name below penstock, and its syntax tree."""
    for file in sorted(ROOT.rglob("*.py")):
        name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        yield name, ast.parse(file.read_text())


def imported(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Modules of penstock that are imported, lazily or not, and the name that is taken from each ("" for itself)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "penstock":
            for alias in node.names:
                inner = ROOT.joinpath(*(node.module or "").split(".")[1:], alias.name)
                if inner.is_dir() or inner.with_suffix(".py").is_file():
                    yield f"{node.module}.{alias.name}", ""
                else:
                    yield str(node.module), alias.name
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names if alias.name.startswith("penstock."))


def package(name: str) -> str:
    return name.removeprefix("penstock.").partition(".")[0]


def test_nothing_lower_imports_anything_higher() -> None:
    found = set()
    for name, tree in modules():
        if name in ("__init__", "__main__"):  # the public names, and the way to the command line
            continue
        for module, _ in imported(tree):
            if module == "penstock":
                continue
            if LAYERS.index(package(module)) > LAYERS.index(package(name)):
                found.add((name, module))
    assert found == set(KNOWN)


def test_no_private_name_crosses_a_package() -> None:
    found = set()
    for name, tree in modules():
        for module, taken in imported(tree):
            private = [part for part in (*module.split(".")[1:], taken) if re.match(r"_(?!_|version$)", part)]
            if package(module) != package(name) and private:
                found.add((name, module))
    assert found == PRIVATE


def test_no_module_imports_itself_over_others() -> None:
    """No cycle among the imports at the top of modules, which would depend on who comes first."""
    edges = {}
    for name, tree in modules():
        top = ast.Module([node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)], [])
        edges[name] = {module.removeprefix("penstock.") for module, _ in imported(top)} - {name, "penstock"}
    done: set[str] = set()

    def follow(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " → ".join([*path[path.index(name) :], name])
        if name in done:
            return
        for other in edges.get(name, ()):
            follow(other, (*path, name))
        done.add(name)

    for name in edges:
        follow(name, ())
