"""What a step leaves behind, kept on the device until it is flushed.

`Recorder` holds 0-dim tensors of the steps since the last flush and brings them over in one
transfer. `sample_groups` measures, on sampled steps only, the optional columns: norms by group,
update-to-weight ratios, attention logits and activations. `Probe` watches the model's outputs on one
fixed batch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from models.clip import total_norm
from models.norms import wide
from study.precision import autocast

if TYPE_CHECKING:
    from models.imported import Model
    from study.config import RecordSection


PROBE_SEQUENCES = 8


class Recorder:
    """Rows since the last flush."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.steps: list[int] = []
        self.lrs: list[float] = []
        self.rows: list[dict[str, Tensor]] = []
        self.sampled: list[dict[str, Tensor]] = []

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, step: int, row: dict[str, Tensor], *, lr: float, sampled: dict[str, Tensor]) -> None:
        """Keep a step's 0-dim tensors; `sampled` may differ from step to step."""
        self.steps.append(step)
        self.lrs.append(lr)
        self.rows.append(row)
        self.sampled.append(sampled)

    def flush(self) -> dict[str, Any]:
        """Columns of all rows since the last flush: arrays, masked where a column was not sampled."""
        names = list(self.rows[0])
        sampled_names = list(dict.fromkeys(name for sampled in self.sampled for name in sampled))
        values = [row[name] for name in names for row in self.rows]
        values += [sampled[name] for name in sampled_names for sampled in self.sampled if name in sampled]
        flat = torch.stack([value.to(torch.float32) for value in values]).cpu().numpy()
        count = len(self.steps)
        columns: dict[str, Any] = {"step": np.array(self.steps, np.int32)}
        for index, name in enumerate(names):
            columns[name] = flat[index * count : (index + 1) * count]
        columns["skipped"] = columns["skipped"] != 0
        columns["lr"] = np.array(self.lrs, np.float32)
        position = len(names) * count
        for name in sampled_names:
            here = np.array([name in sampled for sampled in self.sampled])
            column = np.ma.masked_all(count, np.float32)
            column[here] = flat[position : position + here.sum()]
            columns[name] = column
            position += int(here.sum())
        self.__init__(self.device)  # type: ignore[misc]
        return columns


class GroupSamples:
    """The optional columns of one sampled step, by name."""

    def __init__(self, model: "Model", record: "RecordSection", sampled: bool) -> None:
        self.model, self.values, self.observed = model, dict[str, Tensor](), dict[str, Tensor]()
        self.gradients = sampled and record.grad_norms
        self.updates = sampled and record.update_ratios
        self.activations = sampled and record.activations
        self.before: dict[str, list[Tensor]] = {}
        if self.updates:
            self.before = {
                name: [p.detach().clone() for p in group] for name, group in model.groups().items()
            }

    def measure_gradients(self) -> None:
        """grad_norm/<group>, before clipping; their squares sum to that of grad_norm."""
        if not self.gradients:
            return
        for name, group in self.model.groups().items():
            gradients = [p.grad for p in group if p.grad is not None]
            self.values[f"grad_norm/{name}"] = total_norm(gradients)

    def measure_updates(self) -> None:
        """update_ratio/<group> = ||W' - W|| / ||W||, of the step that was just taken."""
        if self.updates:
            for name, group in self.model.groups().items():
                before = self.before[name]
                changes = torch._foreach_sub([p.detach() for p in group], before)
                norms = total_norm(changes), total_norm(before)
                self.values[f"update_ratio/{name}"] = norms[0] / norms[1]


class Probe:
    """The logits of one fixed batch, and how far training has moved them since initialization.

    tokens_BxT: int64 inputs, of which the first PROBE_SEQUENCES are used. The logits at the start are
    kept on the device and go into checkpoints, so that a resumed trial measures from the same place.
    """

    def __init__(self, model: "Model", tokens_BxT: Tensor, precision: str) -> None:
        self.model, self.precision = model, precision
        self.tokens_BxT = tokens_BxT[:PROBE_SEQUENCES]
        self.start_BxTxV = self._logits()

    @torch.no_grad()
    def _logits(self) -> Tensor:
        self.model.eval()
        with autocast(self.precision, self.tokens_BxT.device):
            logits_BxTxV = wide(self.model(self.tokens_BxT))
        self.model.train()
        return logits_BxTxV

    def measure(self) -> dict[str, Tensor]:
        """0-dim float32 tensors, of the model as it is now.

        model_update: root mean square over positions of ||logits - logits at the start||, DeepNet
        (arXiv 2203.00555), section 3. output_logit_max: the largest |logit|. log_z: mean over
        positions of log sum exp, which z-loss holds near 0.
        """
        logits_BxTxV = self._logits()
        squares_BxT = (logits_BxTxV - self.start_BxTxV).square().sum(dim=-1)
        return {
            "model_update": squares_BxT.mean().sqrt(),
            "output_logit_max": logits_BxTxV.abs().amax(),
            "log_z": logits_BxTxV.logsumexp(dim=-1).mean(),
        }

    def state_dict(self) -> dict[str, Tensor]:
        return {"start": self.start_BxTxV}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.start_BxTxV = state["start"].to(self.start_BxTxV)


@contextmanager
def sample_groups(model: "Model", record: "RecordSection", sampled: bool) -> Iterator[GroupSamples]:
    """Measurements around one step; a step that isn't sampled costs nothing."""
    samples = GroupSamples(model, record, sampled)
    if samples.activations:
        model.observe(True)
    yield samples
    if samples.activations:
        samples.observed = model.observations()
        model.observe(False)
