"""Learning-rate schedules: the factor of the peak rate at a step, pure functions of step and steps.

All warm up linearly: the factor at step t <= warmup_steps is t / warmup_steps.
"""

import math


class Schedule:
    """Warm-up, then what the subclass says; `factor(step, steps)` for step 1..steps."""

    def __init__(self, *, warmup_steps: int = 0) -> None:
        if warmup_steps < 0:
            raise ValueError(f"warmup_steps must not be negative, got {warmup_steps}")
        self.warmup_steps = warmup_steps

    def factor(self, step: int, steps: int) -> float:
        if step <= self.warmup_steps:
            return step / self.warmup_steps
        return self.after_warmup(step, steps)

    def progress(self, step: int, steps: int) -> float:
        """0 at the end of the warm-up, 1 at the last step."""
        return (step - self.warmup_steps) / max(1, steps - self.warmup_steps)

    def after_warmup(self, step: int, steps: int) -> float:  # noqa: ARG002
        raise AssertionError("a schedule says what comes after its warm-up")


class Constant(Schedule):
    """factor = 1."""

    def after_warmup(self, step: int, steps: int) -> float:  # noqa: ARG002
        return 1.0


class Linear(Schedule):
    """factor = 1 - (1 - final) * progress: fairseq's polynomial decay of power 1."""

    def __init__(self, *, warmup_steps: int = 0, final: float = 0.0) -> None:
        super().__init__(warmup_steps=warmup_steps)
        self.final = final

    def after_warmup(self, step: int, steps: int) -> float:
        return 1.0 - (1.0 - self.final) * self.progress(step, steps)


class Cosine(Linear):
    """factor = final + (1 - final) * (1 + cos(pi * progress)) / 2 (arXiv 1608.03983)."""

    def after_warmup(self, step: int, steps: int) -> float:
        return self.final + (1.0 - self.final) * (1.0 + math.cos(math.pi * self.progress(step, steps))) / 2.0


class WarmupStableDecay(Schedule):
    """factor = 1, then linear to 0 over the last `decay_fraction` of the steps (arXiv 2404.06395)."""

    def __init__(self, *, warmup_steps: int = 0, decay_fraction: float = 0.1) -> None:
        super().__init__(warmup_steps=warmup_steps)
        if not 0 < decay_fraction <= 1:
            raise ValueError(f"decay_fraction must lie in (0, 1], got {decay_fraction}")
        self.decay_fraction = decay_fraction

    def after_warmup(self, step: int, steps: int) -> float:
        decay_steps = max(1.0, self.decay_fraction * steps)
        return min(1.0, (steps - step) / decay_steps)


class InverseSquareRoot(Schedule):
    """factor = sqrt(warmup_steps / step) (arXiv 1706.03762)."""

    def after_warmup(self, step: int, steps: int) -> float:  # noqa: ARG002
        return math.sqrt(max(1, self.warmup_steps) / step)


SCHEDULES = {
    "constant": Constant,
    "linear": Linear,
    "cosine": Cosine,
    "wsd": WarmupStableDecay,
    "inverse_sqrt": InverseSquareRoot,
}
