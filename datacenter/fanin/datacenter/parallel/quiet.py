"""What torch says on every rank of a mesh about things that are as they should be, silenced by name."""

import logging
import warnings


def quiet() -> None:
    """Silence two messages for this process."""
    # Logits that were put together over tp are a view, and nothing is written into them.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor", category=UserWarning)
    # Whole parameters are fetched over two axes one after the other, seldom and in one order on all ranks.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
