"""Imported last by the process that ranks are forked from: what it has imported is no garbage of theirs.

Otherwise each rank's collections of garbage would walk over all of torch, and copy every page that they count on.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
