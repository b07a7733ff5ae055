"""Runs the GPU tests and the benchmarks in one call; prints a short table last.

    python scripts/gpu_check.py [--only 1.7b,8b] [--peers] [--skip-tests] [--out FOLDER] [--commit HASH]

--only takes names of cases or groups: 1.7b, 8b, 8b-lora, 8b-small, one, links, long, huge, scaling, loading; of
peers: roof, fsdp2, roundpipe. --peers adds the peers of the chosen groups. FOLDER gets gpu_check.json, written
anew after each case, so that what is done stays if the call is ended, and gpu_check.log. rpft runs under a cap of
24 GiB of VRAM a GPU; an H200 computes faster and has a wider link than the cards that the cap stands for.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

from record import ROOT, commit, machine, write_record

from rpft.peers.process import reason, run_python

TESTS_SECONDS = 400
WORKERS = re.compile(r"\d+ worker\(s\)")
"""In the names of what throughput.py measures."""
MEDIAN, DRAINED = "tokens a second, median step", "tokens a second, drained"
COLUMNS = {
    "median": (MEDIAN, "{:,.0f}"),
    "drained": (DRAINED, "{:,.0f}"),
    "predicted": ("tokens a second, predicted", "{:,.0f}"),
    "VRAM": ("peak VRAM, reserved", "{:.1f}"),
    "bill": ("VRAM by the bill", "{:.1f}"),
    "RAM": ("RAM, resident", "{:.0f}"),
    "RAM bill": ("RAM by the bill", "{:.0f}"),
    "hides all": ("tokens a step that hide all", "{:,.0f}"),
    "by the rule": ("the same by the rule of thumb", "{:,.0f}"),
    "loading": ("second load", "{:.1f}"),
}
"""Of the table: metric and format; rates in tokens a second, memory in GiB, loading in GB/s.

