"""NVFlare's side of the comparison, run by its own Python: FedAvg in a POC, one process for the server and each site.

python nvflare_job.py FOLDER NUM_CLIENTS NUM_VALUES NUM_ROUNDS
"""

import sys
from pathlib import Path

import numpy as np
from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe
from nvflare.recipe.poc_env import PocEnv


def main(folder: Path, num_clients: int, num_values: int, num_rounds: int) -> None:
    """Run the job, and wait until it ends."""
    initial = folder / "initial.npy"
    np.save(initial, np.zeros(num_values, np.float32))
    recipe = NumpyFedAvgRecipe(
        name="rounds",
        initial_ckpt=str(initial),
        min_clients=num_clients,
        num_rounds=num_rounds,
        train_script=str(Path(__file__).with_name("nvflare_client.py")),
        train_args=str(folder),
    )
    env = PocEnv(num_clients=num_clients)
    try:
        recipe.execute(env).get_result()
    finally:
        env.stop(clean_up=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
