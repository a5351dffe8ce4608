"""Strict reader of JSON objects.

An unknown key, a missing key and a wrong type are errors that name the path of the key. A signature covers the
complete document, so the reader either understands all of it or rejects it.
"""

from fanin.protos.errors import InvalidBundle


class Reader:
    """One JSON object with its path in the document. All methods raise InvalidBundle for a wrong type."""

    def __init__(self, row: object, path: str) -> None:
        if not isinstance(row, dict):
            raise InvalidBundle(f"{path}: got {type(row).__name__}, expected an object", code="FN-0307")
        self.row: dict[str, object] = row
        self.path = path

    def only(self, keys: str, optional: str = "") -> None:
        """Raise InvalidBundle unless the object has all ``keys`` and no others but ``optional``, split at spaces."""
        known = set(keys.split())
        faults = [
            f"{word} {sorted(names)}"
            for word, names in (
                ("unknown", set(self.row) - known - set(optional.split())),
                ("no", known - set(self.row)),
            )
            if names
        ]
        if faults:
            raise InvalidBundle(f"{self.path}: got {' and '.join(faults)}, expected {sorted(known)}", code="FN-0307")

    def _value(self, key: str, kind: type) -> object:
        value = self.row[key]
        if type(value) is not kind:
            raise InvalidBundle(
                f"{self.path}.{key}: got {type(value).__name__}, expected {kind.__name__}", code="FN-0307"
            )
        return value

    def text(self, key: str) -> str:
        return str(self._value(key, str))

    def integer(self, key: str) -> int:
        value = self._value(key, int)
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self._value(key, float)
        assert isinstance(value, float)
        return value

    def shape(self, key: str, *, least: int = 0) -> tuple[int, ...]:
        value = self._value(key, list)
        assert isinstance(value, list)
        if not all(type(dim) is int and dim >= least for dim in value):
            raise InvalidBundle(
                f"{self.path}.{key}: got {value!r}, expected integers of at least {least}", code="FN-0307"
            )
        return tuple(value)

    def child(self, key: str) -> "Reader":
        return Reader(self.row[key], f"{self.path}.{key}")

    def children(self, key: str) -> list[tuple[str, "Reader"]]:
        return [(name, Reader(row, f"{self.path}.{key}.{name}")) for name, row in self.child(key).row.items()]

    def rows(self, key: str) -> list["Reader"]:
        value = self._value(key, list)
        assert isinstance(value, list)
        return [Reader(row, f"{self.path}.{key}[{index}]") for index, row in enumerate(value)]
