"""Checks a run of wattle against a real llama.cpp server: English came back, and the counts and times are the server's own.

Usage: check_llama.py RUN
"""

import json
import sys
from pathlib import Path

import pyarrow.parquet as pq


def fail(why: str) -> None:
    sys.exit(f"check_llama: {why}")


def main() -> None:
    run = Path(sys.argv[1])
    rows = pq.read_table(run / "requests.parquet").to_pylist()
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
