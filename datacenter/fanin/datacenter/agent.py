"""torchrun that ends with its launcher: ``python -m fanin.datacenter.agent`` and torchrun's own arguments.

A launcher that is killed cannot end its torchrun, which then would train on unseen, and of several machines stand in
for one that was given up. It is told to stop instead, as its launcher would have told it: its ranks save, and end.
"""

import os
import signal

from torch.distributed.run import main

from fanin.datacenter.elastic import end_with_parent

if __name__ == "__main__":
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    main()
