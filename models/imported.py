"""A model of somebody else's making, offering what Transformer offers to a trial.

    model = ImportedModel(build(vocab_size=256, context_length=48), vocab_size=256)
    objective, loss = model.loss(inputs_BxT, targets_BxT)

The module maps (B, T) int64 tokens to (B, T, V) logits, or to an object with `.logits` as Hugging
Face's models do; V may be larger than the vocabulary. Its blocks are found by its structure: the list
of like modules that holds most of the parameters. Parameters that need no gradient stay out.
"""

from typing import Any

from torch import Tensor, nn

from models.losses import Criterion, cross_entropy
from models.norms import wide
from models.transformer import Transformer


class OutputError(ValueError):
    """A module that doesn't give logits of the right shape."""


class ImportedModel(nn.Module):
    """A module with the loss, the groups and the observations that a trial asks for."""

    def __init__(self, model: nn.Module, vocab_size: int, criterion: Criterion = cross_entropy) -> None:
        super().__init__()
        self.model, self.vocab_size, self.criterion = model.train(), vocab_size, criterion
        self.blocks_path = blocks_path(model)
        self._hooks: list[Any] = []
        self._observed: dict[str, Tensor] = {}

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """The module's parameters under its own names, by which an optimizer may tell them apart."""
        return self.model.named_parameters(*args, **kwargs)

    def forward(self, tokens_BxT: Tensor) -> Tensor:
        """(B, T) int64 token ids to (B, T, V) logits. OutputError for anything else."""
        made = self.model(tokens_BxT)
        logits = getattr(made, "logits", made)
        if not isinstance(logits, Tensor):
            raise OutputError(f"the model gave {type(made).__name__}; must be logits or have .logits")
        wanted = (*tokens_BxT.shape, self.vocab_size)
        if logits.ndim != 3 or logits.shape[:2] != wanted[:2] or logits.shape[2] < self.vocab_size:
            raise OutputError(f"the model gave logits of shape {tuple(logits.shape)}; must be {wanted}")
        return logits

    def loss(self, inputs_BxT: Tensor, targets_BxT: Tensor) -> tuple[Tensor, Tensor]:
        """(objective, the same number to be recorded), float32 scalars; targets of -100 don't count."""
        objective = self.criterion(wide(self(inputs_BxT)), targets_BxT)
        return objective, objective.detach()

    def groups(self) -> dict[str, list[nn.Parameter]]:
        """Every trainable parameter in exactly one group, that of its module; tied weights where first met.

        'block<i>.<child>' in the list of blocks, else the module's own dotted name, cut after the first
        number and one word more.
        """
        groups: dict[str, list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                groups.setdefault(self._group_of(name), []).append(parameter)
        return groups

    def _group_of(self, name: str) -> str:
        *modules, _ = name.split(".")
        for number, word in enumerate(modules):
            if word.isdigit():
                modules = modules[: number + 2]
                if ".".join(modules[:number]) == self.blocks_path:
                    modules = [f"block{word}", *modules[number + 1 :]]
                break
        return ".".join(modules) or name

    def after_step(self) -> None:
        """Nothing: what acts after a step is the module's own affair."""

    def observe(self, on: bool) -> None:
        """From the next forward on, keep (or stop keeping) what observations() returns."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._observed = [], {}
        if on and self.blocks_path is not None:
            blocks = self.model.get_submodule(self.blocks_path)
            self._hooks = [
                block.register_forward_hook(self._keep(name)) for name, block in blocks.named_children()
            ]

    def _keep(self, name: str) -> Any:
        def keep(_block: nn.Module, _inputs: Any, made: Any) -> None:
            hidden = made[0] if isinstance(made, tuple) else made
            if isinstance(hidden, Tensor):
                self._observed[f"act_rms/block{name}"] = wide(hidden.detach()).square().mean().sqrt().float()

        return keep

    def observations(self) -> dict[str, Tensor]:
        """0-dim float32 tensors of the last observed forward: 'act_rms/block<i>', the RMS of its output."""
        return dict(self._observed)


Model = Transformer | ImportedModel


def blocks_path(model: nn.Module) -> str | None:
    """The dotted name of the list of two or more modules of one class that holds most parameters."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        children = list(module.children())
        alike = len(children) > 1 and len({type(child) for child in children}) == 1
        if path and alike and isinstance(module, nn.ModuleList | nn.Sequential):
            sizes[path] = sum(p.numel() for p in module.parameters())
    return max(sizes, key=lambda path: sizes[path]) if any(sizes.values()) else None
