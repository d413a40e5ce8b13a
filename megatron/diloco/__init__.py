"""DiLoCo training of islands: replica groups that exchange pseudo-gradients every H steps."""
