"""Daily files of what keys have used and what that costs, in the columns of FOCUS (https://focus.finops.org)."""

from __future__ import annotations

import asyncio
import csv
import io
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

import msgspec

from deployments.billing.hourly_usage import HourlyUsage, UsageLine
from deployments.billing.totals import UsageTotals
from engine.errors import ConfigError
from engine.user_folder import given_folder, write_private

logger = logging.getLogger(__name__)

WRITE_S = 60.0
"""Seconds between two writes; an ingress that is killed loses so much."""
CLOSE_S = 10.0
"""Seconds for which an ingress that ends waits for the last write."""
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
            given_folder(folder)
        except OSError as error:
            raise ConfigError("ingress.usage_dir", self.folder, f"a folder ({error})") from None
        if not os.access(folder, os.W_OK):
            raise ConfigError("ingress.usage_dir", self.folder, "a writable folder")


class NoUsageFiles:
    """The files of an ingress that writes none."""

    def __init__(self, usage: HourlyUsage | None = None):
        """usage: what is written; None for one that is empty."""
        self.usage = usage or HourlyUsage()

    @asynccontextmanager
    async def written(self) -> AsyncGenerator[None]:
        """Write the files inside the block, and once more at its end."""
        yield


class UsageFiles(NoUsageFiles):
    """One file for each day and ingress, which is written again whenever it has changed. Only one task writes, so
    nothing older replaces something newer."""

    def __init__(self, config: UsageConfig, ingress_id: str, usage: HourlyUsage | None = None):
        """Raises ConfigError if the folder cannot be written."""
        super().__init__(usage)
        config.check()
        assert config.folder is not None
        self._folder, self._currency = Path(config.folder).expanduser(), config.currency
        self._ingress_id = ingress_id
        self.usage.unwritten = {}

    async def write(self) -> None:
        """Write the files of the days that have changed, in a thread. Raises OSError; then these days are written the
        next time."""
        unwritten = self.usage.unwritten
        assert unwritten is not None
        days = dict(unwritten)
        lines = [(line, msgspec.structs.replace(used)) for line, used in self.usage.lines.items() if line.day in days]
        await asyncio.to_thread(self._write, lines)
        for day, change in days.items():
            if unwritten[day] == change:
                del unwritten[day]

    @asynccontextmanager
    async def written(self) -> AsyncGenerator[None]:
        ending = asyncio.Event()
        task = asyncio.create_task(self._keep_writing(ending))
        try:
            yield
        finally:
            ending.set()
            _, late = await asyncio.wait([task], timeout=CLOSE_S)
            if late:
                logger.error("usage not written folder=%s error=the folder does not answer", self._folder)
                task.cancel()

    async def _keep_writing(self, ending: asyncio.Event) -> None:
        """Write until `ending` is set, and once more then."""
        last = False
        while not last:
            with suppress(TimeoutError):
                async with asyncio.timeout(WRITE_S):
                    await ending.wait()
            last = ending.is_set()
            try:
                await self.write()
            except Exception as error:  # noqa: BLE001  keep this task running
                logger.error("usage not written folder=%s error=%s", self._folder, error)

    def _write(self, lines: list[tuple[UsageLine, UsageTotals]]) -> None:
        by_day: dict[datetime, list[tuple[UsageLine, UsageTotals]]] = {}
        for entry in lines:
            by_day.setdefault(entry[0].day, []).append(entry)
        for day, entries in by_day.items():
            name = f"manta-usage-{day:%Y-%m-%d}-{self._ingress_id}.csv"
            write_private(self._folder / name, self._text(entries).encode())

    def _text(self, entries: list[tuple[UsageLine, UsageTotals]]) -> str:
        entries.sort(key=lambda entry: msgspec.structs.astuple(entry[0]))
        rows = [self._row(line, used) for line, used in entries]
        text = io.StringIO()
        writer = csv.DictWriter(text, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
        return text.getvalue()

    def _row(self, line: UsageLine, used: UsageTotals) -> dict[str, str | int | float]:
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
            "ResourceName": line.adapter or line.model,
            "ResourceType": "LoRA adapter" if line.adapter else "Model",
            "SubAccountId": line.key,
            **CONSTANTS,
            "x_Ingress": self._ingress_id,
            "x_Sequences": used.sequences,
            "x_PromptTokens": used.prompt_tokens,
            "x_CachedTokens": used.cached_tokens,
            "x_OutputTokens": used.output_tokens,
            "x_WastedSeconds": used.wasted_s,
            "x_KvGibSeconds": used.kv_gib_s,
            "x_TierGibSeconds": used.tier_gib_s,
        }
