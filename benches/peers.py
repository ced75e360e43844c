"""Compares wattle, Zeus and CodeCarbon on a pretended NVIDIA board whose joules are known. Started by benches/peers.

Every tool runs in a process of its own, at the same time, on the same boards: power is a function of CLOCK_MONOTONIC, so
all of them see one counter, refreshed every 100 ms. Each measures its own windows; each is held to the exact integral of power
between its own two stamps of that clock."""

import argparse
import json
import math
import os
import random
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from statistics import median

REFRESH_MS = 100
LENGTHS = [(0.1, 120), (0.25, 120), (1.0, 60), (5.0, 20)]  # seconds, windows
TOOLS = ["wattle", "zeus", "zeus-instant", "codecarbon"]
TITLES = {
    "wattle": "wattle",
    "zeus": "Zeus",
    "zeus-instant": "Zeus, `approx_instant_energy`",
    "codecarbon": "CodeCarbon",
}


def bursts():
    """An answer after the other: a prompt at 700 W, tokens at 350 W, a pause at 90 W. Seeded, over and over."""
    chance, at, steps = random.Random(1), 0.0, []
    for _ in range(12):
        for watts, least, most in [(700, 0.05, 0.3), (350, 0.5, 3), (90, 0.2, 2)]:
            steps.append([round(at, 6), watts])
            at += round(chance.uniform(least, most), 6)
    return steps, round(at, 6)


# Periods that do not divide the refresh: the phases of load and counter go through all pairs.
LOADS = {
    "constant 300 W": ([[0, 300]], 1.0),
    "square 400/100 W, 0.73 s": ([[0, 400], [0.365, 100]], 0.73),
    "square 400/100 W, 0.137 s": ([[0, 400], [0.0685, 100]], 0.137),
    "LLM-like bursts": bursts(),
}


def joules(load, start_ns, end_ns):
    """The exact integral, in whole nanoseconds."""
    steps, period = load
    period = round(period * 1e9)
    edges = [(round(at * 1e9), watts) for at, watts in steps]
    ends = [at for at, _ in edges[1:]] + [period]

    def since_boot(ns):
        whole, rest = divmod(ns, period)
        within = lambda until: sum(max(min(until, end) - at, 0) * w for (at, w), end in zip(edges, ends))
        return whole * within(period) + within(rest)

    return (since_boot(end_ns) - since_boot(start_ns)) * 1e-9


def plan(tool, load, exact):
    """Pauses, lengths and what they are called, shuffled: a window begins and ends at any place of the refresh.

    Lengths vary by a tenth. Over a whole number of refreshes the errors of both ends cancel wherever power is even, and
    no work takes a whole number of refreshes; `--exact` shows that case."""
    chance = random.Random(f"{tool} {load}")
    windows = [length for length, count in LENGTHS for _ in range(count)]
    chance.shuffle(windows)
    vary = lambda: 1.0 if exact else chance.uniform(0.9, 1.1)
    return [(chance.uniform(0.05, 0.25), length * vary(), length) for length in windows]


def measure(windows, begin, end):
    """Runs the windows; each lies between the return of one call and the start of the other, as a user's work does."""
    for pause, length in windows:
        time.sleep(pause)
        called = time.monotonic_ns()
        begin()
        start = time.monotonic_ns()
        time.sleep(length)
        stop = time.monotonic_ns()
        energy = end()
        calls = (time.monotonic_ns() - stop + start - called) * 1e-9
        print(json.dumps({"start": start, "end": stop, "joules": energy, "calls_s": calls}), flush=True)


def child(tool):
    """One of the Python tools, in its own process."""
    windows = [tuple(map(float, line.split())) for line in sys.stdin]
    if tool.startswith("zeus"):
        import warnings

        from zeus.monitor import ZeusMonitor

        warnings.simplefilter("ignore")  # it warns of every window in which the counter stood still
        monitor = ZeusMonitor(gpu_indices=[0], approx_instant_energy=tool == "zeus-instant")
        begin = lambda: monitor.begin_window("w", sync_execution=False)
        end = lambda: monitor.end_window("w", sync_execution=False).gpu_energy[0]
    else:
        from codecarbon import OfflineEmissionsTracker

        # Tasks are its shortest windows: counters are read at both ends, whatever measure_power_secs is.
        tracker = OfflineEmissionsTracker(
            country_iso_code="SWE",
            measure_power_secs=1,
            save_to_file=False,
            allow_multiple_runs=True,
            log_level="error",
        )
        begin = lambda: tracker.start_task()
        end = lambda: tracker.stop_task().gpu_energy * 3.6e6
        begin()  # the first looks for hardware, for a second and more
        end()
    before = resource.getrusage(resource.RUSAGE_SELF)
    measure(windows, begin, end)
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(json.dumps({"cpu_s": spent}))


