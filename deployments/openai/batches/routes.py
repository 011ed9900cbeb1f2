"""Routes of files and batches."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any, get_args

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from deployments.errors import UnsupportedMediaType
from deployments.http.bodies import Bodies
from deployments.http.body import validated
from deployments.http.context import key_name
from deployments.http.json_body import json_response, with_warning
from deployments.http.middleware import AuthConfig
from deployments.http.route import OWNER, Route
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.errors import NotConfigured, ObjectNotFound, StorageError
from deployments.openai.batches.files import File
from deployments.openai.batches.input_file import InputFile
from deployments.openai.batches.objects import (
    Batch,
    BatchBody,
    BatchList,
    BatchQuery,
    DeletedFile,
    Endpoint,
    FileList,
    FileQuery,
    UploadForm,
)
from deployments.openai.batches.store import BatchStore
from deployments.openai.batches.worker import BatchWorker
from deployments.openai.served.served_models import ServedModels
from deployments.storage.config import StoreConfig, open_store
from deployments.storage.key_value import KeyValueStore
from engine.errors import InvalidParameter
from engine.user_folder import user_folder

logger = logging.getLogger(__name__)

FORM = "multipart/form-data"
MAX_FORM_FIELDS = 8
DATABASE = "batches.db"  # in the folder, if ingresses have no other shared store


class BatchRoutes:
    """Routes of files and batches. Each API key sees only its own files and batches; without keys, all see all."""

    def __init__(
        self,
        app: FastAPI,
        models: ServedModels,
        config: BatchConfig,
        auth: AuthConfig,
        bodies: Bodies,
        values: KeyValueStore | None,
    ):
        """values: store shared by all ingresses; None if they share only the folder. Raises ConfigError if the folder
        is not writable."""
        self._app, self._models, self._config, self._auth, self._bodies = app, models, config, auth, bodies
        if config.folder is None:
            return
        folder = user_folder(config.folder)
        self._own = AsyncExitStack()
        if values is None:
            values = open_store(StoreConfig(url=f"sqlite://{folder.absolute()}/{DATABASE}"))
            self._own.push_async_callback(values.close)
        self._store = BatchStore(folder, values)
        self._files = self._store.files
        self._worker = BatchWorker(app, self._store, models, config, auth.max_body_bytes)
        app.router.lifespan_context = lambda _: self._running()

    @asynccontextmanager
    async def _running(self) -> AsyncGenerator[None]:
        async with self._own, self._worker.running():
            yield

    def routes(self) -> list[Route]:
        files, batches, needs = "/v1/files", "/v1/batches", [Depends(self._check_configured)]
        store, download = "Store the requests of a batch.", "application/octet-stream"
        found = [
            Route(OWNER, "POST", files, self.upload, store, body=UploadForm, result=File, body_type=FORM),
            Route(OWNER, "GET", files, self.list_files, "The files, newest first.", body=FileQuery, result=FileList),
            Route(OWNER, "GET", f"{files}/{{name}}", self.retrieve_file, "One file.", result=File),
            Route(OWNER, "DELETE", f"{files}/{{name}}", self.delete_file, "Delete a file.", result=DeletedFile),
            Route(OWNER, "GET", f"{files}/{{name}}/content", self.content, "The content of a file.", result=download),
            Route(OWNER, "POST", batches, self.create, "Answer the requests of a file.", body=BatchBody, result=Batch),
            Route(
                OWNER,
                "GET",
                batches,
                self.list_batches,
                "The batches, newest first.",
                body=BatchQuery,
                result=BatchList,
            ),
            Route(OWNER, "GET", f"{batches}/{{name}}", self.retrieve, "One batch.", result=Batch),
            Route(OWNER, "POST", f"{batches}/{{name}}/cancel", self.cancel, "Cancel a batch.", result=Batch),
        ]
        return [replace(route, dependencies=needs) for route in found]

    async def _check_configured(self) -> None:
        if self._config.folder is None:
            raise NotConfigured("files and batches", "ingress.batch_dir")

    async def upload(self, request: Request) -> Response:
        content_type = request.headers.get("content-type")
        if not (content_type or "").lower().startswith(FORM):
            raise UnsupportedMediaType(content_type, FORM)
        with storage():  # covers the form's temporary file too
            async with request.form(max_files=1, max_fields=MAX_FORM_FIELDS) as fields:
                form = validated(UploadForm, nested(fields))
                if not isinstance(form.file, UploadFile):
                    raise InvalidParameter("file", form.file, "a file with a name")
                content, name = form.file.file, form.file.filename or "upload"
                return json_response(
                    await self._files.upload(content, key_name(request), name, form.expires_after.seconds)
                )

    async def list_files(self, request: Request) -> Response:
        query = validated(FileQuery, dict(request.query_params))
        newest_first = query.order == "desc"
        found, has_more = await self._files.page(
            key_name(request), query.limit, query.after, query.purpose, newest_first=newest_first
        )
        return json_response(FileList.of(found, has_more))

    async def retrieve_file(self, request: Request, name: str) -> Response:
        return json_response(await self._files.get(name, key_name(request)))

    async def content(self, request: Request, name: str) -> Response:
        with storage():
            file, path = await self._files.content(name, key_name(request))
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    async def delete_file(self, request: Request, name: str) -> Response:
        with storage():
            await self._files.delete(name, key_name(request))
        return json_response(DeletedFile(name))

    async def create(self, request: Request) -> Response:
        body = await self._bodies.read(request, BatchBody)
        endpoints = {route.path for route in self._app.routes if isinstance(route, APIRoute)}
        if body.endpoint not in endpoints:
            served = ", ".join(sorted(endpoints.intersection(get_args(Endpoint))))
            raise InvalidParameter("endpoint", body.endpoint, f"one of the served models: {served}")
        try:
            with storage():
                _, content = await self._files.content(body.input_file_id, key_name(request))
                model = await InputFile(content, self._auth.max_body_bytes).model()
                await self._models.read()
                batch = await self._store.create(body, key_name(request), model if model in self._models else None)
        except ObjectNotFound as error:
            error.param = "input_file_id"
            raise
        self._worker.wake()
        return with_warning(body.ignored, json_response(batch))

    async def list_batches(self, request: Request) -> Response:
        query = validated(BatchQuery, dict(request.query_params))
        found, has_more = await self._store.page(key_name(request), query.limit, query.after)
        return json_response(BatchList.of(found, has_more))

    async def retrieve(self, request: Request, name: str) -> Response:
        return json_response(await self._store.get(name, key_name(request)))

    async def cancel(self, request: Request, name: str) -> Response:
        return json_response(await self._store.cancel(name, key_name(request)))


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a form, with fields like `a[b]` collected in an object `a`."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if (match := re.fullmatch(r"(\w+)\[(\w+)\]", name)) is None:
            found[name] = value
        elif isinstance(parent := found.setdefault(match[1], {}), dict):
            parent[match[2]] = value
    return found


@contextmanager
def storage() -> Iterator[None]:
    """Convert OSError to StorageError."""
    try:
        yield
    except OSError as error:
        logger.error("files cannot be stored or read: %s", error)
        raise StorageError(error.strerror or type(error).__name__) from None
