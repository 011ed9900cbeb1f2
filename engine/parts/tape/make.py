"""Makes the tape of an engine."""

from __future__ import annotations

from functools import partial

from engine.core.scheduler import Scheduler
from engine.parts.handoffs.handoffs import Handoffs
from engine.parts.setup import Made, PartSetup
from engine.parts.tape.kept_tapes import KeptTapes
from engine.parts.tape.recorder import Tape
from engine.parts.tape.shared_copy import keep_orphans, shared_root
from engine.parts.tape.tape_courier import TapeCourier


def make(setup: PartSetup) -> Made:
    records = bool(setup.loaded.config.tape_mib)
    return Made(couriers=[TapeCourier()], journal=partial(make_tape, setup) if records else None)


def make_tape(setup: PartSetup, scheduler: Scheduler) -> Tape:
    config, handoffs = setup.loaded.config, scheduler.parts.get(Handoffs)
    role = (handoffs and handoffs.role) or ("" if config.handoff is None else config.handoff.role)
    keep_orphans(root := shared_root())
    return Tape(
        scheduler,
        setup.step_times,
        engine_id=setup.engine_id,
        role=role,
        max_bytes=config.tape_mib * 2**20,
        clock=setup.clock,
        kept=KeptTapes.of(config),
        shared_root=root,
    )
