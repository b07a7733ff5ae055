"""Whatever befalls a run, it goes on as the unbroken one or says why not, and no whole checkpoint is lost."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SIMULATOR = Path(__file__).parents[1] / "support" / "trouble.py"


@pytest.mark.parametrize("seeds", [(1004, 1005), pytest.param((0, 500), marks=pytest.mark.slow)], ids=str)
def test_a_run_goes_on_after_any_trouble(seeds):
    command = [sys.executable, str(SIMULATOR), *map(str, seeds)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    counts = json.loads(ran.stdout.splitlines()[-1])
    assert counts["seeds"] == seeds[1] - seeds[0]
    assert any(name.endswith(", met") for name in counts)
