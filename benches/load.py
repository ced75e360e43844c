"""Compares wattle with load generators for language models on a scripted server whose log tells the truth. Started by benches/load.

Every tool runs alone, in a cage of its own that counts the CPU time of the whole tree of processes. CPU figures are slopes between two
sizes, so that start-up cancels, and the lower of two runs, because a shared machine only ever adds. Every answer's id is in the
server's log and in the tool's own output, so each time to first token is held to that of its own request."""

import argparse
import asyncio
import ctypes
import gc
import importlib.abc
import importlib.machinery
import json
import logging
import os
import platform
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import types
from datetime import date
from statistics import mean, median

AT_ONCE = {"ttft_ms": 0, "itl_ms": 0, "keep_log": False}  # an answer in one write
ONE_BY_ONE = {"ttft_ms": 10, "itl_ms": 10, "keep_log": False}  # a write for every token
SLOW = {"ttft_ms": 500, "itl_ms": 50, "tokens": 16, "realtime": True, "keep_log": False}
TTFT = [(1, 30), (32, 480), (256, 1280), (1000, 3000)]  # concurrency, requests
SHORT = 160  # requests of the other size at concurrency 32, for the CPU used while waiting
WORDS = [f"w{i}" for i in range(1000)]


class Tool:
    def __init__(self, title, version, sizes, command, ttfts):
        # sizes: requests of the small and the large run, of 16 tokens, of 512 at once, of 512 one by one
        self.title, self.version, self.sizes, self.command, self.ttfts = title, version, sizes, command, ttfts


