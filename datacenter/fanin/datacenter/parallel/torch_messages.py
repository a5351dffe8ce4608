"""Messages that torch logs on every rank although nothing is wrong. Each is silenced by name."""

import logging
import warnings


def silence_expected_messages() -> None:
    """Silence two expected torch messages in this process."""
    # The logits gathered over tp are a view, and nothing writes into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # Complete parameters are gathered over two axes, one after the other. This is rare, and all ranks use the same
    # order.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
