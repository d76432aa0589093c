"""Clipping rules that remember: what is too large is judged by the gradients of earlier steps.

What they remember are tensors on the gradients' device, scalars in float64 so that a threshold
does not drift in a long run. A non-finite norm leaves all of it as it was.
"""

import math

import torch
from torch import Tensor

from models.bounds import above, at_least, count, decay
from models.clip import TORCH_EPS, Clip, Clipped, Parameters, measured


class MovingNorm(Clip):
    """A rule whose threshold c moves: g' = g c / (||g|| + 1e-6) where ||g|| > c, untouched elsewhere.

    The norm after is computed, ||g|| times the factor: NaN where ||g|| is inf. A NaN leaves the
    gradients as they are.
    """

    def threshold(self, norm: Tensor) -> Tensor:
        """c for this step, from what the rule remembers and `norm`; both 0-dim float64."""
        raise NotImplementedError

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        norm = norm.float()
        threshold = self.threshold(norm.double()).float()
        factor = torch.where(norm > threshold, threshold / (norm + TORCH_EPS), 1.0)
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)
        return Clipped(norm, norm * factor, threshold, factor < 1)


class ZClip(MovingNorm):
    """c = min(m + z_thresh s / (z / z_thresh) where z = (||g|| - m) / (s + eps) > z_thresh, max_grad_norm).

    Kumar et al. 2025 (2504.02507). m and s^2 are moving averages with factor alpha, first m and then
    s^2 about the new m; a spike enters them as the value that it was cut to (before max_grad_norm).
    They start as mean and population variance of the first warmup_steps norms, in which only
    max_grad_norm clips. Defaults .97, 2.5, 25, 1.0 are those of the paper's code; max_grad_norm None
    leaves the rule alone with its statistics. Matters at spikes; with max_grad_norm below every norm it
    is GlobalNorm, and where no norm is an outlier and none exceeds max_grad_norm a no-op.
    """

    def __init__(
        self,
        *,
        alpha: float = 0.97,
        z_thresh: float = 2.5,
        max_grad_norm: float | None = 1.0,
        warmup_steps: int = 25,
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.alpha = decay("alpha", alpha)
        self.z_thresh = above("z_thresh", z_thresh, 0)
        self.max_grad_norm = math.inf if max_grad_norm is None else above("max_grad_norm", max_grad_norm, 0)
        self.warmup_steps = count("warmup_steps", warmup_steps, 1)
        self.eps = above("eps", eps, 0)

    def first_state(self, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:  # noqa: ARG002
        zero = torch.zeros((), dtype=torch.float64, device=device)
        return {"mean": zero, "var": zero, "seen": zero, "warmup_norms": zero.repeat(self.warmup_steps)}

    def threshold(self, norm: Tensor) -> Tensor:
        mean, deviation = self.state["mean"], self.state["var"].sqrt()
        z = (norm - mean) / (deviation + self.eps)
        cut = mean + self.z_thresh * deviation / (z / self.z_thresh)
        outlier = (self.state["seen"] >= self.warmup_steps) & (z > self.z_thresh)
        self.learn(torch.where(outlier, cut, norm), torch.isfinite(norm))
        return torch.where(outlier, cut, math.inf).clamp(max=self.max_grad_norm)

    def learn(self, norm: Tensor, finite: Tensor) -> None:
        """Take `norm` into the averages, or during warm-up into what they will start from."""
        mean, var, seen, norms = (self.state[key] for key in ("mean", "var", "seen", "warmup_norms"))
        warm = seen >= self.warmup_steps
        place = torch.arange(self.warmup_steps, device=norm.device)
        norms = torch.where((place == seen) & finite, norm, norms)
        new_mean = torch.where(warm, self.alpha * mean + (1 - self.alpha) * norm, norms.mean())
        moved = self.alpha * var + (1 - self.alpha) * (norm - new_mean) ** 2
        self.state["mean"] = torch.where(finite, new_mean, mean)
        self.state["var"] = torch.where(finite, torch.where(warm, moved, norms.var(correction=0)), var)
        self.state["seen"] = seen + finite
        self.state["warmup_norms"] = norms


class AutoClip(MovingNorm):
    """c = the percentile of all norms so far, this one included.

    Seetharaman et al. 2020 (2007.14469). Percentiles are interpolated linearly, as numpy's; `percentile`
    has the paper's 10 as its default [M], which clips nine steps of ten. Matters throughout; 100 makes it
    a no-op. All norms so far are kept, sorted, 4 bytes each; non-finite ones are left out.
    """

    def __init__(self, *, percentile: float = 10.0) -> None:
        super().__init__()
        self.percentile = at_least("percentile", percentile, 0)
        if percentile > 100:
            raise ValueError(f"percentile must be at most 100, got {percentile!r}")

    def first_state(self, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:  # noqa: ARG002
        # the places not yet taken hold inf, which sorts behind every norm
        return {
            "norms": torch.full((1024,), math.inf, device=device),
            "seen": torch.zeros((), dtype=torch.float64, device=device),
        }

    def threshold(self, norm: Tensor) -> Tensor:
        norms, seen = self.state["norms"], self.state["seen"]
        if self.steps > len(norms):
            norms = torch.cat([norms, torch.full_like(norms, math.inf)])
        finite = torch.isfinite(norm)
        # insertion into a sorted row: everything above the new value moves up by one place
        moved = torch.cat([norms.new_full((1,), -math.inf), norms[:-1]])
        norms = torch.maximum(torch.minimum(norms, torch.where(finite, norm, math.inf).float()), moved)
        seen = seen + finite
        self.state.update(norms=norms, seen=seen)
        rank = (seen - 1).clamp(min=0) * (self.percentile / 100)
        low, high = norms.take(torch.stack([rank.floor(), rank.ceil()]).long()).double().unbind()
        # equal neighbours are not subtracted: before the first finite norm both are inf
        return torch.where(low == high, low, low + (high - low) * (rank - rank.floor()))


class AdaGC(Clip):
    """Tensor i: h_i = min(1, lambda_rel c_i / ||g_i||), g_i' = h_i g_i, c_i = beta c_i + (1 - beta) ||g_i'||.

    Wang et al. 2025 (2502.11034), form [S]; lambda_rel 1.05, beta 0.98, lambda_abs 1.0 and 100 warm-up
    steps [M]. In the first warmup_steps calls h = min(1, lambda_abs / ||g||) over all tensors at once, and
    c_i is the least ||h g_i|| so far. A gradient of exactly 0 is no observation and c_i stays: else a
    tensor that starts with one, as behind a zero-initialized scale, would be held at 0 for ever. Matters
    where one tensor's norm jumps while the global norm hides it; seldom a no-op (lambda_rel is near 1).
    """

    keeps_direction = False

    def __init__(
        self,
        *,
        lambda_rel: float = 1.05,
        beta: float = 0.98,
        lambda_abs: float = 1.0,
        warmup_steps: int = 100,
    ) -> None:
        super().__init__()
        self.lambda_rel = above("lambda_rel", lambda_rel, 0)
        self.beta = decay("beta", beta)
        self.lambda_abs = above("lambda_abs", lambda_abs, 0)
        self.warmup_steps = count("warmup_steps", warmup_steps, 0)

    def first_state(self, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:
        return {"typical": torch.full((len(parameters),), math.inf, device=device)}

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        typical, absent = self.state["typical"], torch.zeros_like(norm).float()
        norms = torch.stack(
            [absent if p.grad is None else torch.linalg.vector_norm(p.grad).float() for p in parameters]
        )
        warming = self.steps <= self.warmup_steps
        limit = torch.full_like(typical, self.lambda_abs) if warming else self.lambda_rel * typical
        against = norm.float().expand_as(typical) if warming else norms
        factor = torch.where(against > limit, limit / (against + (TORCH_EPS if warming else 0)), 1.0)
        for parameter, scale in zip(parameters, factor.unbind(), strict=True):
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        after = norms * factor
        moved = torch.minimum(typical, after) if warming else self.beta * typical + (1 - self.beta) * after
        moved = torch.where(torch.isinf(typical), after, moved)
        self.state["typical"] = torch.where(torch.isfinite(norm) & (norms > 0), moved, typical)
        report = measured(parameters, norm, (factor < 1).any())
        return (
            report._replace(threshold=torch.full_like(report.grad_norm, self.lambda_abs))
            if warming
            else report
        )


class SPAM(Clip):
    """Element: g' = sign(g) sqrt(theta v) where g^2 > theta v, then v = beta2 v + (1 - beta2) g'^2.

    Huang et al. 2025 (2501.06842), defaults from the paper's code. A clip doesn't see the optimizer, so v
    is its own; it equals Adam's exp_avg_sq (without bias correction) where Adam has the same beta2 and no
    step was skipped. At every call that `period` divides v is set to 0 (None: never), and calls are
    counted anew; nothing is clipped while that count is below `grace_steps`. The other half of the
    method, which at the same time sets Adam's moments to 0 and warms the learning rate up again, is
    models.resets.MomentumReset: give both the same period. An element whose v is 0 has no history and is
    left alone; the paper's code would hold it at 0 until the next reset, as the embedding of a token not
    seen in the grace steps. Matters at spikes of sqrt(theta), 70 times the usual size; a no-op elsewhere.
    Cuts inf, so it is the norm before that shows an overflow.
    """

    keeps_direction = False

    def __init__(
        self, *, theta: float = 5000.0, beta2: float = 0.999, period: int | None = 500, grace_steps: int = 20
    ) -> None:
        super().__init__()
        self.theta = above("theta", theta, 0)
        self.beta2 = decay("beta2", beta2)
        self.period = None if period is None else count("period", period, 1)
        self.grace_steps = count("grace_steps", grace_steps, 0)

    def first_state(self, parameters: Parameters, device: torch.device) -> dict[str, Tensor]:
        return {
            f"v{i}": torch.zeros_like(p, dtype=torch.float32, device=device) for i, p in enumerate(parameters)
        }

    def clip(self, parameters: Parameters, norm: Tensor) -> Clipped:
        since = self.steps if self.period is None else self.steps % self.period
        finite, clipped = torch.isfinite(norm), []
        keep = torch.where(finite, self.beta2, 1.0)
        for index, parameter in enumerate(parameters):
            v = self.state[f"v{index}"]
            if since == 0 and self.period is not None:
                v.zero_()
            if parameter.grad is None:
                continue
            grad = parameter.grad
            if since >= self.grace_steps:
                limit = (self.theta * v).sqrt_().masked_fill_(v == 0, math.inf).to(grad.dtype)
                clipped.append((grad.abs() > limit).any())
                grad.clamp_(-limit, limit)
            entering = torch.where(finite, grad, 0.0).float()
            v.mul_(keep).addcmul_(entering, entering, value=1 - self.beta2)
        return measured(parameters, norm, torch.stack(clipped).any() if clipped else torch.zeros_like(finite))
