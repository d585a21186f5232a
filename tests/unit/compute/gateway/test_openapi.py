"""The description: a path per deployed function, its types under names of its own."""

from __future__ import annotations

from indilog.base.deployed import AppInfo, FunctionSpec
from indilog_compute.gateway.openapi import describe


def test_types_of_equal_name_in_two_apps_have_separate_schemas() -> None:
    def app(name: str, kind: str) -> AppInfo:
        arguments = {
            "type": "object",
            "properties": {"order": {"$ref": "#/$defs/Order"}},
            "$defs": {
                "Order": {"properties": {"n": {"$ref": "#/$defs/N"}}},
                "N": {"type": kind},
            },
        }
        spec = FunctionSpec("f", "First line.\nMore.", arguments, {"type": "integer"})
        return AppInfo(name, 1, "me", (spec,))

    document = describe({"paths": {"/x": {}}}, [app("a", "integer"), app("b", "string")])
    schemas = document["components"]["schemas"]
    assert schemas["a.f.N"] == {"type": "integer"}
    assert schemas["b.f.N"] == {"type": "string"}
    assert schemas["b.f.Order"]["properties"]["n"] == {"$ref": "#/components/schemas/b.f.N"}
    post = document["paths"]["/functions/a/f"]["post"]
    assert post["summary"] == "First line."
    assert post["requestBody"]["content"]["application/json"]["schema"]["properties"] == {
        "order": {"$ref": "#/components/schemas/a.f.Order"}
    }
    assert "/x" in document["paths"]


def test_operations_are_described_without_what_only_functions_take() -> None:
    spec = FunctionSpec("runs.list", "List runs.", {"type": "object"}, {"type": "array"})
    document = describe({}, [AppInfo("shop", 1, "me", (), operations=(spec,))])
    post = document["paths"]["/operations/shop/runs.list"]["post"]
    assert post["summary"] == "List runs."
    assert post["responses"]["200"]["content"]["application/json"]["schema"] == {"type": "array"}
    assert "parameters" not in post
    assert "202" not in post["responses"]
