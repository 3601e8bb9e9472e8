"""mergekit-evolve on a machine without a GPU: `python evolve_driver.py` and mergekit-evolve's arguments.

mergekit's command, its strategies and its Ray workers run as they are. mergekit 0.1.5 leaves no choice but a GPU, so
three things are worked around here, and nothing else; the plugin is neither imported nor mentioned:

- The workers ask Ray for a GPU. Ray is told that there is one, which is bookkeeping: it looks at none.
- The pool's workers call `torch.cpu.empty_cache`, which torch does not have.
- lm_eval is never told the device and takes "cuda".

On a machine with a GPU the stock command needs none of it.
"""

from __future__ import annotations

import os
from typing import Any


def mend() -> None:
    """What every worker does before its first task."""
    import torch
    from lm_eval.models.huggingface import HFLM

    torch.cpu.empty_cache = lambda: None  # type: ignore[attr-defined]
    stock = HFLM.__init__

    def on_cpu(self: HFLM, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **{"device": "cpu", **kwargs})

    HFLM.__init__ = on_cpu


if __name__ == "__main__":
    import ray
    from mergekit.scripts.evolve import main

    environment = {"worker_process_setup_hook": "evolve_driver.mend"}
    ray.init(
        num_cpus=2, num_gpus=1, include_dashboard=False, runtime_env=environment, _temp_dir=os.environ["RAY_TMPDIR"]
    )
    main()