What hides, and the rule: benchmarks/hiding.py.
"""

OF_ONE = "of one"
"""The column for how many times as fast as on one worker the same work is, where both were measured."""


@dataclass(frozen=True)
class Case:
    """One benchmark process."""

    name: str
    words: str
    """What Python is given; {gpus} stands for the number of GPUs, two at most, {counts} for 1, 2, 4 .. of them."""
    groups: tuple[str, ...] = ()
    seconds: int = 300
    """What it may take before it is ended."""
    peer: bool = False

    def arguments(self, gpus: int) -> list[str]:
        """What Python is given on a machine with ``gpus`` GPUs."""
        counts = ",".join(str(2**power) for power in reversed(range(gpus.bit_length())))
        return self.words.format(gpus=min(2, gpus), counts=counts).split()


STEP = "--rows 24 --sequence 4096 --microbatches 3"
HUGE_STEP = "--rows 16 --sequence 4096 --microbatches 4 --steps 4 --workers {gpus}"
SCALING_STEP = "--microbatches 5 --steps 6 --workers {counts}"
ATTENTION = "--targets q_proj,k_proj,v_proj,o_proj"
SMALL_STEP = "--rows 12 --sequence 1024 --microbatches 3"
RPFT = "benchmarks/throughput.py"
ROUNDPIPE = "benchmarks/peer.py roundpipe"
FSDP2 = "benchmarks/peer.py fsdp2"
STALE = "--workers {gpus} --steps 8 --warm-up 5 --update delayed"
EXACT = "--workers {gpus} --steps 8 --warm-up 5"
FSDP2_STEP = "--rows 24 --sequence 4096 --microbatches 6 --workers {gpus}"
BOTH = "--update sync,delayed"


def _roof(name: str, words: str, group: str) -> list[Case]:
    """Two cases, since a roof depends on the attention kernel."""
    return [
        Case(
            f"roof-{name}{suffix}",
            f"benchmarks/peer.py roof {words} --sequence 4096 --rows 8 --steps 5{attention}",
            (group, "roof"),
            150,
            peer=True,
        )
        for suffix, attention in (("", " --option torch-attention"), ("-cudnn", ""))
    ]


def _peer(name: str, words: str, group: str, seconds: int = 300) -> Case:
    return Case(name, words, (group, name.split("-")[0]), seconds, peer=True)


CASES = [
    Case("1.7b", f"{RPFT} qwen3-1.7b {STEP} --steps 20 {BOTH} --workers {{gpus}}"),
    Case("1.7b-one", f"{RPFT} qwen3-1.7b {STEP} --steps 10 {BOTH} --workers 1", ("one",)),
    *_roof("1.7b", "qwen3-1.7b", "1.7b"),
    _peer("fsdp2-1.7b", f"{FSDP2} qwen3-1.7b {FSDP2_STEP} --steps 5", "1.7b"),
    _peer("fsdp2-1.7b-resident", f"{FSDP2} qwen3-1.7b {FSDP2_STEP} --steps 5 --option resident", "1.7b"),
    _peer("roundpipe-1.7b", f"{ROUNDPIPE} qwen3-1.7b {STEP} {STALE}", "1.7b"),
    _peer("roundpipe-1.7b-as-it-comes", f"{ROUNDPIPE} qwen3-1.7b {STEP} {STALE} --option as-it-comes", "1.7b"),
    _peer("roundpipe-1.7b-exact", f"{ROUNDPIPE} qwen3-1.7b {STEP} {EXACT} --option as-it-comes", "1.7b"),
    Case("8b", f"{RPFT} llama-3.1-8b {STEP} --steps 20 {BOTH} --workers {{gpus}}", seconds=400),
    Case("8b-one", f"{RPFT} llama-3.1-8b {STEP} --steps 5 {BOTH} --workers 1", ("one",), 400),
    *_roof("8b", "llama-3.1-8b", "8b"),
    _peer("fsdp2-8b", f"{FSDP2} llama-3.1-8b {FSDP2_STEP} --steps 3", "8b", 400),
    _peer("roundpipe-8b", f"{ROUNDPIPE} llama-3.1-8b {STEP} {STALE}", "8b", 400),
    Case("8b-lora", f"{RPFT} llama-3.1-8b --lora 32 {STEP} --steps 10 --workers {{gpus}}"),
    *_roof("8b-lora", "llama-3.1-8b --lora 32", "8b-lora"),
    _peer(
        "roundpipe-8b-lora",
        f"{ROUNDPIPE} llama-3.1-8b --lora 32 {STEP} {STALE} --option as-it-comes",
        "8b-lora",
        400,
    ),
    Case("8b-small", f"{RPFT} llama-3.1-8b {SMALL_STEP} --steps 10 {BOTH} --workers {{gpus}}"),
    _peer(
        "roundpipe-8b-small",
        f"{ROUNDPIPE} llama-3.1-8b {SMALL_STEP} {STALE} --option as-it-comes",
        "8b-small",
        400,
    ),
    *(
        Case(
            f"links-{name}",
            f"{RPFT} {preset} {STEP} --steps 4 {BOTH} --workers {{gpus}} --emulate-link 25,12",
            ("links",),
            400,
        )
        for name, preset in (("1.7b", "qwen3-1.7b"), ("8b", "llama-3.1-8b"))
    ),
    *(
        Case(
            f"long-{name}",
            f"{RPFT} {words} --rows 1 --microbatches 1 --steps 2 --warm-up 1 --workers 1",
            ("long",),
        )
        for name, words in (
            ("8b", "llama-3.1-8b --sequence 65536"),
            ("1.7b", "qwen3-1.7b --sequence 98304"),
            ("32b-lora", "qwen3-32b --lora 16 --sequence 40960"),
        )
    ),
    *(
        Case(name, f"{RPFT} {words} {HUGE_STEP}", ("huge",), 400)
        for name, words in (
            ("32b-lora", "qwen3-32b --lora 32"),
            ("32b-lora-nf4", "qwen3-32b --lora 32 --quantize nf4"),
            ("70b-lora-nf4", "llama-3.1-70b --lora 32 --quantize nf4"),
            ("14b", "qwen3-14b --ram-limit 200"),
            ("8b-8bit", "llama-3.1-8b --state 8bit --ram-limit 96"),
        )
    ),
    Case(
        "235b-lora-nf4",
        f"{RPFT} qwen3-235b-a22b --lora 32 {ATTENTION} --quantize nf4 --ram-limit 200 --rows 2 --sequence 32768"
        " --microbatches 2 --steps 3 --warm-up 1 --workers {gpus}",
        ("huge",),
        500,
    ),
    Case("scaling-1.7b", f"{RPFT} qwen3-1.7b --rows 40 --sequence 4096 {SCALING_STEP} {BOTH}", ("scaling",), 400),
    Case("scaling-8b", f"{RPFT} llama-3.1-8b --rows 20 --sequence 4096 {SCALING_STEP} {BOTH}", ("scaling",), 500),
    Case("loading", "benchmarks/loading.py llama-3.1-8b --gb 6", seconds=200),
    Case(
        "scaling-8b-lora", f"{RPFT} llama-3.1-8b --lora 32 --rows 20 --sequence 4096 {SCALING_STEP}", ("scaling",)
    ),
]


def choose(only: list[str], peers: bool) -> list[Case]:
    """The cases that ``--only`` and ``--peers`` name, in their order; SystemExit for a name that is none."""
    known = {name for case in CASES for name in (case.name, *case.groups)}
    unknown = [name for name in only if name not in known]
    if unknown:
        sys.exit(f"--only: no case or group {', '.join(unknown)}; there are {', '.join(sorted(known))}")

    def chosen(case: Case) -> bool:
        if case.peer and (case.name in only or case.groups[-1] in only):
            return True
        return (peers or not case.peer) and (not only or bool({case.name, *case.groups} & set(only)))

    return [case for case in CASES if chosen(case)]


@dataclass
class Outcome:
    """What became of one case."""

    case: str
    results: list[dict[str, Any]]
    failure: str = ""
    """One line; empty where all of it was done."""
    seconds: float = 0.0


@dataclass
class Check:
    """One call: where its files go, and what is done so far."""

    folder: Path
    gpus: list[str]
    commit: str
    tests: str = "not run"
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.folder / "gpu_check.log"

    @property
    def machine(self) -> str:
        return machine(self.gpus or ["no GPU"])

    def write(self) -> None:
        """The record of what is done, failures beside the figures."""
        failed = [{"case": o.case, "reason": o.failure} for o in self.outcomes if o.failure]
        results = [result for outcome in self.outcomes for result in outcome.results]
        more = {"commit": self.commit, "tests": self.tests, "failed": failed}
        write_record(self.folder / "gpu_check.json", "gpu_check", self.machine, results, **more)

    def run_case(self, case: Case) -> Outcome:
        """Runs ``case`` in a process of its own; what its record holds counts even if the process is killed."""
        record = self.folder / "cases" / f"{case.name}.json"
        record.parent.mkdir(parents=True, exist_ok=True)
        record.unlink(missing_ok=True)
        words = case.arguments(max(1, len(self.gpus)))
        started = time.monotonic()
        code, lines = run([*words, "--json", str(record)], self.log, case.seconds)
        outcome = Outcome(case.name, [], seconds=time.monotonic() - started)
        if record.exists():
            outcome.results = json.loads(record.read_text(encoding="utf-8"))["results"]
        if code is None:
            outcome.failure = f"ended after {case.seconds} s"
        elif code:
            outcome.failure = f"exit code {code}: {reason(lines)}"
        elif not outcome.results:
            outcome.failure = "it wrote no record"
        self.outcomes.append(outcome)
        return outcome

    def run_tests(self) -> bool:
        """The gpu-marked tests; whether they pass. A failure's report is printed."""
        # A line a test, so that failures have names even if the tests are ended.
        words = "-m pytest -m gpu tests/gpu -v --maxfail=5 --tb=short --no-header --durations=8"
        code, lines = run(words.split(), self.log, TESTS_SECONDS)
        lines = [line for line in lines if " PASSED" not in line]
        self.tests = f"ended after {TESTS_SECONDS} s" if code is None else (lines or ["no output"])[-1]
        print("\n".join(lines[-60:] if code != 0 else lines[-12:]), flush=True)
        return code == 0


