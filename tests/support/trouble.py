"""A seeded simulator of trouble around `rpft train`: a run is broken again and again, and gone on with.

Every life of a run is a forked process, so that it can be killed like one. What befalls it (an exception, a device
without memory, a full or broken disk, a power cut at a file operation, signals, kill -9, a thread that stands
still, damaged checkpoint files between two lives) is drawn from the seed, as are the kind of run, workers, delays,
how often it saves, and what room there is for copies of what a slow disk has not written. Moments of signals and
kills are drawn too, but hit where the clock lets them.

    python tests/support/trouble.py FIRST LAST    seeds FIRST to LAST - 1; a line for each that fails, then counts
"""

from __future__ import annotations

import collections
import errno
import gc
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]
    import conftest  # noqa: F401  # transformers quiet and offline

KINDS: dict[str, tuple[str, dict[str, dict[str, Any]]]] = {
    "full": ("llama", {}),
    "full bfloat16": ("llama", {"model": {"dtype": "bfloat16"}}),
    "LoRA": ("llama", {"adapter": {"r": 4, "dropout": 0.2}}),
    "delayed": ("llama", {"optimizer": {"update": "delayed"}}),
    "delayed bfloat16": ("qwen3", {"optimizer": {"update": "delayed"}, "model": {"dtype": "bfloat16"}}),
}
STEPS = 6
LIFE_SECONDS = 60.0
"""A life that takes longer has hung; the longest takes a few seconds."""
TROUBLES = (
    "exception",
    "memory",
    "optimizer",
    "disk full",
    "disk broken",
    "power cut",
    "signal",
    "signals",
    "kill",
    "stall",
)
STALL_SECONDS = 1.0


class Broken(AssertionError):
    """A promise that did not hold."""


class Ended(NamedTuple):
    """How a life ended: ``code`` is below zero for a signal that killed it."""

    code: int
    out: str
    err: str


def live(words: list[str], folder: Path, before: Callable[[], None], meanwhile: Callable[[int], None]) -> Ended:
    """Runs `rpft WORDS...` in a child. ``before`` is called in it; ``meanwhile`` here, with its process id."""
    out, err = folder / "stdout", folder / "stderr"
    child = os.fork()
    if child == 0:
        try:
            for number, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
            before()
            from rpft.cli import main
            from rpft.train import prepare, room

            # To measure them takes longer than a life.
            prepare.turnover_rate = lambda folder: 1e9
            prepare.write_rate = lambda folder, num_bytes: 1e9
            room.lies_in_ram = lambda folder: False  # wherever this runs

            main(words)
        except SystemExit as end:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 0)
        os._exit(99)
    meanwhile(child)
    deadline = time.monotonic() + LIFE_SECONDS
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return Ended(os.waitstatus_to_exitcode(status), out.read_text(), err.read_text())
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise Broken(f"a life did not end: {out.read_text()[-1000:]}")
        time.sleep(0.005)


# -- what befalls a life -----------------------------------------------------------------------------------


