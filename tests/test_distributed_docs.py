"""docs/distributed.md: blocks marked as run are run as written, the others are parsed by what will read them."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.analysis.ranks import possible_sizes
from penstock.analysis.trace import outline_of
from penstock.cli.plan import spans
from penstock.weights.resolve import ANY, resolve_model
from tests.cli.common import call
from tests.server.test_serve import started

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"(?:^\*([^*\n]*):\*\n\n)?^```(\w*)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
RUN = [block for mark, language, block in BLOCKS if mark == "Run by a test" and language == "sh"]
COMMANDS = [line for block in RUN for line in block.splitlines()]
ELSEWHERE = {"Run by tests/test_examples.py where Ray is installed"}
NODES = "Run by a test, twice at once on one machine"
PARSED = "Parsed by a test, never run"
CONFIGS = sorted(path.stem for path in (ROOT / "src" / "penstock" / "configs").glob("*.json"))


def block_of(mark: str, language: str) -> str:
    [found] = [block for own, kind, block in BLOCKS if (own, kind) == (mark, language)]
    return found


def torchrun(words: list[str]) -> Any:
    """What torchrun makes of its arguments; the program behind them has flags that it knows."""
    run = pytest.importorskip("torch.distributed.run", reason="the extra `distributed` is not installed")
    assert words[0] == "torchrun"
    found = run.get_args_parser().parse_args(words[1:])
    assert (found.module, found.training_script, found.rdzv_backend) == (True, "penstock", "c10d")
    return found


def check_flags(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    known = call(capsys, words[0], "--help").out
    for word in words[1:]:
        if word.startswith("-"):
            assert re.search(rf"(^|[ ,]){word}\b", known, re.MULTILINE), word


def ran(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """A command of the page; ranks of it inherit files, not pipes that a hung one would keep open."""
    return subprocess.run(programs(*words), stdin=subprocess.DEVNULL, timeout=240, text=True, **options)


def programs(*words: str) -> list[str]:
    """The same with this interpreter's programs."""
    found = {"penstock": ["-m", "penstock"], "torchrun": ["-m", "torch.distributed.run"]}[words[0]]
    return [sys.executable, *found, *words[1:]]


def test_every_block_says_whether_it_is_run():
    known = {"Run by a test", NODES, PARSED} | ELSEWHERE
    assert len(BLOCKS) > 8 and {mark for mark, _, _ in BLOCKS} <= known


