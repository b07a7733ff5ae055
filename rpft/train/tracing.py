"""Which steps are traced: those that the recipe names, into files, and now and then one for whoever watches."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rpft import files
from rpft.engine.idle import CAUSES, Idle, idle_by_cause, idle_table
from rpft.engine.streams import Stream
from rpft.engine.trace import Trace
from rpft.engine.trace_svg import write_svg
from rpft.engine.tracer import Tracer, being_traced
from rpft.train.watched import Watched, seen_step

TRACES_FOLDER = "traces"

_STEPS_BETWEEN = 20
_SECONDS_BETWEEN = 5.0
"""Between two steps that are traced for a display: a traced step may take 10% longer and a run 0.5%."""


class StepTracing:
    """Starts and ends traces at the boundaries of steps. All methods are called from the main thread."""

    def __init__(
        self,
        output_dir: Path,
        steps: Sequence[int],
        streams: Callable[[], Sequence[Stream]],
        watched: Watched,
        say: Callable[[str], None],
    ) -> None:
        """``steps``: to be written to ``output_dir``. ``streams``: those of the engine and of the optimizer."""
        self._folder, self._steps = output_dir / TRACES_FOLDER, set(steps)
        self._streams, self._watched, self._say = streams, watched, say
        self._tracer: Tracer | None = None
        self._traced: Sequence[Stream] = ()
        self._marks: dict[int, float] = {}
        """Step to when it ended, of those in the trace and the one before."""
        self._begun_at = 0
        """The last step before the first trace can begin."""
        self._last_seen = (-_STEPS_BETWEEN, 0.0)
        """(Step, time) of the last trace for a display."""

    def begin(self, step: int, num_steps: int) -> None:
        """To be called when everything up to ``step`` is done and nothing more was submitted."""
        self.drop()
        self._begun_at = step
        beyond = [number for number in sorted(self._steps) if number > num_steps]
        if beyond:
            listed = ", ".join(map(str, beyond))
            self._say(f"engine.trace_steps: the run ends with step {num_steps}, so there is no trace of {listed}")
        self._begin_if_wanted(step)

    def passed(self, step: int) -> None:
        """To be called when ``step`` is done, while the next one is under way."""
        if self._tracer is not None and step not in self._marks:
            self._marks[step] = time.perf_counter()
            if step + 1 not in self._steps:
                self._end()
        if self._tracer is None:
            self._begin_if_wanted(step)

    def drop(self) -> None:
        """Forgets a trace under way; for an engine that failed."""
        if self._tracer is not None:
            self._tracer.drop()
            self._tracer = None

    def close(self) -> None:
        """To be called at the end of a run, also one that stops early: what was traced of named steps is kept."""
        if self._tracer is not None and len(self._marks) > 1 and self._steps & self._marks.keys():
            self._end()
        self.drop()

    def _begin_if_wanted(self, step: int) -> None:
        # A step before a named one is in the trace for what is under way when the named one begins.
        if not {step + 1, step + 2} & self._steps and not self._due_for_display(step):
            return
        streams = list(self._streams())
        if being_traced(streams):  # the first steps may be, for the plan
            return
        self._traced = streams
        self._tracer = Tracer(streams)
        self._tracer.start()
        self._marks = {step: self._tracer.origin_seconds}

    def _due_for_display(self, step: int) -> bool:
        """A run's first step, which compiles, is no picture of the others."""
        last, when = self._last_seen
        return (
            self._watched.wants_steps
            and step > self._begun_at
            and step - last >= _STEPS_BETWEEN
            and time.perf_counter() - when >= _SECONDS_BETWEEN
        )

    def _end(self) -> None:
        tracer, self._tracer = self._tracer, None
        assert tracer is not None
        trace = tracer.stop()
        times = {step: at - tracer.origin_seconds for step, at in self._marks.items()}
        steps = [step for step in times if step - 1 in times]
        windows = {step: trace.between(times[step - 1], times[step]) for step in steps}
        idle = {step: idle_by_cause(window) for step, window in windows.items()}
        last = steps[-1]
        self._watched.seen = seen_step(last, windows[last], idle[last])
        self._last_seen = last, time.perf_counter()
        named = [step for step in steps if step in self._steps]
        if named:
            whole = trace.between(times[named[0] - 1], times[last])
            self._write(whole, {step: idle[step] for step in named})

    def _write(self, trace: Trace, idle: dict[int, list[Idle]]) -> None:
        """Leaves ``trace`` and what its workers waited for, step by step, in files, and says the latter."""
        name = "-".join(str(step) for step in dict.fromkeys((min(idle), max(idle))))
        path = self._folder / f"step-{name}.json"
        accounts = {
            "causes": CAUSES,
            "steps": [
                {"step": step, "workers": [account.as_dict() for account in of]} for step, of in idle.items()
            ],
        }
        try:
            self._folder.mkdir(exist_ok=True)
            trace.write_chrome_trace(path)
            write_svg(trace, path.with_suffix(".svg"))
            files.write_whole(path.with_suffix(".idle.json"), json.dumps(accounts, indent=1) + "\n")
        except OSError as error:
            self._say(f"the trace of step {name} could not be written: {error}")
            return
        for step, of in idle.items():
            self._say(
                f"step {step}, {of[0].window_seconds:.3f} s: share of it that workers computed, and waited for"
            )
            for line in idle_table(of):
                self._say(f"  {line}")
        self._say(
            f"trace of step {name}: {path} (ui.perfetto.dev opens it); a picture and the waits lie beside it"
        )
