"""Turn trained weights into what the repository keeps: models, items, reference fixtures.

Everything measured here is measured on the GGUF files as written, dequantised to float32, with
no quantisation of activations.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import numpy as np

import gguf_file
from model import DECODE_LENGTH, greedy, logits_at, prompt_tokens
from tasks import EOS, ITEMS_PER_TASK, Item, decode, held_out
from train import MODELS, SEED

FILES = [("demo-1m", "q8_0"), ("demo-1m", "q4_0"), ("demo-300k", "q8_0")]
MODELS_AT = Path("crates/lab/models")
ITEMS_AT = Path("crates/lab/data/demo.jsonl")
LOGITS_AT = Path("fixtures/demo-logits.json")
ACCURACY_AT = Path("fixtures/demo-accuracy.json")
SIZE_LIMIT = 2_000_000
SUBJECTS_WITH_LOGITS = ("addition", "multiplication", "reverse", "upper", "sort", "count")
NOTE = "Made by tools/demo-model: float32 math on the dequantised weights of each file."


def write_items(path: Path, items: list[Item]):
    """One JSON object per line; the id is the subject and its running number."""
    lines = []
    for index, item in enumerate(items):
        name = f"{item.subject}-{index % ITEMS_PER_TASK + 1:02}"
        lines.append(json.dumps({"id": name, **item._asdict()}) + "\n")
    path.write_text("".join(lines))


def right(item: Item, answer: list[int]) -> bool:
    return answer[-1] == EOS and decode(answer) == item.answer


def share(verdicts: list[bool]) -> float:
    return round(sum(verdicts) / len(verdicts), 4)


def accuracy(shape, weights, drawn: dict[str, list[Item]]) -> dict:
    """Exact match on the items of demo.jsonl (the first of each subject) and on all drawn."""
    verdicts = {}
    for subject, items in drawn.items():
        answers = greedy(weights, shape, [item.prompt for item in items])
        verdicts[subject] = [right(i, a) for i, a in zip(items, answers)]
    kept = {subject: v[:ITEMS_PER_TASK] for subject, v in verdicts.items()}
    return {
        "items": sum(map(len, kept.values())),
        "exact": share(sum(kept.values(), [])),
        "exact_by_subject": {subject: share(v) for subject, v in kept.items()},
        "held_out": sum(map(len, verdicts.values())),
        "held_out_exact": share(sum(verdicts.values(), [])),
    }


def reference(shape, weights, prompt: str) -> dict:
    """Tokens, logits after the last of them, and the greedy continuation."""
    tokens = prompt_tokens(prompt)
    row = np.zeros((1, DECODE_LENGTH), np.int32)
    row[0, : len(tokens)] = tokens
    logits = np.asarray(logits_at(weights, shape, row, np.array([len(tokens) - 1])))[0]
    return {
        "prompt": prompt,
        "tokens": tokens,
        "logits": [float(f"{value:.5g}") for value in logits],
        "greedy": greedy(weights, shape, [prompt])[0],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("weights", type=Path, help="folder with the .npz files of train.py")
    parser.add_argument("root", type=Path, help="repository to write to")
    arguments = parser.parse_args()
    for path in (MODELS_AT, ITEMS_AT.parent, LOGITS_AT.parent):
        (arguments.root / path).mkdir(parents=True, exist_ok=True)

    drawn = held_out(SEED)
    kept = {subject: items[:ITEMS_PER_TASK] for subject, items in drawn.items()}
    write_items(arguments.root / ITEMS_AT, sum(kept.values(), []))

    paths = [arguments.root / MODELS_AT / f"{name}-{kind}.gguf" for name, kind in FILES]
    for path, (name, kind) in zip(paths, FILES):
        with np.load(arguments.weights / f"{name}.npz") as weights:
            gguf_file.write(path, path.stem, MODELS[name][0], dict(weights), kind)
    total = sum(path.stat().st_size for path in paths)
    assert total <= SIZE_LIMIT, f"the models take {total} bytes, more than {SIZE_LIMIT}"

    logits, accuracies = [], []
    for path in paths:
        shape, weights = gguf_file.read(path)
        origin = {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        prompts = [drawn[subject][0].prompt for subject in SUBJECTS_WITH_LOGITS]
        references = [reference(shape, weights, prompt) for prompt in prompts]
        logits.append({**origin, "prompts": references})
        accuracies.append({**origin, **accuracy(shape, weights, drawn)})
        print(json.dumps(accuracies[-1], indent=1), file=sys.stderr)
    for at, models, indent in ((LOGITS_AT, logits, None), (ACCURACY_AT, accuracies, 1)):
        text = json.dumps({"note": NOTE, "models": models}, indent=indent)
        (arguments.root / at).write_text(text + "\n")


if __name__ == "__main__":
    main()