def tools(binaries, peers, folder):
    """Those that are there. Each has a command and a way to read {id of the answer: its time to first token in seconds}."""
    wattle = os.path.join(binaries, "wattle")
    words = [f"{folder}/prompts.jsonl", f"{folder}/tokenizer"]

    def ours(*more):
        def command(url, n, concurrency, tokens, out):
            load = ["--max-queries", n, "--concurrency", concurrency, "--warmup", 0, "--idle-s", 0]
            data = ["--dataset", "synthetic", "--dataset-param", "input=32", "--dataset-param", f"output={tokens}"]
            return [wattle, "run", "--client", "openai", "--url", url, *data, *load, *more, "--out", out, "--name", "x"]

        def ttfts(out):
            found = {}
            for exchange in records(f"{out}/x/log.jsonl"):
                if exchange["first_token_ns"]:
                    found[exchange["response_id"]] = (exchange["first_token_ns"] - exchange["sent_ns"]) * 1e-9
            return found

        return command, ttfts

    def vllm(url, n, concurrency, tokens, out):
        where = ["--backend", "openai-chat", "--base-url", url, "--endpoint", "/v1/chat/completions", "--model", "tiny"]
        data = ["--dataset-name", "random", "--random-input-len", 32, "--random-output-len", tokens, "--tokenizer", words[1]]
        load = ["--num-prompts", n, "--max-concurrency", concurrency, "--request-id-prefix", "q", "--disable-tqdm"]
        save = ["--save-result", "--save-detailed", "--result-dir", out, "--result-filename", "x.json"]
        python = f"{peers}/vllm/bin/python"
        return [python, os.path.abspath(__file__), "--vllm", f"{peers}/vllm/wheel", *where, *data, *load, *save]

    def guidellm(url, n, concurrency, tokens, out):
        where = ["--backend", f"kind=openai_http,target={url}", "--profile", f"kind=concurrent,streams={concurrency}"]
        load = ["--constraint", f"kind=max_requests,count={n}", "--data", f"kind=json_file,path={words[0]}"]
        rest = ["--tokenizer", f"kind=hf_auto,model={words[1]}", "--output", f"kind=json,path={out}/x.json", "--disable-progress"]
        return [f"{peers}/guidellm/bin/guidellm", "run", *where, *load, *rest]

    def guidellm_ttfts(out):
        with open(f"{out}/x.json") as file:
            answers = json.load(file)["benchmarks"][0]["requests"]["successful"]
        times = lambda a: a["info"]["timings"]
        return {a["response_id"]: times(a)["first_token_iteration"] - times(a)["request_start"] for a in answers}

    def aiperf(url, n, concurrency, tokens, out):
        where = ["--url", url, "--model", "tiny", "--endpoint-type", "chat", "--streaming", "--tokenizer", words[1]]
        data = ["--input-file", words[0], "--custom-dataset-type", "single_turn", "--extra-inputs", f"max_tokens:{tokens}"]
        load = ["--request-count", n, "--concurrency", concurrency, "--artifact-dir", out]
        rest = ["--ui", "none", "--no-gpu-telemetry", "--no-server-metrics"]
        return [f"{peers}/aiperf/bin/aiperf", "profile", *where, *data, *load, *rest]

    def aiperf_ttfts(out):
        with open(f"{out}/profile_export.jsonl") as file:
            lines = [json.loads(line) for line in file]
        took = lambda line: line["metrics"]["time_to_first_token"]["value"] * 1e-3
        return {line["metadata"]["x_request_id"]: took(line) for line in lines if not line.get("error")}

    def vllm_ttfts(out):
        with open(f"{out}/x.json") as file:
            return {f"q{i}": ttft for i, ttft in enumerate(json.load(file)["ttfts"])}

    said = subprocess.run([wattle, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    # Start-up of the slow ones takes 10 to 20 s of CPU, and varies: their large runs are to cost more than that.
    fast, slow = ((5000, 30000), (1000, 5000), (64, 320)), ((500, 4000), (64, 512), (64, 256))
    found = {
        "wattle-bare": Tool("wattle, `--energy none`", said, fast, *ours("--energy", "none")),
        "wattle": Tool("wattle, metered (the default)", said, fast, *ours()),
        "vllm": Tool("vLLM `bench serve`", "0.32.0", ((1000, 5000), (200, 1000), (64, 192)), vllm, vllm_ttfts),
        "guidellm": Tool("guidellm", "0.8.1", slow, guidellm, guidellm_ttfts),
        "aiperf": Tool("aiperf", "0.13.0", slow, aiperf, aiperf_ttfts),
    }
    there = lambda name: name.startswith("wattle") or os.path.exists(f"{peers}/{name}/done")
    return {name: tool for name, tool in found.items() if there(name)}


def records(path):
    """The exchanges of a run's log."""
    with open(path) as file:
        for line in file:
            if '"type":"record"' in line[:60]:
                yield json.loads(line)["exchange"]


def vllm_bench(wheel, rest):
    """vLLM's own benchmark files, unchanged; of the engine's modules they import, the few that `serve` uses are written out here."""
    import transformers

    given = {
        "vllm.tokenizers": {"get_tokenizer": lambda name, **_: transformers.AutoTokenizer.from_pretrained(name)},
        "vllm.utils.argparse_utils": {"FlexibleArgumentParser": argparse.ArgumentParser},
        "vllm.utils.gc_utils": {"freeze_gc_heap": lambda: (gc.collect(), gc.freeze())},
        "vllm.utils.network_utils": {"join_host_port": lambda host, port: f"{host}:{port}"},
        "vllm.utils.mistral": {"is_mistral_tokenizer": lambda _: False},
        "vllm.logger": {"init_logger": logging.getLogger},
    }
    unused = {"__init__": lambda *_, **__: None, "placeholder_attr": lambda self, *_: self}

    class Engine(importlib.abc.MetaPathFinder, importlib.abc.Loader):
        def find_spec(self, name, path, target=None):
            if name.split(".")[0] == "vllm" and not name.startswith("vllm.benchmarks"):
                return importlib.machinery.ModuleSpec(name, self, is_package=True)

        def create_module(self, spec):
            module = types.ModuleType(spec.name)
            module.__path__ = [f"{wheel}/vllm"] if spec.name == "vllm" else []
            module.__getattr__ = lambda name: type(name, (), unused)
            return module

        def exec_module(self, module):
            vars(module).update(given.get(module.__name__, {}))

    sys.meta_path.insert(0, Engine())
    sys.argv = ["vllm", *rest]
    from vllm.benchmarks.serve import add_cli_args, main_async

    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    asyncio.run(main_async(parser.parse_args(rest)))


def cage(report, command):
    """Runs a command and everything it starts, also what outlives it, and reports what all of it used."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans become ours
    began = time.monotonic()
    process = subprocess.Popen(command)
    _, status, _ = os.wait4(process.pid, 0)
    wall = time.monotonic() - began
    signal.alarm(30)  # orphans that do not end
    try:
        while True:
            os.wait4(-1, 0)
    except ChildProcessError:
        pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(report, "w") as file:
        status = os.waitstatus_to_exitcode(status)
        json.dump({"status": status, "cpu": used.ru_utime + used.ru_stime, "wall": wall, "rss": used.ru_maxrss * 1024}, file)


class Bench:
    def __init__(self, binaries, folder):
        self.server, self.folder, self.runs = os.path.join(binaries, "wattle-sim-server"), folder, 0

    def run(self, tool, config, tokens, n, concurrency, log=True, read=None):
        """One run against a server of its own. What it used, and, if it is logged, the server's view of every request."""
        self.runs += 1
        out = f"{self.folder}/{self.runs}"
        os.mkdir(out)
        with open(f"{out}/server.json", "w") as file:
            json.dump({**config, "tokens": tokens}, file)
        serve = [self.server, "--config", f"{out}/server.json"] + (["--log", f"{out}/served.jsonl"] if log else [])
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True)
        try:
            url = "http://" + server.stdout.readline().strip()
            command = [str(part) for part in tool.command(url, n, concurrency, tokens, out)]
            with open(f"{out}/said", "w") as said:
                caged = [sys.executable, os.path.abspath(__file__), "--cage", f"{out}/used.json", *command]
                environment = {**os.environ, "COLUMNS": "200"}
                subprocess.run(caged, stdout=said, stderr=said, env=environment, cwd=out, stdin=subprocess.DEVNULL)
        finally:
            server.terminate()
            server.wait()
        with open(f"{out}/used.json") as file:
            used = json.load(file)
        served = list(self.served(f"{out}/served.jsonl")) if log else []
        if used["status"] != 0 or log and len([s for s in served if s["outcome"] == "finished"]) < n:
            with open(f"{out}/said") as file:
                raise RuntimeError(f"{tool.title}: status {used['status']}, {len(served)} of {n} requests\n{file.read()[-3000:]}")
        if read:
            used["read"] = read(out)
        subprocess.run(["rm", "-r", out], check=True)
        return used, served

    def served(self, path):
        with open(path) as file:
            for line in file:
                answer = json.loads(line)
                if answer["path"].endswith("/completions"):
                    ends = {"received": answer["received"], "first": answer["written"][0], "last": answer["last_byte"]}
                    yield {**ends, "id": answer["id"], "connection": answer["connection"], "outcome": answer["outcome"]}

    def slope(self, tool, config, tokens, sizes):
        """CPU seconds per request: lower of two. And the connections of the last large run, per 1,000 requests."""
        slopes, rates = [], []
        for _ in range(2):
            small, _ = self.run(tool, config, tokens, sizes[0], 64)
            large, served = self.run(tool, config, tokens, sizes[1], 64)
            slopes.append((large["cpu"] - small["cpu"]) / (len(served) - sizes[0]))
            rates.append(len(served) / span(served))
        note(f"{tool.title}, {tokens} tokens: " + ", ".join(f"{s * 1e6:.1f}" for s in slopes) + " µs per request")
        return min(slopes), max(rates), len({s["connection"] for s in served}), len(served)

    def ttft(self, tool, concurrency, n):
        """Errors in seconds, sorted; what was used; how long the load took; how many requests were joined."""
        used, served = self.run(tool, SLOW, 16, n, concurrency, read=tool.ttfts)
        truths = {s["id"]: (s["first"] - s["received"]) * 1e-9 for s in served}
        errors = sorted(ttft - truths[id] for id, ttft in used["read"].items() if id in truths)
        in_flight = sum(s["last"] - s["received"] for s in served) * 1e-9 / span(served)
        note(f"{tool.title}, concurrency {concurrency}: mean {mean(errors) * 1e3:.3f} ms, {in_flight:.0f} in flight on average")
        return errors, mean(truths.values()), used, span(served)


def span(served):
    return (max(s["last"] for s in served) - min(s["received"] for s in served)) * 1e-9


def note(text):
    print(text, file=sys.stderr, flush=True)


def table(heads, rows):
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print(flush=True)


def seconds(value):
    """With a fitting unit and three digits."""
    for unit, factor in [("s", 1), ("ms", 1e3), ("µs", 1e6)]:
        if abs(value) * factor >= 1 or unit == "µs":
            value *= factor
            return f"{value:.{max(0, 2 - len(str(int(abs(value)))) + 1)}f} {unit}"


def p99(ordered):
    return ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]


