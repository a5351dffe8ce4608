"""Parts of sentences for people: errors, progress lines and results share them."""


def counted(num: int, singular: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 round``, ``2 rounds``.

    Args:
        num: The number.
        singular: The noun for one thing.
        plural: The noun for any other number; default: ``singular`` with an s.
    """
    return f"{num} {singular if num == 1 else plural or f'{singular}s'}"
