"""One peer on one piece of work, in this process: python -m rpft.peers NAME FOLDER RESULT [WORKERS]."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path

from rpft.peers import PEERS


def main() -> None:
    """Does the work in FOLDER and writes RESULT; ends with one line where that cannot be."""
    name, folder, result = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    peer = PEERS[name]
    missing = peer.missing()
    if missing is not None:
        sys.exit(missing)
    from rpft.peers.harness import run, write_result
    from rpft.peers.work import read_work

    work = read_work(folder)
    module = importlib.import_module(f"rpft.peers.{peer.module}")
    build = module.build_roof if name == "roof" else module.build
    found = run(build, work, folder, limited=name != "roof")
    if os.environ.get("RANK", "0") == "0":
        write_result(found, result)


if __name__ == "__main__":
    main()
