"""When a trial counts as diverged: read from the recorded rows, so that it never waits for the device.

The answer depends on the rows alone, not on where flushes cut them, and the trial ends at the same
step however often it was interrupted.
"""

from typing import Any, NamedTuple

import numpy as np

LOSS_SCALE_FLOOR = 1e-4  # fairseq ends a run there
FINAL_STEPS = 100  # at most; the last tenth of a shorter trial
SHORTEST_JUDGED = 100  # steps below which a trial's last loss says nothing about its first


class Divergence(NamedTuple):
    """Why and where: `ends` is the last step to keep, `began` the first step of what ended it."""

    reason: str
    began: int
    ends: int


class DivergenceWatch:
    """Scans rows as they are flushed.

    nonfinite_loss, nonfinite_grad: `patience` steps in a row; under dynamic loss scaling a
    non-finite gradient is how the scale is found, so there the scale's floor decides.
    loss_above_init: the mean loss of the last steps is not below that of the first step
    (Wortsman et al., arXiv 2309.14322, clamp there).
    """

    def __init__(self, patience: int, scaled: bool) -> None:
        self.patience, self.scaled = patience, scaled
        self.streaks = {"nonfinite_loss": 0, "nonfinite_grad": 0}
        self.initial_loss = float("nan")
        self.recent = np.empty(0, np.float32)

    def state_dict(self) -> dict[str, Any]:
        return {
            "streaks": dict(self.streaks),
            "initial_loss": self.initial_loss,
            "recent": self.recent.tolist(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.streaks, self.initial_loss = dict(state["streaks"]), state["initial_loss"]
        self.recent = np.array(state["recent"], np.float32)

    def scan(self, rows: dict[str, np.ndarray]) -> Divergence | None:
        """The first divergence in these rows (which follow those of the last call), if any."""
        steps, losses = rows["step"], rows["loss"]
        if steps[0] == 1:
            self.initial_loss = float(losses[0])
        self.recent = np.concatenate([self.recent, losses])[-FINAL_STEPS:]
        found = [self._streak("nonfinite_loss", steps, ~np.isfinite(losses))]
        if self.scaled:
            below = np.flatnonzero(rows["loss_scale"] < LOSS_SCALE_FLOOR)
            if len(below):
                step = int(steps[below[0]])
                found.append(Divergence("loss_scale_floor", step, step))
        else:
            found.append(self._streak("nonfinite_grad", steps, ~np.isfinite(rows["grad_norm"])))
        return min((one for one in found if one), key=lambda one: one.ends, default=None)

    def _streak(self, reason: str, steps: np.ndarray, bad: np.ndarray) -> Divergence | None:
        first = int(bad.argmax()) if bad.any() else len(bad)
        if first > 0:
            self.streaks[reason] = 0
        for step, is_bad in zip(steps[first:].tolist(), bad[first:].tolist(), strict=True):
            self.streaks[reason] = self.streaks[reason] + 1 if is_bad else 0
            if self.streaks[reason] == self.patience:
                return Divergence(reason, step - self.patience + 1, step)
        return None

    def at_the_end(self, steps: int) -> Divergence | None:
        """Whether the finished trial's last losses are no better than its first."""
        if steps < SHORTEST_JUDGED:
            return None
        final = self.recent[-max(1, min(FINAL_STEPS, steps // 10)) :]
        final = final[np.isfinite(final)]
        if len(final) and not final.mean() < self.initial_loss:
            return Divergence("loss_above_init", steps, steps)
        return None
