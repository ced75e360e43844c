"""The ten tasks, the held-out split and the byte-level vocabulary.

A task is a function from a seeded generator to one (prompt, answer) pair. A prompt belongs to the
held-out part iff crc32 of its UTF-8 bytes is divisible by HELD_OUT_ONE_IN, so anyone can tell from
the prompt alone whether training may have drawn it.
"""

import random
import string
import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

UNK, BOS, EOS = 0, 1, 2
FIRST_BYTE = 3
VOCAB = FIRST_BYTE + 256

HELD_OUT_ONE_IN = 10
ITEMS_PER_TASK = 50
HELD_OUT_PER_TASK = 200
# A task whose held-out prompts are nearly all drawn would otherwise be asked for more for ever.
HELD_OUT_TRIES = 200_000


class Item(NamedTuple):
    """One question with the only answer that counts as right."""

    subject: str
    prompt: str
    answer: str


def word(rng: random.Random, alphabet: str, shortest: int, longest: int) -> str:
    return "".join(rng.choices(alphabet, k=rng.randint(shortest, longest)))


def addition(rng):
    a, b = rng.randrange(1000), rng.randrange(1000)
    return f"{a}+{b}=", str(a + b)


def subtraction(rng):
    b, a = sorted((rng.randrange(1000), rng.randrange(1000)))
    return f"{a}-{b}=", str(a - b)


def multiplication(rng):
    a, b = rng.randrange(100), rng.randrange(10)
    return f"{a}*{b}=", str(a * b)


def copy(rng):
    text = word(rng, string.ascii_lowercase, 3, 10)
    return f"copy {text}=", text


def reverse(rng):
    text = word(rng, string.ascii_lowercase, 3, 9)
    return f"rev {text}=", text[::-1]


def upper(rng):
    text = word(rng, string.ascii_lowercase, 3, 10)
    return f"up {text}=", text.upper()


def sort(rng):
    digits = word(rng, string.digits, 3, 7)
    return f"sort {digits}=", "".join(sorted(digits))


def maximum(rng):
    numbers = [rng.randrange(1000) for _ in range(3)]
    return f"max {numbers[0]} {numbers[1]} {numbers[2]}=", str(max(numbers))


def count(rng):
    text = word(rng, "abc", 4, 9)
    letter = rng.choice("abc")
    return f"count {letter} in {text}=", str(text.count(letter))


def sequence(rng):
    start, step = rng.randrange(100), rng.randint(1, 30)
    return f"next {start} {start + step} {start + 2 * step}=", str(start + 3 * step)


# Subject, generator and share of the training stream: arithmetic takes longest to learn.
TASKS: list[tuple[str, Callable[[random.Random], tuple[str, str]], int]] = [
    ("addition", addition, 4),
    ("subtraction", subtraction, 4),
    ("multiplication", multiplication, 3),
    ("copy", copy, 1),
    ("reverse", reverse, 2),
    ("upper", upper, 1),
    ("sort", sort, 2),
    ("maximum", maximum, 2),
    ("count", count, 2),
    ("sequence", sequence, 2),
]


def is_held_out(prompt: str) -> bool:
    return zlib.crc32(prompt.encode()) % HELD_OUT_ONE_IN == 0


def training_stream(seed: int) -> Iterator[Item]:
    """Endless items for training; never a held-out prompt."""
    rng = random.Random(f"train {seed}")
    shares = [share for _, _, share in TASKS]
    while True:
        subject, make, _ = rng.choices(TASKS, weights=shares)[0]
        prompt, answer = make(rng)
        if not is_held_out(prompt):
            yield Item(subject, prompt, answer)


def held_out(seed: int) -> dict[str, list[Item]]:
    """Up to HELD_OUT_PER_TASK distinct held-out items per subject, in the order drawn."""
    drawn = {}
    for subject, make, _ in TASKS:
        rng = random.Random(f"held out {seed} {subject}")
        answers: dict[str, str] = {}
        for _ in range(HELD_OUT_TRIES):
            if len(answers) == HELD_OUT_PER_TASK:
                break
            prompt, answer = make(rng)
            if is_held_out(prompt):
                answers[prompt] = answer
        drawn[subject] = [Item(subject, p, a) for p, a in answers.items()]
        assert len(drawn[subject]) >= ITEMS_PER_TASK, f"{subject}: too few held-out prompts"
    return drawn


def encode(text: str) -> list[int]:
    return [FIRST_BYTE + byte for byte in text.encode()]


def decode(tokens: list[int]) -> str:
    return bytes(t - FIRST_BYTE for t in tokens if t >= FIRST_BYTE).decode(errors="replace")
