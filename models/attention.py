"""What keeps attention scores sane: a relaxation is an object per attention layer.

It may change queries and keys, the scale, the scores on their way to the softmax, the attention
weights, the projections themselves, and their matrices after the optimizer step: the seams of
scores.Relaxation. One that leaves the scores alone runs on torch's fused attention; one that touches
them (or a model that stores them in half precision) takes the explicit path of sublayers.py.

In the formulas s is a score, q.k / sqrt(d_head). Shapes: B batch, H heads, T positions, K head width.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.norms import NORMS
from models.scores import Relaxation, without_autocast
from models.variants import Spec, Table, build, positive

if TYPE_CHECKING:
    from models.sublayers import MLP, Attention
    from models.transformer import ModelConfig


class Plain(Relaxation):
    """softmax(q k^T / sqrt(d_head)) v, fused.

    Vaswani et al. 2017, arXiv 1706.03762. scale `pre` divides the query before the product, `post`
    divides the stored product, which then overflows sqrt(d_head) times earlier.
    `post` matters only where scores are stored in float16; elsewhere it equals `pre` to rounding.
    """

    def __init__(self, config: "ModelConfig", *, scale: str = "pre") -> None:
        super().__init__(config)
        if scale not in ("pre", "post"):
            raise ValueError(f"relaxation none: unknown scale '{scale}'; known: post, pre")
        self.touches_scores = scale == "post"

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if not self.touches_scores:
            return super().scores(q, k, scale)
        return self.stored(self.stored(self.stored(q) @ self.stored(k).mT) * scale)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        if not self.touches_scores or config.scores == "float16":
            return None
        return (
            "relaxation none with scale post equals scale pre up to rounding: "
            f"scores are stored in {config.scores}, which these logits cannot overflow"
        )


class PBRelax(Relaxation):
    """softmax(((q / (alpha sqrt(d_head))) k^T - max_j) alpha): precision-bottleneck relaxation.

    Ding et al. 2021 (CogView), arXiv 2105.13290, sec 2.4; alpha 32 there. Equal to plain attention
    in exact arithmetic, and bit for bit where alpha is a power of two and nothing under- or
    overflows. Matters only where scores are stored in float16: form `pre_matmul` raises the largest
    storable |logit| from 65504 to alpha * 65504; `post_matmul` (found in later code) divides what
    has already overflowed and protects nothing. A no-op in float32 and bfloat16 scores.
    """

    touches_scores = True

    def __init__(self, config: "ModelConfig", *, alpha: float = 32.0, form: str = "pre_matmul") -> None:
        super().__init__(config)
        self.alpha, self.form = positive("relaxation pb_relax: alpha", alpha), form
        if form not in ("pre_matmul", "post_matmul"):
            raise ValueError(f"relaxation pb_relax: unknown form '{form}'; known: post_matmul, pre_matmul")

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        if self.form == "pre_matmul":
            return super().scores(q, k, scale / self.alpha)
        return self.stored(super().scores(q, k, scale) / self.alpha)

    def weights(self, scores: Tensor, hidden_TxT: Tensor | None) -> Tensor:
        # The row's maximum is a shift of the softmax: its gradient is exactly zero in sum.
        largest = scores.detach().amax(dim=-1, keepdim=True)
        return super().weights(self.stored(self.stored(scores - largest) * self.alpha), hidden_TxT)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        if config.scores != "float16":
            return (
                f"pb_relax (alpha {self.alpha:g}) equals none in exact arithmetic; scores are stored "
                f"in {config.scores}, which these logits cannot overflow"
            )
        if self.form == "post_matmul":
            return (
                "pb_relax in its post_matmul form is unprotective: it divides scores that have "
                "already overflowed float16, and fails where none fails"
            )
        return None


class Smoothing(Relaxation):
    """A' = (1 - gamma) A + gamma / n, n the keys a query may see: "relaxed attention".

    Lohrenz et al. 2022, arXiv 2209.09735 [M]; gamma 0.1 [M]; in training only, unless `evaluation`
    [M]. Bounds how peaked attention can get; the loss of the training is then not comparable with
    one evaluated without it. A no-op at gamma 0.
    """

    touches_scores = True

    def __init__(self, config: "ModelConfig", *, gamma: float = 0.1, evaluation: bool = False) -> None:
        super().__init__(config)
        if not 0 <= gamma <= 1:
            raise ValueError(f"relaxation smoothing: gamma {gamma}; must lie in 0..1")
        self.gamma, self.evaluation = gamma, evaluation

    def weights(self, scores: Tensor, hidden_TxT: Tensor | None) -> Tensor:
        weights = super().weights(scores, hidden_TxT)
        if not (self.training or self.evaluation):
            return weights
        visible = torch.ones_like(weights[0, 0])
        if hidden_TxT is not None:
            visible = visible.masked_fill(hidden_TxT, 0.0)
        return self.stored(torch.lerp(weights, visible / visible.sum(dim=-1, keepdim=True), self.gamma))

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        return "smoothing with gamma 0 equals none" if self.gamma == 0 else None


class SoftCap(Relaxation):
    """s' = cap tanh(s / cap), after the scale and before the mask.

    Gemma 2 (2024), arXiv 2408.00118; cap 50 (its released configuration; the order is [M]).
    Bounds scores and their gradient; close to the identity while |s| is far below cap, never exact.
    """

    touches_scores = True

    def __init__(self, config: "ModelConfig", *, cap: float = 50.0) -> None:
        super().__init__(config)
        self.cap = positive("relaxation softcap: cap", cap)

    def scores(self, q: Tensor, k: Tensor, scale: float) -> Tensor:
        return self.stored(self.cap * torch.tanh(super().scores(q, k, scale) / self.cap))


class QKNorm(Relaxation):
    """q' = norm(q), k' = norm(k) per head, the norms' parameters shared across heads.

    Dehghani et al. 2023 (ViT-22B), arXiv 2302.05442; Wortsman et al. 2023, arXiv 2309.14322, sec
    3.1.1 (per head beats whole width, 3.2.5). kind: an entry of NORMS, layer by default. Bounds
    logits by the norms' gains, which lets training survive high learning rates; a no-op with kind none.
    """

    sizes_query_key = True

    def __init__(self, config: "ModelConfig", *, kind: Spec = "layer") -> None:
        super().__init__(config)
        where = "model.relaxation.kind"
        self.query_norm: nn.Module = build("norm", NORMS, kind, self.d_head, where=where)
        self.key_norm: nn.Module = build("norm", NORMS, kind, self.d_head, where=where)

    def query_key(self, q_BxHxTxK: Tensor, k_BxHxTxK: Tensor) -> tuple[Tensor, Tensor]:
        # A norm returns float32 under autocast; the fused kernel wants q, k and v of one type.
        return self.query_norm(q_BxHxTxK).to(q_BxHxTxK.dtype), self.key_norm(k_BxHxTxK).to(k_BxHxTxK.dtype)

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        return "qk_norm of kind none equals none" if isinstance(self.query_norm, nn.Identity) else None


class SigmaLinear(nn.Module):
    """x -> x W^T with W = (g / sigma(W0)) W0, sigma followed by one power-iteration step a forward.

    u and v are buffers, so a resumed training goes on with the same estimate; gradients pass through
    W0 in u^T W0 v but not through u and v. Evaluation uses them as they are.
    """

    u: Tensor
    v: Tensor

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        with torch.no_grad():
            wide_or_tall = self.weight if self.weight.shape[0] <= self.weight.shape[1] else self.weight.T
            # The largest eigenvector of the smaller Gram matrix: an SVD would cost minutes at d 4096.
            left = torch.linalg.eigh(wide_or_tall @ wide_or_tall.T).eigenvectors[:, -1]
            right = functional.normalize(wide_or_tall.T @ left, dim=0)
            u, v = (left, right) if wide_or_tall is self.weight else (right, left)
            self.register_buffer("u", u.clone())
            self.register_buffer("v", v.clone())
            self.gain = nn.Parameter(torch.dot(u, self.weight @ v))

    def forward(self, x: Tensor) -> Tensor:
        with without_autocast(x.device.type):
            u, v = self._power_step() if self.training else (self.u, self.v)
            weight = self.weight * (self.gain / torch.dot(u, self.weight @ v))
        return functional.linear(x, weight)

    @torch.no_grad()
    def _power_step(self) -> tuple[Tensor, Tensor]:
        u = functional.normalize(self.weight @ self.v, dim=0)
        v = functional.normalize(self.weight.T @ u, dim=0)
        self.u.copy_(u)
        self.v.copy_(v)
        return u, v


class SigmaReparam(Relaxation):
    """W = (g / sigma(W0)) W0 for every matrix of the block: its spectral norm is the learnable g.

    Zhai et al. 2023, arXiv 2303.06296. g starts at sigma(W0), so training starts from the block's
    own init (released code; the text has g = 1 [M]). Bounds how fast attention entropy can collapse;
    at init, forward equals none; gradients differ. mlp: reparametrize the MLP's two matrices too.
    """

    sizes_query_key = True

    def __init__(self, config: "ModelConfig", *, mlp: bool = True) -> None:
        super().__init__(config)
        self.mlp = mlp

    def attach(self, attention: "Attention", mlp: "MLP") -> None:
        for name in ("query", "key", "value", "out"):
            setattr(attention, name, SigmaLinear(getattr(attention, name)))
        for name in ("up", "down") if self.mlp else ():
            setattr(mlp, name, SigmaLinear(getattr(mlp, name)))


class Temperature(Relaxation):
    """s' = s / T; learnable: s' = c_h s with one c per head, starting at 1 / T.

    T is sqrt(d_head) by default, the 1 / d_head scaling of muP (Yang et al. 2022, arXiv 2203.03466);
    as in Wortsman et al. 2023, sec 3.2.4. Smaller logits at the same weights: a slower approach to
    one-hot attention. A no-op at T 1 when not learnable. Under nGPT it divides that placement's scale.
    """

    def __init__(
        self, config: "ModelConfig", *, temperature: float | None = None, learnable: bool = False
    ) -> None:
        super().__init__(config)
        own = math.sqrt(self.d_head) if temperature is None else temperature
        self.temperature = positive("relaxation temperature: temperature", own)
        self.inverse_H = (
            nn.Parameter(torch.full((self.num_heads,), 1.0 / self.temperature)) if learnable else None
        )

    def scale(self, scale: float) -> float:
        return scale if self.inverse_H is not None else scale / self.temperature

    def query_key(self, q_BxHxTxK: Tensor, k_BxHxTxK: Tensor) -> tuple[Tensor, Tensor]:
        if self.inverse_H is None:
            return q_BxHxTxK, k_BxHxTxK
        return (q_BxHxTxK * self.inverse_H[:, None, None]).to(q_BxHxTxK.dtype), k_BxHxTxK

    def no_op(self, config: "ModelConfig", precision: str) -> str | None:  # noqa: ARG002
        fixed_at_one = self.inverse_H is None and self.temperature == 1
        return "temperature 1 that is not learnable equals none" if fixed_at_one else None


class QKClip(Relaxation):
    """After the step, per head: S = max logit; if S > tau, W_q and W_k of the head *= sqrt(tau / S).

    Kimi K2 (2025), arXiv 2507.20534 [S]; tau 100 [S]. S is over all forwards since the last time: a
    step's micro-batches, and those of skipped steps before it. Rescues heads whose logits run away
    and leaves the others' bits alone; a no-op while every S stays below tau, and S that is not finite
    is left to the step guards.
    """

    logit_max_H: Tensor  # a buffer: after a skipped step a checkpoint has to carry it
    watches_logits = True
    sizes_query_key = True

    def __init__(self, config: "ModelConfig", *, tau: float = 100.0) -> None:
        super().__init__(config)
        self.tau = positive("relaxation qk_clip: tau", tau)
        self.register_buffer("logit_max_H", torch.full((self.num_heads,), -math.inf))

    def gather_logits(self, largest_H: Tensor) -> None:
        self.logit_max_H.copy_(torch.maximum(self.logit_max_H, largest_H))

    @torch.no_grad()
    def after_step(self, attention: "Attention") -> None:
        largest_H = self.logit_max_H
        over_H = (largest_H > self.tau) & largest_H.isfinite()
        factor_H = torch.where(over_H, self.tau / largest_H, torch.ones_like(largest_H)).sqrt()
        factor_Dx1 = factor_H.repeat_interleave(self.d_head)[:, None]
        for projection in (attention.query, attention.key):
            projection.weight.mul_(factor_Dx1.to(projection.weight.dtype))
        self.logit_max_H.fill_(-math.inf)


RELAXATIONS: Table = {
    "none": Plain,
    "pb_relax": PBRelax,
    "qk_clip": QKClip,
    "qk_norm": QKNorm,
    "sigma_reparam": SigmaReparam,
    "smoothing": Smoothing,
    "softcap": SoftCap,
    "temperature": Temperature,
}
