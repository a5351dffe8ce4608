"""Checks of the arguments of public calls. A wrong argument raises InvalidInput before anything is sent.

Each error names the call, the argument, the received value and the expected one.
"""

from fanin.protos.errors import InvalidInput


def check_type(what: str, value: object, kind: type) -> None:
    """Raise InvalidInput unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise InvalidInput(f"{what}: got {type(value).__name__}, expected {kind.__name__}", code="FN-0801")


def check_text(what: str, value: object) -> None:
    """Raise InvalidInput unless ``value`` is text that the wire can carry."""
    if not isinstance(value, str):
        raise InvalidInput(f"{what}: got {type(value).__name__}, expected str", code="FN-0801")
    try:
        value.encode()
    except UnicodeEncodeError as exc:
        raise InvalidInput(
            f"{what}: got a str with a lone surrogate at {exc.start}, expected text", code="FN-0801"
        ) from exc


def check_number(what: str, value: object, largest: int) -> None:
    """Raise InvalidInput unless ``value`` is an int from 0 to ``largest``. A bool is none."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInput(f"{what}: got {type(value).__name__}, expected int", code="FN-0801")
    if not 0 <= value <= largest:
        raise InvalidInput(f"{what}: got {value}, expected 0 to {largest}", code="FN-0801")


def clean_token(what: str, token: object) -> str:
    """Return a token without the white space around it, which a file often has.

    Args:
        what: Name of the argument, for the message.
        token: The token.

    Raises:
        InvalidInput: It is no str, is empty, or holds other characters than the metadata of a call can carry.
    """
    if not isinstance(token, str):
        raise InvalidInput(f"{what}: got {type(token).__name__}, expected str", code="FN-0801")
    text = token.strip()
    if not text or not text.isascii() or not text.isprintable():
        raise InvalidInput(
            f"{what}: got {len(text)} characters that are no token, expected one line of printable ones", code="FN-0804"
        )
    return text