def prompts(folder):
    """For tools that read their prompts from a file: 32 words each; and a tokenizer that counts words."""
    chance = random.Random(1)
    with open(f"{folder}/prompts.jsonl", "w") as file:
        for _ in range(6000):
            text = " ".join(chance.choices(WORDS, k=32))
            file.write(json.dumps({"prompt": text, "text": text}) + "\n")
    os.mkdir(f"{folder}/tokenizer")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model = {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(["<unk>", *WORDS])}, "unk_token": "<unk>"}
    fast = {"version": "1.0", "added_tokens": [{"id": 0, "content": "<unk>", **special}], "model": model}
    fast |= {"pre_tokenizer": {"type": "WhitespaceSplit"}}
    fast |= dict.fromkeys(["truncation", "padding", "normalizer", "post_processor", "decoder"])
    chat = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "chat_template": chat, "model_max_length": 100000}
    for name, content in [("tokenizer.json", fast), ("tokenizer_config.json", settings)]:
        with open(f"{folder}/tokenizer/{name}", "w") as file:
            json.dump(content, file)


def compare(bench, found):
    costs, waits, errors, failed = [], [], [], []

    def measure(tool):
        few, rate, connections, of = bench.slope(tool, AT_ONCE, 16, tool.sizes[0])
        many, *_ = bench.slope(tool, AT_ONCE, 512, tool.sizes[1])
        single, *_ = bench.slope(tool, ONE_BY_ONE, 512, tool.sizes[2])
        cells = [seconds(few), seconds((many - few) / 496), seconds(many / 512), seconds(single / 512)]
        costs.append([tool.title, tool.version, *cells, f"{rate:,.0f}"])
        used = {}
        for concurrency, n in [(32, SHORT), *TTFT]:
            these, truth, spent, took = bench.ttft(tool, concurrency, n)
            used[n] = spent["cpu"], took
            if n != SHORT:
                cells = [seconds(f(these)) for f in (mean, median, p99)]
                errors.append([tool.title, tool.version, str(concurrency), f"{len(these)} of {n}", seconds(truth), *cells])
        large, small = used[dict(TTFT)[32]], used[SHORT]
        share = (large[0] - small[0]) / (large[1] - small[1])
        waits.append([tool.title, tool.version, f"{connections / of * 1000:,.1f}", f"{connections} for {of:,}", f"{share * 100:.1f} %"])

    for tool in found.values():
        try:
            measure(tool)
        except (RuntimeError, OSError, LookupError, ValueError) as error:  # the others still have their rows
            failed.append(f"{tool.title} {tool.version} is not in all tables: {str(error).splitlines()[0]}")
            note(str(error))
    heads = ["tool", "version", "CPU per request", "per further token", "per token of 512", "per token, one write each", "requests/s"]
    table(heads, costs)
    table(["tool", "version", "concurrency", "joined", "true mean TTFT", "error: mean", "median", "p99"], errors)
    table(["tool", "version", "connections per 1,000 requests", "counted", "CPU while waiting, part of a core"], waits)
    print("\n".join(failed))


