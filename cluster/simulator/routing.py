"""The routers of deployments/routing/, as the simulator asks them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from deployments.routing.balancer import Balancer
from deployments.routing.config import Role, RoutingConfig
from deployments.routing.prompt_digest import PromptDigester
from engine.wire.messages import EngineUpdate

ROUTERS = ("prefix_aware", "power_of_two", "round_robin", "random")


class Router(Protocol):
    def choose(self, request_id: str, tokens: list[int], engines: Sequence[str]) -> str: ...

    def end(self, request_id: str) -> None:
        """The request is over, or nothing is computed for it any more."""

    @property
    def follows(self) -> bool:
        """Whether it wants news of the engines."""

    def news(self, news: EngineUpdate) -> None: ...

    def keep(self, engines: Sequence[str]) -> None:
        """These are all there are."""


class RandomRouter:
    """Each request anywhere, whatever is known: what published gains are measured against."""

    follows = False

    def __init__(self, seed: int):
        self._random = random.Random(seed)

    def choose(self, request_id: str, tokens: list[int], engines: Sequence[str]) -> str:
        return engines[self._random.randrange(len(engines))]

    def end(self, request_id: str) -> None:
        pass

    def news(self, news: EngineUpdate) -> None:
        pass

    def keep(self, engines: Sequence[str]) -> None:
        pass


class BalancerRouter:
    """A real Balancer."""

    def __init__(self, config: RoutingConfig, role: Role, block_size: int, seed: int):
        self._balancer = Balancer(config, role, block_size, random.Random(seed))
        self.follows = config.policy != "round_robin"
        # the others do not look at prefixes, so they need not be read
        self._prompts = PromptDigester(block_size if config.policy == "prefix_aware" else None)

    def choose(self, request_id: str, tokens: list[int], engines: Sequence[str]) -> str:
        return self._balancer.choose(self._prompts.digest(request_id, tokens, ""), engines).engines[0]

    def end(self, request_id: str) -> None:
        self._balancer.end(request_id, confirmed=True)

    def news(self, news: EngineUpdate) -> None:
        assert self._balancer.update(news), "no message is lost here"

    def keep(self, engines: Sequence[str]) -> None:
        self._balancer.keep(engines)


def make_router(name: str, role: Role, block_size: int, seed: int) -> Router:
    """Raises ConfigError."""
    if name == "random":
        return RandomRouter(seed)
    return BalancerRouter(RoutingConfig(policy=name), role, block_size, seed)  # type: ignore[arg-type]
