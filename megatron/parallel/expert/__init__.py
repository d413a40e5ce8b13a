"""Expert parallelism: token permutation and the all-to-alls of token rows."""
