"""What people may say of drafts."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from services.executor.settings import ExecutorSettings
from services.executor.speculation.setting import DraftSetting, parse_draft


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("none", DraftSetting()),
        ("ngram", DraftSetting(ngram=True)),
        ("early-exit", DraftSetting(early_exit=True)),
        ("early-exit:12", DraftSetting(early_exit=True, layers=12)),
        ("/models/small", DraftSetting(model="/models/small")),
        ("smollm2-135m", DraftSetting(model="smollm2-135m")),
    ],
)
def test_reads_what_is_to_draft(text: str, expected: DraftSetting) -> None:
    assert parse_draft(text) == expected


@pytest.mark.parametrize("text", ["", "early-exit:", "early-exit:0", "early-exit:-1", "early-exit:x", "early-exit12"])
def test_refuses_the_rest_by_name(text: str) -> None:
    with pytest.raises(ValidationError, match="draft"):
        ExecutorSettings.model_validate({"draft": text})
