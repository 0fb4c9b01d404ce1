"""What every model of the project is: frozen, validated when made, small in memory.

Knows no word of the field; ``model.py`` has those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Self, TypeVar, cast, dataclass_transform

from pydantic import ConfigDict, TypeAdapter
from pydantic.dataclasses import dataclass


class Model:
    """Base of all models: frozen, no unknown fields, validated when made.

    A dataclass with slots and not a BaseModel: a node may have ten thousand
    attachments in memory, and a BaseModel's two dicts and set cost each of them
    3 KB. Names of the methods are pydantic's.
    """

    __slots__ = ()

    def model_copy(self, update: Mapping[str, Any]) -> Self:
        """A copy with some fields changed; validated again."""
        return replace(self, **update)  # type: ignore[type-var]

    def model_dump(self, mode: Literal["json", "python"] = "python") -> dict[str, Any]:
        """Fields as a dict; with mode ``json`` only what JSON knows, in clear text."""
        return cast(dict[str, Any], _adapter(type(self)).dump_python(self, mode=mode))

    def model_dump_json(self) -> str:
        """The model as JSON text."""
        return _adapter(type(self)).dump_json(self).decode()

    @classmethod
    def model_validate(cls, value: object) -> Self:
        """From a dict. Raises pydantic.ValidationError, which names every wrong field."""
        return cast(Self, _adapter(cls).validate_python(value))

    @classmethod
    def model_validate_json(cls, text: str | bytes) -> Self:
        """From JSON text. Raises pydantic.ValidationError."""
        return cast(Self, _adapter(cls).validate_json(text))


_CONFIG = ConfigDict(extra="forbid")


_ADAPTERS: dict[type, TypeAdapter[Any]] = {}


def _adapter(cls: type) -> TypeAdapter[Any]:
    if cls not in _ADAPTERS:
        _ADAPTERS[cls] = TypeAdapter(cls)
    return _ADAPTERS[cls]


_T = TypeVar("_T")


@dataclass_transform(kw_only_default=True, frozen_default=True)
def model(cls: type[_T]) -> type[_T]:
    """Class decorator: a frozen pydantic dataclass with slots and keyword arguments."""
    made = dataclass(frozen=True, slots=True, kw_only=True, config=_CONFIG)(cls)
    return cast(type[_T], made)
