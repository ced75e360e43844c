"""Checks a run of wattle against a real llama.cpp server: English came back, and the counts and times are the server's own.

Usage: check_llama.py RUN, or check_llama.py --times RUN for a run of prompts long enough to compare times.
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def fail(why: str) -> None:
    sys.exit(f"check_llama: {why}")


def agree(rows: list) -> None:
    """Time to first token and tokens a second are the server's own, to 5 %, over the middle half of the answers."""
    ttft, speed = [], []
    for row in rows:
        server = json.loads(row["server"])
        # The server's clock starts when it takes the prompt up and stops when it has read it; the first token is sampled after that.
        ttft.append((row["first_token_ns"] - row["sent_ns"]) / 1e6 / server["prompt_ms"])
        gaps = row["completion_tokens"] - 1
        if gaps >= 8:
            ours = gaps / ((row["token_ns"][-1] - row["first_token_ns"]) / 1e9)
            theirs = gaps / (server["predicted_ms"] / 1e3 * gaps / row["completion_tokens"])
            speed.append(ours / theirs)
    for name, ratios in [("time to first token", ttft), ("tokens a second", speed)]:
        if not ratios:
            fail(f"no answer is long enough to tell {name}")
        middle = sorted(ratios)[len(ratios) // 4 : -(len(ratios) // 4) or None]
        ratio = sum(middle) / len(middle)
        print(f"check_llama: {name}: {ratio:.3f} times the server's own ({len(ratios)} answers, {min(ratios):.3f} to {max(ratios):.3f})")
        if not 0.95 <= ratio <= 1.05:
            fail(f"{name} is {ratio:.3f} times what the server says")


def main() -> None:
    run = Path(sys.argv[-1])
    rows = pq.read_table(run / "requests.parquet").to_pylist()
    if sys.argv[1] == "--times":
        return agree(rows)
    summary = json.loads((run / "summary.json").read_text())
    if not rows or any(row["status"] != "ok" for row in rows):
        fail(f"not every query was answered: {[(r['id'], r['status'], r['error']) for r in rows]}")
    for row in rows:
        answer, server = row["answer"], json.loads(row["server"] or "{}")
        letters = sum(c.isascii() and (c.isalpha() or c.isspace()) for c in answer)
        if len(answer) < 2 or letters < 0.6 * len(answer):
            fail(f"query {row['id']} does not look like English: {answer!r}")
        if row["tokens_from"] != "usage":
            fail(f"query {row['id']}: token counts are from {row['tokens_from']}, not from the server")
        if row["completion_tokens"] != server["predicted_n"]:
            fail(f"query {row['id']}: {row['completion_tokens']} tokens, the server says {server['predicted_n']}")
        cached = row["cached_tokens"] or 0
        if row["prompt_tokens"] != server["prompt_n"] + cached:
            fail(f"query {row['id']}: {row['prompt_tokens']} prompt tokens, the server says {server['prompt_n']} + {cached}")
        # The client sees the server's own work and a little more, never less.
        total_ms = (row["done_ns"] - row["sent_ns"]) / 1e6
        server_ms = server["prompt_ms"] + server["predicted_ms"]
        if not 0.9 * server_ms <= total_ms <= server_ms * 1.5 + 500:
            fail(f"query {row['id']}: took {total_ms:.1f} ms, the server says {server_ms:.1f} ms")
        if not row["sent_ns"] <= row["first_token_ns"] <= row["done_ns"]:
            fail(f"query {row['id']}: stamps out of order")
        if len(row["token_ns"]) < 0.5 * row["completion_tokens"]:
            fail(f"query {row['id']}: {len(row['token_ns'])} stamps for {row['completion_tokens']} tokens")
    right = summary["metrics"]["accuracy"]["value"]
    if not right or right < 0.3:
        fail(f"accuracy {right} is no better than noise")
    first = rows[0]
    print(f"check_llama: {len(rows)} answers ok, accuracy {right:.2f}; {first['prompt']!r} -> {first['answer']!r}")


if __name__ == "__main__":
    main()
