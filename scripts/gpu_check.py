"""Runs the GPU tests and benchmarks in one call; prints a short table last.

    python scripts/gpu_check.py [--out FOLDER] [--skip-tests]

FOLDER gets gpu_check.json (machine, date, command, commit, results) and gpu_check.log. Every case runs under a cap
of 24 GiB of VRAM a GPU; an H200 computes faster and has a wider link than the cards that the cap stands for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

CASES = [
    "qwen3-1.7b --rows 16 --sequence 4096 --microbatches 8 --steps 5 --workers 1",
    "qwen3-1.7b --rows 16 --sequence 4096 --microbatches 8 --steps 5",
    "qwen3-1.7b --rows 16 --sequence 4096 --microbatches 8 --steps 5 --update delayed",
    "llama-8b --lora 32 --rows 16 --sequence 4096 --microbatches 8 --steps 4",
]


def run(words: list[str], log: Path, timeout_seconds: int) -> tuple[int, str]:
    """Runs Python with ``words`` in the repository; (exit code, output); the output is added to ``log`` too."""
    command = [sys.executable, *words]
    path = f"{ROOT}:{ROOT / 'benchmarks'}"
    try:
        done = subprocess.run(
            ["env", f"PYTHONPATH={path}", *command],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=timeout_seconds,
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        partial = error.stdout or b""
        code, output = 124, partial.decode() if isinstance(partial, bytes) else partial
    with log.open("a", encoding="utf-8") as file:
        file.write(output)
    return code, output


def run_tests(log: Path) -> tuple[int, str]:
    """The gpu-marked tests; exit code and pytest's closing line. A failure's report is printed."""
    words = [
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-q",
        "--maxfail=5",
        "--tb=short",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    code, output = run(words, log, timeout_seconds=400)
    lines = output.strip().splitlines() or ["no output"]
    if code:
        print("\n".join(lines[-60:]))
    return code, lines[-1]


def main() -> int:
    from record import machine, write_record

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_check")
    parser.add_argument("--skip-tests", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    log = arguments.out / "gpu_check.log"
    log.unlink(missing_ok=True)
    worst, rows, results = 0, [], []
    tests = "not run"
    if not arguments.skip_tests:
        worst, tests = run_tests(log)
    json_file = arguments.out / "case.json"
    for case in CASES:
        words = ["benchmarks/throughput.py", *case.split(), "--json", str(json_file)]
        code, output = run(words, log, timeout_seconds=240)
        worst = max(worst, code)
        found = re.search(r"RESULT (.*)", output)
        rows.append(found.group(1) if found else f"{case}: failed with exit code {code}\n{output[-1500:]}")
        if json_file.exists():
            results += json.loads(json_file.read_text(encoding="utf-8"))["results"]
            json_file.unlink()
    import torch

    where = machine([torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["no GPU"])
    write_record(arguments.out / "gpu_check.json", "gpu_check", where, results, tests=tests)
    print(f"\n{where}\ngpu tests: {tests}")
    print("\n".join(rows))
    return worst


if __name__ == "__main__":
    sys.exit(main())
