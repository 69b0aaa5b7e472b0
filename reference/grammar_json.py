"""JSON schemas as expressions over bytes: a subset, in strict mode, in which every key keeps its place."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .byte_grammar import EMPTY, Alt, ByteGrammar, Node, Repeat, Rule, Seq, literal, optional, points

SPACE = Repeat(points([(9, 10), (13, 13), (32, 32)]), 0, None)
DIGIT = points([(0x30, 0x39)])
DIGITS = Repeat(DIGIT, 1, None)
NONZERO = points([(0x31, 0x39)])
HEX = points([(0x30, 0x39), (0x41, 0x46), (0x61, 0x66)])
PLAIN = points([(0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)], negated=True)
ESCAPE = Seq((literal("\\"), Alt((*map(literal, '"\\/bfnrt'), Seq((literal("u"), HEX, HEX, HEX, HEX))))))
STRING = Seq((literal('"'), Repeat(Alt((PLAIN, ESCAPE)), 0, None), literal('"')))
WHOLE = Alt((literal("0"), Seq((NONZERO, Repeat(DIGIT, 0, None)))))
INTEGER = Alt((literal("0"), Seq((optional(literal("-")), NONZERO, Repeat(DIGIT, 0, None)))))
EXPONENT = Seq((points([(0x45, 0x45), (0x65, 0x65)]), optional(points([(0x2B, 0x2B), (0x2D, 0x2D)])), DIGITS))
NUMBER = Seq((optional(literal("-")), WHOLE, optional(Seq((literal("."), DIGITS))), optional(EXPONENT)))
BOOLEAN = Alt((literal("true"), literal("false")))
NULL = literal("null")
SCALARS: dict[str, Node] = {"string": STRING, "integer": INTEGER, "number": NUMBER, "boolean": BOOLEAN, "null": NULL}
# what a schema of a type may say beside its type; anything else is declined, for it would not be obeyed
SAYS = {
    "object": {"properties", "required", "additionalProperties"},
    "array": {"items", "minItems", "maxItems"},
    **{name: set() for name in SCALARS},
}
REMARKS = {"$schema", "$id", "$defs", "title", "description"}


def json_schema(schema: str) -> ByteGrammar:
    """The grammar of the texts that a schema admits: keys in the order of the schema, no others, free white space.

    Raises:
        ValueError: the text is no JSON, is no schema, or names a definition that is not there.
        NotImplementedError: a keyword outside the subset.
    """
    try:
        found = json.loads(schema)
    except json.JSONDecodeError as error:
        raise ValueError(f"schema: expected JSON, got {schema!r}: {error}") from error
    definitions = found.get("$defs", {}) if isinstance(found, Mapping) else {}
    rules = {f"#/$defs/{name}": _value(part, definitions) for name, part in definitions.items()}
    return ByteGrammar(_value(found, definitions), rules)


def _value(schema: Any, definitions: Mapping[str, Any]) -> Node:
    if not isinstance(schema, Mapping):
        raise ValueError(f"schema: expected an object for every value, got {schema!r}")
    said = set(schema) - REMARKS
    if "$ref" in said:
        if schema["$ref"].removeprefix("#/$defs/") not in definitions:
            raise ValueError(f"schema: expected a definition for {schema['$ref']}, got {sorted(definitions)}")
        return Rule(schema["$ref"])
    if "const" in said or "enum" in said:
        values = schema["enum"] if "enum" in said else [schema["const"]]
        return Alt(tuple(literal(json.dumps(value, ensure_ascii=False)) for value in values))
    if "anyOf" in said:
        return Alt(tuple(_value(option, definitions) for option in schema["anyOf"]))
    kind = schema.get("type")
    if kind not in SAYS:
        raise ValueError(f"schema: expected a type among {', '.join(SAYS)}, got {kind!r}")
    if said - {"type"} - SAYS[kind]:
        raise NotImplementedError(f"schema: {kind} is not limited by {sorted(said - {'type'} - SAYS[kind])}")
    if kind in SCALARS:
        return SCALARS[kind]
    return _object(schema, definitions) if kind == "object" else _array(schema, definitions)


def _object(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    properties = schema.get("properties", {})
    if not properties or schema.get("additionalProperties", False) is not False:
        raise NotImplementedError(f"schema: expected an object with the keys that it may have, got {dict(schema)}")
    required = set(schema.get("required", ()))
    if not required <= set(properties):
        raise ValueError(f"schema: expected properties for {sorted(required)}, got {sorted(properties)}")
    members = []
    for name, part in properties.items():
        key = literal(json.dumps(name, ensure_ascii=False))
        members.append((Seq((key, SPACE, literal(":"), SPACE, _value(part, definitions))), name in required))
    filled = Seq((literal("{"), SPACE, _members(members), SPACE, literal("}")))
    return filled if required else Alt((filled, Seq((literal("{"), SPACE, literal("}")))))


def _members(members: Sequence[tuple[Node, bool]]) -> Node:
    """One or more members in order, with commas between them; those that are required are there."""
    options = []
    for place, (first, is_required) in enumerate(members):
        later: Node = EMPTY
        for member, must in reversed(members[place + 1 :]):
            more = Seq((SPACE, literal(","), SPACE, member))
            later = Seq((more if must else optional(more), later))
        options.append(Seq((first, later)))
        if is_required:
            break
    return Alt(tuple(options))


def _array(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Node:
    least, most = schema.get("minItems", 0), schema.get("maxItems")
    if "items" not in schema:
        raise NotImplementedError(f"schema: expected an array with the kind of its items, got {dict(schema)}")
    item = _value(schema["items"], definitions)
    more = Repeat(Seq((SPACE, literal(","), SPACE, item)), max(least - 1, 0), None if most is None else most - 1)
    filled = Seq((literal("["), SPACE, item, more, SPACE, literal("]")))
    empty = Seq((literal("["), SPACE, literal("]")))
    if most == 0:
        return empty
    return filled if least else Alt((filled, empty))
