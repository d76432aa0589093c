"""Slow formulas in float64 that the models are compared with: written from the definitions, by row.

Each takes a module for its parameters only and computes with plain tensor algebra: no fused kernels,
no masks (a query gets the list of keys it may see), none of the code under test.
"""

import math

import torch

from models.transformer import ModelConfig

TINY = {"vocab_size": 11, "d_model": 8, "num_layers": 2, "num_heads": 2, "context_length": 5, "d_ff": 12}


def tiny(**changes):
    """A small config; placements that take no norm get none."""
    block = changes.get("block", "pre")
    name = block if isinstance(block, str) else block["name"]
    normless = {"norm": "none"} if name in ("rezero", "ngpt") else {}
    return ModelConfig(**(TINY | normless | changes))


def randomize(module, seed=0, std=0.3):
    """Move every parameter off its special start (ones, zeros), so that none is invisible."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(std * noise.to(parameter.dtype))
    return module


def norm(module, x):
    """The configured norm by its kind's formula."""
    kind = type(module).__name__
    if kind == "LayerNorm":
        mean = x.sum(-1, keepdim=True) / x.shape[-1]
        variance = ((x - mean) ** 2).sum(-1, keepdim=True) / x.shape[-1]
        return (x - mean) / (variance + module.eps) ** 0.5 * module.weight + module.bias
    if kind == "RMSNorm":
        return x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + module.eps) ** 0.5 * module.weight
    if kind == "ScaleNorm":
        return module.length * x / (x * x).sum(-1, keepdim=True) ** 0.5
    if kind == "DyT":
        e = torch.exp(2 * module.alpha * x)
        return module.weight * (e - 1) / (e + 1) + module.bias
    assert kind == "NoNorm"
    return x


def softmax(row):
    e = torch.exp(row - row.max())
    return e / e.sum()


def unit(x):
    return x / (x * x).sum(-1, keepdim=True) ** 0.5


def row_weights(relaxation, head, scale, q, keys):
    """Attention weights of one query over the keys it sees, by the relaxation's formula."""
    kind = type(relaxation).__name__
    s = scale * (keys @ q)
    if kind in ("Plain", "QKClip", "SigmaReparam"):
        return softmax(s)
    if kind == "PBRelax":
        small = keys @ (q * scale / relaxation.alpha)
        return softmax((small - small.max()) * relaxation.alpha)
    if kind == "Smoothing":
        on = relaxation.training or relaxation.evaluation
        gamma = relaxation.gamma if on else 0.0
        return (1 - gamma) * softmax(s) + gamma / len(keys)
    if kind == "SoftCap":
        return softmax(relaxation.cap * torch.tanh(s / relaxation.cap))
    if kind == "QKNorm":
        return softmax(scale * (norm(relaxation.key_norm, keys) @ norm(relaxation.query_norm, q)))
    if kind == "Temperature":
        learned = relaxation.inverse_H
        return softmax(s / relaxation.temperature if learned is None else s * learned[head])
    raise AssertionError(f"no formula for {kind}")


def matrix(linear):
    """A linear's matrix; under sigmaReparam g / sigma(W) W with sigma from a full SVD."""
    if hasattr(linear, "gain"):
        return linear.gain / torch.linalg.svdvals(linear.weight)[0] * linear.weight
    return linear.weight


