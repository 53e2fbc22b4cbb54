"""Dataclasses as JSON and back, as their annotations say.

The fields of a class are defined once, in the class: a field that is added to `Request` or
`StepResult` is in recordings from then on. Fields that have their default are left out, so that
the text, and with it its hash, stays the same when a field is added.
"""

import base64
import binascii
import dataclasses
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

Convert = Callable[[Any], Any]

_MISSING = dataclasses.MISSING


class Unreadable(ValueError):
    """JSON that does not match the type; says where, and what was expected."""


class _Converter(NamedTuple):
    encode: Convert
    decode: Convert


class Codec:
    """Converts values of annotated types to what `json` can write, and back.

    `Any` stands for the sampling parameters, which the core does not read: `encode_opaque` converts
    them to text, and `decode_opaque` back.
    """

    def __init__(
        self, encode_opaque: Callable[[Any], str], decode_opaque: Callable[[str], Any]
    ) -> None:
        self._encode_opaque = encode_opaque
        self._decode_opaque = decode_opaque
        self._converters: dict[Any, _Converter] = {}

    def encode(self, kind: Any, value: Any) -> Any:
        """A value of type `kind` for `json`. Lists of numbers are not copied."""
        return self.converter(kind).encode(value)

    def decode(self, kind: Any, data: Any, where: str = "") -> Any:
        """The value of type `kind` that `data` stands for; raises Unreadable, naming `where`."""
        converter = self.converter(kind)
        return _decode_at(where, converter, data) if where else converter.decode(data)

    def converter(self, kind: Any) -> _Converter:
        """The converter of a type, made once."""
        found = self._converters.get(kind)
        if found is None:
            found = self._converters[kind] = self._make(kind)
        return found

    def _make(self, kind: Any) -> _Converter:
        if kind is Any:
            return _Converter(self._encode_opaque, _reading(str, self._decode_opaque))
        if kind in _SCALARS:
            return _Converter(_same, _reading(_SCALARS[kind], _same))
        if kind is bytes:
            return _Converter(_to_base64, _reading(str, _from_base64))
        if kind is Exception:
            return _Converter(lambda error: type(error).__name__, _unreadable_error)
        if isinstance(kind, type) and issubclass(kind, Enum):
            return _Converter(lambda member: member.value, kind)
        if dataclasses.is_dataclass(kind):
            return _dataclass(self, kind)
        return self._make_generic(kind, typing.get_origin(kind), typing.get_args(kind))

    def _make_generic(self, kind: Any, origin: Any, args: tuple[Any, ...]) -> _Converter:
        if origin in (types.UnionType, typing.Union) and args[1:] == (type(None),):
            return _optional(self.converter(args[0]))
        if origin in (list, Sequence):
            return _list_of(args[0], self.converter(args[0]))
        if origin is frozenset:
            items = _list_of(args[0], self.converter(args[0]))
            return _Converter(sorted, lambda data: frozenset(items.decode(data)))
        if origin is tuple:
            return _tuple_of([self.converter(arg) for arg in args])
        if origin in (dict, Mapping):
            return _dict_of(args[0], self.converter(args[1]))
        raise TypeError(f"a recording cannot hold a {kind}")


def _dataclass(codec: Codec, kind: Any) -> _Converter:
    """An object with the fields that do not have their default."""
    hints = typing.get_type_hints(kind)
    name_of = kind.__name__
    fields = [
        (field.name, _default_of(field), codec.converter(hints[field.name]))
        for field in dataclasses.fields(kind)
    ]

    def encode(value: Any) -> dict[str, Any]:
        data = {}
        for name, default, converter in fields:
            item = getattr(value, name)
            if default is _MISSING or item != default:
                data[name] = converter.encode(item)
        return data

    def decode(data: Any) -> Any:
        if not isinstance(data, dict):
            raise Unreadable(f"{name_of}: expected an object, got {type(data).__name__}")
        values = {}
        for name, default, converter in fields:
            if name in data:
                values[name] = _decode_at(f"{name_of}.{name}", converter, data[name])
            elif default is _MISSING:
                raise Unreadable(f"{name_of}.{name} is missing")
        if unknown := data.keys() - values.keys():
            raise Unreadable(f"{name_of} has no field {min(unknown)} in this version")
        try:
            return kind(**values)
        except ValueError as error:
            raise Unreadable(f"{name_of}: {error}") from error

    return _Converter(encode, decode)


def _decode_at(where: str, converter: _Converter, data: Any) -> Any:
    try:
        return converter.decode(data)
    except ValueError as error:
        raise Unreadable(f"{where}: {error}") from error


def _default_of(field: "dataclasses.Field[Any]") -> Any:
    if field.default_factory is not _MISSING:
        return field.default_factory()
    return field.default


_SCALARS: dict[Any, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
}


def _same(value: Any) -> Any:
    return value


def _reading(kinds: type | tuple[type, ...], convert: Convert) -> Convert:
    """`convert`, after a check of the type; `True` is not a number here."""
    expected = kinds if isinstance(kinds, tuple) else (kinds,)

    def read(data: Any) -> Any:
        if type(data) not in expected:
            raise Unreadable(f"expected {expected[0].__name__}, got {type(data).__name__}")
        return convert(data)

    return read


def _to_base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _from_base64(data: str) -> bytes:
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise Unreadable(f"expected base64: {error}") from error


def _unreadable_error(data: Any) -> Any:
    raise Unreadable("errors cannot be decoded")


def _optional(inner: _Converter) -> _Converter:
    return _Converter(
        lambda value: None if value is None else inner.encode(value),
        lambda data: None if data is None else inner.decode(data),
    )


def _list_of(kind: Any, item: _Converter) -> _Converter:
    """Lists of scalars, which are long, are checked and passed on without a copy."""
    is_flat = kind in _SCALARS
    allowed = set(_SCALARS.get(kind, ()))

    def encode(value: Sequence[Any]) -> list[Any]:
        if is_flat:
            return value if isinstance(value, list) else list(value)
        return [item.encode(entry) for entry in value]

    def decode(data: Any) -> list[Any]:
        if not isinstance(data, list):
            raise Unreadable(f"expected a list, got {type(data).__name__}")
        if not is_flat:
            return [item.decode(entry) for entry in data]
        if wrong := set(map(type, data)) - allowed:
            raise Unreadable(f"expected a list of {kind.__name__}, got {wrong.pop().__name__}")
        return data

    return _Converter(encode, decode)


def _tuple_of(items: Sequence[_Converter]) -> _Converter:
    def encode(value: tuple[Any, ...]) -> list[Any]:
        return [item.encode(entry) for item, entry in zip(items, value, strict=True)]

    def decode(data: Any) -> tuple[Any, ...]:
        if not isinstance(data, list) or len(data) != len(items):
            raise Unreadable(f"expected a list of {len(items)}")
        return tuple(item.decode(entry) for item, entry in zip(items, data, strict=True))

    return _Converter(encode, decode)


def _dict_of(key: Any, item: _Converter) -> _Converter:
    """JSON's keys are strings; these dictionaries have strings or integers."""

    def decode(data: Any) -> dict[Any, Any]:
        if not isinstance(data, dict):
            raise Unreadable(f"expected an object, got {type(data).__name__}")
        return {key(name): item.decode(entry) for name, entry in data.items()}

    return _Converter(
        lambda value: {name: item.encode(entry) for name, entry in value.items()}, decode
    )
