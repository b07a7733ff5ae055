"""Settings for all tests: transformers quiet and offline, and no test that ends the process of the others."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import NoReturn

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
# Threads of a kernel that wait for one another would keep cores busy which other tests could have. OpenMP reads
# this when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")


# A shell without job control starts what it puts in the background with SIGINT ignored, and children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def _stay(code: int) -> NoReturn:
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    raise AssertionError(f"the process would have ended at once with code {code}; threads: {', '.join(left)}")


@pytest.fixture(autouse=True, scope="session")
def no_end_of_the_process() -> Iterator[None]:
    """`rpft` ends a process at once where a thread of the engine is left: here that fails a test instead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "_exit", _stay)
        yield
