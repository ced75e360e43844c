"""A real llama.cpp server with a real small model, for tests: both come from the package index as wheels.

Usage: llama_server.py MODEL.gguf PORT. Prints "ready" when it answers and stays until it is killed.
"""

import sys
import threading

import xllamacpp


def main() -> None:
    model, port = sys.argv[1], int(sys.argv[2])
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = 2
    params.hostnames = ["127.0.0.1"]
    params.port = port
    server = xllamacpp.Server(params)
    print("ready", server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
