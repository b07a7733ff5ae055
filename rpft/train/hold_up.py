"""How long a save is expected to hold up training, where RAM has no room for copies of all that it writes."""

from __future__ import annotations

from rpft.plan.bill import gib
from rpft.train.planned import Planned

_WORTH_SAYING_SECONDS = 0.1


def about_saves(planned: Planned) -> str | None:
    """For people; None where copies hold all that a save writes, or nothing is saved on the way."""
    copied, most = planned.copies_bytes, planned.most_copies_bytes
    if copied >= most:
        return None
    rate, prediction = planned.target.write_rate, planned.prediction()
    step_seconds = 0.0 if prediction is None else prediction.step_seconds
    room = "none" if not copied else gib(copied)
    why = "; none are made of moments that lie in a file" if planned.offload is not None else ""
    said = f"a checkpoint takes {gib(planned.checkpoint_bytes)}, and RAM has {room} for copies of it{why}: "
    if rate is None:
        return f"{said}each save holds up training until the disk has written the rest"
    # The disk has a step's time before the next update, which then waits until the rest has room or is written.
    seconds = max(0.0, (most - copied) / rate - step_seconds)
    if seconds < _WORTH_SAYING_SECONDS:
        return None
    at_most = "" if prediction is not None else "at most "
    interval = _seconds_between_saves(planned, step_seconds)
    share = ""
    if interval is not None and seconds < interval:
        share = f", {seconds / interval:.1%} of the time between saves"
    said += f"at {rate / 1e9:.2g} GB/s each save holds up training for {at_most}about {seconds:.2g} s{share}"
    if interval is not None and most / rate > interval:
        said += f"; it takes {most / rate:.2g} s to write, and the next waits for it"
    return said


def _seconds_between_saves(planned: Planned, step_seconds: float) -> float | None:
    """By the recipe, without what saves take themselves; None where the time of a step is not known."""
    settings = planned.recipe.checkpoint
    found = [60 * settings.every_minutes] if settings.every_minutes is not None else []
    if settings.every_steps is not None:
        if not step_seconds:
            return None
        found.append(settings.every_steps * step_seconds)
    return min(found)
