"""One trial as a generator: trains, and yields a Report at every flush. Knows no Ray.

    for report in train(config, tokens):
        writer.append(report.rows)
        torch.save(report.state(), file)     # exact: a trial resumed from it continues bit for bit

The step path never waits for the device: a step's numbers stay there as 0-dim tensors until the
next flush brings all of them over at once. Divergence is read from the flushed rows.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.clipping import CLIPS
from models.guards import GUARDS
from models.optimizers import build_optimizer, guarded_step
from models.resets import RESETS
from models.variants import build
from study.config import TrialConfig
from study.data import Batches, Tokens, causal_pairs, masked_pairs
from study.divergence import Divergence, DivergenceWatch
from study.imported import build_model
from study.precision import LossScale, autocast
from study.ranks import ranks_of
from study.recording import Probe, Recorder, sample_groups
from study.schedules import SCHEDULES

MAX_ROWS = 2000  # steps between two flushes at most: bounds what waits on the device


@dataclass(frozen=True)
class Report:
    """What happened since the last report."""

    step: int  # the last step that is in rows
    rows: dict[str, Any]  # column -> array (masked where not sampled), one entry a step
    status: str  # running, finished or diverged
    reason: str | None
    diverged_step: int | None
    data_wait: float  # share of the time since the last report that was spent waiting for batches
    state: Callable[
        [], dict[str, Any]
    ]  # what train() resumes from; call it before the next report, on all ranks
    agree: Callable[[int], int]  # what the first rank says


def train(
    config: TrialConfig,
    data: Tokens,
    *,
    device: str = "cpu",
    state: dict[str, Any] | None = None,
    flush_seconds: float = 2.0,
    stop: Callable[[], bool] = lambda: False,
) -> Iterator[Report]:
    """Train `config` on `data` from its start, or from a `state` that a report gave.

    The last report has status `finished` or `diverged`. Rows are the same however often and wherever
    the trial was resumed (bit for bit on one CPU thread). Where `stop` says so, after any step, the
    next report comes at once. With `config.workers` each rank calls this with the same arguments and
    gets the same reports.
    """
    trial = Trial(config, data, torch.device(device))
    if state is not None:
        trial.load_state_dict(state)
    if trial.step == config.steps:  # it had finished; only the news of that was lost
        yield trial.report({}, trial.watch.at_the_end(config.steps), data_wait=0.0)
        return
    flush_at = trial.step + 1  # a person who waits sees soon that it works
    started, waited, first = time.monotonic(), 0.0, trial.step
    while trial.step < config.steps:
        waited += trial.run_step()
        if trial.step < min(flush_at, config.steps) and not stop():
            continue
        rows = trial.recorder.flush()
        end = trial.judge(rows)
        if end is not None and end.ends < trial.step:
            rows = {name: values[rows["step"] <= end.ends] for name, values in rows.items()}
        seconds = max(time.monotonic() - started, 1e-9)
        yield trial.report(rows, end, data_wait=waited / seconds)
        if end is not None:
            return
        # As many steps as these seconds hold, counted beforehand: so all ranks flush at the same one.
        pace = int(flush_seconds * (trial.step - first) / seconds)
        flush_at = trial.step + trial.ranks.agree(min(max(pace, 1), MAX_ROWS))
        started, waited, first = time.monotonic(), 0.0, trial.step


class Trial:
    """Model, optimizer and everything else that a step changes: what a checkpoint holds."""

    def __init__(self, config: TrialConfig, data: Tokens, device: torch.device) -> None:
        self.config, self.device, self.step = config, device, 0
        torch.manual_seed(config.seed)
        # Masked prediction hides positions behind a token that the text doesn't have.
        self.mask_token = data.vocab_size
        self.model = build_model(config, data.vocab_size).to(device)
        self.ranks = ranks_of(config.workers, config.parallel)
        self.ranks.shard(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = build_optimizer(config.optimizer, self.model, "trial.optimizer")
        self.clip = build("clip", CLIPS, config.clip)
        self.guard = build("guard", GUARDS, config.guard)
        self.reset = build("reset", RESETS, config.reset)
        self.schedule = build("schedule", SCHEDULES, config.schedule)
        self.loss_scale = LossScale(config.precision, device)
        self.watch = DivergenceWatch(config.patience, self.loss_scale.active)
        self.recorder = Recorder(device)
        held_out = int(len(data.tokens) * config.validation.fraction)
        train_tokens = data.tokens[: len(data.tokens) - held_out]
        self.batches = Batches(train_tokens, config.model.context_length, config.batch_size, config.seed)
        self.held_out = data.tokens[len(data.tokens) - held_out :]
        loss = torch.compile(self.model.loss) if config.compile else self.model.loss
        self.loss = self.ranks.wrap(self.model, loss)
        self.probe: Probe | None = None
        if config.record.model_update:
            self.probe = Probe(self.model, self._batch(self.batches, 1)[0], config.precision)

    def run_step(self) -> float:
        """One optimizer update, recorded; returns the seconds spent waiting for its batch."""
        self.step += 1
        sampled = self.config.record.period and (self.step - 1) % self.config.record.period == 0
        began = time.perf_counter()
        inputs, targets = self._batch(self.batches, self.step)
        waited = time.perf_counter() - began
        factor = self.schedule.factor(self.step, self.config.steps)
        factor *= self.reset(self.optimizer, self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor

        with sample_groups(self.model, self.config.record, bool(sampled)) as groups:
            loss = self._forward_backward(inputs, targets)
            self.loss_scale.unscale([p.grad for p in self.parameters if p.grad is not None])
            groups.measure_gradients()
            clipped = self.clip(self.parameters)
            skip = self.guard(loss, clipped.grad_norm)
            skip = skip | (self.loss_scale.active & ~torch.isfinite(clipped.grad_norm))
            used_scale = self.loss_scale.scale
            guarded_step(self.optimizer, skip)
            self.model.after_step()
            self.loss_scale.update(~torch.isfinite(clipped.grad_norm))
            groups.measure_updates()
        # Outside, where nothing is observed: the probe's forward is not the step's.
        probed = self.probe.measure() if sampled and self.probe is not None else {}
        self.recorder.add(
            self.step,
            {
                "loss": loss,
                "grad_norm": clipped.grad_norm,
                "grad_norm_clipped": clipped.grad_norm_clipped,
                "clip_threshold": clipped.threshold,
                "skipped": skip,
                "loss_scale": used_scale,
            },
            lr=self.optimizer.param_groups[0]["lr"],
            sampled=self.ranks.combine(groups.observed) | groups.values | probed | self._validate(),
        )
        self.optimizer.zero_grad(set_to_none=True)
        return waited

    def _forward_backward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the step's mean loss; returns it (0-dim float32).

        A micro-batch weighs by its share of the targets, so that any number of them, on any number of
        ranks, gives the loss and the gradient of the whole batch.
        """
        num_parts = self.config.accumulate * self.ranks.size
        if num_parts == 1:
            with autocast(self.config.precision, self.device):
                objective, loss = self.loss(inputs, targets)
            self.loss_scale.scaled(objective).backward()
            return loss.detach()
        total = torch.zeros((), device=self.device)
        num_targets = (targets >= 0).sum()
        parts = list(zip(inputs.chunk(num_parts), targets.chunk(num_parts), strict=True))
        for number in range(self.ranks.rank, num_parts, self.ranks.size):
            part_inputs, part_targets = parts[number]
            weight = (part_targets >= 0).sum() / num_targets
            with self.ranks.reducing(last=number + self.ranks.size >= num_parts):
                with autocast(self.config.precision, self.device):
                    objective, loss = self.loss(part_inputs, part_targets)
                # Ranks' gradients are averaged; their sum is wanted.
                self.loss_scale.scaled(objective * (weight * self.ranks.size)).backward()
            total += loss.detach() * weight
        return self.ranks.sum(total)

    def _batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        window = batches(step)
        if self.config.model.causal:
            inputs, targets = causal_pairs(window)
        else:
            fraction, seed = self.config.mask_fraction, self.config.seed
            inputs, targets = masked_pairs(window, fraction, self.mask_token, seed, step)
        return self._to_device(inputs), self._to_device(targets)

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array))
        if self.device.type == "cuda":
            return tensor.pin_memory().to(self.device, non_blocking=True)
        return tensor

    def _validate(self) -> dict[str, Tensor]:
        """`val_loss` on the same held-out batches each time, where this step is due."""
        settings = self.config.validation
        if not settings.period or (self.step % settings.period and self.step != self.config.steps):
            return {}
        batches = Batches(self.held_out, self.config.model.context_length, self.config.batch_size, 0)
        self.model.eval()
        with torch.no_grad(), autocast(self.config.precision, self.device):
            pairs = [self._batch(batches, number + 1) for number in range(settings.batches)]
            losses = [self.model.loss(inputs, targets)[1] for inputs, targets in pairs]
        self.model.train()
        return {"val_loss": torch.stack(losses).mean()}

    def report(self, rows: dict[str, Any], end: Divergence | None, data_wait: float) -> Report:
        """The report of rows that were flushed and judged."""
        finished = self.step == self.config.steps
        return Report(
            step=int(rows["step"][-1]) if rows else self.step,
            rows=rows,
            status="diverged" if end else "finished" if finished else "running",
            reason=end.reason if end else None,
            diverged_step=end.began if end else None,
            data_wait=data_wait,
            state=self.state_dict,
            agree=self.ranks.agree,
        )

    def judge(self, rows: dict[str, Any]) -> Divergence | None:
        """Whether these rows, which follow those judged before, end the trial as diverged."""
        found = self.watch.scan(rows)
        if found is None and self.step == self.config.steps:
            found = self.watch.at_the_end(self.config.steps)
        return found

    def state_dict(self) -> dict[str, Any]:
        """All that the next step depends on; plain tensors, numbers and lists."""
        return {
            "step": self.step,
            **self.ranks.state_dict(self.model, self.optimizer),
            "clip": self.clip.state_dict(),
            "guard": self.guard.state_dict(),
            "loss_scale": self.loss_scale.state_dict(),
            "watch": self.watch.state_dict(),
            "probe": self.probe.state_dict() if self.probe else None,
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.ranks.load_state_dict(self.model, self.optimizer, state)
        self.clip.load_state_dict(state["clip"])
        self.guard.load_state_dict(state["guard"])
        self.loss_scale.load_state_dict(state["loss_scale"])
        self.watch.load_state_dict(state["watch"])
        if self.probe is not None:
            self.probe.load_state_dict(state["probe"])
        torch.set_rng_state(state["rng"])
        if state["cuda_rng"] is not None:
            torch.cuda.set_rng_state(state["cuda_rng"], self.device)
