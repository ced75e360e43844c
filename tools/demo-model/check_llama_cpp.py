"""Ask a real llama.cpp server the same questions as the reference and compare the answers.

Each file is served twice. As an F32 copy of its dequantised weights every answer must be the same:
that proves shape, RoPE and tokenizer. As written, llama.cpp also quantises activations, which may
turn the choice between two nearly equal tokens: such answers are printed and must stay few.
"""

import argparse
import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import xllamacpp

import gguf_file
from build import FILES, ITEMS_AT, MODELS_AT
from model import CONTEXT, greedy, prompt_tokens
from tasks import decode

LONGEST_ANSWER = 16
TOLERATED_SHARE = 0.02


def post(address: str, path: str, body: dict) -> dict:
    request = urllib.request.Request(
        address + path, json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)


def serve(path: Path) -> xllamacpp.Server:
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = CONTEXT
    params.n_parallel = 1
    params.cpuparams.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.verbosity = 0
    return xllamacpp.Server(params)


def differences(path: Path, prompts: list[str], answers: list[str]) -> list[str]:
    """One line per prompt that llama.cpp tokenises or answers differently."""
    server = serve(path)
    lines = []
    for prompt, expected in zip(prompts, answers):
        read = post(server.listening_address, "/tokenize", {"content": prompt, "add_special": True})
        if read["tokens"] != prompt_tokens(prompt):
            lines.append(f"  {prompt} is read as {read['tokens']}")
        question = {"prompt": prompt, "temperature": 0, "n_predict": LONGEST_ANSWER}
        answer = post(server.listening_address, "/completion", question)["content"]
        if answer != expected:
            lines.append(f"  {prompt} gives {answer}, reference {expected}")
    return lines


def agrees(path: Path, prompts: list[str]) -> bool:
    shape, weights = gguf_file.read(path)
    answers = [decode(tokens) for tokens in greedy(weights, shape, prompts)]
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "f32.gguf"
        gguf_file.write(copy, path.stem, shape, weights, "f32")
        exact = differences(copy, prompts, answers)
    quantised = differences(path, prompts, answers)
    print(
        f"{path.name}: {len(prompts)} prompts,",
        f"{len(exact)} differences as F32, {len(quantised)} as written",
    )
    print("".join(line + "\n" for line in exact + quantised), end="")
    return not exact and len(quantised) <= TOLERATED_SHARE * len(prompts)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path, help="repository with the built files")
    arguments = parser.parse_args()
    lines = (arguments.root / ITEMS_AT).read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    models = arguments.root / MODELS_AT
    verdicts = [agrees(models / f"{name}-{kind}.gguf", prompts) for name, kind in FILES]
    sys.exit(not all(verdicts))


if __name__ == "__main__":
    main()
