"""Named arrays kept in a folder between runs: whole or absent, and rebuilt when damaged."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.atomic import atomic_write

Arrays = dict[str, NDArray[Any]]


def cached_arrays(
    cache_path: str | Path | None, kind: str, identity: dict[str, Any], build: Callable[[], Arrays]
) -> Arrays:
    """`build()`'s arrays, from the folder when it holds them for the same `identity`.

    Args:
        cache_path: folder; None builds without keeping.
        kind: start of the file names.
        identity: everything that the arrays depend on, of JSON types; its hash is in the file names.
        build: returns the arrays by name.
    """
    if cache_path is None:
        return build()
    text = json.dumps(identity, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    folder = Path(cache_path)
    manifest = folder / f"{kind}-{digest}.json"
    found = _load(folder, manifest, digest, kind)
    if found is not None:
        return found
    arrays = build()
    for name, array in arrays.items():
        with atomic_write(folder / f"{kind}-{digest}-{name}.npy") as stream:
            np.save(stream, array, allow_pickle=False)
    # Written last: a manifest vouches for its arrays.
    shapes = {name: [array.dtype.str, list(array.shape)] for name, array in arrays.items()}
    with atomic_write(manifest) as stream:
        stream.write(json.dumps({"identity": identity, "arrays": shapes}, indent=1).encode())
    return arrays


def _load(folder: Path, manifest: Path, digest: str, kind: str) -> Arrays | None:
    try:
        shapes = json.loads(manifest.read_text())["arrays"]
        arrays: Arrays = {}
        for name, (dtype, shape) in shapes.items():
            array = np.load(folder / f"{kind}-{digest}-{name}.npy", mmap_mode="r", allow_pickle=False)
            if array.dtype.str != dtype or list(array.shape) != shape:
                return None
            arrays[name] = array
        return arrays
    except (OSError, ValueError, KeyError, TypeError):
        return None
