"""penstock plan: whether a model runs here, with how much of it where, and how fast that would be."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from penstock.cli._model import ANY_MODEL, SAME_MODEL, UsageError, named, note, resolved, size
from penstock.cli._output import print_json, print_table
from penstock.errors import InvalidArgument

if TYPE_CHECKING:
    from penstock.analysis.plan import CacheNeeds, ModelPlan, TokenCost
    from penstock.analysis.ranks import Link

_MEMORY = "such as 6G, 500M or bytes; G is 1024³, GB 1000³"


def plan(
    argument: Annotated[str | None, ANY_MODEL] = None,
    model: Annotated[str | None, SAME_MODEL] = None,
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option("--device", help="Where the model is to run.")
    ] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(
            "--device-memory", metavar="SIZE", help=f"Memory of the device, {_MEMORY}; by default what is free."
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        typer.Option("--host-memory", metavar="SIZE", help="Memory beside a GPU's; by default what is free."),
    ] = None,
    max_context: Annotated[
        int | None,
        typer.Option(
            "--max-context",
            "--max-kv-size",
            "--ctx-size",
            "-c",
            "--max-model-len",
            metavar="N",
            parser=size,
            help="Positions to leave room for (32k, 32K); by default 8192, or all that the model has.",
        ),
    ] = None,
    routes: Annotated[
        Path | None,
        typer.Option("--routes", metavar="FILE.npz", help="Hit rates of a text kept by penstock routes --save."),
    ] = None,
    memory_bandwidth: Annotated[
        float | None, typer.Option("--memory-bandwidth", metavar="GB/S", help="Instead of a measurement.")
    ] = None,
    link_bandwidth: Annotated[
        float | None, typer.Option("--link-bandwidth", metavar="GB/S", help="From host memory to a GPU, likewise.")
    ] = None,
    disk_bandwidth: Annotated[
        float | None, typer.Option("--disk-bandwidth", metavar="GB/S", help="Of reading experts, likewise.")
    ] = None,
    state_dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option("--state-dtype", help="Numbers of recurrent states; bfloat16 has half the bytes, not on the CPU."),
    ] = "auto",
    tensor_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--tensor-parallel-size",
            "-tp",
            metavar="N",
            min=1,
            max=1024,
            help="Ranks to split it over; memory and bandwidths that are given are those of one.",
        ),
    ] = None,
    expert_parallel: Annotated[
        Literal["on", "off"],
        typer.Option("--expert-parallel", help="Of a split model: whole experts on each rank, or a part of each."),
    ] = "on",
    rank_link: Annotated[
        Literal["nvlink", "pcie", "ethernet", "loopback"] | None,
        typer.Option("--rank-link", help="Between ranks; assumed if left out: nvlink, on the CPU loopback."),
    ] = None,
    rank_bandwidth: Annotated[
        float | None,
        typer.Option(
            "--rank-bandwidth", metavar="GB/S", help="Between ranks, as penstock doctor measures it under torchrun."
        ),
    ] = None,
    rank_latency: Annotated[
        float | None, typer.Option("--rank-latency", metavar="US", help="Microseconds of a small sum, likewise.")
    ] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit of a hub model.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Use only what has been downloaded before.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show whether a model runs here: its bytes by part, where they go, and the tokens per second to expect.

    No weights are loaded, and of a hub model that is not here only its config.json is fetched. Bandwidths are measured
    (that of the disk on the model's own files, as experts are read). A token's time is what its bytes need: all weights
    it uses at the memory's bandwidth, experts that are not in the device's slots at the link's, those not in memory at
    the disk's. How many are in slots follows from the share of experts that fit, or from a recorded text. Of a model
    that is split over ranks (-tp) all that is of the largest rank, and the sums over ranks of a token add their time.
    No kernel reaches a memory's bandwidth, so a token is that fast at most; where it was measured how much of it models
    of the family reach, the speed to expect is printed as well.

    \b
    Examples:
      penstock plan ./my-model --device-memory 6G
      penstock plan mlx-community/Qwen3.6-35B-A3B-4bit --json
      penstock plan deepseek-v3 --device-memory 32G --disk-bandwidth 6
      penstock plan deepseek-v3 -tp 8 --device cuda --device-memory 140G
    """
    given = {
        "--memory-bandwidth": memory_bandwidth,
        "--link-bandwidth": link_bandwidth,
        "--disk-bandwidth": disk_bandwidth,
    }
    for name, value in given.items():
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name}: is {value}, expected GB/s above 0")
    for name, value, unit in (("--rank-bandwidth", rank_bandwidth, "GB/s"), ("--rank-latency", rank_latency, "µs")):
        if value is not None and not 0 < value < float("inf"):
            raise UsageError(f"{name}: is {value}, expected {unit} above 0")
    from penstock.analysis.plan import Hits, ModelPlan, device_of, memory_of, room_of, speeds_of, subject_of, trace_of
    from penstock.engine.rank import ranks_of
    from penstock.weights.resolve import ANY

    chosen = device_of(device)
    ranks = ranks_of(tensor_parallel_size or 1, expert_parallel == "on", 1.0)
    sizes = _bytes("--device-memory", device_memory), _bytes("--host-memory", host_memory)
    try:
        memory = memory_of(chosen, *sizes, 1 if ranks is None else ranks.size)
    except InvalidArgument as error:
        raise UsageError(str(error)) from None
    meant = named(argument, model)
    resolved_model = resolved(meant, ANY, revision, offline, files="config")
    if resolved_model.hub_id is not None and resolved_model.kind == "config":
        note(f"{resolved_model.hub_id}: not here; its config.json says how large it is")
    subject = subject_of(resolved_model, meant, chosen, state_dtype, ranks)
    room = room_of(subject, chosen, memory, max_context)
    hits = Hits(None if routes is None else trace_of(routes, subject))
    link = None if ranks is None else _link(rank_link, rank_bandwidth, rank_latency, chosen)
    found = ModelPlan(subject, chosen, memory, room, speeds_of(subject, chosen, room, given, note), hits, link)
    if as_json:
        print_json(_described(found))
    else:
        _print(found)


