"""Keys of `checkpoint`: when one is written, which are kept, when a run goes back to one."""

from __future__ import annotations

from pydantic import Field

from rpft.recipe.section import Section


class Checkpoint(Section):
    """Checkpoints from which a run can go on."""

    every_steps: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints. null: not by steps."
    )
    every_minutes: float | None = Field(
        default=None,
        gt=0,
        description="Minutes between checkpoints, taken at the next step's end. null: not by time.",
    )
    keep_last: int = Field(
        default=2,
        ge=1,
        description="Checkpoints kept; older ones are deleted. Each holds the trained weights and moments.",
    )
    keep_best: bool = Field(
        default=False,
        description="Also keep the checkpoint with the lowest evaluation loss. Needs evaluation rows and "
        "train.eval_every.",
    )
    make_room: bool = Field(
        default=False,
        description="true: when the disk is too full for a checkpoint, the oldest goes first, however many"
        " keep_last keeps; the newest and the best stay. false: the checkpoint is left out, which is said.",
    )
    spike_deviations: float | None = Field(
        default=None,
        gt=0,
        description="A guard against a loss that jumps: spike_steps steps in a row with a loss so many robust "
        "deviations above the median of the last 64 send the run back to the last checkpoint before them; when it "
        "comes to these steps again it passes them over. 10 or more is safe for most data. null: no guard.",
    )
    spike_steps: int = Field(
        default=3, ge=1, description="Steps in a row that make a spike. Not read without spike_deviations."
    )
    most_rewinds: int = Field(
        default=3,
        ge=0,
        description="How often a run goes back; the next spike ends it. Not read without spike_deviations.",
    )

    @property
    def regular(self) -> bool:
        """Whether checkpoints are written on the way, and not only when a run is interrupted."""
        return self.every_steps is not None or self.every_minutes is not None
