"""Bodies as an application with all parts reads them."""

from __future__ import annotations

from deployments.http.bodies import Bodies
from deployments.parts.table import part_fields

BODIES = Bodies("refuse", part_fields())
