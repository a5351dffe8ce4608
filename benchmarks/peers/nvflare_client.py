"""NVFlare's client script: fresh random values instead of training. Each site writes when its models arrive.

python nvflare_client.py FOLDER
"""

import json
import sys
import time
from pathlib import Path

import numpy as np
import nvflare.client as flare

flare.init()
out = Path(sys.argv[1]) / f"{flare.get_site_name()}.json"
came_s: list[float] = []
while flare.is_running():
    received = flare.receive()
    if received is None:
        break
    came_s.append(time.time())
    if any(array.dtype != np.float32 for array in received.params.values()):
        raise ValueError(f"got {[array.dtype for array in received.params.values()]}, expected float32")
    out.write_text(json.dumps(came_s))
    rng = np.random.default_rng()
    fresh = {name: rng.random(np.shape(array), dtype=np.float32) for name, array in received.params.items()}
    flare.send(flare.FLModel(params=fresh, params_type="FULL", meta={"NUM_STEPS_CURRENT_ROUND": 1}))
