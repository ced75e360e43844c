"""A small Llama in JAX: RMSNorm, interleaved RoPE, SwiGLU, tied embedding.

Weights live in one flat dict under their GGUF tensor names, each matrix as [out, in], so that
training, export and reference all speak of the same thing.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tasks import BOS, EOS, VOCAB, encode

ROPE_BASE = 10_000.0
RMS_EPSILON = 1e-5
CONTEXT = 128
# The longest question with its answer ("copy" of ten letters, bos, eos) takes 28 tokens.
DECODE_LENGTH = 32
DECODE_BATCH = 250
BLOCK = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")
BLOCK += ("ffn_norm", "ffn_gate", "ffn_up", "ffn_down")


class Shape(NamedTuple):
    """Hyperparameters; a tuple, so that it can be a static argument of jit."""

    dim: int
    layers: int
    heads: int
    ff: int


def init(shape: Shape, seed: int) -> dict[str, jax.Array]:
    """Normal weights of variance 1/in; matrices that write to the residual start smaller."""
    rng = np.random.default_rng(seed)
    residual = (2 * shape.layers) ** -0.5

    def matrix(rows, columns, scale=1.0):
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        return jnp.asarray(values * np.float32(scale * columns**-0.5))

    weights = {
        "token_embd.weight": matrix(VOCAB, shape.dim),
        "output_norm.weight": jnp.ones(shape.dim),
    }
    for layer in range(shape.layers):
        blk = f"blk.{layer}."
        weights[blk + "attn_norm.weight"] = jnp.ones(shape.dim)
        weights[blk + "attn_q.weight"] = matrix(shape.dim, shape.dim)
        weights[blk + "attn_k.weight"] = matrix(shape.dim, shape.dim)
        weights[blk + "attn_v.weight"] = matrix(shape.dim, shape.dim)
        weights[blk + "attn_output.weight"] = matrix(shape.dim, shape.dim, residual)
        weights[blk + "ffn_norm.weight"] = jnp.ones(shape.dim)
        weights[blk + "ffn_gate.weight"] = matrix(shape.ff, shape.dim)
        weights[blk + "ffn_up.weight"] = matrix(shape.ff, shape.dim)
        weights[blk + "ffn_down.weight"] = matrix(shape.dim, shape.ff, residual)
    return weights


def rms_norm(x, gain):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + RMS_EPSILON) * gain


def rope(x):
    """Rotate the pairs (2i, 2i+1) of each head (llama.cpp's NORM), x as [batch, time, head, d]."""
    _, time, _, d = x.shape
    angle = jnp.arange(time)[:, None] * ROPE_BASE ** (-jnp.arange(0, d, 2) / d)
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    even, odd = x[..., 0::2], x[..., 1::2]
    return jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1).reshape(x.shape)


def forward(weights, shape: Shape, tokens, segments):
    """Logits [batch, time, VOCAB]; a token sees earlier tokens of its own segment only.

    RoPE depends on distances alone, so a packed segment computes what it would from position 0.
    """
    batch, time = tokens.shape
    seen = jnp.tril(jnp.ones((time, time), bool)) & (segments[:, :, None] == segments[:, None, :])
    x = weights["token_embd.weight"][tokens]
    for layer in range(shape.layers):
        w = {k: weights[f"blk.{layer}.{k}.weight"] for k in BLOCK}
        h = rms_norm(x, w["attn_norm"])
        q, k, v = (
            (h @ w[name].T).reshape(batch, time, shape.heads, -1)
            for name in ("attn_q", "attn_k", "attn_v")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", rope(q), rope(k)) * q.shape[-1] ** -0.5
        attention = jax.nn.softmax(jnp.where(seen[:, None], scores, -jnp.inf), axis=-1)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", attention, v).reshape(batch, time, -1)
        x = x + mixed @ w["attn_output"].T
        h = rms_norm(x, w["ffn_norm"])
        x = x + (jax.nn.silu(h @ w["ffn_gate"].T) * (h @ w["ffn_up"].T)) @ w["ffn_down"].T
    return rms_norm(x, weights["output_norm.weight"]) @ weights["token_embd.weight"].T


@partial(jax.jit, static_argnames="shape")
def logits_at(weights, shape: Shape, tokens, positions):
    """Logits after position `positions[i]` of row i; what is right of it has no influence."""
    logits = forward(weights, shape, tokens, jnp.zeros_like(tokens))
    return jnp.take_along_axis(logits, positions[:, None, None], axis=1)[:, 0]


def prompt_tokens(prompt: str) -> list[int]:
    return [BOS] + encode(prompt)


def greedy(weights, shape: Shape, prompts: list[str]) -> list[list[int]]:
    """The greedy continuation of each prompt, up to and including eos."""
    answers = []
    for first in range(0, len(prompts), DECODE_BATCH):
        answers += greedy_batch(weights, shape, prompts[first : first + DECODE_BATCH])
    return answers


def greedy_batch(weights, shape: Shape, prompts: list[str]) -> list[list[int]]:
    rows = [prompt_tokens(p) for p in prompts]
    starts = [len(row) for row in rows]
    while any(row[-1] != EOS and len(row) < DECODE_LENGTH for row in rows):
        tokens = np.zeros((len(rows), DECODE_LENGTH), np.int32)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        last = np.array([len(row) - 1 for row in rows], np.int32)
        best = np.asarray(logits_at(weights, shape, tokens, last)).argmax(axis=-1)
        for row, token in zip(rows, best):
            if row[-1] != EOS and len(row) < DECODE_LENGTH:
                row.append(int(token))
    return [row[start:] for row, start in zip(rows, starts)]
