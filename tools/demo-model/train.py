"""Train one demonstration model and save its float32 weights as .npz.

Run it through run.sh, which holds XLA to one thread: the order of float additions is then fixed,
and the two models still use two cores side by side.
"""

import argparse
import sys
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from model import Shape, forward, init
from tasks import BOS, EOS, encode, training_stream

MODELS = {
    "demo-1m": (Shape(dim=128, layers=4, heads=4, ff=384), 3000),
    "demo-300k": (Shape(dim=96, layers=3, heads=3, ff=256), 1250),
}
SEED = 1
BATCH, TIME = 32, 96
PEAK_RATE = 2e-3
WARMUP_STEPS = 100
WEIGHT_DECAY = 0.05
CLIP_NORM = 1.0
LOG_EVERY = 100


def batches(seed: int):
    """Endless (tokens, segments, loss weights), items packed whole into rows of TIME + 1 bytes.

    Segment 0 is padding. The loss weight of a token is 1 where it belongs to an answer or is the
    eos after it; the bytes of a random prompt cannot be predicted and would only add noise.
    """
    stream = training_stream(seed)
    item = next(stream)
    while True:
        tokens = np.zeros((BATCH, TIME + 1), np.int32)
        segments = np.zeros((BATCH, TIME + 1), np.int32)
        weights = np.zeros((BATCH, TIME + 1), np.float32)
        for row in range(BATCH):
            end, segment = 0, 0
            while True:
                prompt, answer = [BOS] + encode(item.prompt), encode(item.answer) + [EOS]
                begin, middle, end = end, end + len(prompt), end + len(prompt) + len(answer)
                if end > TIME + 1:
                    break
                segment += 1
                tokens[row, begin:end] = prompt + answer
                segments[row, begin:end] = segment
                weights[row, middle:end] = 1.0
                item = next(stream)
        yield tokens, segments, weights


def loss(weights, shape, tokens, segments, token_weights):
    logits = forward(weights, shape, tokens[:, :-1], segments[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    return jnp.sum(losses * token_weights[:, 1:]) / jnp.sum(token_weights[:, 1:])


def train(name: str, steps: int, shape: Shape) -> dict[str, np.ndarray]:
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARMUP_STEPS, steps)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP_NORM),
        optax.adamw(rate, b1=0.9, b2=0.99, weight_decay=WEIGHT_DECAY),
    )

    @partial(jax.jit, donate_argnums=(0, 1))
    def step(weights, state, batch):
        value, gradient = jax.value_and_grad(loss)(weights, shape, *batch)
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state, value

    weights = init(shape, SEED)
    state = optimizer.init(weights)
    for n, batch in zip(range(1, steps + 1), batches(SEED)):
        weights, state, value = step(weights, state, batch)
        if n % LOG_EVERY == 0:
            spent = time.process_time()
            print(f"{name} {n}/{steps} loss {value:.4f} cpu {spent:.0f} s", file=sys.stderr)
    return {key: np.asarray(value) for key, value in weights.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=MODELS)
    parser.add_argument("weights", type=Path, help="the .npz to write")
    parser.add_argument("--steps", type=int, help="fewer steps, to try the program")
    arguments = parser.parse_args()
    shape, steps = MODELS[arguments.name]
    weights = train(arguments.name, arguments.steps or steps, shape)
    np.savez(arguments.weights, **weights)
    print(f"{arguments.name} trained in {time.process_time():.0f} CPU-seconds", file=sys.stderr)


if __name__ == "__main__":
    main()
