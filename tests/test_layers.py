"""The layers hold: a module imports from its own package or from those below it, and no private name of another one."""

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import penstock

ROOT = Path(penstock.__file__).parent

# from below; the first line are single modules that everything may use, the last ones ways to the command line
LAYERS = """
    _version errors dtypes units settings machine child kernel_cache backend_module progress compile_progress
    quant ops backends graph weights text experts models parallel engine analysis convert api mlx_lm server cli demo
    benchmark cache_prompt chat generate perplexity serve
""".split()


@functools.cache
def modules() -> list[tuple[str, ast.Module]]:
    """Every module's name below penstock, and its syntax tree."""
    return [
        (".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"), ast.parse(file.read_text()))
        for file in sorted(ROOT.rglob("*.py"))
    ]


def statements(node: ast.AST, types: bool) -> Iterator[ast.AST]:
    """What is not an expression in a module; without `types` not what only type checkers see."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr) or (
            not types and isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        ):
            continue
        yield child
        yield from statements(child, types)


def imported(tree: ast.Module, types: bool = True) -> Iterator[tuple[str, str]]:
    """Modules of penstock that are imported, lazily or not, and the name that is taken from each ("" for itself)."""
    for node in statements(tree, types):
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
        if name == "__init__" or name.endswith("__main__"):  # the public names, and the way to the command line
            continue
        for module, _ in imported(tree):
            if module == "penstock":
                continue
            if LAYERS.index(package(module)) > LAYERS.index(package(name)):
                found.add((name, module))
    assert not found


def test_no_private_name_crosses_a_package() -> None:
    found = set()
    for name, tree in modules():
        for module, taken in imported(tree):
            private = [part for part in (*module.split(".")[1:], taken) if re.match(r"_(?!_|version$)", part)]
            if package(module) != package(name) and private:
                found.add((name, module))
    assert not found


def test_no_module_imports_itself_over_others() -> None:
    """No cycle among the imports of modules, those within functions included."""
    edges = {}
    for name, tree in modules():
        reached = imported(tree, types=False)
        edges[name] = {module.removeprefix("penstock.") for module, _ in reached} - {name, "penstock"}
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


def _called(call: ast.Call) -> str:
    """The last name of what is called."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def test_lower_layers_find_backends_in_one_place() -> None:
    """`backend_module` is the one import of a backend by name, which the test of layers cannot see."""
    found = {
        name
        for name, tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and "import_module" in _called(node) and "backends" in ast.unparse(node)
    }
    assert found == {"backend_module"}
