"""The routes of files and batches."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, get_args

from fastapi import Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.datastructures import UploadFile
from starlette.responses import FileResponse

from deployments.http.body import validated
from deployments.http.context import key_name
from deployments.http.json_body import json_response, read_body, with_warning
from deployments.http.validation import UnknownFields
from deployments.openai.batches.config import BatchConfig
from deployments.openai.batches.errors import ForbiddenOrigin, NotConfigured, ObjectNotFound, StorageError
from deployments.openai.batches.objects import (
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
from deployments.openai.served_models import ServedModels
from engine.errors import InvalidParameter, UnsupportedMediaType

logger = logging.getLogger(__name__)

FORM = "multipart/form-data"
MAX_FORM_FIELDS = 8
P = ParamSpec("P")
R = TypeVar("R")


def add_batch_routes(
    app: FastAPI,
    models: ServedModels,
    config: BatchConfig,
    cors_origins: tuple[str, ...],
    unknown_fields: UnknownFields,
) -> None:
    """Each API key sees its own files and batches only; without keys they are everybody's."""

    async def check_configured() -> None:
        if config.folder is None:
            raise NotConfigured("files and batches", "ingress.batch_dir")

    needs = [Depends(check_configured)]
    store = BatchStore(Path(os.path.expanduser(config.folder or "")))
    files, worker = store.files, BatchWorker(app, store, models, config)
    if config.folder is not None:
        app.router.lifespan_context = lambda _: worker.running()

    @app.post("/v1/files", dependencies=needs)
    async def upload(request: Request) -> Response:
        check_origin(request, cors_origins)
        content_type = request.headers.get("content-type")
        if not (content_type or "").lower().startswith(FORM):
            raise UnsupportedMediaType(content_type, FORM)
        try:
            async with request.form(max_files=1, max_fields=MAX_FORM_FIELDS) as fields:
                form = validated(UploadForm, nested(fields))
                if not isinstance(form.file, UploadFile):
                    raise InvalidParameter("file", form.file, "a file with a name")
                content, name = form.file.file, form.file.filename or "upload"
                seconds = form.expires_after.seconds
                return json_response(await asyncio.to_thread(files.upload, content, key_name(request), name, seconds))
        except OSError as error:  # also of the temporary file that a form is kept in
            raise storage_error(error) from None

    @app.get("/v1/files", dependencies=needs)
    async def list_files(request: Request) -> Response:
        query = validated(FileQuery, dict(request.query_params))
        found, has_more = await in_thread(
            files.page, key_name(request), query.limit, query.after, query.purpose, newest_first=query.order == "desc"
        )
        return json_response(FileList.of(found, has_more))

    @app.get("/v1/files/{name}", dependencies=needs)
    async def retrieve_file(request: Request, name: str) -> Response:
        return json_response(await in_thread(files.get, name, key_name(request)))

    @app.get("/v1/files/{name}/content", dependencies=needs)
    async def content(request: Request, name: str) -> Response:
        file, path = await in_thread(files.content, name, key_name(request))
        return FileResponse(path, media_type="application/octet-stream", filename=file.filename)

    @app.delete("/v1/files/{name}", dependencies=needs)
    async def delete_file(request: Request, name: str) -> Response:
        await in_thread(files.delete, name, key_name(request))
        return json_response(DeletedFile(name))

    @app.post("/v1/batches", dependencies=needs)
    async def create(request: Request) -> Response:
        body = await read_body(request, BatchBody, unknown_fields)
        endpoints = {route.path for route in app.routes if isinstance(route, APIRoute)}
        if body.endpoint not in endpoints:
            served = ", ".join(sorted(endpoints.intersection(get_args(Endpoint))))
            raise InvalidParameter("endpoint", body.endpoint, f"one of those that are served here: {served}")
        try:
            batch = await in_thread(store.create, body, key_name(request), models)
        except ObjectNotFound as error:
            error.param = "input_file_id"
            raise
        worker.wake()
        return with_warning(body, json_response(batch))

    @app.get("/v1/batches", dependencies=needs)
    async def list_batches(request: Request) -> Response:
        query = validated(BatchQuery, dict(request.query_params))
        found, has_more = await in_thread(store.page, key_name(request), query.limit, query.after)
        return json_response(BatchList.of(found, has_more))

    @app.get("/v1/batches/{name}", dependencies=needs)
    async def retrieve(request: Request, name: str) -> Response:
        return json_response(await in_thread(store.get, name, key_name(request)))

    @app.post("/v1/batches/{name}/cancel", dependencies=needs)
    async def cancel(request: Request, name: str) -> Response:
        return json_response(await in_thread(store.cancel, name, key_name(request)))


def check_origin(request: Request, allowed: tuple[str, ...]) -> None:
    """Raise ForbiddenOrigin for a web page's form: unlike JSON, browsers send it to any server without asking first."""
    origin = request.headers.get("origin")
    if origin is not None and origin not in allowed and "*" not in allowed:
        raise ForbiddenOrigin(origin)


def nested(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a form with those like `a[b]` as an object `a`."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if (match := re.fullmatch(r"(\w+)\[(\w+)\]", name)) is None:
            found[name] = value
        elif isinstance(parent := found.setdefault(match[1], {}), dict):
            parent[match[2]] = value
    return found


async def in_thread(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Work with files. Raises StorageError in place of OSError."""
    try:
        return await asyncio.to_thread(work, *args, **kwargs)
    except OSError as error:
        raise storage_error(error) from None


def storage_error(error: OSError) -> StorageError:
    logger.error("files cannot be stored or read: %s", error)
    return StorageError(error.strerror or type(error).__name__)
