"""Batches: files of requests that ingresses answer when engines have time. Store, leases, worker and files are the real
ones; the folder is one of this machine, and the route that answers a line is modelled."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import random
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.http.context import BACKGROUND_CLIENT, SOURCE
from deployments.http.errors import error_response
from deployments.openai.batches import files, input_file, output_file, records, run, store, threads, worker
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.errors import Conflict, ObjectNotFound
from deployments.openai.batches.input_file import BatchRequest
from deployments.openai.batches.objects import ENDED, Batch, BatchBody
from deployments.openai.batches.store import BatchStore
from deployments.openai.batches.worker import BatchWorker, source_of
from deployments.storage.key_value import StoreUnavailable
from engine.errors import ServingError
from engine.wire.generate_request import GenerateRequest
from engine.wire.sampling_params import SamplingParams
from tests.days.model import alone
from tests.days.part import Part
from tests.days.stills import in_process
from tests.days.store import open_store

if TYPE_CHECKING:
    from tests.days.day import Day
    from tests.days.ingress import Ingress
    from tests.days.world import World

START = 1_800_000_000.0  # seconds since 1970
WINDOW_HOUR_S = 20  # in place of an hour
DISK_S = 0.003  # longest time of an operation on the folder
LOOK_S = 1.0  # between two looks of a client at its batch
ROUTE = "/v1/completions"
OWNER: ContextVar[Ingress | None] = ContextVar("ingress", default=None)
PART: ContextVar[BatchPart] = ContextVar("part")


@dataclass(frozen=True)
class Job:
    """A batch that a client sends. hours: its window. cancels_after: seconds; None if it does not cancel."""

    at: float
    ingress: int
    lines: tuple[GenerateRequest, ...]
    hours: int
    cancels_after: float | None


@dataclass(frozen=True)
class Batches:
    jobs: tuple[Job, ...]
    max_in_flight: int

    def open(self, world: World) -> Part:
        return BatchPart(world, self)


class Routes:
    """The application of one ingress, which has one route."""

    def __init__(self, part: BatchPart, ingress: Ingress):
        self._part, self._ingress = part, ingress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = await receive()
        response: Response
        try:
            response = Response(await self._answer(json.loads(message["body"]), scope["state"]))
        except ServingError as error:
            self._part.seen[f"a line of a batch: {type(error).__name__}"] += 1
            response = error_response(error, scope)
        await response(scope, receive, send)

    async def _answer(self, body: dict[str, Any], state: dict[str, Any]) -> bytes:
        request = msgspec.structs.replace(
            request_of(body),
            request_id=f"batch-{self._part.rng.getrandbits(64):016x}",
            reply_to=self._ingress.inboxes.address,
            client=state[BACKGROUND_CLIENT],
        )
        generation = await state[SOURCE].start(self._ingress.context, [[request]], request.client, None)
        text, reason = "", None
        async for chunk in generation.chunks():
            text, reason = text + chunk.text, chunk.finish_reason
        return msgspec.json.encode([text, reason])


def request_of(body: dict[str, Any]) -> GenerateRequest:
    params = SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True)
    return GenerateRequest(request_id="", prompt=body["prompt"], params=params, timeout_s=60.0)


class Models(dict[str, Any]):
    """In place of ServedModels."""

    async def read(self) -> None: ...


class WatchedRun(run.BatchRun):
    """Counts which ingresses work on which batch."""

    __slots__ = ()

    async def run(self) -> None:
        ingress, working = OWNER.get(), PART.get().working
        key = ingress, self.claim.record.object.id
        working[key] += 1
        try:
            await super().run()
        finally:
            working[key] -= 1


class BatchPart(Part):
    def __init__(self, world: World, plan: Batches):
        self._world, self._cluster, self._plan = world, world.cluster, plan
        self.rng, self.seen = random.Random(f"{world.day.seed} batches"), world.cluster.seen
        self._folder = Path(tempfile.mkdtemp(prefix="days-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
        world.patches.callback(shutil.rmtree, self._folder, ignore_errors=True)
        loop = world.loop
        time = SimpleNamespace(
            time=lambda: START + loop.time(),
            time_ns=lambda: int((START + loop.time()) * 1e9),
            monotonic=loop.time,
        )
        chance = SimpleNamespace(token_hex=lambda size: f"{self.rng.getrandbits(8 * size):0{2 * size}x}")
        self.working: Counter[tuple[Ingress | None, str]] = Counter()  # by ingress and batch
        for name, value, modules in (
            ("BatchRun", WatchedRun, (worker,)),
            ("time", time, (files, records, run, store, worker)),
            ("secrets", chance, (records, run)),
            ("in_thread", self._in_thread, (files, input_file, run, store, threads)),
            ("check_space", self._check_space, (files, run)),
            ("HOUR_S", WINDOW_HOUR_S, (store,)),
        ):
            for module in modules:
                world.patches.enter_context(mock.patch.object(module, name, value))
        self._workers: dict[Ingress, BatchWorker] = {}
        self._lines: dict[str, dict[str, GenerateRequest]] = {}  # by batch and custom id
        self._ended: Counter[str] = Counter()
        for ingress in self._cluster.ingresses:
            self._start(ingress)
        self._cluster.on_new_ingress.append(self._start)

    async def _in_thread(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The work of a process that is gone never begins."""
        if (owner := OWNER.get()) is not None and not owner.up:
            await asyncio.get_running_loop().create_future()
        found = work(*args, **kwargs)
        await asyncio.sleep(self.rng.uniform(0, DISK_S))
        return found

    def _check_space(self, folder: Path, size: int = 0) -> None:
        if self._cluster.loop.time() < self._cluster.disk_full_until:
            self.seen["the disk of a batch is full"] += 1
            raise OSError(errno.ENOSPC, "full")

    def _store(self, ingress: Ingress) -> BatchStore:
        return BatchStore(self._folder, open_store(self._cluster, ingress.node, lambda: ingress.up))

    def _start(self, ingress: Ingress) -> None:
        models: Any = Models(m=SimpleNamespace(admission=ingress.admission))
        config = BatchConfig(folder=str(self._folder), max_in_flight=self._plan.max_in_flight)
        self._workers[ingress] = work = BatchWorker(Routes(self, ingress), self._store(ingress), models, config, 2**20)

        async def live() -> None:
            OWNER.set(ingress)
            PART.set(self)
            async with work.running():
                await asyncio.get_running_loop().create_future()

        task = in_process(ingress.process, asyncio.ensure_future, live())
        ingress.endings.append(task.cancel)

    # -- clients -------------------------------------------------------------------------------------------

    def clients(self) -> list[Coroutine[Any, Any, None]]:
        return [self._client(job) for job in self._plan.jobs]

    async def _client(self, job: Job) -> None:
        await asyncio.sleep(job.at)
        try:
            await self._follow(job)
        except ObjectNotFound:
            assert self._cluster.redis.lost_at > job.at, "a batch or a file of it is lost"
            self.seen["a batch is lost with the store"] += 1

    async def _follow(self, job: Job) -> None:
        """Create a batch, and look at it until it has ended. Raises ObjectNotFound if the store has lost it."""
        batch_id = await self._ask(job, self._create, job)
        self._lines[batch_id] = {f"line {i}": request for i, request in enumerate(job.lines)}
        if job.cancels_after is not None:
            await asyncio.sleep(job.cancels_after)
            with suppress(Conflict, ObjectNotFound):
                await self._ask(job, self._cancel, batch_id)
        while True:
            await asyncio.sleep(LOOK_S)
            batch: Batch = await self._ask(job, self._get, batch_id)
            if batch.status in ENDED:
                break
            if self._is_forgotten(batch):
                self.seen["a batch is lost with the store"] += 1
                return
        await self._check_answers(job, batch)

    def _is_forgotten(self, batch: Batch) -> bool:
        """Return whether the store has lost a batch, on which nobody works since. Its client may have written its
        record again."""
        lost_at = self._cluster.redis.lost_at
        is_running = any(count for (_, batch_id), count in self.working.items() if batch_id == batch.id)
        return lost_at > 0 and self._cluster.loop.time() > lost_at + 60.0 and not is_running

    async def _ask(self, job: Job, call: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Any:
        """Call a route of an ingress until one has answered."""
        number = job.ingress
        while True:
            ingress = await self._cluster.an_ingress(number)
            answer: asyncio.Future[Any] = self._cluster.loop.create_future()
            handler = ingress.handle(self._route(ingress, answer, call, *args))
            await asyncio.wait([handler])
            if answer.done():
                return answer.result()
            number = self.rng.randrange(100)
            await asyncio.sleep(LOOK_S)

    async def _route(
        self, ingress: Ingress, answer: asyncio.Future[Any], call: Callable[..., Coroutine[Any, Any, Any]], *args: Any
    ) -> None:
        OWNER.set(ingress)
        try:
            answer.set_result(await call(ingress, self._store(ingress), *args))
        except (ObjectNotFound, Conflict) as error:
            answer.set_exception(error)
        except (StoreUnavailable, OSError):
            self.seen["a route of batches fails"] += 1

    async def _create(self, ingress: Ingress, batches: BatchStore, job: Job) -> str:
        lines = [
            {
                "custom_id": f"line {i}",
                "method": "POST",
                "url": ROUTE,
                "body": {"model": "m", "prompt": request.prompt, "max_tokens": request.params.max_tokens},
            }
            for i, request in enumerate(job.lines)
        ]
        content = io.BytesIO(b"".join(json.dumps(line).encode() + b"\n" for line in lines))
        file = await batches.files.upload(content, "alice", "lines.jsonl", 3600)
        body = BatchBody(input_file_id=file.id, endpoint=ROUTE, completion_window=f"{job.hours}h")
        batch = await batches.create(body, "alice", "m")
        self._workers[ingress].wake()
        return batch.id

    async def _cancel(self, ingress: Ingress, batches: BatchStore, batch_id: str) -> None:
        await batches.cancel(batch_id, "alice")
        self.seen["a batch is cancelled"] += 1

    async def _get(self, ingress: Ingress, batches: BatchStore, batch_id: str) -> Batch:
        return await batches.get(batch_id, "alice")

    async def _content(self, ingress: Ingress, batches: BatchStore, file_id: str) -> bytes:
        _, path = await batches.files.content(file_id, "alice")
        return path.read_bytes()

    # -- what batches promise ------------------------------------------------------------------------------

    async def _check_answers(self, job: Job, batch: Batch) -> None:
        """Each line is once in the output or the error file, with the text that it has alone."""
        self._cluster.note(f"batch {batch.id[-4:]} {batch.status} {batch.request_counts}")
        self.seen[f"batch {batch.status}"] += 1
        kills = sum(fault.kind == "kill ingress" for fault in self._world.day.faults)
        match batch.status:
            case "failed":
                assert kills > 1, f"a batch failed: {batch.errors}"
                if not batch.request_counts.total:
                    return
            case "expired":
                expires_at = int(job.at) + job.hours * WINDOW_HOUR_S  # times of batches are whole seconds
                assert self._cluster.loop.time() >= expires_at, "a batch expires early"
            case "cancelled":
                assert job.cancels_after is not None, "nobody has cancelled it"
        found: Counter[str] = Counter()
        counts = {"completed": 0, "failed": 0}
        for file_id, what in ((batch.output_file_id, "completed"), (batch.error_file_id, "failed")):
            content = b"" if file_id is None else await self._ask(job, self._content, file_id)
            for text in content.splitlines():
                line = msgspec.json.decode(text, type=output_file.BatchOutputLine)
                found[line.custom_id] += 1
                counts[what] += 1
                if what == "completed":
                    self._check_line(batch, line)
                else:
                    self._check_error(batch, line)
        wanted = self._lines[batch.id]
        assert found == Counter(wanted.keys()), f"lines are missing or doubled: {found}"
        told = {"completed": batch.request_counts.completed, "failed": batch.request_counts.failed}
        assert batch.request_counts.total == len(wanted), "another number of lines is told"
        if batch.status == "completed":
            assert told == counts, f"{told} lines are told, {counts} are there"

    def _check_line(self, batch: Batch, line: output_file.BatchOutputLine) -> None:
        assert line.response is not None
        assert line.response.status_code == 200
        request = self._lines[batch.id][line.custom_id]
        source = source_of(batch, BatchRequest(int(line.custom_id.split()[1]) + 1, line.custom_id, b""))
        seeded = source._record.seeded([[request]])[0][0]
        text, reason = msgspec.json.decode(bytes(line.response.body))
        right = alone(seeded, self._world.day.size.max_model_len)
        assert (text, reason) == right[1:], f"{line.custom_id} of a batch has another text"
        self.seen["a line of a batch is answered"] += 1

    def _check_error(self, batch: Batch, line: output_file.BatchOutputLine) -> None:
        code = "none" if line.error is None else line.error.code
        self.seen[f"a line of a batch is not answered: {code}"] += 1
        wanted = {"batch_cancelled": "cancelled", "batch_expired": "expired", "batch_failed": "failed"}.get(code)
        if wanted is not None:
            assert batch.status == wanted, f"{code} in a batch that is {batch.status}"
        else:
            assert code == "request_timeout", f"a line ends with {line}"

    @property
    def works_on(self) -> bool:
        """Whether an ingress works on a batch; its client stops waiting if the store has lost it."""
        return self._cluster.redis.lost_at > 0 and any(self.working.values())

    def check(self) -> None:
        """No two ingresses work on a batch, unless the store was away or one stood still."""
        working: Counter[str] = Counter()
        for (ingress, batch_id), count in self.working.items():
            if ingress is not None and ingress.up and not ingress.is_behind:
                working[batch_id] += count
        for count in working.values():
            self.seen["two ingresses work on a batch"] += count > 1
            assert count <= 1 or self._cluster.store_fails, "two ingresses work on a batch"

    def check_end(self) -> None:
        for ingress, work in self._workers.items():
            if ingress.up:
                assert not work._running, f"{ingress.node}: batches left"
        if not self._cluster.store_fails:
            left = [path.name for path in (self._folder / "work").glob("*") if path.name in self._lines]
            assert not left, f"working files left: {left}"


def add(day: Day, rng: random.Random) -> Day:
    """Give some days batches."""
    if rng.random() < 0.85:
        return day
    length_s = max(ask.at for ask in day.asks) + 1.0
    jobs = tuple(
        Job(
            at=rng.uniform(0, length_s),
            ingress=rng.randrange(day.size.ingresses),
            lines=tuple(_line(rng) for _ in range(rng.choice([1, 4, 12]))),
            hours=rng.choice([1, 4, 9]),
            cancels_after=rng.uniform(0, 3) if rng.random() < 0.15 else None,
        )
        for _ in range(rng.choice([1, 2, 3]))
    )
    faults = day.faults
    if faults and not day.only_losses:
        from tests.days.day import Fault

        kinds = rng.choice([(), ("kill ingress",), ("kill ingress", "disk full"), ("store away", "kill ingress")])
        faults += tuple(
            Fault(
                rng.uniform(0, length_s + 2.0), rng.choice(kinds), rng.randrange(100), rng.randrange(100),
                rng.uniform(0, 6),
            )
            for _ in range(rng.choice([1, 3]) if kinds else 0)
        )  # fmt: skip
    return replace(day, faults=faults, parts=(*day.parts, Batches(jobs, rng.choice([1, 4]))))


def _line(rng: random.Random) -> GenerateRequest:
    prompt = [rng.randrange(1, 64) for _ in range(rng.randrange(1, 30))]
    return request_of({"prompt": prompt, "max_tokens": rng.choice([1, 5, 30])})