def _link(name: str | None, bandwidth: float | None, latency: float | None, device: str) -> "Link":
    """Between ranks: as given, the rest as it is assumed."""
    from penstock.analysis.ranks import ASSUMED_LINKS, Link

    name = name or ("nvlink" if device == "cuda" else "loopback")
    assumed = ASSUMED_LINKS[name]
    if bandwidth is None and latency is None:
        return assumed
    known = [text for text, value in (("GB/s", bandwidth), ("latency", latency)) if value is not None]
    how = "as given" if len(known) == 2 else f"{known[0]} as given, the rest of {assumed.how}"
    return Link(bandwidth or assumed.rate, assumed.latency if latency is None else latency * 1e-6, how)


def _bytes(option: str, given: str | None) -> int | None:
    from penstock.units import parse_size

    return None if given is None else parse_size(given, option)


# --------------------------------------------------------------------------------------------------------------------
# Output


def _print(found: "ModelPlan") -> None:
    print(f"{_heading(found)}\n")
    columns, rows = _parts(found) if found.subject.ranks is None else _rank_parts(found)
    print_table(columns, rows, wrap=("",))
    print()
    if not found.room.fits:
        print(_refusal(found))
        return
    print_table(("", "experts", "hits", "per token", "GB/s", "from"), _tiers(found), wrap=("from",))
    if found.subject.ranks is not None:
        print()
        print_table(("over ranks", "count", "bytes each", "per token", "link"), _sums(found), wrap=("link",))
    print("\n" + "\n".join(_verdict(found)))


