"""Requests that shared a real engine have shares of their own that add up, and none of them is taken for somebody else's.

Usage: check_shares.py RUN
"""

import json
import sys
from pathlib import Path


def main() -> None:
    run = Path(sys.argv[1])
    summary = json.loads((run / "summary.json").read_text())
    info = json.loads((run / "run.json").read_text())
    metrics = {name: metric["value"] for name, metric in summary["metrics"].items()}
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    records = [line for line in lines if line["type"] == "record"]
    phases = ("queue", "prefill", "decode", "shared")
    shares = [sum(record["share"][phase] for phase in phases) for record in records]
    assert len(shares) == metrics["queries"] and all(share > 0 for share in shares), shares
    assert abs(metrics["attribution_residual"]) <= 1e-9, metrics["attribution_residual"]
    assert metrics["mean_in_flight"] > 1.5, metrics["mean_in_flight"]
    assert metrics["foreign_j"] == 0, metrics["foreign_j"]
    assert metrics["prefill_j"] > 0 and metrics["decode_j"] > 0 and metrics["shared_j"] > 0, metrics
    assert all(record["share"]["bound"] > 0 for record in records)
    engine = info["model"]["engine"] or ""
    assert engine.startswith("llama.cpp"), engine
    print(f"{len(shares)} shares of {sum(shares):.1f} J on {engine}, residual {metrics['attribution_residual']:.1e}")


main()
