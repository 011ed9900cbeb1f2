"""Finds the nodes of a Ray cluster for `manta doctor`. A separate process looks for them, because it may hang or be
killed.

If a driver joins a cluster that is just ending, it waits for minutes, or Ray kills it.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
from multiprocessing.connection import Connection

import ray

from deployments.ray_driver import patience
from engine.errors import StartupError
from placement.capacity import Node, cluster_nodes

ANSWER_S = 15.0  # time limit on an idle machine, of which the process takes a second or two to start


def find_nodes(address: str | None) -> list[Node] | None:
    """Return the nodes of the cluster at `address`; None if no address is given and no cluster is found.

    Raises StartupError if there is no cluster at `address`, or if the cluster does not answer.
    """
    named, limit_s = address or os.environ.get("RAY_ADDRESS"), ANSWER_S * patience()
    context = multiprocessing.get_context("spawn")
    answers, answer = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(answer, named), daemon=True)
    process.start()
    answer.close()  # the process has the other end, so that recv() returns when it ends
    try:
        found = answers.recv() if answers.poll(limit_s) else f"no answer within {limit_s:.0f} s"
    except EOFError:
        found = "Ray has ended the process that tried to join"
    finally:
        process.kill()
        process.join()
        answers.close()
    if isinstance(found, str):
        raise StartupError(f"no Ray cluster answers at {named or 'the address found on this machine'}: {found}")
    return found


def _answer(answer: Connection, named: str | None) -> None:
    """Send the nodes; None if no cluster was named and none is found; otherwise a line that says why there are no
    nodes."""
    try:
        ray.init(address=named or "auto", logging_level=logging.ERROR, log_to_driver=False)
        answer.send(cluster_nodes())
    except (ConnectionError, ValueError, RuntimeError) as error:
        answer.send(" ".join(str(error).split()) if named else None)