def _parts(found: "ModelPlan") -> tuple[tuple[str, ...], list[list[str]]]:
    from penstock.analysis.plan import cache_needs
    from penstock.units import spelled

    subject, room = found.subject, found.room
    rows = [[part, spelled(nbytes), ""] for part, nbytes in subject.parts.items()]
    if subject.layers:
        each = f"{spelled(max(subject.layers))} each, {spelled(subject.chosen_bytes)} per token"
        rows.append(["experts", spelled(subject.expert_bytes), each])
    rows.append([f"caches, {room.context} positions", spelled(room.caches), _needs(cache_needs(subject.caches))])
    rows.append(["working memory", spelled(room.working), ""])
    rows.append(["all", spelled(subject.dense + subject.expert_bytes + room.caches + room.working), ""])
    return ("part", "bytes", ""), rows


def _rank_parts(found: "ModelPlan") -> tuple[tuple[str, ...], list[list[str]]]:
    """Bytes of the whole model, of its largest rank, and what all ranks together have more than the model."""
    from penstock.analysis.plan import cache_needs
    from penstock.units import spelled

    subject, room, ranks = found.subject, found.room, found.subject.ranks
    assert ranks is not None
    own = subject.parts | {"experts": subject.expert_bytes}
    rows = []
    for part, whole in ranks.whole.items():
        repeated, more = ranks.repeated_bytes(part), _main_fields(ranks.repeated.get(part, {}))
        if part == "experts":
            more = f"{subject.experts} of {subject.all_experts}, {spelled(subject.chosen_bytes)} per token"
        rows.append([part, spelled(whole), spelled(own.get(part, 0)), spelled(repeated) if repeated else "", more])
    whole, repeated = ranks.cache_bytes(room.context)
    needs = _needs(cache_needs(subject.caches))
    rows.append(
        [
            f"caches, {room.context} positions",
            spelled(whole),
            spelled(room.caches),
            spelled(repeated) if repeated > 0 else "",
            needs,
        ]
    )
    rows.append(["working memory", "", spelled(room.working), "", ""])
    whole += sum(ranks.whole.values())
    rest = subject.dense + subject.expert_bytes + room.caches + room.working
    repeated = max(0, repeated) + sum(map(ranks.repeated_bytes, ranks.repeated))
    rows.append(["all", spelled(whole), spelled(rest), spelled(repeated), ""])
    return ("part", "model", "largest rank", "repeated", ""), rows


def _main_fields(repeated: dict[str, int]) -> str:
    """Names of the weights that are most of what is repeated of a part."""
    return ", ".join(name for name, nbytes in repeated.items() if nbytes > 0.1 * sum(repeated.values()))


def _sums(found: "ModelPlan") -> list[list[str]]:
    from penstock.units import spelled

    ranks, link = found.subject.ranks, found.link
    assert ranks is not None and link is not None
    rows = [
        [one.op, str(one.count), spelled(one.nbytes), f"{one.seconds(ranks.size, link) * 1e3:.3f} ms", ""]
        for one in ranks.sums
    ]
    for row in rows[:1]:
        row[-1] = f"{link.rate:g} GB/s, {link.latency * 1e6:g} µs: {link.how}"
    return rows


def _heading(found: "ModelPlan") -> str:
    from penstock.units import spelled

    subject, memory = found.subject, found.memory
    shape = f"{len(subject.layers)} layers of {subject.all_experts} experts, {subject.top_k} per token"
    where = f"on {found.device}" if subject.ranks is None else f"on {subject.ranks.size} ranks, {found.device}, each"
    where += f" with {spelled(memory.device)}"
    if found.device == "cuda":
        where += f" and {spelled(memory.host)} of host memory"
    return f"{subject.name} {where}: {shape if subject.layers else 'no experts'}"


def _needs(needs: "CacheNeeds") -> str:
    from penstock.units import spelled

    parts = [f"{spelled(needs.per_1000)} per 1000 tokens"]
    parts += [f"{spelled(needs.windows)} in windows"] if needs.windows else []
    parts += [f"{spelled(needs.state)} of state per sequence"] if needs.state else []
    return ", ".join(parts)


