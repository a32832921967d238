"""Draw every picture again: ``python docs/pictures [FOLDER]``; by default where the pages look for them.

Needs the extras ``plot`` and ``demo``.
"""

import sys
from pathlib import Path

import fused
import masking
import scaling
import seven_steps
import trained_heads
import visible_keys


def main(folder=Path(__file__).parent):
    for module in (seven_steps, scaling, masking, fused, visible_keys, trained_heads):
        module.draw(Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
