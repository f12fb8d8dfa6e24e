"""penstock kernels: which ops there are, what they mean, and where each has a kernel."""

import difflib
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli._output import print_json, print_table
from penstock.errors import InvalidArgument, KernelNotFound

if TYPE_CHECKING:
    from penstock.ops._op import Op


def kernels(
    op: Annotated[
        str | None, typer.Argument(metavar="OP", help="Show this op alone: signature, meaning, kernels, sources.")
    ] = None,
    family: Annotated[
        str | None, typer.Option("--family", "-f", metavar="F", help="Only the ops of one family, such as norm.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the ops and where each has a kernel.

    Every op has a NumPy definition (ref). On cpu and cuda "yes" is a kernel of its own, with its variants in
    parentheses; "composed" calls other ops' kernels; "–" is none: there the definition runs (cpu) or the call is
    refused (cuda). The last column counts the kernels of the source programs whose work the op does.

    \b
    Examples:
      penstock kernels --family norm
      penstock kernels rms_norm
      penstock kernels --json
    """
    from penstock.ops import REGISTRY

    chosen = _chosen(REGISTRY, op, family)
    if as_json:
        print_json({"ops": [_described(each) for each in chosen], "count": len(chosen)})
    elif op is not None:
        _print_one(chosen[0])
    else:
        _print_all(chosen)


def _chosen(registry: "dict[str, Op]", name: str | None, family: str | None) -> "list[Op]":
    families = sorted({op.family for op in registry.values()})
    if family is not None and family not in families:
        raise InvalidArgument(f"kernels: family is {family!r}, expected one of {', '.join(families)}")
    if name is not None and name not in registry:
        close = difflib.get_close_matches(name, registry, n=3)
        known = f"did you mean {' or '.join(close)}?" if close else "penstock kernels lists them"
        raise KernelNotFound(f"kernels: there is no op {name!r}; {known}")
    chosen = [op for op in registry.values() if name in (None, op.name) and family in (None, op.family)]
    if not chosen:
        raise InvalidArgument(f"kernels: op {name!r} is of family {registry[str(name)].family!r}, not {family!r}")
    return sorted(chosen, key=lambda op: (op.family, op.name))


def _described(op: "Op") -> dict[str, Any]:
    """One op as a JSON object."""
    return {
        "name": op.name,
        "family": op.family,
        "reference": True,
        "backends": {
            device: {"kind": _kind(kernel), "variants": list(kernel.variants) if kernel else []}
            for device, kernel in op.backends().items()
        },
        "writes": list(op.writes),
        "sources": list(op.sources),
        "signature": _signature(op),
        "doc": op.doc.partition("\n")[0],
    }


def _kind(kernel: Any) -> str:
    if kernel is None:
        return "none"
    return "composed" if kernel.composed else "kernel"


def _signature(op: "Op", one_line: bool = True) -> str:
    """The call as it stands in the source, on one line or with a line per parameter."""
    parts: list[str] = []
    for parameter in op.signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        default = "" if parameter.default is parameter.empty else f" = {parameter.default!r}"
        parts.append(f"{parameter.name}: {parameter.annotation}{default}")
    listed = ", ".join(parts) if one_line else "".join(f"\n    {part}," for part in parts) + "\n"
    return f"{op.name}({listed}) -> {op.signature.return_annotation}"


_MARK = {"kernel": "yes", "composed": "composed", "none": "–"}


def _mark(kernel: Any) -> str:
    """A cell of the table: the kind of kernel and its variants."""
    variants = f" ({', '.join(kernel.variants)})" if kernel and kernel.variants else ""
    return _MARK[_kind(kernel)] + variants


def _print_all(ops: "list[Op]") -> None:
    rows, count, sources = [], {"cpu": 0, "cuda": 0}, set()
    for op in ops:
        found = op.backends()
        for device in count:
            count[device] += found[device] is not None
        sources |= set(op.sources)
        rows.append([op.name, op.family, "yes", *(_mark(found[device]) for device in count), str(len(op.sources))])
    print_table(("op", "family", "ref", "cpu", "cuda", "sources"), rows, wrap=("cpu", "cuda"))
    print(
        f"{len(ops)} ops, all with a NumPy definition (ref); {count['cpu']} have a cpu kernel, {count['cuda']} a cuda "
        f"kernel.\nThey do the work of {len(sources)} source kernels."
    )


def _print_one(op: "Op") -> None:
    signature = _signature(op)
    print((signature if len(signature) < 80 else _signature(op, one_line=False)) + "\n")
    print(op.doc + "\n")
    rows = [("family", op.family), ("reference", "yes")]
    rows += ((device, _mark(kernel)) for device, kernel in op.backends().items())
    if op.writes:
        rows.append(("writes", ", ".join(op.writes)))
    rows.append(("sources", ", ".join(op.sources) or "none"))
    print_table(("", "value"), rows, wrap=("value",), header=False)
