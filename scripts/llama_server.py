"""A real llama.cpp server with a real small model, for tests: both come from the package index as wheels.

Usage: llama_server.py -m MODEL.gguf --port PORT [-np SLOTS], as llama.cpp's own. Prints "ready" when it answers and stays until it is killed.
"""

import argparse
import threading

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", "--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("-np", "--parallel", type=int, default=1)
    parser.add_argument("-a", "--alias")
    given, _ = parser.parse_known_args()
    model, port = given.model, given.port
    params = xllamacpp.CommonParams()
    params.model.path = model
    if given.alias:
        params.model_alias = {given.alias}
    params.n_ctx = 2048 * given.parallel
    params.n_parallel = given.parallel
    params.cpuparams.n_threads = 2
    params.endpoint_metrics = True
    params.hostnames = ["127.0.0.1"]
    params.port = port
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
