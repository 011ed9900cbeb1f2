"""llama.cpp's server, as the package xllamacpp has it, in a process of its own with the Python of its environment:

python -m benchmarks.llamacpp_server FILE.gguf --served-model-name NAME --port PORT

Nothing but the standard library is imported before it. Slots and context are those of benchmarks.peers.
"""

from __future__ import annotations

import argparse
import signal

from benchmarks.peer_engines import CONTEXT, SLOTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--served-model-name", required=True)
    parser.add_argument("--port", type=int, required=True)
    args = parser.parse_args()
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.hostname, params.port = args.model, "127.0.0.1", args.port
    params.n_parallel, params.n_ctx, params.kv_unified = SLOTS, SLOTS * CONTEXT // 4, True
    params.n_gpu_layers = params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"{args.served_model_name} at {server.listening_address}", flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
