#!/usr/bin/env python3
"""Opens a run folder with other people's programs: hf/ with Hugging Face `datasets`, both tables with `pyarrow`.

    check_datasets.py RUN

Prints one line and exits 0 if all is as docs/schema.md says; otherwise says what is not, and exits 1.
Needs: pip install datasets pyarrow
"""

import json
import math
import sys
from pathlib import Path

import pyarrow.parquet
from datasets import load_from_disk

REQUESTS = """index id response_id status error due_ns sent_ns first_token_ns done_ns token_ns prompt_tokens
    completion_tokens reasoning_tokens cached_tokens tokens_from energy_j energy_bound_j energy_method energy_coverage
    energy_perimeter prefill_j decode_j shared_j subject prompt answer expected score scorer""".split()
READINGS = ["session", "at_ns", "sensor", "value"]
HF = ["problem", "answer", "dataset_metadata", "subject", "model_answers", "model_metrics"]

STATS = dict.fromkeys(["avg", "max", "median", "min"])
WATTS = {"per_query_watts": STATS, "total_watts": STATS}
METRICS = {
    "compute_metrics": dict.fromkeys(["flops_per_request", "macs_per_request"]),
    "energy_metrics": dict.fromkeys(
        f"{device}{what}_joules" for device in ["", "cpu_", "ane_"] for what in ["per_query", "total"]
    ),
    "latency_metrics": dict.fromkeys(
        ["per_token_ms", "throughput_tokens_per_sec", "time_to_first_token_seconds", "total_query_seconds"]
    ),
    "memory_metrics": {"cpu_mb": STATS, "gpu_mb": STATS},
    "power_metrics": {"gpu": WATTS, "cpu": WATTS},
    "temperature_metrics": STATS,
    "token_metrics": dict.fromkeys(["input", "output", "total"]),
    "phase_metrics": dict.fromkeys(
        ["prefill_energy_j", "decode_energy_j", "prefill_duration_ms", "decode_duration_ms"]
    ),
    "hardware_utilization": {
        "gpu": dict.fromkeys(
            [
                "compute_utilization_pct",
                "memory_bandwidth_utilization_pct",
                "tensor_core_utilization_pct",
                "memory_used_gb",
                "memory_total_gb",
            ]
        ),
        "derived": dict.fromkeys(["mfu", "mbu", "arithmetic_intensity"]),
    },
    "gpu_info": dict.fromkeys(["name", "vendor", "device_id", "device_type", "backend"]),
    "system_info": dict.fromkeys(
        ["os_name", "os_version", "kernel_version", "host_name", "cpu_count", "cpu_brand"]
    ),
    "lm_correctness": None,
    "lm_response": None,
}
MAY_BE_NULL = {"gpu_info"}


class Wrong(Exception):
    """What is not as it should be."""


def need(condition, what):
    if not condition:
        raise Wrong(what)


def check_nesting(where, value, shape):
    """The nesting is there in every row, down to the leaves."""
    for key, below in shape.items():
        need(key in value, f"{where} has no {key!r}")
        if below is not None and not (value[key] is None and key in MAY_BE_NULL):
            need(isinstance(value[key], dict), f"{where}.{key} is {value[key]!r}, not a group")
            check_nesting(f"{where}.{key}", value[key], below)


def check_unknown(where, value):
    """What is unknown is null: never NaN, never -1."""
    if isinstance(value, dict):
        for key, below in value.items():
            check_unknown(f"{where}.{key}", below)
    elif isinstance(value, float):
        need(math.isfinite(value), f"{where} is {value}")
        need(value != -1.0, f"{where} is -1")
    elif isinstance(value, int):
        need(value >= 0, f"{where} is {value}")


def check_columns(name, found, wanted):
    need(found[: len(wanted)] == wanted, f"{name} begins with the columns {found}, not {wanted}")


def check(run):
    info = json.loads((run / "run.json").read_text(encoding="utf-8"))
    model = info["model"]["name"]

    requests = pyarrow.parquet.read_table(run / "requests.parquet")
    check_columns("requests.parquet", requests.column_names, REQUESTS)
    rows = requests.to_pylist()
    for i, row in enumerate(rows):
        check_unknown(f"requests.parquet row {i}", row)
    need(len({row["index"] for row in rows}) == len(rows), "requests.parquet has an index twice")

    readings = pyarrow.parquet.read_table(run / "readings.parquet")
    check_columns("readings.parquet", readings.column_names, READINGS)
    sensors = {sensor["name"] for sensor in info["sensors"]}
    strangers = set(readings["sensor"].unique().to_pylist()) - sensors
    need(not strangers, f"readings.parquet has sensors that run.json does not: {strangers}")
    need(not any(math.isnan(v) for v in readings["value"].drop_null().to_pylist()), "readings.parquet has a NaN")
    for name in ["requests.parquet", "readings.parquet"]:
        labels = pyarrow.parquet.read_metadata(run / name).metadata
        need(labels.get(b"wattle.run_id") == info["run_id"].encode(), f"{name} does not name its run")

    dataset = load_from_disk(str(run / "hf"))
    check_columns("hf", dataset.column_names, HF)
    need(len(dataset) == len(rows), f"hf has {len(dataset)} rows, requests.parquet {len(rows)}")
    shape = dataset.features["model_metrics"]
    need(list(shape) == [model], f"model_metrics is for {list(shape)}, not for {model!r}")
    check_nesting("model_metrics", shape[model], METRICS)
    for i, (row, request) in enumerate(zip(dataset, rows)):
        where = f"hf row {i}"
        need(row["problem"] == request["prompt"], f"{where} has another problem than requests.parquet")
        need(row["answer"] == request["expected"], f"{where} has another answer than requests.parquet")
        need(isinstance(json.loads(row["dataset_metadata"]), dict), f"{where}.dataset_metadata is no JSON object")
        need(list(row["model_answers"]) == [model], f"{where}.model_answers is for {list(row['model_answers'])}")
        need(list(row["model_metrics"]) == [model], f"{where}.model_metrics is for {list(row['model_metrics'])}")
        check_nesting(f"{where}.model_metrics", row["model_metrics"][model], METRICS)
        check_unknown(where, row)
        need(row["wattle_metrics"]["energy_j"] == request["energy_j"], f"{where} has another energy_j")
    return len(rows)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        rows = check(Path(sys.argv[1]))
    except Exception as error:  # whatever the reason, the run does not open
        kind = "" if isinstance(error, Wrong) else f"{type(error).__name__}: "
        sys.exit(f"check_datasets: {sys.argv[1]}: {kind}{error}")
    print(f"check_datasets: {rows} rows ok")


if __name__ == "__main__":
    main()