def million(bench, found):
    rows = []

    def load(out):
        requests = 0
        with open(f"{out}/x/log.jsonl") as file:
            for line in file:
                requests += '"type":"record"' in line[:60]
                if '"event":"load"' in line[:100]:
                    data = json.loads(line)["data"]
        return requests, data["requests"] / data["wall_s"], data["cpu_s"], os.path.getsize(f"{out}/x/log.jsonl")

    for name in ("wattle-bare", "wattle"):
        tool = found[name]
        for n in (10_000, 10_000, 1_000_000, 10_000):
            used, _ = bench.run(tool, AT_ONCE, 16, n, 64, log=False, read=load)
            logged, rate, _, size = used["read"]
            note(f"{tool.title}: {n} in {used['wall']:.1f} s, {rate:.0f}/s")
            cells = [f"{logged:,}", f"{used['rss'] / 1e6:.0f} MB", f"{rate:,.0f}", f"{used['wall']:.1f} s", seconds(used["cpu"] / n)]
            rows.append([tool.title, tool.version, f"{n:,}", *cells, f"{size / 1e6:,.0f} MB"])
    heads = ["tool", "version", "requests", "rows in the log", "peak memory", "requests/s in the load", "whole time", "CPU per request, all of it"]
    table([*heads, "size of the log"], rows)


def main():
    if sys.argv[1:2] == ["--vllm"]:
        return vllm_bench(sys.argv[2], sys.argv[3:])
    if sys.argv[1:2] == ["--cage"]:
        return cage(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--binaries", help="folder of wattle and wattle-sim-server")
    parser.add_argument("--peers", help="folder that benches/load installed the others into")
    parser.add_argument("--only", help="these tools, with commas between: wattle-bare, wattle, vllm, guidellm, aiperf")
    parser.add_argument("what", nargs="*", help="million: wattle alone, with a million requests")
    arguments = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a thousand connections
    with tempfile.TemporaryDirectory() as folder:
        prompts(folder)
        found = tools(arguments.binaries, arguments.peers, folder)
        if arguments.only:
            found = {name: found[name] for name in arguments.only.split(",") if name in found}
        bench, began = Bench(arguments.binaries, folder), time.monotonic()
        print(f"{date.today()}, {os.cpu_count()} cores, Linux {platform.release()}, Python {platform.python_version()}\n", flush=True)
        (million if arguments.what == ["million"] else compare)(bench, found)
        print(f"Took {time.monotonic() - began:.0f} s.")


if __name__ == "__main__":
    main()
