"""The one way in which this surface writes JSON."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

# ASCII only: some readers of event streams split lines at U+2028 and its like. No NaN or Infinity: JSON has none.
to_json = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode


class JsonResponse(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content).encode("ascii")