def attention(layer, x, causal, *, scale=None, on_query_key=None, inner=None):
    """Multi-head attention by batch, head and query."""
    width, heads = x.shape[-1], layer.num_heads
    size = width // heads
    scale = 1 / math.sqrt(size) if scale is None else scale
    joined = torch.zeros_like(x)
    for b in range(x.shape[0]):
        q_all, k_all, v_all = (x[b] @ matrix(m).T for m in (layer.query, layer.key, layer.value))
        for h in range(heads):
            part = slice(h * size, (h + 1) * size)
            q, k, v = q_all[:, part], k_all[:, part], v_all[:, part]
            if on_query_key is not None:
                q, k = on_query_key(q, k, part)
            for i in range(x.shape[1]):
                seen = slice(0, i + 1) if causal else slice(0, x.shape[1])
                joined[b, i, part] = row_weights(layer.relaxation, h, scale, q[i], k[seen]) @ v[seen]
    return (joined if inner is None else inner(joined)) @ matrix(layer.out).T


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def mlp(layer, x, gain=1.0, inner=None):
    hidden = gelu(x @ matrix(layer.up).T * gain)
    return (hidden if inner is None else inner(hidden)) @ matrix(layer.down).T


class Parts:
    """A block's pieces as functions of float64 tensors."""

    def __init__(self, block, config, index):
        self.block, self.config, self.number = block, config, index + 1

    def att(self, x, **gaps):
        return attention(self.block.attention, x, self.config.causal, **gaps)

    def ff(self, x, **gaps):
        return mlp(self.block.mlp, x, **gaps)

    def n1(self, x):
        return norm(self.block.attention_norm, x)

    def n2(self, x):
        return norm(self.block.mlp_norm, x)


def pre(p, x):
    x = x + p.att(p.n1(x))
    return x + p.ff(p.n2(x))


def post(p, x):
    x = p.n1(x + p.att(x))
    return p.n2(x + p.ff(x))


def deepnorm(p, x):
    alpha = (2 * p.config.num_layers) ** (1 / 4)
    x = p.n1(alpha * x + p.att(x))
    return p.n2(alpha * x + p.ff(x))


def sandwich(p, x):
    x = x + norm(p.block.attention_out_norm, p.att(p.n1(x)))
    return x + norm(p.block.mlp_out_norm, p.ff(p.n2(x)))


def reordered(p, x):
    x = x + p.n1(p.att(x))
    return x + p.n2(p.ff(x))


def sublayer_norms(p, x):
    x = x + p.att(p.n1(x), inner=lambda z: norm(p.block.attention.inner_norm, z))
    return x + p.ff(p.n2(x), inner=lambda z: norm(p.block.mlp.inner_norm, z))


def ln_scaling(p, x):
    x = x + p.att(p.n1(x) / math.sqrt(p.number))
    return x + p.ff(p.n2(x) / math.sqrt(p.number))


def rezero(p, x):
    x = x + p.block.alpha * p.att(x)
    return x + p.block.alpha * p.ff(x)


def layerscale(p, x):
    x = x + p.block.attention_scale * p.att(p.n1(x))
    return x + p.block.mlp_scale * p.ff(p.n2(x))


def ngpt(p, x):
    """By the released model's constants: stored gains times value / scaling."""
    m, d = p.block, p.config.d_model
    s_qk = m.attention.on_query_key.gain.weight * math.sqrt(d)

    def on_sphere(q, k, part):
        return s_qk[part] * unit(q), s_qk[part] * unit(k)

    def rate(step):
        return (step.rate.weight * 0.05 * math.sqrt(d)).abs()

    answer = p.att(x, scale=math.sqrt(d // p.config.num_heads), on_query_key=on_sphere)
    x = unit(x + rate(m.attention_step) * (unit(answer) - x))
    answer = p.ff(x, gain=m.mlp.up_gain.weight * math.sqrt(d))
    return unit(x + rate(m.mlp_step) * (unit(answer) - x))


PLACEMENTS = {
    "deepnorm": deepnorm,
    "layerscale": layerscale,
    "ln_scaling": ln_scaling,
    "ngpt": ngpt,
    "peri": sandwich,
    "post": post,
    "pre": pre,
    "reordered": reordered,
    "rezero": rezero,
    "sandwich": sandwich,
    "sub": sublayer_norms,
}


def block(name, module, x, config, index):
    """One block by its placement's formula, index from 0."""
    return PLACEMENTS[name](Parts(module, config, index), x)