class Trouble:
    """One kind of trouble, drawn; ``before`` arms it in the child, ``meanwhile`` brings it about from outside."""

    def __init__(self, kind: str, rng: random.Random, offloaded: bool) -> None:
        """``offloaded``: whether moments lie on the disk, too."""
        self.kind = kind
        share, self._later = rng.random(), rng.random()
        operations = [("write", 60), ("sync", 30), ("rename", 9)]
        operations += [("read_at", 90), ("write_at", 60)] if offloaded else []
        self._file_operation, most = rng.choice(operations)
        most = {"exception": 400, "memory": 400, "stall": 400, "optimizer": 36}.get(kind, most)
        self._number = 1 + int(share * most)
        self._lasting = rng.random() < 0.5
        self._signal = rng.choice([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])

    def __str__(self) -> str:
        where = f"{self._file_operation} " if self.kind in ("disk full", "disk broken", "power cut") else ""
        return f"{self.kind} ({where}{self._number}, {self._later:.3f})"

    def before(self) -> None:
        import torch
        from transformers.models.llama.modeling_llama import LlamaRMSNorm
        from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

        from rpft import files
        from rpft.optim.adamw import LayerUpdate

        if self.kind == "exception":
            for norm in (LlamaRMSNorm, Qwen3RMSNorm):
                self._break(norm, "forward", self._number, RuntimeError("the kernel gave up"))
        elif self.kind == "memory":
            for norm in (LlamaRMSNorm, Qwen3RMSNorm):
                self._break(norm, "forward", self._number, torch.OutOfMemoryError("CUDA out of memory"))
        elif self.kind == "optimizer":
            self._break(LayerUpdate, "__call__", self._number, ArithmeticError("no update"))
        elif self.kind in ("disk full", "disk broken"):
            number = errno.ENOSPC if self.kind == "disk full" else errno.EIO
            error = OSError(number, os.strerror(number))
            self._break(files, self._file_operation, self._number, error, self._lasting)
        elif self.kind == "power cut":
            self._break(files, self._file_operation, self._number, None)
        elif self.kind == "stall":
            for norm in (LlamaRMSNorm, Qwen3RMSNorm):
                self._break(norm, "forward", self._number, None, stand=True)

    def _break(
        self,
        owner: Any,
        name: str,
        number: int,
        error: BaseException | None,
        lasting: bool = False,
        stand: bool = False,
    ) -> None:
        """From its call of that ``number`` on, or then only, ``owner.name`` raises, stands still or is the end."""
        whole, calls = getattr(owner, name), iter(range(1, 1 << 40))

        def breaking(*arguments: Any, **named: Any) -> Any:
            call = next(calls)
            if call == number or (lasting and call > number):
                if stand:
                    time.sleep(LIFE_SECONDS)
                if error is None:
                    os._exit(98)
                if name == "write":  # half of it gets there
                    whole(arguments[0], memoryview(arguments[1])[: len(arguments[1]) // 2])
                raise error
            return whole(*arguments, **named)

        setattr(owner, name, breaking)

    def meanwhile(self, child: int, out: Path) -> None:
        if self.kind not in ("signal", "signals", "kill"):
            return
        _wait_for(child, out, "training: steps")
        time.sleep(self._later * 0.7)
        sent = {"signal": [self._signal], "signals": [signal.SIGINT] * 2, "kill": [signal.SIGKILL]}[self.kind]
        for number in sent:
            try:
                os.kill(child, number)
            except ProcessLookupError:
                return
            time.sleep(self._later / 10)

    def check(self, ended: Ended) -> None:
        """The exit code, and what is said, are of the kind."""
        signalled = 128 + (signal.SIGINT if self.kind == "signals" else self._signal)
        codes = {
            "exception": {1},
            "memory": {0},
            "optimizer": {1},
            "disk full": {5},
            "disk broken": {5},
            "power cut": {98},
            "signal": {signalled, -self._signal},
            "signals": {signalled, -signal.SIGINT},
            "kill": {-signal.SIGKILL},
            "stall": {4},
        }[self.kind]
        if ended.code not in codes | {0}:
            raise Broken(f"exit code {ended.code}: {ended.err[-2000:]}")
        if "Traceback" in ended.err:
            raise Broken(f"a traceback: {ended.err[-2000:]}")
        if ended.code in (1, 3, 4, 5, 6) and not re.search(
            "is the last that was finished|no step was fin", ended.err
        ):
            raise Broken(f"the report lacks where the run stands: {ended.err}")


class Saving:
    """How a seed's runs save: the room for copies, from none to all, in what pieces, and how slow the disk is."""

    def __init__(self, rng: random.Random) -> None:
        self._room = rng.choice([0.0, rng.random() * 0.1, rng.random(), 1.0])
        self._piece_bytes = rng.choice([1 << 12, 1 << 14, 1 << 24])
        self._pause_seconds = rng.choice([0.0, rng.random() * 0.003])

    def __str__(self) -> str:
        return f"room for {self._room:.1%} of a save, pauses of {1000 * self._pause_seconds:.1f} ms"

    def before(self) -> None:
        """To be called in the child, before a trouble's."""
        from rpft import files
        from rpft.train import shards
        from rpft.train.planned import Planned

        room, write = Planned.copies_bytes.func, files.write

        def slowly(file: Any, data: Any) -> None:
            time.sleep(self._pause_seconds)
            write(file, data)

        shards._CHUNK_BYTES = self._piece_bytes
        patched: Any = Planned
        patched.copies_bytes = property(lambda planned: int(self._room * room(planned)))
        if self._pause_seconds:
            files.write = slowly


def _wait_for(child: int, out: Path, text: str) -> None:
    deadline = time.monotonic() + LIFE_SECONDS
    while text not in (out.read_text() if out.exists() else "") and time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.005)


def damage(checkpoint: Path, rng: random.Random) -> str:
    """Truncates a file of ``checkpoint``, flips one of its bits, or removes it."""
    file = rng.choice(sorted(checkpoint.iterdir()))
    content = bytearray(file.read_bytes())
    how = rng.choice(["truncated", "flipped", "removed"])
    if how == "removed":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(content[: rng.randrange(len(content))])
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
    return f"{checkpoint.name}/{file.name} {how}"


# -- a seed ------------------------------------------------------------------------------------------------


class Simulator:
    """Runs seeds; the unbroken run of each kind is made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._unbroken: dict[str, Any] = {}
        self.counts: collections.Counter[str] = collections.Counter()

    def _project(self, kind: str) -> Any:
        from support.recipes import make_project

        if kind not in self._unbroken:
            family, sections = KINDS[kind]
            train = {"max_steps": STEPS, "gradient_accumulation_steps": 2, "eval_every": 3}
            made = make_project(self._folder / kind, family, sections={**sections, "train": train})
            words = ["train", str(made.recipe), f"output_dir={made.folder / 'unbroken'}"]
            ended = live(words, self._folder, lambda: None, lambda child: None)
            if ended.code != 0:
                raise Broken(f"the unbroken run ended with {ended.code}: {ended.err}")
            self._unbroken[kind] = made, made.outcome("unbroken")
        return self._unbroken[kind]

    def broken_promise(self, seed: int) -> str | None:
        """What a seed showed not to hold, with what befell its run; None where all held."""
        try:
            self.run(seed)
        except Broken as broken:
            return str(broken)
        return None

    def run(self, seed: int) -> None:
        """Breaks a run and goes on with it. Broken where a promise did not hold."""
        rng = random.Random(seed)
        kind = rng.choice(list(KINDS))
        made, unbroken = self._project(kind)
        output = made.folder / f"seed {seed}"
        saving = Saving(rng)
        story: list[str] = [kind, str(saving)]
        words = ["train", str(made.recipe), f"output_dir={output}"]
        words += [f"checkpoint.every_steps={rng.randint(1, 3)}", f"checkpoint.keep_last={rng.randint(1, 3)}"]
        words += [f"engine.stall_seconds={STALL_SECONDS}"] if rng.random() < 0.15 else []
        offloaded = rng.random() < 0.3
        if offloaded:
            story.append("moments on disk")
            words.insert(2, f"optimizer.offload={made.folder}")
        try:
            for _ in range(rng.randint(1, 3)):
                trouble = Trouble(rng.choice(TROUBLES[: None if "stall" in words[-1] else -1]), rng, offloaded)
                self._one_life(words, output, rng, saving, trouble, story)
                whole = self._whole(output)
                if whole and rng.random() < 0.4:
                    story.append(damage(output / "checkpoints" / rng.choice(whole), rng))
                    self.counts["damaged checkpoint"] += 1
            resumed = self._life(words, output, rng, saving.before, lambda child: None, story)
            if resumed.code != 0:
                raise Broken(f"the last life ended with {resumed.code}: {resumed.err[-2000:]}")
            outcome = made.outcome(output.name)
            if outcome.numbers != unbroken.numbers:
                raise Broken("metrics.jsonl differs from the unbroken run's")
            if outcome.result != unbroken.result:
                raise Broken("the result differs from the unbroken run's")
        except Broken as broken:
            raise Broken(f"seed {seed}: {'; '.join(story)}: {broken}") from None
        shutil.rmtree(output)
        self.counts["seeds"] += 1

    def _one_life(
        self,
        words: list[str],
        output: Path,
        rng: random.Random,
        saving: Saving,
        trouble: Trouble,
        story: list[str],
    ) -> None:
        before = self._whole(output)
        out = self._folder / "stdout"
        out.unlink(missing_ok=True)
        story.append(str(trouble))

        def arm() -> None:
            saving.before()
            trouble.before()

        ended = self._life(words, output, rng, arm, lambda child: trouble.meanwhile(child, out), story)
        self.counts["lives that wrote from copies"] += bool(re.search(r"[1-9]\d* .iB of them from cop", ended.out))
        story.append(f"exit {ended.code}")
        met = ended.code or (trouble.kind == "memory" and "done again with a smaller plan" in ended.out)
        self.counts[f"{trouble.kind}, {'met' if met else 'missed'}"] += 1
        trouble.check(ended)
        after = self._whole(output)
        if before and (not after or max(after) < max(before)):
            raise Broken(f"whole checkpoints were {before} and are {after}")

    def _life(
        self,
        words: list[str],
        output: Path,
        rng: random.Random,
        before: Callable[[], None],
        meanwhile: Callable[[int], None],
        story: list[str],
    ) -> Ended:
        """Begins or goes on, whichever the output directory is for; refusing to go on must be for a reason."""
        words = [*words, f"engine.workers={rng.randint(1, 3)}"]
        words += [f"engine.inject_delays={rng.randrange(1000)}"] if rng.random() < 0.3 else []
        if self._whole(output):
            return live([*words, "--resume"], self._folder, before, meanwhile)
        if (output / "metrics.jsonl").exists() or (output / "checkpoints").exists():
            refused = live([*words, "--resume"], self._folder, lambda: None, lambda child: None)
            if refused.code != 2 or "no whole checkpoint" not in refused.err:
                raise Broken(f"going on from nothing ended with {refused.code}: {refused.err}")
            story.append("anew")
            self.counts["refused for want of a whole checkpoint"] += 1
        shutil.rmtree(output, ignore_errors=True)
        return live(words, self._folder, before, meanwhile)

    @staticmethod
    def _whole(output: Path) -> list[str]:
        from rpft.train.checkpoint import fault

        found = sorted((output / "checkpoints").glob("step-????????"))
        return [path.name for path in found if fault(path) is None]


def main(first: int, last: int) -> int:
    """Runs seeds ``first`` to ``last`` - 1 and prints counts as JSON; the number of seeds that failed."""
    import torch

    torch.set_num_threads(1)  # a forked child has no helper threads
    # Everything heavy is imported once, here.
    import rpft.train.loop  # noqa: F401
    import support.recipes  # noqa: F401

    gc.freeze()  # no child is to look through what all have
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        simulator = Simulator(Path(folder))
        for seed in range(first, last):
            broken = simulator.broken_promise(seed)
            print(f"seed {seed} is through", file=sys.stderr, flush=True)
            if broken is not None:
                failures += 1
                print(broken, flush=True)
        print(json.dumps({**dict(sorted(simulator.counts.items())), "failed": failures}), flush=True)
    return failures


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