def test_links_lead_somewhere():
    assert all((ROOT / "docs" / target).exists() for target in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", TEXT))


def said(out: str, speed: str, sums: str) -> bool:
    """Whether `plan` predicts this speed and this time of its sums, whatever it expects of them."""
    found = re.search(r"at most ([\d,]+) tokens/s of one sequence(?:, expected [^;]*)?; of its time (.*)", out)
    return found is not None and found[1] == speed and found[2].startswith(sums)


@pytest.mark.slow
def test_plan_says_what_the_page_says(capsys):
    first, second = (line for line in COMMANDS if line.startswith("penstock plan"))
    shown = call(capsys, *shlex.split(first)[1:])
    assert shown.status == 0
    rows = {line.partition("  ")[0]: line.split() for line in shown.out.splitlines()}
    total = re.search(r"a rank holds (\d+) GiB of (\d+)", TEXT)
    assert total and [round(float(rows["all"][at])) for at in (3, 1)] == [int(number) for number in total.groups()]
    sums = re.search(
        r"that (\d+) sums and a gather take ([\d.]+) ms of a token, and that there are at most (\d+)", TEXT
    )
    assert sums and said(shown.out, sums[3], f"{float(sums[2]):.2f}")
    counts = re.findall(r"^all_reduce +(\d+)", shown.out, re.MULTILINE)
    assert sum(map(int, counts)) == int(sums[1])
    assert "the busiest rank has 2.56 on average" in shown.out and "2.56 on average" in TEXT
    shown = call(capsys, *shlex.split(second)[1:])
    assert shown.status == 0 and "says 0.551 ms of a token for 81 sums and a gather" in TEXT
    assert said(shown.out, "1,302", "0.551 ms are sums") and "1,302 tokens/s" in TEXT


def test_speeds_of_one_gpu_are_those_of_the_results():
    found = json.loads((ROOT / "benchmarks" / "results" / "h200_ranks.json").read_text())
    page = TEXT.partition("**On one H200**")[2].partition("### Which numbers")[0]
    speeds = [line.split("|")[2:5] for line in page.splitlines() if line.startswith("| ") and "row" not in line[:9]]
    shown = [float(cell.split()[0].replace(",", "")) for row in speeds for cell in row]
    tests = [("tg64", 1), ("tg64", 32), ("pp512", 1)]
    rows = {(row["variant"], row["test"], row["rows"]): row["tokens_per_second"] for row in found["rows"]}
    variants = list(dict.fromkeys(row["variant"] for row in found["rows"]))
    assert shown == pytest.approx([rows[name, *test] for name in variants for test in tests], rel=2e-4)


def test_the_table_of_ranks_is_that_of_the_configs():
    shown = dict(re.findall(r"^\| `([\w.-]+)` \| (.*) \|$", TEXT.partition("### Which numbers")[2], re.MULTILINE))
    made = {name: possible_sizes(outline_of(resolve_model(name, ANY, files="config"), None), False) for name in CONFIGS}
    assert {name: shown.get(name) for name in CONFIGS} == {name: spans(sizes) for name, sizes in made.items()}


def test_the_file_for_slurm_is_one(capsys):
    text = next(block for mark, _, block in BLOCKS if mark == PARSED and "#SBATCH" in block)
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert text.count("#SBATCH") == len(options)
    assert set(options) == {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time"}
    assert options["ntasks-per-node"] == "1"  # torchrun starts the others
    [line] = [line for line in text.splitlines() if line.startswith("srun ")]
    found = torchrun(shlex.split(line)[1:])
    assert found.nproc_per_node == options["gpus-per-node"]
    assert (found.nnodes, found.rdzv_id, found.rdzv_endpoint) == ("$SLURM_NNODES", "$SLURM_JOB_ID", "$HEAD:29400")
    check_flags(capsys, found.training_script_args)


def test_the_objects_for_kubernetes_fit_together(capsys):
    yaml = pytest.importorskip("yaml")
    objects = list(yaml.safe_load_all(block_of(PARSED, "yaml")))
    assert [one["kind"] for one in objects] == ["Service", "Service", "NetworkPolicy", "StatefulSet"]
    assert [one["apiVersion"] for one in objects] == ["v1", "v1", "networking.k8s.io/v1", "apps/v1"]
    names, http, policy, pods = (one["spec"] for one in objects)
    label = pods["template"]["metadata"]["labels"]
    assert names["clusterIP"] == "None" and names["publishNotReadyAddresses"] is True
    assert names["selector"] == pods["selector"]["matchLabels"] == policy["podSelector"]["matchLabels"] == label
    assert pods["serviceName"] == objects[0]["metadata"]["name"] and pods["podManagementPolicy"] == "Parallel"
    first = f"{objects[3]['metadata']['name']}-0"
    assert http["selector"] == {"statefulset.kubernetes.io/pod-name": first}
    ranks, clients = policy["ingress"]  # every port to ranks alone
    assert ranks == {"from": [{"podSelector": {"matchLabels": label}}]} and clients["ports"] == [{"port": 8080}]
    [container] = pods["template"]["spec"]["containers"]
    assert all(isinstance(word, str) for word in container["args"])
    found = torchrun([*container["command"], *container["args"]])
    assert found.nnodes == str(pods["replicas"]) and found.rdzv_id
    assert found.nproc_per_node == container["resources"]["limits"]["nvidia.com/gpu"]
    assert found.rdzv_endpoint == f"{first}.{pods['serviceName']}:{names['ports'][0]['port']}"
    assert "PENSTOCK_API_KEY" in [one["name"] for one in container["env"]]  # the server asks for one on 0.0.0.0
    mounted = {one["name"] for one in container["volumeMounts"]}
    assert mounted == {one["name"] for one in pods["template"]["spec"]["volumes"]}
    check_flags(capsys, found.training_script_args)


distributed = pytest.mark.skipif(sys.platform != "linux", reason="ranks are tested on Linux")


@distributed
@pytest.mark.slow
@pytest.mark.parametrize("command", [line for line in COMMANDS if not line.startswith("penstock plan")])
def test_commands_run_as_written(command, tmp_path):
    pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")
    words = shlex.split(command)
    if words[1] == "serve":  # it ends when it is told to
        with started(*words[2:]) as server:
            assert server.end(signal.SIGTERM) == 0
        return
    with (tmp_path / "out").open("w+") as out, (tmp_path / "err").open("w+") as err:
        done = ran(*words, stdout=out, stderr=err)
        out.seek(0)
        err.seek(0)
        assert done.returncode == 0, err.read()
        text = out.read()
    assert "penstock plan MODEL -tp 2 --rank-latency" in text if "doctor" in words else len(text) > 20


@distributed
@pytest.mark.slow
def test_two_nodes_run_as_written(tmp_path):
    block = block_of(NODES, "sh")
    found = torchrun(shlex.split(block.splitlines()[1]))
    assert found.nnodes == "2"
    script = block.replace("torchrun", shlex.join(programs("torchrun")))
    outs = [tmp_path / "first", tmp_path / "second"]
    nodes = []
    for out in outs:
        with out.open("w") as file:
            nodes.append(subprocess.Popen(["bash", "-c", script], stdin=subprocess.DEVNULL, stdout=file, stderr=file))
    try:
        assert [node.wait(240) for node in nodes] == [0, 0], [out.read_text() for out in outs]
    finally:
        for node in nodes:
            node.kill()
    assert sum("Generation: " in out.read_text() for out in outs) == 1  # rank 0's


@distributed
@pytest.mark.slow
def test_python_runs_as_written(tmp_path):
    pytest.importorskip("torch.distributed", reason="the extra `distributed` is not installed")
    script = tmp_path / "script.py"
    script.write_text(block_of("Run by a test", "python"))
    with (tmp_path / "out").open("w+") as out:
        command = [sys.executable, str(script)]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=out, timeout=240, env=os.environ)
        out.seek(0)
        assert done.returncode == 0 and len(out.read()) > 20
