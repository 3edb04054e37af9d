"""torchft's HTTP transport on the state of ``restore.py``; run by the interpreter of an environment that has torchft.

Each line on standard input asks for one transfer of each kind; the answer is a line of JSON: by name, seconds of the clock and
of the processor, in receiver and sender. A child process is the sender. Nothing of instep is imported.
"""

import ctypes
import json
import multiprocessing
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
from torchft.checkpointing.http_transport import HTTPTransport  # type: ignore[import-not-found]

WIDTH = 2048
PATIENCE = timedelta(seconds=100)
CHUNKS = {"torchft": 0, "torchft_8_chunks": 8}
"""By name: chunks that are fetched at once; 0, the default of torchft's manager, is all in one."""


def state(layers: int) -> dict[str, object]:
    """Parameters, and what AdamW keeps for each."""
    shapes = [(WIDTH, WIDTH), (WIDTH,)] * layers
    moments = {number: {name: torch.ones(shape) for name in ("exp_avg", "exp_avg_sq")} for number, shape in enumerate(shapes)}
    steps = {number: {"step": torch.tensor(1.0), **kept} for number, kept in moments.items()}
    return {"model": {str(number): torch.ones(shape) for number, shape in enumerate(shapes)}, "optimizer": {"state": steps}}


def sender(layers: int, pipe: Connection) -> None:
    """Offer the state as often as asked."""
    torch.set_num_threads(1)
    held = state(layers)
    while chunks := pipe.recv():
        transport = HTTPTransport(PATIENCE, num_chunks=chunks[0])
        transport.send_checkpoint([1], 1, held, PATIENCE)
        begin = time.perf_counter(), time.process_time()
        pipe.send(transport.metadata())
        pipe.recv()
        pipe.send((time.perf_counter() - begin[0], time.process_time() - begin[1]))
        transport.disallow_checkpoint()
        transport.shutdown()


def main() -> None:
    """Receive as often as asked."""
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=sender, args=(int(sys.argv[1]), theirs), daemon=True).start()
    receiver = HTTPTransport(PATIENCE, num_chunks=0)
    for _ in sys.stdin:
        found: dict[str, object] = {}
        for name, chunks in CHUNKS.items():
            pipe.send([chunks])
            address = pipe.recv()
            receiver._num_chunks = chunks
            begin = time.perf_counter(), time.process_time()
            got = receiver.recv_checkpoint(0, address, 1, PATIENCE)
            took = time.perf_counter() - begin[0], time.process_time() - begin[1]
            assert float(got["optimizer"]["state"][0]["step"]) == 1
            del got
            # The next transfer must not find freed memory: a replacement is a new process.
            ctypes.CDLL(None).malloc_trim(0)
            pipe.send(None)
            found[name] = [took, (took[0], pipe.recv()[1])]
        print(json.dumps(found), flush=True)
    pipe.send(None)
    receiver.shutdown()


if __name__ == "__main__":
    main()
