"""Runs the GPU tests and benchmarks in one call; prints a short table last.

    python scripts/gpu_check.py [--out FOLDER]

Results go to FOLDER/gpu_check.json with machine, date and command.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def machine() -> str:
    """The GPUs, processor count and software of this machine, in one line."""
    import torch
    import transformers

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"{len(names)} x {names[0] if names else 'no GPU'}, {os.cpu_count()} cores, torch {torch.__version__},"
        f" transformers {transformers.__version__}, Python {sys.version.split()[0]}"
    )


def run_tests(log: Path) -> dict[str, object]:
    """The gpu-marked tests; pytest's closing line and the seconds they took."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "tests/gpu",
        "-q",
        "--maxfail=6",
        "--tb=short",
        "--no-header",
        "-p",
        "no:cacheprovider",
    ]
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    log.write_text(done.stdout + done.stderr, encoding="utf-8")
    lines = done.stdout.strip().splitlines()
    print("\n".join(lines[-40:]) if done.returncode else lines[-1])
    counts = re.findall(r"(\d+) (passed|failed|skipped|errors?)", lines[-1] if lines else "")
    return {
        "command": " ".join(["python", *command[1:]]),
        "exit_code": done.returncode,
        "counts": {word: int(count) for count, word in counts},
        "seconds": round(time.monotonic() - started, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu_check")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    tests = run_tests(arguments.out / "gpu_tests.txt")
    result = {
        "name": "gpu_check",
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "machine": machine(),
        "tests": tests,
    }
    (arguments.out / "gpu_check.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"\n{result['machine']}, {result['date']}")
    print(f"gpu tests: {tests['counts']} in {tests['seconds']} s")
    return int(bool(tests["exit_code"]))


if __name__ == "__main__":
    sys.exit(main())
