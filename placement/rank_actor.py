"""The Ray actor around one rank: a process of its own, so that HTTP and scheduling never share a GIL."""

from __future__ import annotations

from dataclasses import dataclass

import ray

from engine.config import EngineConfig
from placement.console_log import log_to_console


@dataclass(frozen=True, slots=True)
class RankReady:
    """What rank 0 tells once its model is loaded. address: where the engine takes commands (ZMQ)."""

    address: str
    max_model_len: int


class RankActor:
    """Hosts the engine. A dead rank is never restarted by itself: its whole replica is replaced."""

    def start(self, config: EngineConfig, engine_id: str, status_to: str) -> RankReady:
        """Load the model. Raises StartupError."""
        log_to_console(f"{engine_id}/rank0")
        from engine.server import EngineServer  # imports torch, which the process that starts ranks does without

        host = ray.util.get_node_ip_address()
        self._server = EngineServer(config, engine_id=engine_id, status_to=status_to, host=host)
        return RankReady(self._server.address, self._server.max_model_len)

    def run(self) -> None:
        """Serve until the process ends. That this call is open is how the rank group knows that the rank lives."""
        self._server.run()
