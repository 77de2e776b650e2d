"""The OpenAPI description: routes read their bodies themselves, so the bodies' schemas are added here."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.gateway.http.access import OPEN

_REF = "#/components/schemas/{model}"


def body_of(model: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads a body of this model."""
    schema = {"$ref": _REF.format(model=model.__name__)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def describe(app: FastAPI, models: list[type[BaseModel]]) -> None:
    """Makes `app.openapi` include the schemas of `models`, and that all but the open routes need a credential."""
    _, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REF)
    without = app.openapi

    def openapi() -> dict[str, Any]:
        document = without()
        components = document.setdefault("components", {})
        components.setdefault("schemas", {}).update(definitions["$defs"])
        components["securitySchemes"] = {
            "key": {"type": "http", "scheme": "bearer"},
            "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        document["security"] = [{"key": []}, {"x-api-key": []}]
        for path in OPEN & document["paths"].keys():
            for operation in document["paths"][path].values():
                operation["security"] = []
        return document

    app.openapi = openapi  # type: ignore[method-assign] # FastAPI's documented way to extend it
