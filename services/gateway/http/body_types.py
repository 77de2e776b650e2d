"""What bodies of requests are made of: null means absent, unknown fields are refused."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

Ignored = Annotated[Any, Field(description="Accepted; it has no effect on the output.")]


def only(*accepted: Any) -> AfterValidator:
    """Admits null and values that ask for nothing; a field that would change the output is refused."""

    def check(value: Any) -> Any:
        if value is None or any(value == one and type(value) is type(one) for one in accepted):
            return value
        raise PydanticCustomError("unsupported_parameter", "is not supported")

    return AfterValidator(check)


def by_type(default: str, what: str) -> Discriminator:
    """Tells objects apart by their field `type`, `default` where they have none. Branches are named as pydantic names
    them, dict[TYPE]: errors leave them out."""

    def kind(value: Any) -> str:
        return f"dict[{value.get('type', default) if isinstance(value, dict) else default}]"

    return Discriminator(kind, "unsupported_parameter", f"{what} of this type are not supported")


class Body(BaseModel):
    """A JSON object that admits no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, value: Any) -> Any:
        # Stops at the first one, where "forbid" would build an error for each of a million.
        known = {field.alias or name for name, field in cls.model_fields.items()}
        for name in value if isinstance(value, dict) else ():
            if name not in known:
                raise PydanticCustomError("unknown_field", "unknown field", {"name": name})
        return value