def _tiers(found: "ModelPlan") -> list[list[str]]:
    """Where experts are, how many of the choices are found there, and what a warm token moves."""
    from penstock.units import spelled

    subject, room, step = found.subject, found.room, found.step(warm=True)

    def row(title: str, way: str, held: int, hits: float | None) -> list[str]:
        speed = found.speeds[way]
        share = f"{spelled(held)}, {held / subject.expert_bytes:.0%}" if subject.layers and held else ""
        shown = "" if hits is None or not subject.layers else f"{hits:.1%}"
        rate = "?" if speed.rate is None else f"{speed.rate:.2f}"
        return [title, share, shown, spelled(step.moved[way]), rate, speed.how]

    rows = [row("GPU memory" if found.device == "cuda" else "memory", "memory", room.cache, found.hit)]
    if "link" in step.moved:
        rows.append(row("host memory", "link", room.host, found.known - found.hit))
    if "disk" in step.moved:
        rows.append(row("disk", "disk", subject.expert_bytes, 1 - found.known))
    return rows


def _verdict(found: "ModelPlan") -> list[str]:
    from penstock.engine.expert_weights import packed_beside

    subject, room = found.subject, found.room
    warm, cold = found.step(warm=True), found.step(warm=False)
    if subject.ranks is not None:
        return _rank_verdict(found)
    if room.resident:
        return [f"Everything fits; no flags are needed. Predicted: at most {_rate(warm)}{_expected(found)}."]
    by = "as in the recorded text" if found.hits.trace is not None else "all experts as likely"
    lines = [
        f"{found.hit:.1%} of the choices are in slots ({by}).",
        f"Predicted: at most {_rate(warm)} warm, {_rate(cold)} cold, when every expert comes from disk.",
        f"Flags: {' '.join(found.flags)}",
    ]
    if subject.files is not None and subject.given is not None and not packed_beside(subject.files).is_file():
        lines.append(f"penstock pack {subject.given} makes each expert one read.")
    return lines


def _rank_verdict(found: "ModelPlan") -> list[str]:
    subject, ranks = found.subject, found.subject.ranks
    assert ranks is not None
    warm, cold = found.step(warm=True), found.step(warm=False)
    sums = f"of its time {warm.sums * 1e3:.3g} ms are sums" if warm.seconds else "its memory's bandwidth is not known"
    if found.room.resident:
        lines = [f"Everything fits. Predicted: at most {_rate(warm)} of one sequence{_expected(found)}; {sums}."]
    else:
        by = "as in the recorded text" if found.hits.trace is not None else "all experts as likely"
        lines = [
            f"{found.hit:.1%} of the choices are in slots ({by}).",
            f"Predicted: at most {_rate(warm)} of one sequence warm, {_rate(cold)} cold; {sums}.",
        ]
    if subject.layers and not ranks.experts_split:
        lines.append(f"Of {subject.top_k} experts the busiest rank has {ranks.busiest:.2f} on average (all as likely).")
    lines.append(f"The model can be split over {spans(ranks.sizes)} ranks.")
    lines.append(f"Flags: {' '.join(found.flags)}")
    return lines