def run(words: Sequence[str], log: Path, seconds: float) -> tuple[int | None, list[str]]:
    """``run_python`` in the repository."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    return run_python(words, log, seconds, cwd=ROOT, env={"PYTHONPATH": path.rstrip(os.pathsep)})


def table(outcomes: list[Outcome]) -> str:
    """A line for each combination that was measured, then one for each case that failed, with its reason."""
    rows = [["case", *COLUMNS, OF_ONE]]
    for outcome in outcomes:
        medians = {r["case"]: r["value"] for r in outcome.results if r["metric"] == MEDIAN}
        for name in dict.fromkeys(result["case"] for result in outcome.results):
            values = {r["metric"]: r["value"] for r in outcome.results if r["case"] == name}
            values.setdefault("RAM, resident", values.get("RAM, taken"))
            one = WORKERS.sub("1 worker(s)", name)
            ratio = f"{medians[name] / medians[one]:.2f}" if one != name and one in medians else ""
            cells = [
                "" if values.get(metric) is None else form.format(values[metric])
                for metric, form in COLUMNS.values()
            ]
            rows.append([name, *cells, ratio])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    names = [row[0].ljust(widths[0]) for row in rows]
    figures = [[cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)] for row in rows]
    lines = ["  ".join([name, *cells]) for name, cells in zip(names, figures, strict=True)]
    return "\n".join([*lines, *(f"FAILED {o.case}: {o.failure}" for o in outcomes if o.failure)])


def gpu_names() -> list[str]:
    """The GPUs that torch sees, asked for in another process: this one must not hold memory of theirs."""
    code = "import torch; [print(torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_check", metavar="FOLDER")
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--only", type=lambda text: text.split(","), default=[], metavar="NAMES")
    parser.add_argument("--peers", action="store_true", help="the roof, FSDP2 and roundpipe on the same work too")
    parser.add_argument("--commit", metavar="HASH", help="what is measured, where there is no git to ask")
    arguments = parser.parse_args(words)
    cases = choose(arguments.only, arguments.peers)
    check = Check(arguments.out.resolve(), gpu_names(), arguments.commit or commit())
    check.folder.mkdir(parents=True, exist_ok=True)
    check.log.unlink(missing_ok=True)
    passed = arguments.skip_tests or check.run_tests()
    check.write()
    for case in cases:
        outcome = check.run_case(case)
        check.write()
        print(f"{outcome.case}: {outcome.failure or 'done'} ({outcome.seconds:.0f} s)", flush=True)
    print(f"\n{check.machine}\ncommit {check.commit}; GPU tests: {check.tests}\n{table(check.outcomes)}")
    return 0 if passed and not any(outcome.failure for outcome in check.outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