def install(folder, library, load):
    """A machine for one process: the library under its usual name, what it plays, and an nvidia-smi for CodeCarbon to find."""
    steps, period = load
    path = os.path.join(folder, "libnvidia-ml.so.1")
    shutil.copy(library, path)
    board = {"power": steps, "period_s": period, "refresh_ms": REFRESH_MS, "power_limit": 700}
    with open(path + ".json", "w") as file:
        json.dump({"devices": [board]}, file)
    smi = os.path.join(folder, "nvidia-smi")
    with open(smi, "w") as file:
        file.write("#!/bin/sh\nexit 0\n")
    os.chmod(smi, os.stat(smi).st_mode | stat.S_IXUSR)
    return path


def start(folder, tool, load, arguments):
    library = install(folder, arguments.library, LOADS[load])
    paths = {"LD_LIBRARY_PATH": folder, "PATH": folder + os.pathsep + os.environ["PATH"]}
    command = [arguments.windows, library]
    if tool != "wattle":
        command = [sys.executable, os.path.abspath(__file__), "--child", tool]
    lines = "".join(f"{pause} {length}\n" for pause, length, _ in plan(tool, load, arguments.exact))
    with open(os.path.join(folder, "plan"), "w+") as file:
        file.write(lines)
        file.seek(0)
        return subprocess.Popen(
            command,
            stdin=file,
            stdout=open(os.path.join(folder, "out"), "w"),
            stderr=open(os.path.join(folder, "err"), "w"),
            env={**os.environ, **paths},
            cwd=folder,
        )


def figures(windows, load, length):
    """Of one tool, load and length: rms and worst error in % of the mean energy, and how often a bound held."""
    chosen = [w for w in windows if w["called"] == length]
    truths = [joules(LOADS[load], w["start"], w["end"]) for w in chosen]
    errors = [w["joules"] - truth for w, truth in zip(chosen, truths)]
    mean = sum(truths) / len(truths)
    rms = math.sqrt(sum(e * e for e in errors) / len(errors)) / mean * 100
    worst = max(map(abs, errors)) / mean * 100
    held = None
    if "bound" in chosen[0]:
        held = sum(abs(e) <= w["bound"] for e, w in zip(errors, chosen)) / len(chosen) * 100
    return len(chosen), rms, worst, held


def number(value):
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--child", choices=TOOLS, help=argparse.SUPPRESS)
    parser.add_argument("--library", help="the stand-in library, as cargo built it")
    parser.add_argument("--windows", help="the example of wattle-meter, as cargo built it")
    parser.add_argument("--exact", action="store_true", help="windows of whole refreshes")
    parser.add_argument("--keep", help="a folder that the windows are written to, as JSON")
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child)

    found, spent, began = {}, {}, time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        running = {}
        for load in LOADS:
            for tool in TOOLS:
                folder = os.path.join(root, f"{len(running)}")
                os.mkdir(folder)
                running[load, tool] = (folder, start(folder, tool, load, arguments))
        for (load, tool), (folder, process) in running.items():
            if process.wait() != 0:
                sys.exit(f"{tool} on {load} failed:\n" + open(os.path.join(folder, "err")).read())
            lines = [json.loads(line) for line in open(os.path.join(folder, "out")) if line.startswith("{")]
            windows = [line for line in lines if "joules" in line]
            called = [length for _, _, length in plan(tool, load, arguments.exact)]
            found[load, tool] = [{**w, "called": length} for w, length in zip(windows, called, strict=True)]
            spent[load, tool] = sum(line.get("cpu_s", 0) for line in lines)
    wall = time.monotonic() - began
    if arguments.keep:
        os.makedirs(arguments.keep, exist_ok=True)
        for (load, tool), windows in found.items():
            with open(os.path.join(arguments.keep, f"{tool} {load}.json".replace("/", "-")), "w") as file:
                json.dump(windows, file)

    print(f"zeus {version('zeus')}, codecarbon {version('codecarbon')}, nvidia-ml-py {version('nvidia-ml-py')}; {wall:.0f} s\n")
    print("| load | window | n | " + " | ".join(TITLES[t] for t in TOOLS) + " | wattle's bound held |")
    print("|---" * (len(TOOLS) + 4) + "|")
    for load in LOADS:
        for i, (length, _) in enumerate(LENGTHS):
            cells, held, count = [], None, 0
            for tool in TOOLS:
                count, rms, worst, holds = figures(found[load, tool], load, length)
                cells.append(f"{number(rms)} · {number(worst)}")
                held = holds if holds is not None else held
            print(f"| {load if i == 0 else ''} | {length:g} s | {count} | {' | '.join(cells)} | {held:.0f} % |")
    print("\n| | " + " | ".join(TITLES[t] for t in TOOLS) + " |")
    print("|---" * (len(TOOLS) + 1) + "|")
    for title, of in [
        ("a window's calls, median", lambda tool: f"{median(w['calls_s'] for load in LOADS for w in found[load, tool]) * 1e3:.1f} ms"),
        ("CPU, part of a core", lambda tool: f"{sum(spent[load, tool] for load in LOADS) / len(LOADS) / wall * 100:.2f} %"),
    ]:
        print(f"| {title} | " + " | ".join(of(tool) for tool in TOOLS) + " |")


if __name__ == "__main__":
    main()
