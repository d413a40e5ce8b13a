"""Programs of a clone; commands that are in the package are only called here."""