def spans(numbers: tuple[int, ...]) -> str:
    """1 to 4, 8, 16."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _rate(step: "TokenCost") -> str:
    return "unknown" if step.rate is None else _tokens(step.rate)


def _tokens(rate: float) -> str:
    return f"{rate:,.0f} tokens/s" if rate >= 100 else f"{rate:.3g} tokens/s"


def _expected(found: "ModelPlan") -> str:
    """What such models were measured to reach, where that is known."""
    rate, measured = found.step(warm=True).expected_rate, found.measured
    return "" if rate is None or measured is None else f", expected {_tokens(rate)} ({measured})"


def _refusal(found: "ModelPlan") -> str:
    from penstock.units import spelled

    subject, room = found.subject, found.room
    lines = [f"Does not fit: needs at least {spelled(room.need)}, {spelled(found.memory.device)} are there."]
    shorter = room.need - room.caches + subject.caches.bytes_of(256)
    if shorter <= found.memory.device:
        lines.append("A shorter --max-context would fit.")
    if subject.layers and not subject.streams:
        lines.append("Experts that are split along their width are not streamed.")
    if subject.ranks is not None:
        lines.append(f"The model can be split over {spans(subject.ranks.sizes)} ranks.")
    return " ".join(lines)


def _described(found: "ModelPlan") -> dict[str, Any]:
    """As --json prints it: bytes, GB/s, tokens per second, seconds."""
    from penstock.analysis.plan import cache_needs

    subject, room, needs = found.subject, found.room, cache_needs(found.subject.caches)

    def predicted(warm: bool) -> dict[str, Any]:
        step = found.step(warm)
        cost = {"tokens_per_s": step.rate, "seconds_per_token": step.seconds, "bytes_per_token": step.moved}
        cost["expected_tokens_per_s"] = step.expected_rate
        return cost if subject.ranks is None else cost | {"sum_seconds_per_token": step.sums}

    return {
        "model": subject.name,
        "device": found.device,
        "memory": {"device": found.memory.device, "to_host": found.memory.host},
        "parts": subject.parts | ({"experts": subject.expert_bytes} if subject.layers else {}),
        "experts": {
            "layers": len(subject.layers),
            "per_layer": subject.all_experts,
            "per_token": subject.top_k,
            "bytes_each": list(subject.layers),
        },
        "caches": {
            "context": room.context,
            "bytes": room.caches,
            "bytes_per_1000_tokens": needs.per_1000,
            "window_bytes": needs.windows,
            "state_bytes_per_sequence": needs.state,
        },
        "working_bytes": room.working,
        "fits": room.fits,
        "resident": room.resident,
        "needed_bytes": room.need,
        "tiers": {
            "device": {"bytes": room.cache, "hit_rate": found.hit},
            "host": {"bytes": room.host, "hit_rate": found.known - found.hit},
            "disk": {"bytes": 0 if room.resident else subject.expert_bytes, "hit_rate": 1 - found.known},
        },
        "hit_rates_from": "uniform routing" if found.hits.trace is None else "recorded routes",
        "gb_per_s": {way: speed.rate for way, speed in found.speeds.items()},
        "gb_per_s_from": {way: speed.how for way, speed in found.speeds.items()},
        "expected_share": None if found.measured is None else found.measured.share,
        "expected_from": None if found.measured is None else found.measured.source,
        "predicted": {"warm": predicted(True), "cold": predicted(False)} if room.fits else None,
        "flags": found.flags,
        "ranks": _described_ranks(found),
    }


def _described_ranks(found: "ModelPlan") -> dict[str, Any] | None:
    """How the model is split; its parts, experts and caches are those of the largest rank everywhere else."""
    ranks, link = found.subject.ranks, found.link
    if ranks is None or link is None:
        return None
    whole, repeated = ranks.cache_bytes(found.room.context)
    return {
        "size": ranks.size,
        "expert_parallel": not ranks.experts_split,
        "largest_rank": ranks.largest,
        "experts_of_rank": found.subject.experts,
        "experts_of_busiest_rank": ranks.busiest,
        "whole_bytes": ranks.whole | {"caches": whole},
        "repeated_bytes": {part: ranks.repeated_bytes(part) for part in ranks.repeated}
        | ({"caches": repeated} if repeated > 0 else {}),
        "repeated_weights": ranks.repeated,
        "sums": [{"op": one.op, "bytes": one.nbytes, "count": one.count} for one in ranks.sums],
        "link": {"gb_per_s": link.rate, "latency_us": link.latency * 1e6, "from": link.how},
        "possible_sizes": list(ranks.sizes),
    }
