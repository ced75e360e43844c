#!/usr/bin/env python3
"""What wattle itself costs: start-up, CPU per query, memory against the number of queries, the sampler's share.

Usage: benches/measure.py [path of the binary]   (default: target/release/wattle)
CPU times are of the whole process; every figure that grows with work is a slope between two sizes, so that start-up cancels.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WATTLE = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "target/release/wattle").resolve()


def run(*args: str, cwd: str) -> tuple[float, float, bytes]:
    """CPU seconds, peak resident MB and output of one call."""
    script = (
        "import resource, subprocess, sys\n"
        "out = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True).stdout\n"
        "use = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "sys.stderr.write(f'{use.ru_utime + use.ru_stime} {use.ru_maxrss / 1024}\\n')\n"
        "sys.stdout.buffer.write(out)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(WATTLE), *args], cwd=cwd, capture_output=True, check=True
    )
    cpu, peak = done.stderr.split()[-2:]
    return float(cpu), float(peak), done.stdout


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        for _ in range(100):
            subprocess.run([WATTLE, "--version"], stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / 100
        print(f"start-up: {start * 1e3:.2f} ms of CPU (mean of 100)")

        sizes = {}
        for count in (2_000, 20_000):
            path = Path(folder) / f"{count}.jsonl"
            path.write_text("".join(json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) + "\n" for i in range(count)))
            for energy in ("none", "auto"):
                cpu, peak, out = run(
                    "run", "--dataset", "jsonl", "--dataset-param", f"path={path}", "--energy", energy,
                    "--idle-s", "0", "--format", "json", "--model", "demo-300k", cwd=folder,
                )
                sizes[energy, count] = (cpu, peak, json.loads(out)["metrics"])
        for energy in ("none", "auto"):
            small, large = sizes[energy, 2_000], sizes[energy, 20_000]
            slope = (large[0] - small[0]) / 18_000
            print(
                f"--energy {energy}: {slope * 1e6:.0f} µs of CPU per query, inference of demo-300k included; "
                f"peak memory {small[1]:.0f} MB at 2,000 queries, {large[1]:.0f} MB at 20,000"
            )
        metrics = sizes["auto", 20_000][2]
        print(f"sampler at 5 ms: {metrics['meter_cpu_fraction']['value'] * 100:.2f} % of one core")
        latency = metrics["latency_s"]["value"]
        print(f"of each query {latency * 1e6:.0f} µs (mean) pass between due and done on the embedded engine")
    print(f"binary: {os.path.getsize(WATTLE) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
