"""Daily files of what keys have used and what that costs, in the columns of FOCUS (https://focus.finops.org)."""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import os
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from deployments.billing.totals import UsageTotals
from engine.clock import SYSTEM_CLOCK
from engine.errors import ConfigError

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Seconds between two writes; an ingress that is killed loses so much."""
TIME = "%Y-%m-%dT%H:%M:%SZ"
CONSTANTS = {
    "ChargeCategory": "Usage",
    "ChargeFrequency": "Usage-Based",
    "ServiceCategory": "AI and Machine Learning",
    "ProviderName": "Manta",
    "PublisherName": "Manta",
    "InvoiceIssuerName": "Manta",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageConfig:
    folder: str | None = None
    """Folder of the files; None for no files."""
    currency: str = "USD"

    def check(self) -> None:
        """Raise ConfigError unless files can be written."""
        if self.folder is None:
            return
        folder = Path(self.folder).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError("ingress.usage_dir", self.folder, f"a folder ({error})") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError("ingress.usage_dir", self.folder, "a writable folder")


class _Line(NamedTuple):
    """What is summed together."""

    hour: datetime
    key: str
    model: str
    adapter: str


class NoUsageFiles:
    """The files of an ingress that writes none."""

    def add(self, key: str, model: str, adapter: str | None, used: UsageTotals) -> None:
        """Count a sequence that has ended now."""

    @asynccontextmanager
    async def written(self) -> AsyncGenerator[None]:
        """Write the files inside the block, and once more at its end."""
        yield


NO_USAGE_FILES = NoUsageFiles()


class UsageFiles(NoUsageFiles):
    """One file for each day and ingress, which is written again whenever it has changed."""

    def __init__(self, config: UsageConfig, ingress_id: str, wall: Callable[[], float] = SYSTEM_CLOCK.wall):
        """Raises ConfigError if the folder cannot be written. wall: returns seconds since 1970."""
        config.check()
        assert config.folder is not None
        self._folder, self._currency = Path(config.folder).expanduser(), config.currency
        self._ingress_id, self._wall = ingress_id, wall
        self._lines: dict[_Line, UsageTotals] = {}
        self._changed: set[datetime] = set()  # days

    def add(self, key: str, model: str, adapter: str | None, used: UsageTotals) -> None:
        now = datetime.fromtimestamp(self._wall(), UTC)
        line = _Line(now.replace(minute=0, second=0, microsecond=0), key, model, adapter or "")
        self._lines.setdefault(line, UsageTotals()).add(used)
        self._changed.add(_day(line.hour))

    def write(self) -> None:
        """Write the files that have changed, and forget the days before yesterday. Raises OSError."""
        yesterday = _day(datetime.fromtimestamp(self._wall(), UTC)) - timedelta(days=1)  # a clock may be set back
        for day in sorted(self._changed):
            name = f"manta-usage-{day:%Y-%m-%d}-{self._ingress_id}.csv"
            new = self._folder / f".{name}.new"
            new.write_text(self._text(day), encoding="utf-8")
            new.replace(self._folder / name)
            self._changed.discard(day)
        self._lines = {line: used for line, used in self._lines.items() if line.hour >= yesterday}

    @asynccontextmanager
    async def written(self) -> AsyncGenerator[None]:
        task = asyncio.create_task(self._keep_writing())
        try:
            yield
        finally:
            task.cancel()
            self._try_to_write()

    async def _keep_writing(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self.write()
        except OSError as error:
            logger.error("usage not written folder=%s error=%s", self._folder, error)

    def _text(self, day: datetime) -> str:
        rows = [self._row(line, used) for line, used in sorted(self._lines.items()) if _day(line.hour) == day]
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _row(self, line: _Line, used: UsageTotals) -> dict[str, str | int | float]:
        month = line.hour.replace(day=1, hour=0)
        next_month = (month + timedelta(days=32)).replace(day=1)
        return {
            "BilledCost": used.cost,
            "EffectiveCost": used.cost,
            "ListCost": used.cost,
            "ContractedCost": used.cost,
            "BillingCurrency": self._currency,
            "BillingPeriodStart": month.strftime(TIME),
            "BillingPeriodEnd": next_month.strftime(TIME),
            "ChargePeriodStart": line.hour.strftime(TIME),
            "ChargePeriodEnd": (line.hour + timedelta(hours=1)).strftime(TIME),
            "ChargeDescription": f"Requests to {line.adapter or line.model}",
            "ConsumedQuantity": used.compute_s,
            "ConsumedUnit": "Seconds",
            "PricingQuantity": used.compute_s / 3600,
            "PricingUnit": "Hours",
            "ServiceName": line.model,
            "ResourceId": line.adapter or line.model,
            "SubAccountId": line.key,
            **CONSTANTS,
            "x_Ingress": self._ingress_id,
            "x_Sequences": used.sequences,
            "x_PromptTokens": used.prompt_tokens,
            "x_CachedTokens": used.cached_tokens,
            "x_OutputTokens": used.output_tokens,
            "x_WastedSeconds": used.wasted_s,
            "x_KvGibSeconds": used.kv_gib_s,
        }


def _day(hour: datetime) -> datetime:
    return hour.replace(hour=0, minute=0, second=0, microsecond=0)
