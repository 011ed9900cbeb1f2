"""Builds an engine: one function for each part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from engine.assembly.kv_cache import make_kv_cache
from engine.assembly.load import load
from engine.assembly.open_launcher import open_launcher
from engine.clock import SYSTEM_CLOCK, Clock
from engine.config import EngineConfig
from engine.core.door.journal import NOBODY_LISTENS
from engine.core.door.kernel import ModelLimits
from engine.core.engine import EngineCore
from engine.core.mail.mail import Mail
from engine.core.mail.ranks import Ranks
from engine.core.scheduler import Scheduler
from engine.costs.step_cost import StepTimes
from engine.distributed.no_broadcaster import NoBroadcaster
from engine.distributed.tp_group import TPGroup
from engine.errors import ConfigError
from engine.parts.setup import Loaded, Made, PartSetup
from engine.parts.table import PARTS
from engine.runner.launcher import Launcher
from engine.runner.model_runner import ModelRunner

if TYPE_CHECKING:  # they need pyzmq, which an engine of one rank without handoffs does without
    from engine.distributed.plan_broadcast import PlanBroadcaster


def build_engine(
    config: EngineConfig,
    group: TPGroup | None = None,
    *,
    engine_id: str = "engine",
    host: str = "127.0.0.1",
    wake: Callable[[], None] = lambda: None,
    clock: Clock = SYSTEM_CLOCK,
) -> EngineCore:
    """Load the model, size the KV cache, and connect to the other ranks. Raises StartupError.

    group: `config.num_ranks` joined ranks, of which this process is rank 0. Its key also protects handoffs.
    engine_id, host: name and address under which other engines reach this one for handoffs.
    wake: function called from another thread when an `idle` engine has something to do again.
    """
    group = group or TPGroup.single()
    if group.size != config.num_ranks:
        raise ConfigError("tensor_parallel_size", config.num_ranks, f"the size of the group ({group.size})")
    with ExitStack() as opened, group.starting():
        loaded = load(config, group, host)
        opened.callback(loaded.runner.close)
        broadcaster = make_broadcaster(config, group)
        opened.pop_all()
    kv_cache, limits_of_groups = make_kv_cache(loaded)
    step_times = StepTimes()
    setup = PartSetup(
        table=PARTS,
        loaded=loaded,
        kv_cache=kv_cache,
        step_times=step_times,
        clock=clock,
        group=group,
        broadcaster=broadcaster,
        engine_id=engine_id,
        host=host,
        wake=wake,
        compute_s=step_times.compute_s,
        made={"kv_groups": Made(limits_of_groups)},
    )
    features = setup.all()
    scheduler = Scheduler(
        loaded.config,
        kv_cache,
        limits=make_limits(loaded),
        parts=[part for feature in features for part in feature.parts],
        compute_s=setup.compute_s,
    )
    journals = [feature.journal(scheduler) for feature in features if feature.journal is not None]
    return EngineCore(
        loaded.config,
        loaded.model,
        ranks=Ranks(
            group,
            runner=loaded.runner,
            launcher=make_launcher(loaded.runner, group),
            broadcaster=broadcaster,
            marks=[marks for feature in features for marks in feature.marks],
        ),
        scheduler=scheduler,
        observers=[step_times, *(observer for feature in features for observer in feature.observers)],
        mail=Mail(scheduler, [courier for feature in features for courier in feature.couriers]),
        clock=clock,
        journal=next(iter(journals), NOBODY_LISTENS),
    )


def make_broadcaster(config: EngineConfig, group: TPGroup) -> PlanBroadcaster | NoBroadcaster:
    """Return the broadcaster that sends plans to the other ranks."""
    if group.size == 1:
        return NoBroadcaster()
    from engine.distributed.plan_broadcast import PlanBroadcaster

    return PlanBroadcaster(group, tells_tokens=config.pipeline_parallel_size > 1 < config.tensor_parallel_size)


def make_launcher(runner: ModelRunner, group: TPGroup) -> Launcher:
    """Return what launches steps: a thread for overlap on devices whose calls block. With other ranks a thread is
    needed even without overlap, to notice a rank that hangs while a step waits for it."""
    return open_launcher(runner, group, group.size > 1 or (runner.overlap and not runner.device.asynchronous))


def make_limits(loaded: Loaded) -> ModelLimits:
    model = loaded.model
    return ModelLimits(
        max_model_len=loaded.runner.max_model_len,
        vocab_size=model.vocab_size,
        eos_token_ids=frozenset(model.eos_token_ids),
        chunked_prefill=not model.bidirectional,
        longest_span=model.longest_span,
    )
